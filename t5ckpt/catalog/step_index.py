"""The index of steps on object stores: lists the steps of a run without listing the chunks.

A listing of an object store has no directories: finding the names of 100 checkpoints of 10,000 chunks takes a listing of a
million keys. So a small marker ``.t5ckpt/steps/<step>`` is written after each commit, and ``.t5ckpt/busy/<step>.<who>`` while a
step is written or deleted. One listing returns all markers. The manifests decide: each marked step is checked, and it is listed
if its manifest exists.

    steps/<step>   committed, and not deleted by t5ckpt since
    busy/<step>.<who>   a write lease of a step that is being written or deleted, see commit/write_lease.py
    others/<name>  a step in another layout, see catalog/layouts.py
    complete.<hash of the run's URL>   every step that existed has its marker
    held_...       read leases, see commit/read_lease.py; here, so that the same listing returns them

In a run without ``complete.*``, which T5X or a copy has made, all keys are listed until the next save writes the markers. A copy
of a run to another URL has the hash of the first URL, so it is listed again, too.

In a run with ``complete.*``, steps ``checkpoint_<step>`` of other programs are found if the store can list the names between the
known ones: Google's storage can, with one request per step; S3 through TensorStore cannot. Steps that Orbax adds under their
numbers are found on neither, since this would take a request for each digit. ``reindex_steps`` finds all of these. A step
that is requested by its number is always found.
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

# The directory of a step in an Orbax CheckpointManager is its number.
_STEP_PREFIXES = (STEP_PREFIX, *'0123456789')
_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class Index:
    """The markers of a run, from one listing.

    Attributes:
      steps: committed steps.
      busy: steps that are being written or deleted.
      is_complete: whether every step that is not busy had a marker when all keys were last listed.
      others: names of steps in other layouts.
      read_leases: the read leases, also expired ones.
      write_leases: the write leases of the steps in ``busy``, also of processes that ended.
      elsewhere: ``complete.*`` keys of other URLs.
    """

    steps: frozenset[int]
    busy: frozenset[int]
    is_complete: bool
    others: frozenset[str] = frozenset()
    read_leases: tuple[ReadLease, ...] = ()
    elsewhere: tuple[str, ...] = ()
    write_leases: tuple[WriteLeaseName, ...] = ()


def read_index(storage: Storage) -> Index:
    """Lists the markers of a run."""
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
    """The complete steps of a run on a store without rename, ascending, in any layout."""
    return steps_of(storage, read_index(storage))


def newest_indexed_step(storage: Storage) -> ListedStep | None:
    """The step with the largest number, or None. Checks the manifests of smaller steps only if there may be other layouts."""
    index = read_index(storage)
    unmarked = _unmarked(storage, index)
    if index.others or unmarked:
        return max(_steps(storage, index, unmarked), key=lambda each: each.step, default=None)
    for step in sorted(index.steps | index.busy, reverse=True):
        if storage.is_file(join(step_dir(step), MANIFEST)):
            return ListedStep(step, step_dir(step))
    return None


def steps_of(storage: Storage, index: Index, assumed: Collection[int] = ()) -> list[ListedStep]:
    """The complete steps, ascending. The manifests of ``assumed`` steps are not checked."""
    return _steps(storage, index, _unmarked(storage, index), assumed)


def _steps(
    storage: Storage, index: Index, unmarked: Collection[str], assumed: Collection[int] = ()
) -> list[ListedStep]:
    known = sorted((index.steps | index.busy).difference(assumed))
    there = storage.are_files([join(step_dir(step), MANIFEST) for step in known])
    # t5ckpt writes a manifest in one PUT, so an existing one is complete.
    found = [*assumed, *(step for step, is_there in zip(known, there, strict=True) if is_there)]
    steps = [ListedStep(step, step_dir(step)) for step in found]
    looked_at = [inspect_name(storage, name) for name in sorted(index.others.union(unmarked))]
    return one_a_step([*steps, *(found for found in looked_at if found is not None)])


def _unmarked(storage: Storage, index: Index) -> list[str]:
    """The names of steps without a marker, if the index may be incomplete or the store can list names between the known ones."""
    if index.is_complete and not storage.seeks:
        return []
    known = {*map(step_dir, index.steps | index.busy), *index.others}
    beginnings = (STEP_PREFIX,) if index.is_complete else _STEP_PREFIXES
    names = storage.names('', beginnings, known)
    # The listing leaves out known directories, but not files of these names.
    unmarked = [name for name in names if name not in known and parse_prefixed_step(name) is not None]
    if unmarked and not index.is_complete:
        _log.info(
            't5ckpt: %s has no markers of its steps, so all its keys were listed. The next save writes the markers.',
            storage.url(),
        )
    return unmarked


def mark_step(storage: Storage, step: int) -> None:
    """Writes the marker of a committed step."""
    storage.write(step_marker(step), b'')


def ensured_index(storage: Storage, *, again: bool = False) -> Index:
    """Writes the missing markers of all steps and returns the index; does nothing to a complete index without ``again``."""
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
        # Steps that this run gets from now on have no markers at the other URL.
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
    """Finds steps that other tools added to a run on an object store, and adds them to the index for listings.

    Args:
      checkpoints_dir: the run's directory.
      storage_options: see docs/storage.md.

    Returns:
      The steps that were added to the index; empty on a file system, which has no index.
    """
    storage = open_storage(checkpoints_dir, storage_options)
    if storage.renames:
        return []
    before, after = read_index(storage), ensured_index(storage, again=True)
    others = [step for name in after.others - before.others if (step := parse_prefixed_step(name)) is not None]
    return sorted({*(after.steps - before.steps), *others})
