"""Which steps a run on an object store has, without walking its chunks.

A listing there has no directories: to see the names of 100 checkpoints of 10,000 chunks is to page through a million
keys. So a small key ``.t5ckpt/steps/<step>`` is written after each commit, and ``.t5ckpt/busy/<step>.<who>`` says while a step
is written or deleted. Both come in one listing. The manifests have the last word: a step is listed if its manifest is
there, whatever the markers say, and each is asked for.

    steps/<step>   committed, and not deleted by us since
    busy/<step>.<who>   a write lease: being written or deleted, or left by a process that died; see commit/write_lease.py
    others/<name>  a step in another layout lies under this name, see catalog/layouts.py
    complete.<hash of the run's address>   every step that was there has its marker
    held_...       read leases, see commit/read_lease.py; here, so that they come in the same listing

Without ``complete.*`` (a run that T5X or a copy made) everything is walked, once: the next save marks what it finds. A copy
of a run to another place carries the hash of another address, and is walked again.

With it, steps ``checkpoint_<step>`` that others add to the run are found where the store can list what lies between the
known ones (Google's can: one request a step); S3, as TensorStore asks it, cannot. Steps that Orbax adds or finishes under
their numbers are not looked for on either, since that is a request for each digit. ``reindex_steps`` looks for all of
these. A step that is asked for by its number is always found.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Mapping
from typing import Any

from t5ckpt.catalog.layouts import ListedStep, inspect_name, one_a_step
from t5ckpt.core.keys import join
from t5ckpt.format.names import (
    INDEX,
    MANIFEST,
    STEP_PREFIX,
    ReadLease,
    WriteLeaseName,
    index_complete,
    is_index_complete,
    other_marker,
    parse_index,
    parse_other,
    parse_prefixed_step,
    parse_read_lease,
    parse_write_lease,
    step_dir,
    step_marker,
)
from t5ckpt.storage import Storage, open_storage

__all__ = [
    'Index',
    'ensured_index',
    'indexed_steps',
    'mark_step',
    'newest_indexed_step',
    'read_index',
    'reindex_steps',
    'steps_of',
]

# A step of an Orbax CheckpointManager is a directory whose name is its number.
_STEP_PREFIXES = (STEP_PREFIX, *'0123456789')
_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class Index:
    """The markers of a run, as one listing has them.

    Attributes:
      steps: committed.
      busy: being written or deleted.
      is_complete: every step that is not busy had a marker when the run was last walked.
      others: names of steps in other layouts.
      read_leases: the read leases, also expired ones.
      write_leases: those of the steps in ``busy``, also of processes that ended.
      elsewhere: keys that say of other addresses that they are complete.
    """

    steps: frozenset[int]
    busy: frozenset[int]
    is_complete: bool
    others: frozenset[str] = frozenset()
    read_leases: tuple[ReadLease, ...] = ()
    elsewhere: tuple[str, ...] = ()
    write_leases: tuple[WriteLeaseName, ...] = ()


def read_index(storage: Storage) -> Index:
    """Lists the markers."""
    keys = [key for key, _ in storage.walk(INDEX)]
    marked: dict[str, set[int]] = {'steps': set(), 'busy': set()}
    for key in keys:
        parsed = parse_index(key)
        if parsed is not None:
            marked[parsed[0]].add(parsed[1])
    own = index_complete(storage.url())
    elsewhere = tuple(key for key in keys if is_index_complete(key) and key != own)
    read_leases = tuple(lease for key in keys if (lease := parse_read_lease(key.removeprefix(f'{INDEX}/'))) is not None)
    write_leases = tuple(found for key in keys if (found := parse_write_lease(key)) is not None)
    others = frozenset(name for key in keys if (name := parse_other(key)) is not None)
    return Index(
        frozenset(marked['steps']),
        frozenset(marked['busy']),
        own in keys,
        others,
        read_leases,
        elsewhere,
        write_leases,
    )


def indexed_steps(storage: Storage) -> list[ListedStep]:
    """The complete steps of a run on a store without rename, ascending, in whichever layout."""
    return steps_of(storage, read_index(storage))


def newest_indexed_step(storage: Storage) -> ListedStep | None:
    """The one with the largest number, or None. Smaller ones are asked for only where several layouts may have it."""
    index = read_index(storage)
    unmarked = _unmarked(storage, index)
    if index.others or unmarked:
        return max(_steps(storage, index, unmarked), key=lambda each: each.step, default=None)
    for step in sorted(index.steps | index.busy, reverse=True):
        if storage.is_file(join(step_dir(step), MANIFEST)):
            return ListedStep(step, step_dir(step))
    return None


def steps_of(storage: Storage, index: Index, assumed: Collection[int] = ()) -> list[ListedStep]:
    """The complete steps, ascending. The manifests of those ``assumed`` to be there are not asked for."""
    return _steps(storage, index, _unmarked(storage, index), assumed)


def _steps(
    storage: Storage, index: Index, unmarked: Collection[str], assumed: Collection[int] = ()
) -> list[ListedStep]:
    known = sorted((index.steps | index.busy).difference(assumed))
    there = storage.are_files([join(step_dir(step), MANIFEST) for step in known])
    # A manifest is one PUT, so one that we wrote is whole.
    found = [*assumed, *(step for step, is_there in zip(known, there, strict=True) if is_there)]
    steps = [ListedStep(step, step_dir(step)) for step in found]
    looked_at = [inspect_name(storage, name) for name in sorted(index.others.union(unmarked))]
    return one_a_step([*steps, *(found for found in looked_at if found is not None)])


def _unmarked(storage: Storage, index: Index) -> list[str]:
    """The names of steps without a marker, where the index may lack some or the store can list the rest."""
    if index.is_complete and not storage.seeks:
        return []
    known = {*map(step_dir, index.steps | index.busy), *index.others}
    beginnings = (STEP_PREFIX,) if index.is_complete else _STEP_PREFIXES
    names = storage.names('', beginnings, known)
    # A file is not left out with the directories.
    unmarked = [name for name in names if name not in known and parse_prefixed_step(name) is not None]
    if unmarked and not index.is_complete:
        _log.info(
            't5ckpt: %s has no markers of its steps, so all its keys were listed; the next save writes them.',
            storage.url(),
        )
    return unmarked


def mark_step(storage: Storage, step: int) -> None:
    """Writes the marker of a committed step."""
    storage.write(step_marker(step), b'')


def ensured_index(storage: Storage, *, again: bool = False) -> Index:
    """The index, after every step that is there got its marker, unless that was done before; with ``again`` also then."""
    index = read_index(storage)
    if index.is_complete and not again:
        return index
    found = steps_of(storage, dataclasses.replace(index, is_complete=False))
    steps = {each.step for each in found if each.is_t5x}
    others = {each.name for each in found if not each.is_t5x}
    for step in sorted(steps - index.steps):
        mark_step(storage, step)
    for name in sorted(others - index.others):
        storage.write(other_marker(name), b'')
    storage.write(index_complete(storage.url()), b'')
    for key in index.elsewhere:
        # From now on the run here may get steps that it says nothing of.
        storage.delete_file(key)
    return dataclasses.replace(
        index,
        steps=index.steps | steps,
        is_complete=True,
        others=index.others | others,
        elsewhere=(),
    )


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
    others = [step for name in after.others - before.others if (step := parse_prefixed_step(name)) is not None]
    return sorted({*(after.steps - before.steps), *others})
