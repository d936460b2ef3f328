"""Determines the layout in which a step of a run is stored, for all listings, restores and saves.

    t5x     ``checkpoint_<step>/checkpoint`` is a complete T5X manifest; written by t5ckpt and T5X's own checkpointer
    orbax   ``checkpoint_<step>`` as T5X writes it through Orbax, or ``<step>`` of an Orbax CheckpointManager,
            with its ``step_prefix`` and its padding; on Google's storage with ``commit_success.txt``
    flax    ``checkpoint_<step>`` is a file, as ``flax.training.checkpoints`` writes it
    zarr    ``step-<step>`` of Levanter: a tree of zarr arrays, complete with its ``metadata.json``; by its path also any
            other directory tree of zarr arrays
    t5x-padded  as t5x, with leading zeros in the number; T5X lists such steps but does not write them

Steps in all layouts are listed and restored. Only steps in the layout t5x are written or replaced,
and keep policies delete only these.

Notes: costs one read of the manifest for each directory and, without a manifest, a check for five names. Does not load
TensorStore.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from t5ckpt.core.argument_kinds import checks_kinds
from t5ckpt.core.keys import join
from t5ckpt.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    StorageError,
    T5CkptError,
    UnsupportedFormatError,
)
from t5ckpt.format.manifest import begins_state, is_whole
from t5ckpt.format.names import (
    MANIFEST,
    STEP_PREFIX,
    is_facts_file,
    parse_padded_step,
    parse_prefixed_step,
    parse_step_dir,
    parse_step_name,
    step_dir,
)
from t5ckpt.format.orbax import COMMITTED, OCDBT_MANIFEST, PLACEHOLDER, STEP_METADATA, TREE_METADATA
from t5ckpt.storage import Entry, Storage, open_storage, split_path

T5X, ORBAX, FLAX, PADDED, ZARR = 't5x', 'orbax', 'flax', 't5x-padded', 'zarr'
LEVANTER = 'metadata.json'
_ARRAY_METADATA = ('.zarray', 'zarr.json')
# Directories that are listed in search of an array.
_SEARCHED = 20
# Larger manifests count as complete without being read, because a listing must not read gigabytes.
_WALKED_BYTES = 64 * 2**20
# The usual names of the item that holds the tree.
_ITEMS = ('state', 'default')
_ORBAX_MARKERS = (TREE_METADATA, STEP_METADATA, OCDBT_MANIFEST)
_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class ListedStep:
    """A complete step of a run.

    Attributes:
      step: its number.
      name: of its directory, or of its file in Flax's layout, in the run's directory.
      layout: ``'t5x'``, ``'orbax'``, ``'flax'``, ``'zarr'`` or ``'t5x-padded'``.
      manifest: the file to decode, in :attr:`directory`; '' in Orbax's newer layout, which has none.
    """

    step: int
    name: str
    layout: str = T5X
    manifest: str = MANIFEST

    @property
    def directory(self) -> str:
        """The directory of the step's files, a key of the run's storage; '' for a single file."""
        return '' if self.layout == FLAX else self.name

    @property
    def is_t5x(self) -> bool:
        """Whether the step is in T5X's layout, so that t5ckpt may replace and delete it."""
        return self.layout == T5X


@dataclasses.dataclass(frozen=True)
class Listing:
    """The steps of a run.

    Attributes:
      steps: the complete steps, ascending, in any layout.
      unreadable: the error of each step whose files could not be inspected, by name.
    """

    steps: tuple[ListedStep, ...]
    unreadable: Mapping[str, T5CkptError] = dataclasses.field(default_factory=dict[str, T5CkptError])

    @property
    def numbers(self) -> list[int]:
        """The numbers of the steps.

        Raises:
          T5CkptError: a step could not be inspected. Without it the run would seem shorter than it is.
        """
        for error in self.unreadable.values():
            raise error
        return [listed_step.step for listed_step in self.steps]

    @property
    def to_restore(self) -> list[int]:
        """The numbers of the steps above every one that could not be inspected.

        Raises:
          T5CkptError: a step could not be inspected, and none above it could.
        """
        last = max((parse_prefixed_step(name) or 0 for name in self.unreadable), default=-1)
        return [listed_step.step for listed_step in self.steps if listed_step.step > last] or self.numbers

    @property
    def newest(self) -> ListedStep | None:
        """The step with the largest number.

        Raises:
          T5CkptError: a step with a larger number could not be inspected.
        """
        last = self.steps[-1] if self.steps else None
        for name, error in self.unreadable.items():
            if last is None or (parse_prefixed_step(name) or 0) > last.step:
                raise error
        return last


def other_layout(where: str, layout: str, refused: str, cure: str) -> UnsupportedFormatError:
    """The error of an operation that t5ckpt does only on steps in T5X's layout.

    Args:
      where: the step.
      layout: its layout.
      refused: a relative clause that names the operation, such as 'which are not pruned', without a full stop.
      cure: the last sentence, which is replaced for a step with leading zeros in its name.
    """
    padded = parse_padded_step(where.rpartition('/')[2])
    if layout == PADDED and padded is not None:
        cure = f'Rename it to {step_dir(padded)} first.'
    return UnsupportedFormatError(f'{where} is in the layout of {layout}, {refused}. {cure}')


def orbax_marks(directory: str) -> list[str]:
    """Files of which each Orbax directory has at least one: files of a tree, or of the item with the tree."""
    marks = [*_ORBAX_MARKERS, *(f'{item}/{TREE_METADATA}' for item in _ITEMS)]
    return [join(directory, mark) for mark in marks]


def is_orbax(storage: Storage, directory: str) -> bool:
    """Whether a directory contains one of :func:`orbax_marks`."""
    return any(storage.are_files(orbax_marks(directory)))


def is_levanter(storage: Storage, directory: str) -> bool:
    """Whether a directory is a complete step of Levanter, which writes the file last."""
    key = join(directory, LEVANTER)
    if storage.known_size(key) is None:
        return False
    try:
        facts = json.loads(storage.read_range(key, 0, 2**16))
    except (CheckpointNotFoundError, ValueError, RecursionError):
        return False
    return isinstance(facts, dict) and {'step', 'timestamp'} <= facts.keys()


def is_zarr_tree(storage: Storage, name: str) -> bool:
    """Whether the root of a storage, a directory with this name, has an array of zarr below it and nothing of another layout."""
    if name.startswith(STEP_PREFIX):
        # It lacks its manifest.
        return False
    waiting = ['']
    for _ in range(_SEARCHED):
        if not waiting:
            return False
        directory = waiting.pop()
        entries = storage.entries(directory)
        if any(_is_of_other_layout(entry) for entry in entries):
            return False
        if directory and any(entry.name in _ARRAY_METADATA for entry in entries):
            if storage.is_file(join(directory, '.zarray')):
                return True
            with contextlib.suppress(ValueError):
                if b'"array"' in storage.read_range(join(directory, 'zarr.json'), 0, 2**16):
                    return True
        waiting += [join(directory, entry.name) for entry in reversed(entries) if entry.is_dir]
    return False


def _is_of_other_layout(entry: Entry) -> bool:
    is_step = parse_prefixed_step(entry.name) is not None and not entry.name.isdecimal()
    # A step that is being written has arrays, but not yet its manifest.
    is_unfinished = entry.name.startswith(STEP_PREFIX) or '.orbax-checkpoint-tmp' in entry.name
    return (
        is_step or is_unfinished or entry.name in (MANIFEST, TREE_METADATA, STEP_METADATA) or is_facts_file(entry.name)
    )


def is_state_file(storage: Storage, key: str) -> bool:
    """Whether a file begins like a manifest or a state of Flax, whatever its name; a damaged one does, too."""
    return storage.is_file(key) and begins_state(storage.read_range(key, 0, 8))


def is_checkpoint(storage: Storage, directory: str) -> bool:
    """Whether a directory is one checkpoint, by the files in it; its name does not matter, and it may be damaged."""
    return is_state_file(storage, join(directory, MANIFEST)) or (
        (is_orbax(storage, directory) and _is_committed(storage, directory)) or is_levanter(storage, directory)
    )


def has_placeholder(manifest: bytes) -> bool:
    """Whether a complete manifest is in Orbax's older layout, in which a text replaces each array."""
    return PLACEHOLDER.encode() in manifest


def inspect_name(storage: Storage, name: str) -> ListedStep | None:
    """The complete step with this name in the run, in any layout; None if there is none.

    Raises:
      StorageError: its files cannot be inspected.
    """
    step = parse_step_name(name)
    if step is None:
        return _inspect_prefixed(storage, name)
    manifest = _map_file(storage, join(name, MANIFEST))
    if manifest is not None:
        if name == step_dir(step) and not has_placeholder(manifest):
            return ListedStep(step, name)
        return ListedStep(step, name, ORBAX) if _is_committed(storage, name) else None
    if is_orbax(storage, name) and _is_committed(storage, name):
        return ListedStep(step, name, ORBAX, manifest='')
    if parse_step_dir(name) is None:
        return None
    # Where the size is unknown, the file may be large.
    is_flax = storage.is_file(name) if storage.known_size(name) == -1 else _map_file(storage, name) is not None
    return ListedStep(step, name, FLAX, manifest=name) if is_flax else None


def _inspect_prefixed(storage: Storage, name: str) -> ListedStep | None:
    number = parse_prefixed_step(name)
    if number is None:
        return None
    manifest = None if parse_padded_step(name) is None else _map_file(storage, join(name, MANIFEST))
    if manifest is not None and not has_placeholder(manifest):
        return ListedStep(number, name, PADDED)
    layout = _layout_of_prefixed(storage, name)
    return None if layout is None else ListedStep(number, name, layout, manifest='')


def _layout_of_prefixed(storage: Storage, name: str) -> str | None:
    """The layout of a directory with a prefix in its name; one that may not be read counts as another directory."""
    try:
        if is_levanter(storage, name):
            return ZARR
        return ORBAX if is_orbax(storage, name) and _is_committed(storage, name) else None
    except StorageError as error:
        if isinstance(error, AccessDeniedError) or error.errno == errno.ELOOP:
            return None
        raise


def _is_committed(storage: Storage, directory: str) -> bool:
    """Whether Orbax has written a directory completely; on storages with rename, directories of Orbax are always complete."""
    if not storage.orbax_commits:
        return True
    return any(storage.are_files([join(directory, item, COMMITTED) for item in ('', *_ITEMS)]))


def _map_file(storage: Storage, key: str) -> bytes | None:
    """The bytes of a file that is one complete msgpack map, else None; b'' for a large file, which is not read."""
    size = storage.known_size(key)
    if size is None:
        return None
    if size > _WALKED_BYTES:
        return b''
    try:
        data = storage.read(key)
    except CheckpointNotFoundError:
        # Another process has deleted it since it was listed.
        return None
    return data if is_whole(data) else None


def one_a_step(steps: list[ListedStep]) -> list[ListedStep]:
    """Sorts steps by number; of a step in two layouts, keeps that in T5X's."""
    by_step: dict[int, ListedStep] = {}
    for listed_step in sorted(steps, key=lambda listed_step: (listed_step.step, listed_step.is_t5x)):
        by_step[listed_step.step] = listed_step
    return [*by_step.values()]


class CheckpointTypes(enum.Enum):
    """T5X's names of checkpoint formats (t5x/checkpoint_utils.py)."""

    ORBAX = 'ORBAX'
    T5X = 'T5X'
    T5X_TF = 'T5X_TF'


@checks_kinds
def detect_checkpoint_type(
    checkpoint_path: str | os.PathLike[str],
    expected: CheckpointTypes | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> CheckpointTypes:
    """The format of a checkpoint, by T5X's rules.

    Args:
      checkpoint_path: its file ``checkpoint``, or the directory of a step.
      expected: any other format is logged as a warning.
      storage_options: see docs/storage.md.

    Returns:
      ORBAX if the directory has a file ``_METADATA``, T5X_TF for the state file of a TensorFlow checkpoint, else T5X.

    Raises:
      CheckpointNotFoundError: there is no such file.
      UnsupportedFormatError: the file is neither a state file of TensorFlow nor one complete msgpack map.
    """
    parent, name = split_path(checkpoint_path)
    storage = open_storage(parent, storage_options)
    if not storage.is_file(name):
        storage, name = open_storage(checkpoint_path, storage_options), MANIFEST
    actual = _type_of(storage, name)
    if expected is not None and actual is not expected:
        text = 'Expected the checkpoint at %s to be %s format, but the actual detected format was %s.'
        _log.warning(text, storage.url(name), expected, actual)
    return actual


def _type_of(storage: Storage, name: str) -> CheckpointTypes:
    if storage.is_file(TREE_METADATA):
        return CheckpointTypes.ORBAX
    data = storage.read(name)
    if data.startswith(b'model_checkpoint_path'):
        return CheckpointTypes.T5X_TF
    if not is_whole(data):
        raise UnsupportedFormatError(
            f'{storage.url(name)} is neither one complete msgpack map nor the state file of a TensorFlow checkpoint, so its '
            'format is unknown. Check the path, or copy the checkpoint again.'
        )
    return CheckpointTypes.T5X
