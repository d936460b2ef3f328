"""Resolves a path to a checkpoint, and lists the steps of a run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from t5ckpt.catalog.foreign_layouts import foreign_file, model_file, no_checkpoint, not_a_run
from t5ckpt.catalog.layouts import (
    ListedStep,
    Listing,
    inspect_all,
    inspect_step,
    is_orbax,
    step_around,
)
from t5ckpt.catalog.step_index import indexed_steps, newest_indexed_step
from t5ckpt.core.arguments import given_step
from t5ckpt.core.call_site import warn_caller
from t5ckpt.core.keys import join
from t5ckpt.errors import CheckpointNotFoundError, NoEffectWarning, UnsupportedFormatError
from t5ckpt.format.manifest import is_tensorflow_state
from t5ckpt.format.names import (
    MANIFEST,
    TRAIN_DS_PREFIX,
    parse_padded_step,
    parse_prefixed_step,
    parse_step_dir,
    parse_step_name,
    step_dir,
)
from t5ckpt.format.safetensors import is_safetensors
from t5ckpt.storage import AbsentStorage, Storage, open_storage, split_path

__all__ = [
    'Located',
    'dataset_steps_in',
    'has_step',
    'listing',
    'locate',
    'locate_step',
    'newest',
    'no_links_text',
    'open_run_storage',
    'refuse_within',
    'refuse_within_step',
    'steps_in',
    'with_links',
]


@dataclasses.dataclass(frozen=True)
class Located:
    """A checkpoint that was found.

    Attributes:
      storage: whose root is the parent of the checkpoint's directory.
      directory: the checkpoint's directory, a key of ``storage``; '' when the manifest lies at the root.
      manifest: the manifest's file name; '' in an Orbax directory, which has none of ours.
      step: from the directory's name, or None.
      follow_links: symbolic links may lead out of the directory.
    """

    storage: Storage
    directory: str
    manifest: str
    step: int | None
    follow_links: bool = False

    @property
    def url(self) -> str:
        """The manifest, or the directory in Orbax's case, as a user would write it."""
        return self.storage.url(join(self.directory, self.manifest))


def with_links(located: Located, follow_links: bool) -> Located:
    """The same, with symbolic links that may lead out of its directory; warns where there are no links."""
    if follow_links and located.storage.local_path('') is None:
        warn_caller(NoEffectWarning(no_links_text(located)))
    return dataclasses.replace(located, follow_links=follow_links)


def no_links_text(located: Located) -> str:
    """What to say to ``follow_links`` on a storage without links."""
    return f'follow_links has no effect: {located.storage.url()} is not on a local file system and has no links. Leave it out.'


def open_run_storage(
    path: str | os.PathLike[str] | Storage, storage_options: Mapping[str, Any] | None = None
) -> Storage:
    """Opens a run's directory; it need not exist. An empty path gives a storage that raises when it is used.

    Raises:
      CheckpointNotFoundError: it is a step of a run, or lies in one. What would be saved there would lie within a
        checkpoint, and go with it.
    """
    if isinstance(path, (str, bytes, os.PathLike)) and not os.fspath(path):
        return AbsentStorage()
    storage = open_storage(path, storage_options)
    refuse_within_step(storage, storage_options)
    return storage


def refuse_within_step(storage: Storage, storage_options: Mapping[str, Any] | None = None) -> None:
    """Looks whether a directory that is to be a run's lies in that of a step.

    Raises:
      CheckpointNotFoundError: it does, or is a step's itself.
    """
    found = step_around(storage, storage_options)
    if found is not None:
        here, (directory, step) = storage.url().rstrip('/'), found
        what = 'is' if directory == here else f'lies in {directory}, which is'
        raise CheckpointNotFoundError(
            f'{here} {what} step {step} of a run, and no run. Give the run: {directory.rpartition("/")[0]}'
        )


def steps_in(storage: Storage) -> list[int]:
    """The complete steps below a storage's root, ascending, in whichever layout."""
    return listing(storage).numbers


def listing(storage: Storage) -> Listing:
    """The same with the layout of each, and with what cannot be looked at."""
    if not storage.renames:
        return Listing(tuple(indexed_steps(storage)))
    return inspect_all(storage)


def newest(storage: Storage) -> ListedStep | None:
    """The step with the largest number, in whichever layout, or None."""
    return listing(storage).newest if storage.renames else newest_indexed_step(storage)


def dataset_steps_in(storage: Storage) -> list[int]:
    """Likewise, below a storage's root; on an object store those of complete steps alone."""
    if storage.renames:
        names = [entry.name for entry in storage.entries() if entry.is_dir]
    else:
        names = [each.directory for each in indexed_steps(storage) if each.directory]
    steps = {
        name: step
        for name in names
        if (step := _step_of(name)) is not None or (step := parse_step_name(name)) is not None
    }
    return sorted({step for name, step in steps.items() if storage.names(name, f'{TRAIN_DS_PREFIX}-')})


def _step_of(name: str) -> int | None:
    """The step of a directory in T5X's layout, with or without zeros before its number."""
    step = parse_step_dir(name)
    return parse_padded_step(name) if step is None else step


def locate(
    path: str | os.PathLike[str],
    step: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    *,
    tensors: bool = False,
) -> Located:
    """Resolves a path as :func:`find_checkpoint` does, to parts that can be read.

    Args:
      path: of a run, a step or a file.
      step: which step, where ``path`` is a run's directory; None takes the latest.
      storage_options: see docs/storage.md.
      tensors: also a safetensors file, or a directory without a checkpoint that holds a model of them.

    Raises:
      ValueError: ``step`` is not an integer of at least 0.
      CheckpointNotFoundError: with what is there instead.
    """
    step = given_step(step)
    parent, name = split_path(path)
    storage = open_storage(path, storage_options)
    outer = open_storage(parent, storage_options) if name else storage
    if name and outer.is_file(name):
        foreign = foreign_file(name)
        if foreign is not None and not (tensors and is_safetensors(name)):
            raise UnsupportedFormatError(f'{path} is {foreign}.')
        # The bare file: its directory is the checkpoint's.
        grand, directory = split_path(parent)
        if step is not None and step != _step_of(directory):
            raise CheckpointNotFoundError(f'{path}: is one checkpoint, not a run: step {step} cannot be taken from it.')
        number = _step_of(directory)
        if number is None:
            # A file of Flax says it itself.
            number = parse_step_dir(name)
        if directory:
            return Located(open_storage(grand, storage_options), directory, name, number)
        return Located(outer, '', name, number)
    if storage.renames and storage.kind('') != 'dir':
        raise CheckpointNotFoundError(f'{path}: no such file or directory, so no checkpoint.')
    try:
        return _locate_in_dir(storage, outer, name, step)
    except CheckpointNotFoundError:
        # Looked for last: in a bucket each look is a request, and an export that lies in a run is not what its path means.
        file = model_file(storage) if tensors and step is None else None
        if file is None:
            raise
        return Located(outer, name, file, None)


def _locate_in_dir(storage: Storage, outer: Storage, name: str, step: int | None) -> Located:
    if step is None and storage.is_file(MANIFEST) and not _is_run_beside_file(storage, name):
        return Located(outer, name, MANIFEST, _step_of(name))
    if step is None and is_orbax(storage, ''):
        return Located(outer, name, '', parse_prefixed_step(name))
    return locate_step(storage, step)


def _is_run_beside_file(storage: Storage, name: str) -> bool:
    """Whether a directory with a file ``checkpoint`` is a run all the same, as where T5X goes on from a TensorFlow checkpoint.

    T5X takes its latest step. On an object store only the state file of TensorFlow is looked behind: to list the steps there
    costs requests, which most of those who give the directory of a checkpoint would pay for nothing.
    """
    if _step_of(name) is not None:
        return False
    if not storage.renames and not is_tensorflow_state(storage.read_range(MANIFEST, 0, 64)):
        return False
    return newest(storage) is not None


def locate_step(storage: Storage, step: int | None) -> Located:
    """Finds a step below a run's directory; None takes the latest.

    Raises:
      CheckpointNotFoundError: with the steps that are there.
    """
    if step is not None and storage.is_file(join(step_dir(step), MANIFEST)):
        # Whole or not: its decoder says what is wrong with it.
        return Located(storage, step_dir(step), MANIFEST, step)
    found = newest(storage) if step is None else inspect_step(storage, step)
    if found is not None:
        return Located(storage, found.directory, found.manifest, found.step)
    if storage.renames and storage.kind('') == 'file':
        raise not_a_run(storage)
    if step is None:
        # A damaged step is opened when there is nothing better.
        damaged = max(_damaged_steps(storage), default=None)
        if damaged is not None:
            return Located(storage, step_dir(damaged), MANIFEST, damaged)
        raise no_checkpoint(storage)
    if storage.is_file(MANIFEST):
        raise CheckpointNotFoundError(
            f'{storage.url()} is one checkpoint, not a run: step {step} cannot be taken from it.'
        )
    steps = listing(storage).steps
    found = next((each for each in steps if each.step == step), None)
    if found is not None:
        # On an object store, under a name that only a listing shows.
        return Located(storage, found.directory, found.manifest, found.step)
    shown = ', '.join(str(each.step) for each in steps[-10:]) or 'none'
    raise CheckpointNotFoundError(
        f'{storage.url(step_dir(step))}: step {step} is not there, complete steps are: {shown}. Pass one of them, or none to '
        'take the latest.'
    )


def has_step(storage: Storage, step: int) -> bool:
    """Whether a step is there, in whichever layout."""
    return storage.is_file(join(step_dir(step), MANIFEST)) or inspect_step(storage, step) is not None


def refuse_within(target: Storage | None, located: Located) -> None:
    """Keeps a copy from being written into what is copied.

    Raises:
      ValueError: the target lies in the checkpoint's directory.
    """
    inner = None if target is None else target.local_path('')
    outer = located.storage.local_path(located.directory)
    if inner is None or outer is None:
        return
    inner, outer = os.path.realpath(inner), os.path.realpath(outer)
    if inner == outer or inner.startswith(f'{outer}{os.sep}'):
        raise ValueError(f'{inner} is inside of the checkpoint {outer} that is to be copied. Write elsewhere.')


def _damaged_steps(storage: Storage) -> list[int]:
    steps = {parse_step_dir(entry.name): entry.name for entry in storage.entries() if entry.is_dir}
    return [step for step, name in steps.items() if step is not None and storage.is_file(join(name, MANIFEST))]
