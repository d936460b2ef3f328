"""Decides whether a step may be written, from the existing files of the step.

nothing, or a broken checkpoint of T5X's format     the step is written, the broken one is replaced
a complete step, in any layout                      the save is skipped, as in T5X
files of other programs                             a save moves them aside if the storage can rename; else refused
a broken checkpoint that is pinned                  refused
"""

from __future__ import annotations

import re
from collections.abc import Collection

from t5ckpt.catalog.bucket_catalog import complete_steps
from t5ckpt.catalog.layouts import ORBAX, T5X, ListedStep, has_placeholder, inspect_name, orbax_marks, other_layout
from t5ckpt.catalog.listing import catalog_of
from t5ckpt.commit.removal import check_removable, few, foreign_files, keys_below
from t5ckpt.core.keys import join
from t5ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError
from t5ckpt.format.manifest import decode_manifest, is_of_others, is_whole
from t5ckpt.format.names import MANIFEST, PINNED, parse_prefixed_step, step_dir
from t5ckpt.storage import Storage

# The directory of a save, in the location of an array.
_GENERATION = re.compile(rb'(t5ckpt-[0-9a-f]{16})/')


def occupant_on_disk(storage: Storage, step: int) -> ListedStep | None:
    """The complete step with this number, in any layout; None if there is none, or a broken one.

    Raises:
      UnsupportedFormatError: the existing files can neither be skipped nor replaced, see the top of this module.
    """
    names = [name for name in (step_dir(step), str(step)) if storage.kind(name) is not None]
    for name in names:
        occupant = inspect_name(storage, name)
        if occupant is not None and _decodes(storage, occupant):
            return occupant
    elsewhere = catalog_of(storage).with_other_name(step)
    if elsewhere is not None:
        return elsewhere
    directory = step_dir(step)
    if directory in names and storage.is_file(join(directory, PINNED)):
        raise _pinned(storage, directory)
    return None


def _decodes(storage: Storage, listed: ListedStep) -> bool:
    """Whether the manifest of a listed step decodes; False if another process has deleted it.

    Raises:
      UnsupportedFormatError: it is of a newer version.
    """
    if not listed.is_t5x:
        return True
    key = join(listed.name, MANIFEST)
    try:
        decode_manifest(storage.read(key), storage.url(key))
    except (CheckpointNotFoundError, CorruptCheckpointError):
        return False
    return True


def occupant_in_bucket(storage: Storage, step: int) -> ListedStep | None:
    """As :func:`occupant_on_disk`, on a store that cannot rename."""
    directory = step_dir(step)
    key = join(directory, MANIFEST)
    data = _read_if_there(storage, key)
    occupant = ListedStep(step, directory, T5X if data is None or not has_placeholder(data) else ORBAX)
    if data is not None and is_whole(data) and _decodes(storage, occupant) and not is_remnant(storage, directory, data):
        return occupant
    keys = keys_below(storage, directory)
    if not keys:
        return None
    if not {*orbax_marks('')}.isdisjoint(keys):
        return ListedStep(step, directory, ORBAX, manifest='')
    if PINNED in keys and data is not None:
        raise _pinned(storage, directory)
    foreign = foreign_files(storage, directory)
    if foreign or (data is not None and is_of_others(data)):
        raise UnsupportedFormatError(_foreign_text(storage, directory, foreign))
    return None


def generations_in(manifest: bytes) -> set[str]:
    """The directories of saves in the locations of a manifest's arrays."""
    return {match.decode() for match in _GENERATION.findall(manifest)}


def is_remnant(storage: Storage, directory: str, manifest: bytes) -> bool:
    """Whether all files but the manifest are gone. The step was deleted before the write of its manifest arrived."""
    generations = generations_in(manifest)
    return bool(generations) and not any(storage.names(join(directory, name), '') for name in generations)


def _read_if_there(storage: Storage, key: str) -> bytes | None:
    try:
        return storage.read(key) if storage.is_file(key) else None
    except CheckpointNotFoundError:
        return None


def _pinned(storage: Storage, directory: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(f'{storage.url(directory)} is broken, but pinned. Unpin it or move it away.')


def _foreign_text(storage: Storage, directory: str, foreign: list[str]) -> str:
    names = few(foreign) or 'a file in the place of a directory'
    return f'{storage.url(directory)} contains files that neither T5X nor t5ckpt wrote ({names}). Move it away to save this step.'


def listed_elsewhere(storage: Storage, step: int, names: Collection[str]) -> ListedStep | None:
    """On an object store, the step with this number under the name of another layout.

    Args:
      storage: the run.
      step: the number.
      names: in the directory of the run.
    """
    same = [name for name in names if parse_prefixed_step(name) == step]
    return next((listed for listed in complete_steps(storage, same) if not listed.is_t5x), None)


def check_room(storage: Storage, step: int, *, overwrite: bool = False) -> None:
    """Checks that a copy or a conversion can be written as this step.

    Raises:
      CheckpointExistsError: a complete checkpoint or files of other programs exist, and ``overwrite`` is not set.
      UnsupportedFormatError: the step exists in another layout, which is never replaced.
      AccessDeniedError: the step is to be replaced, and is another user's.
    """
    is_disk = storage.commits_by_rename
    occupant = (occupant_on_disk if is_disk else occupant_in_bucket)(storage, step)
    _check_replaced(storage, occupant, overwrite=overwrite)
    foreign = _foreign_at(storage, step_dir(step)) if occupant is None and is_disk and not overwrite else []
    if foreign:
        raise CheckpointExistsError(
            f'{storage.url(step_dir(step))} contains files that neither T5X nor t5ckpt wrote ({few(foreign)}). Move them away, '
            'write to another directory, or have them moved aside (overwrite=True).'
        )


def _check_replaced(storage: Storage, occupant: ListedStep | None, *, overwrite: bool) -> None:
    if occupant is None:
        return
    where = storage.url(occupant.name)
    if not occupant.is_t5x:
        cure = 'Move it away, or write to another directory.'
        raise other_layout(where, occupant.layout, 'which is not replaced', cure)
    if not overwrite:
        raise CheckpointExistsError(
            f'{where} exists already. Write to another directory, or replace it (overwrite=True).'
        )
    if storage.kind(join(occupant.name, PINNED)) == 'file':
        raise CheckpointExistsError(f'{where} is pinned and is not replaced. Unpin it first.')
    check_removable(storage, occupant.name)


def _foreign_at(storage: Storage, directory: str) -> list[str]:
    """The files of other programs in the directory of a step; the name itself if it is not a directory."""
    kind = storage.kind(directory)
    return [] if kind is None else foreign_files(storage, directory) if kind == 'dir' else [directory]
