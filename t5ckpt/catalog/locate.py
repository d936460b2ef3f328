"""Finds the checkpoint that a path, or a step of a run, names: ``Located``. ``catalog/listing.py`` lists the steps."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from t5ckpt.catalog.foreign_layouts import foreign_file, model_file, no_checkpoint, no_step, not_a_run
from t5ckpt.catalog.layouts import is_orbax
from t5ckpt.catalog.listing import catalog_of, inspect_step, listing, newest, step_around, step_of
from t5ckpt.core.arguments import given_step
from t5ckpt.core.call_site import warn_caller
from t5ckpt.core.keys import join
from t5ckpt.errors import CheckpointNotFoundError, NoEffectWarning, UnsupportedFormatError
from t5ckpt.format.names import (
    MANIFEST,
    parse_prefixed_step,
    parse_step_dir,
    step_dir,
)
from t5ckpt.format.safetensors import is_tensor_file
from t5ckpt.storage import AbsentStorage, Storage, open_storage, split_path


@dataclasses.dataclass(frozen=True)
class Located:
    """A checkpoint in a storage; nothing of it has been read but its directory's name.

    Attributes:
      storage: its root is the parent of the checkpoint's directory.
      directory: the checkpoint's directory, a key of ``storage``; '' if the manifest is at the root.
      manifest: the name of the manifest's file; '' in an Orbax directory without one.
      step: from the directory's name, or None.
      follow_links: whether symbolic links may lead out of the directory.
    """

    storage: Storage
    directory: str
    manifest: str
    step: int | None
    follow_links: bool = False

    def step_to_write(self) -> int:
        """The step, for a copy.

        Raises:
          UnsupportedFormatError: there is none in the directory's name.
        """
        if self.step is None:
            raise UnsupportedFormatError(
                f'{self.url}: its directory has no step in its name, so the copy would have none. Rename it to '
                '"checkpoint_<step>".'
            )
        return self.step

    @property
    def url(self) -> str:
        """The path or URL of the manifest, or of the directory without one."""
        return self.storage.url(join(self.directory, self.manifest))


def with_links(located: Located, follow_links: bool) -> Located:
    """Sets ``follow_links``; warns on a storage that has no links."""
    if follow_links and located.storage.local_path('') is None:
        warn_caller(NoEffectWarning(no_links_text(located)))
    return dataclasses.replace(located, follow_links=follow_links)


def no_links_text(located: Located) -> str:
    """The warning for ``follow_links`` on a storage without links."""
    return f'follow_links has no effect: {located.storage.url()} is not on a local file system and has no links. Leave it out.'


def open_run_storage(
    path: str | os.PathLike[str] | Storage, storage_options: Mapping[str, Any] | None = None
) -> Storage:
    """Opens a run's directory, which need not exist. For an empty path, returns a storage that raises when it is used.

    Raises:
      CheckpointNotFoundError: the directory is a step of a run or lies in one, so that its checkpoints would be deleted with
        that step.
    """
    if isinstance(path, (str, bytes, os.PathLike)) and not os.fspath(path):
        return AbsentStorage()
    storage = open_storage(path, storage_options)
    refuse_within_step(storage, storage_options)
    return storage


def refuse_within_step(storage: Storage, storage_options: Mapping[str, Any] | None = None) -> None:
    """Raises CheckpointNotFoundError if a run's directory is that of a step or lies in one."""
    found = step_around(storage, storage_options)
    if found is not None:
        here, (directory, step) = storage.url().rstrip('/'), found
        what = 'is' if directory == here else f'lies in {directory}, which is'
        raise CheckpointNotFoundError(
            f'{here} {what} step {step} of a run, not a run. Pass the directory of the run: {directory.rpartition("/")[0]}'
        )


def locate(
    path: str | os.PathLike[str],
    step: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    *,
    tensors: bool = False,
) -> Located:
    """Resolves a path as :func:`find_checkpoint` does, to a location.

    Args:
      path: of a run, a step or a file.
      step: which step, if ``path`` is a run's directory; None takes the latest.
      storage_options: see docs/storage.md.
      tensors: also accepts a safetensors or npz file, or a directory without a checkpoint that has a safetensors model.

    Raises:
      ValueError: ``step`` is not an integer of at least 0.
      CheckpointNotFoundError: no checkpoint; the message lists the contents of the directory.
    """
    step = given_step(step)
    parent, name = split_path(path)
    storage = open_storage(path, storage_options)
    outer = open_storage(parent, storage_options) if name else storage
    if name and outer.is_file(name):
        foreign = foreign_file(name)
        if foreign is not None and not (tensors and is_tensor_file(name)):
            raise UnsupportedFormatError(f'{path} is {foreign}.')
        # The path is the manifest's file.
        grand, directory = split_path(parent)
        if step is not None and step != step_of(directory):
            raise CheckpointNotFoundError(
                f'{path} is one checkpoint, not a run with step {step}. Leave step out, or pass the directory of a run.'
            )
        number = step_of(directory)
        if number is None:
            # In Flax's layout the file has the number.
            number = parse_step_dir(name)
        if directory:
            return Located(open_storage(grand, storage_options), directory, name, number)
        return Located(outer, '', name, number)
    if storage.root_kind() != 'dir':
        raise CheckpointNotFoundError(f'{path}: no such file or directory. Check the path.')
    try:
        return _locate_in_dir(storage, outer, name, step)
    except CheckpointNotFoundError:
        # Last, because each check is a request on a bucket, and the path of a run does not stand for an export in it.
        file = model_file(storage) if tensors and step is None else None
        if file is None:
            raise
        return Located(outer, name, file, None)


def _locate_in_dir(storage: Storage, outer: Storage, name: str, step: int | None) -> Located:
    if (
        step is None
        and storage.is_file(MANIFEST)
        and (step_of(name) is not None or not catalog_of(storage).is_beside_manifest())
    ):
        return Located(outer, name, MANIFEST, step_of(name))
    if step is None and is_orbax(storage, ''):
        return Located(outer, name, '', parse_prefixed_step(name))
    return locate_step(storage, step)


def locate_step(storage: Storage, step: int | None) -> Located:
    """Finds a step in a run's directory; None takes the latest.

    Raises:
      CheckpointNotFoundError: with the existing steps.
    """
    if step is not None and storage.is_file(join(step_dir(step), MANIFEST)):
        # A damaged manifest is found, too, so that decoding it raises the error.
        return Located(storage, step_dir(step), MANIFEST, step)
    found = newest(storage) if step is None else inspect_step(storage, step)
    if found is not None:
        return Located(storage, found.directory, found.manifest, found.step)
    if storage.root_kind() == 'file':
        raise not_a_run(storage)
    if step is None:
        # If all steps are damaged, open one of them, so that decoding it raises the error.
        damaged = max(_damaged_steps(storage), default=None)
        if damaged is not None:
            return Located(storage, step_dir(damaged), MANIFEST, damaged)
        raise no_checkpoint(storage)
    if storage.is_file(MANIFEST):
        raise CheckpointNotFoundError(
            f'{storage.url()} is one checkpoint, not a run with step {step}. Leave step out, or pass the directory of a run.'
        )
    steps = listing(storage).steps
    found = next((each for each in steps if each.step == step), None)
    if found is not None:
        # On an object store, steps with a prefix in their names are found only by a listing.
        return Located(storage, found.directory, found.manifest, found.step)
    raise no_step(storage, step, steps, 'Pass one of them, or None for the latest.')


def refuse_within(target: Storage | None, located: Located) -> None:
    """Raises ValueError if the target of a copy is the checkpoint's directory or lies in it."""
    inner = None if target is None else target.local_path('')
    outer = located.storage.local_path(located.directory)
    if inner is None or outer is None:
        return
    inner, outer = os.path.realpath(inner), os.path.realpath(outer)
    if inner == outer or inner.startswith(f'{outer}{os.sep}'):
        raise ValueError(f'{inner} is inside the checkpoint to copy, {outer}. Pass another target.')


def _damaged_steps(storage: Storage) -> list[int]:
    steps = {parse_step_dir(entry.name): entry.name for entry in storage.entries() if entry.is_dir}
    return [step for step, name in steps.items() if step is not None and storage.is_file(join(name, MANIFEST))]
