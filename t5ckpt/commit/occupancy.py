"""Decides whether a step may be written, from the existing files of the step.

nothing, or a broken checkpoint of T5X's format     the step is written, the broken one is replaced
a complete step, in any layout                      the save is skipped, as in T5X
files of other programs                             moved aside if the storage can rename; else refused
a broken checkpoint that is pinned                  refused
"""

from __future__ import annotations

import contextlib

from t5ckpt.catalog.layouts import ORBAX, ListedStep, has_placeholder, inspect_name, orbax_marks, other_layout
from t5ckpt.catalog.listing import with_other_name
from t5ckpt.commit.removal import check_removable, foreign_files, generations_in, is_pinned, keys_below
from t5ckpt.core.keys import join
from t5ckpt.core.text import some_of
from t5ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError
from t5ckpt.format.manifest import decode_manifest
from t5ckpt.format.names import MANIFEST, PINNED, step_dir
from t5ckpt.storage import Storage


def occupant_of(storage: Storage, step: int) -> ListedStep | None:
    """The complete step with this number, in any layout; None if there is none, or a broken one.

    Raises:
      UnsupportedFormatError: the existing files can neither be skipped nor replaced, see the top of this module.
    """
    found = (_on_disk if storage.commits_by_rename else _in_bucket)(storage, step)
    return with_other_name(storage, step) if found is None else found


def _on_disk(storage: Storage, step: int) -> ListedStep | None:
    directory = step_dir(step)
    found, key = inspect_name(storage, directory), join(directory, MANIFEST)
    # Another process may delete it.
    with contextlib.suppress(CheckpointNotFoundError):
        if found is not None and (not found.is_t5x or _decodes(storage.read(key), storage.url(key))):
            return found
    if storage.is_file(join(directory, PINNED)):
        raise _pinned(storage, directory)
    return None


def _decodes(manifest: bytes, where: str) -> bool:
    """Whether a manifest decodes.

    Raises:
      UnsupportedFormatError: it is of a newer version.
    """
    try:
        decode_manifest(manifest, where)
    except CorruptCheckpointError:
        return False
    return True


def _in_bucket(storage: Storage, step: int) -> ListedStep | None:
    directory = step_dir(step)
    key = join(directory, MANIFEST)
    try:
        data = storage.read(key)
    except CheckpointNotFoundError:
        data = b''
    if not is_remnant(storage, directory, data):
        if has_placeholder(data):
            return ListedStep(step, directory, ORBAX)
        if _decodes(data, storage.url(key)):
            return ListedStep(step, directory)
    keys = keys_below(storage, directory)
    if not {*orbax_marks('')}.isdisjoint(keys):
        return ListedStep(step, directory, ORBAX, manifest='')
    if data and PINNED in keys:
        raise _pinned(storage, directory)
    foreign = foreign_files(storage, directory, keys)
    if foreign:
        names = some_of(foreign, 3) or 'a file in the place of a directory'
        raise UnsupportedFormatError(
            f'{storage.url(directory)} contains files that neither T5X nor t5ckpt wrote ({names}). Move it away to save this '
            'step.'
        )
    return None


def is_remnant(storage: Storage, directory: str, manifest: bytes) -> bool:
    """Whether all files but the manifest are gone. The step was deleted before the write of its manifest arrived."""
    generations = generations_in(manifest)
    return bool(generations) and not any(storage.names(join(directory, name), '') for name in generations)


def _pinned(storage: Storage, directory: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(f'{storage.url(directory)} is broken, but pinned. Unpin it or move it away.')


def check_room(storage: Storage, step: int, *, overwrite: bool = False) -> None:
    """Checks that a copy or a conversion can be written as this step.

    Raises:
      CheckpointExistsError: a complete checkpoint exists, and ``overwrite`` is not set; or it is pinned.
      UnsupportedFormatError: the step exists in another layout, which is never replaced.
      AccessDeniedError: the step is to be replaced, and is another user's.
    """
    occupant = occupant_of(storage, step)
    if occupant is None:
        return
    where = storage.url(occupant.name)
    if not occupant.is_t5x:
        cure = 'Move it away, or write to another directory.'
        raise other_layout(where, occupant.layout, 'which is not replaced', cure)
    if not overwrite:
        raise CheckpointExistsError(
            f'{where} exists already. Write to another directory, or replace it (overwrite=True, or --force).'
        )
    if is_pinned(storage, occupant.name):
        raise CheckpointExistsError(f'{where} is pinned and is not replaced. Unpin it first.')
    check_removable(storage, occupant.name)
