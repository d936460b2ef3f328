"""The index of steps on object stores: lists the steps of a run without listing the chunks.

A listing of an object store has no directories: finding the names of 100 checkpoints of 10,000 chunks takes a listing of a
million keys. So a small marker ``.t5ckpt/steps/<step>`` is written after each commit, and ``.t5ckpt/busy/<step>.<writer>``
while a step is written or deleted. One listing returns all markers. A marker is only a hint: a marked step is listed if its
manifest exists.

    steps/<step>   committed, and not deleted by t5ckpt since
    busy/<step>.<writer>   a write lease of a step that is being written or deleted, see commit/write_lease.py
    others/<name>  a step in another layout, see catalog/layouts.py
    complete.<hash of the run's URL>   every step that existed has its marker
    held_...       read leases, see commit/read_lease.py; they are here so that the same listing returns them

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
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from t5ckpt.catalog.layouts import ListedStep, Listing, inspect_name, one_a_step, sidecars_in
from t5ckpt.catalog.run_catalog import Index, Leases, RunCatalog
from t5ckpt.core.keys import join
from t5ckpt.format.manifest import is_tensorflow_state
from t5ckpt.format.names import (
    INDEX,
    MANIFEST,
    PINNED,
    STEP_PREFIX,
    busy_key,
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
from t5ckpt.storage import Entry, Storage

# The directory of a step in an Orbax CheckpointManager is its number.
_STEP_PREFIXES = (STEP_PREFIX, *'0123456789')
_log = logging.getLogger('t5ckpt')


def read_index(storage: Storage) -> Index:
    """Lists the markers of a run."""
    keys = [key for key, _ in storage.walk(INDEX)]
    marked: dict[str, set[int]] = {'steps': set(), 'busy': set()}
    for key in keys:
        parsed = parse_index(key)
        if parsed is not None:
            marked[parsed[0]].add(parsed[1])
    own_key = index_complete(storage.url())
    elsewhere = tuple(key for key in keys if is_index_complete(key) and key != own_key)
    read_leases = tuple(lease for key in keys if (lease := parse_read_lease(key.removeprefix(f'{INDEX}/'))) is not None)
    write_leases = tuple(owned for key in keys if (owned := parse_write_lease(key)) is not None)
    others = frozenset(name for key in keys if (name := parse_other(key)) is not None)
    return Index(
        frozenset(marked['steps']),
        frozenset(marked['busy']),
        own_key in keys,
        others,
        read_leases,
        elsewhere,
        write_leases,
    )


def indexed_steps(storage: Storage, index: Index, assumed: Collection[int] = ()) -> list[ListedStep]:
    """The complete steps, ascending. The manifests of ``assumed`` steps are not checked."""
    return _steps(storage, index, _unmarked(storage, index), assumed)


def _steps(
    storage: Storage, index: Index, unmarked: Collection[str], assumed: Collection[int] = ()
) -> list[ListedStep]:
    marked = sorted((index.steps | index.busy).difference(assumed))
    exist = storage.are_files([join(step_dir(step), MANIFEST) for step in marked])
    # t5ckpt writes a manifest in one PUT, so an existing one is complete.
    existing = [*assumed, *(step for step, is_there in zip(marked, exist, strict=True) if is_there)]
    steps = [ListedStep(step, step_dir(step)) for step in existing]
    looked_at = [inspect_name(storage, name) for name in sorted(index.others.union(unmarked))]
    return one_a_step([*steps, *(step for step in looked_at if step is not None)])


def _unmarked(storage: Storage, index: Index) -> list[str]:
    """The names of steps without a marker, if the index may be incomplete or the store can list names between the known ones."""
    if index.is_complete and not storage.seeks:
        return []
    marked_names = {*map(step_dir, index.steps | index.busy), *index.others}
    beginnings = (STEP_PREFIX,) if index.is_complete else _STEP_PREFIXES
    names = storage.names('', beginnings, marked_names)
    # The listing leaves out known directories, but not files of these names.
    unmarked = [name for name in names if name not in marked_names and parse_prefixed_step(name) is not None]
    if unmarked and not index.is_complete:
        _log.info(
            't5ckpt: %s has no markers of its steps, so all its keys were listed. The next save writes the markers.',
            storage.url(),
        )
    return unmarked


def mark_step(storage: Storage, step: int, version: Any = None) -> None:
    """Writes the marker of a committed step, with the version of its manifest, so that each save writes another one."""
    storage.write(step_marker(step), _marker(version))


def unmark_step(storage: Storage, step: int, version: Any = None) -> None:
    """Deletes the marker of a step whose manifest had a version; a late request does not delete the marker of a later save."""
    key = step_marker(step)
    if storage.seeks:
        # A step without a marker is listed, too.
        storage.delete_file(key)
        return
    expected = None if version is None else storage.version_of(_marker(version))
    if expected is not None and storage.delete_unchanged(key, expected):
        return
    stored_version = storage.version(key)
    if stored_version is not None:
        storage.delete_unchanged(key, stored_version)


def _marker(version: Any) -> bytes:
    return version if isinstance(version, bytes) else b''


def mark_missing_steps(storage: Storage, *, again: bool = False) -> Index:
    """Writes the missing markers of all steps and returns the index; does nothing to a complete index without ``again``."""
    index = read_index(storage)
    if index.is_complete and not again:
        return index
    listed_steps = indexed_steps(storage, dataclasses.replace(index, is_complete=False))
    steps = {listed_step.step for listed_step in listed_steps if listed_step.is_t5x}
    other_names = {listed_step.name for listed_step in listed_steps if not listed_step.is_t5x}
    for step in sorted(steps - index.steps):
        mark_step(storage, step)
    for name in sorted(other_names - index.others):
        storage.write(other_marker(name), b'')
    storage.write(index_complete(storage.url()), b'')
    for key in index.elsewhere:
        # Steps that this run gets from now on have no markers at the other URL.
        storage.delete_file(key)
    return dataclasses.replace(
        index,
        steps=index.steps | steps,
        is_complete=True,
        others=index.others | other_names,
        elsewhere=(),
    )


class IndexCatalog(RunCatalog):
    """A run on an object store."""

    absence = 'there is no run: no key begins with it'
    # A step without a manifest is found by its write lease alone.
    incomplete_state = 'unfinished'
    lease_directory = INDEX
    may_arrive_late = True
    # The files are removed one by one, and another writer may write some of the same names before its manifest.
    is_deleted_whole = False

    def exists(self) -> bool:
        return self.newest() is not None or self._storage.kind('') is not None

    def index(self) -> Index | None:
        return read_index(self._storage)

    def listing(self) -> Listing:
        return Listing(tuple(indexed_steps(self._storage, read_index(self._storage))))

    def newest(self) -> ListedStep | None:
        # Checks the manifests of smaller steps only if there may be other layouts.
        index = read_index(self._storage)
        unmarked = _unmarked(self._storage, index)
        if index.others or unmarked:
            return max(_steps(self._storage, index, unmarked), key=lambda listed_step: listed_step.step, default=None)
        for step in sorted(index.steps | index.busy, reverse=True):
            if self._storage.is_file(join(step_dir(step), MANIFEST)):
                return ListedStep(step, step_dir(step))
        return None

    def with_other_name(self, step: int) -> ListedStep | None:
        del step

    def is_beside_manifest(self) -> bool:
        # The steps are listed only if the file is the state file of TensorFlow, because a listing costs requests.
        return is_tensorflow_state(self._storage.read_range(MANIFEST, 0, 64)) and self.newest() is not None

    def directories(self) -> list[str]:
        return [listed_step.directory for listed_step in self.listing().steps if listed_step.directory]

    def sidecars(self, directory: str) -> list[str]:
        return sidecars_in(self._storage, directory)

    def leases(self) -> Leases:
        index = read_index(self._storage)
        return Leases(index.write_leases, index.read_leases)

    def write_lease_key(self, step: int, nonce: str) -> str:
        return busy_key(step, nonce)

    def waiting(self) -> set[int]:
        return set()

    def incomplete(self) -> list[str]:
        # Interrupted saves leave files under the name of the step, so the files do not show whether it is complete.
        return []

    def reindex(self) -> list[int]:
        before, after = read_index(self._storage), mark_missing_steps(self._storage, again=True)
        other_steps = [step for name in after.others - before.others if (step := parse_prefixed_step(name)) is not None]
        return sorted({*(after.steps - before.steps), *other_steps})

    def entries(self, complete: Iterable[str]) -> list[Entry]:
        # From the index: a listing of the names would list every chunk.
        names = {*complete, *map(step_dir, read_index(self._storage).busy)}
        return [Entry(name, True) for name in sorted(names)]

    def files(self, entry: Entry) -> dict[str, Entry] | None:
        return {PINNED: Entry(PINNED, False)} if self._storage.is_file(join(entry.name, PINNED)) else {}

    def nbytes(self, name: str, recorded: int | None, files: Mapping[str, Entry]) -> int | None:
        del name, files
        return recorded
