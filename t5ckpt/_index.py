"""Which steps a run on an object store has, without walking its chunks.

A listing there has no directories: to see the names of 100 checkpoints of 10,000 chunks is to page through a million
keys. So a small key ``.t5ckpt/steps/<step>`` is written after each commit, and ``.t5ckpt/busy/<step>`` says while a step
is written or deleted. Both come in one listing. The manifests have the last word: a step is listed if its manifest is
there, whatever the markers say, and each is asked for.

    steps/<step>   committed, and not deleted by us since
    busy/<step>    being written or deleted, or left by who died over it; see _in_place.py
    others/<name>  a step in another layout lies under this name, see catalog/layouts.py
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
    other_marker,
    parse_index,
    parse_other,
    parse_step_name,
    step_dir,
    step_marker,
)
from t5ckpt.catalog.layouts import ListedStep, inspect_name, one_a_step
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.storage import Storage, open_storage

__all__ = ['Index', 'ensured_index', 'indexed_steps', 'mark_step', 'read_index', 'reindex_steps']

# A step of an Orbax CheckpointManager is a directory whose name is its number.
_STEP_PREFIXES = (STEP_PREFIX, *'0123456789')
_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class Index:
    """The markers of a run; ``is_complete`` where every step that is not ``busy`` had one when it was last walked."""

    steps: frozenset[int]
    busy: frozenset[int]
    is_complete: bool
    others: frozenset[str] = frozenset()


def read_index(storage: Storage) -> Index:
    """Lists the markers."""
    keys = [key for key, _ in storage.walk(INDEX)]
    marked: dict[str, set[int]] = {'steps': set(), 'busy': set()}
    for key in keys:
        parsed = parse_index(key)
        if parsed is not None:
            marked[parsed[0]].add(parsed[1])
    is_complete = INDEX_COMPLETE in keys and _is_of_here(storage)
    others = frozenset(name for key in keys if (name := parse_other(key)) is not None)
    return Index(frozenset(marked['steps']), frozenset(marked['busy']), is_complete, others)


def _is_of_here(storage: Storage) -> bool:
    try:
        return storage.read(INDEX_COMPLETE) == storage.url().encode()
    except CheckpointNotFoundError:
        return False


def indexed_steps(storage: Storage) -> list[ListedStep]:
    """The complete steps of a run on a store without rename, ascending, in whichever layout."""
    return _steps(storage, read_index(storage))


def _steps(storage: Storage, index: Index) -> list[ListedStep]:
    known = sorted(index.steps | index.busy)
    unmarked: list[str] = []
    if not index.is_complete or storage.seeks:
        unmarked = _unmarked(storage, index)
    if unmarked and not index.is_complete:
        _log.info(
            't5ckpt: %s has no markers of its steps, so all its keys were listed; the next save writes them.',
            storage.url(),
        )
    there = storage.are_files([join(step_dir(step), MANIFEST) for step in known])
    # A manifest is one PUT, so one that we wrote is whole.
    steps = [ListedStep(step, step_dir(step)) for step, is_there in zip(known, there, strict=True) if is_there]
    looked_at = [inspect_name(storage, name) for name in sorted(index.others.union(unmarked))]
    return one_a_step([*steps, *(found for found in looked_at if found is not None)])


def _unmarked(storage: Storage, index: Index) -> list[str]:
    known = {*map(step_dir, index.steps | index.busy), *index.others}
    beginnings = (STEP_PREFIX,) if index.is_complete else _STEP_PREFIXES
    names = storage.names('', beginnings, known)
    # A file is not left out with the directories.
    return [name for name in names if name not in known and parse_step_name(name) is not None]


def mark_step(storage: Storage, step: int) -> None:
    """Writes the marker of a committed step."""
    storage.write(step_marker(step), b'')


def ensured_index(storage: Storage, *, again: bool = False) -> Index:
    """The index, after every step that is there got its marker, unless that was done before; with ``again`` also then."""
    index = read_index(storage)
    if index.is_complete and not again:
        return index
    found = _steps(storage, dataclasses.replace(index, is_complete=False))
    steps = {each.step for each in found if each.is_t5x}
    others = {each.name for each in found if not each.is_t5x}
    for step in sorted(steps - index.steps):
        mark_step(storage, step)
    for name in sorted(others - index.others):
        storage.write(other_marker(name), b'')
    storage.write(INDEX_COMPLETE, storage.url().encode())
    return Index(index.steps | steps, index.busy, True, index.others | others)


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
    if storage.renames:
        return []
    before, after = read_index(storage), ensured_index(storage, again=True)
    others = [step for name in after.others - before.others if (step := parse_step_name(name)) is not None]
    return sorted({*(after.steps - before.steps), *others})
