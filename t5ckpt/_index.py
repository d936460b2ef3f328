"""Which steps a run on an object store has, without walking its chunks.

A listing there has no directories: to see the names of 100 checkpoints of 10,000 chunks is to page through a million
keys. So a small key ``.t5ckpt/steps/<step>`` is written after each commit, and ``.t5ckpt/busy/<step>`` says while a step
is written or deleted. Both come in one listing. The manifests have the last word: a step is listed if its manifest is
there, whatever the markers say, and each is asked for.

    steps/<step>   committed, and not deleted by us since
    busy/<step>    being written or deleted, or left by who died over it; see _in_place.py
    complete       the run's address: every step that was there has its marker

Without ``complete`` (a run that T5X or a copy made) everything is walked, once: the next save marks what it finds. A copy
of a run to another place carries another address in ``complete``, and is walked again.

With it, steps that others add to the run are found where the store can list what lies between the known ones (Google's
can: one request a step); S3, as TensorStore asks it, cannot: there ``reindex_steps`` looks for them. A step that is asked
for by its number is always found.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

from t5ckpt._layout import (
    INDEX,
    INDEX_COMPLETE,
    MANIFEST,
    STEP_PREFIX,
    join,
    parse_index,
    parse_step_dir,
    step_dir,
    step_marker,
)
from t5ckpt._manifest import is_whole
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.storage import Storage, open_storage

__all__ = ['complete_index', 'has_whole_manifest', 'indexed_steps', 'mark_step', 'read_index', 'reindex_steps']

_WALKED_BYTES = 64 * 2**20
_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class Index:
    """The markers of a run; ``is_complete`` where every step that is not ``busy`` had one when it was last walked."""

    steps: frozenset[int]
    busy: frozenset[int]
    is_complete: bool


def read_index(storage: Storage) -> Index:
    """Lists the markers."""
    keys = [key for key, _ in storage.walk(INDEX)]
    marked: dict[str, set[int]] = {'steps': set(), 'busy': set()}
    for key in keys:
        parsed = parse_index(key)
        if parsed is not None:
            marked[parsed[0]].add(parsed[1])
    is_complete = INDEX_COMPLETE in keys and _is_of_here(storage)
    return Index(frozenset(marked['steps']), frozenset(marked['busy']), is_complete)


def _is_of_here(storage: Storage) -> bool:
    try:
        return storage.read(INDEX_COMPLETE) == storage.url().encode()
    except CheckpointNotFoundError:
        return False


def indexed_steps(storage: Storage) -> list[int]:
    """The complete steps of a run on a store without rename, ascending."""
    return _steps(storage, read_index(storage))


def _steps(storage: Storage, index: Index) -> list[int]:
    known = sorted(index.steps | index.busy)
    others: list[int] = []
    if not index.is_complete or storage.seeks:
        others = _unmarked(storage, known)
    if others and not index.is_complete:
        _log.info(
            't5ckpt: %s has no markers of its steps, so all its keys were listed; the next save writes them.',
            storage.url(),
        )
    there = storage.are_files([join(step_dir(step), MANIFEST) for step in known])
    # A manifest is one PUT, so one that we wrote is whole.
    steps = [step for step, is_there in zip(known, there, strict=True) if is_there]
    return sorted([*steps, *(step for step in others if has_whole_manifest(storage, step_dir(step)))])


def _unmarked(storage: Storage, known: list[int]) -> list[int]:
    names = storage.names('', STEP_PREFIX, [step_dir(step) for step in known])
    return [step for name in names if (step := parse_step_dir(name)) is not None]


def has_whole_manifest(storage: Storage, directory: str) -> bool:
    """Whether a directory holds a manifest that does not end in the middle."""
    key = join(directory, MANIFEST)
    if storage.renames:
        size = storage.size(key)
        if size is None:
            return False
        if size > _WALKED_BYTES:
            return True
    try:
        return is_whole(storage.read(key))
    except CheckpointNotFoundError:
        # Deleted by another process since it was listed.
        return False


def mark_step(storage: Storage, step: int) -> None:
    """Writes the marker of a committed step."""
    storage.write(step_marker(step), b'')


def complete_index(storage: Storage, *, again: bool = False) -> list[int]:
    """Gives every complete step its marker, unless that was done before; with ``again`` also then.

    Returns:
      The steps that got one.
    """
    index = read_index(storage)
    if index.is_complete and not again:
        return []
    index = dataclasses.replace(index, is_complete=False)
    missing = [step for step in _steps(storage, index) if step not in index.steps]
    for step in missing:
        mark_step(storage, step)
    storage.write(INDEX_COMPLETE, storage.url().encode())
    return missing


def reindex_steps(
    checkpoints_dir: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> list[int]:
    """Looks for steps that other tools added to a run on an object store, and marks them, so that listings show them.

    Args:
      checkpoints_dir: the run's directory.
      storage_options: see docs/storage.md.

    Returns:
      The steps that were not known. On a file system, which needs no markers, none.
    """
    storage = open_storage(checkpoints_dir, storage_options)
    return [] if storage.renames else complete_index(storage, again=True)
