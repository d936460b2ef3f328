"""Garbage collection: the next save removes the leftovers of dead writers, deleters and readers.

A leftover of t5ckpt has a write lease with the boot id, the process and its last heartbeat, see ``commit/write_lease.py``.
It is removed when its lock is free and its owner is dead: the process has ended, which is visible on the same machine, or
its last heartbeat is an hour ago, by the clock of ``commit/lease_time.py``. Host names and locks alone do not decide: hosts may
have equal names, and locks may be local to a node. A directory that was being deleted or is empty is removed when its lock is
free. A directory without a lease (T5X takes no lock) is removed when the time in its name is older than an hour. Expired read
leases are removed. Object stores have their own rules (``commit/write_lease.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection, Iterable

from t5ckpt.catalog.listing import catalog_of, read_facts
from t5ckpt.catalog.run_catalog import BucketListing
from t5ckpt.commit.bucket_deletion import collect_in_bucket
from t5ckpt.commit.lease_files import is_live, leased_directory, warn_of_lease
from t5ckpt.commit.lease_owner import UNKNOWN, dated, has_ended, parse_owner, read_owner
from t5ckpt.commit.lease_time import TIME_PREFIX, lease_clock
from t5ckpt.commit.removal import check_removable, remove_checkpoint, rename_aside, unless_renameless
from t5ckpt.commit.replacement import is_still_kept, put_back
from t5ckpt.commit.step_lease import has_live_lease
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import CheckpointNotFoundError, FormatError, T5CkptError
from t5ckpt.format.facts import decode_facts
from t5ckpt.format.names import FACTS_FILE, MANIFEST, READ_LEASE_PREFIX, Leftover, parse_leftover
from t5ckpt.storage import Storage

STALE_AFTER_SECONDS = 3600.0
_log = logging.getLogger('t5ckpt')


def collect(
    storage: Storage, clock: Clock, stale_after: float = STALE_AFTER_SECONDS
) -> tuple[list[str], BucketListing | None]:
    """Removes leftovers of dead writers and deleters.

    Returns:
      The names that were removed (one that cannot be removed is logged and does not stop the rest), and the names and leases
      that it has listed on an object store.
    """
    catalog = catalog_of(storage)
    listed = catalog.bucket_listing()
    leases = catalog.leases() if listed is None else listed.leases
    now = lease_clock(storage, clock)
    live = [lease for lease in leases.of_readers if is_live(storage, lease, now)]
    for lease in live:
        warn_of_lease(storage, lease, now)
    _remove_leases(
        storage, [join(leased_directory(storage), lease.name) for lease in leases.of_readers if lease not in live]
    )
    if listed is not None:
        collected = collect_in_bucket(storage, listed, clock, stale_after)
        names = tuple(name for name in listed.names if name not in collected)
        return collected, dataclasses.replace(listed, names=names)
    # On object stores, the write lease of a step is removed after its leftovers. File systems have no such leftovers.
    ended = [lease.key for lease in leases.of_writers if not has_live_lease(storage, [lease], clock, stale_after)]
    _remove_leases(storage, ended + [name for name in leases.partial if _is_torn(storage, name, now, stale_after)])
    removed: list[str] = []
    for entry in storage.entries():
        leftover = parse_leftover(entry.name) if entry.is_dir else None
        if leftover is None:
            continue
        try:
            if _collect_one(storage, leftover, clock, stale_after):
                removed.append(entry.name)
        except CheckpointNotFoundError:
            # Another process has removed it.
            continue
        except T5CkptError as error:
            _log.warning('t5ckpt: could not collect %s: %s', storage.url(entry.name), error)
    if removed:
        _log.info('t5ckpt: removed the leftovers %s from %s', ', '.join(removed), storage.url())
    return removed, None


def _remove_leases(storage: Storage, keys: Iterable[str]) -> None:
    """Removes the leases of readers and deleters that were killed."""
    for key in keys:
        try:
            storage.delete_file(key)
        except T5CkptError as error:
            _log.warning('t5ckpt: could not remove %s: %s', storage.url(key), error)


def _is_torn(storage: Storage, name: str, now: Clock, stale_after: float) -> bool:
    """Whether a partial lease belongs to a dead process.

    The lease of a writer contains its owner. A live process writes an empty lease again (``WriteLease``), and an empty time file.
    The lease of a reader is always empty, so only its age counts.
    """
    if name.startswith(READ_LEASE_PREFIX) and not name.startswith(TIME_PREFIX):
        written = storage.modified(name)
        return written is not None and written < now() - stale_after
    owner = read_owner(storage, name)
    return owner is not None and (owner is UNKNOWN or owner.is_dead(now, stale_after))


def _collect_one(storage: Storage, leftover: Leftover, clock: Clock, stale_after: float) -> bool:
    lock = storage.try_lock(leftover.name)
    if lock is None:
        return False
    with contextlib.closing(lock):
        # Before the lease is read: a lease that arrives later is found by the removal.
        names = [entry.name for entry in storage.entries(leftover.name)] if leftover.state == 'tmp' else ['']
        if leftover.state != 'tmp' and lock.is_held:
            is_dead = True
        elif leftover.state != 'tmp':
            # Without a working lock, only the age decides.
            is_dead = leftover.unix < clock() - stale_after
        else:
            is_dead = is_abandoned(storage, leftover, clock, stale_after, has_lock=lock.is_held)
        is_replaced = is_dead and leftover.state == 'replaced'
        if is_replaced and (put_back(storage, leftover) or is_still_kept(storage, leftover, clock)):
            return False
        if is_dead:
            name = leftover.name
            check_removable(storage, name)
            if _has_lease_in_part(names):
                return _remove_without_lease(storage, name, names)
            if leftover.state != 'deleted':
                # A removal that was killed may have removed the files that identify the directory.
                with unless_renameless():
                    name = rename_aside(storage, name, leftover.step, 'deleted', leftover.unix)
            remove_checkpoint(storage, name, leftover.step, leftover.unix)
        return is_dead


def _has_lease_in_part(names: Collection[str]) -> bool:
    """Whether the writer of a directory has written nothing, or only a part of its lease. T5X and Orbax never use such a name."""
    return FACTS_FILE not in names and all(name.startswith(FACTS_FILE) for name in names)


def _remove_without_lease(storage: Storage, name: str, names: Iterable[str]) -> bool:
    """Removes a directory without a lease, and returns whether it did: not if the lease exists in the meantime.

    A live writer of another host, whose lock is not visible, begins again if it finds the directory gone before its lease.
    """
    storage.delete_files([join(name, entry) for entry in names])
    return storage.delete_empty(name)


def is_abandoned(storage: Storage, leftover: Leftover, clock: Clock, stale_after: float, *, has_lock: bool) -> bool:
    """Returns whether a temporary directory has no live writer; the caller holds the lock of the directory.

    Args:
      storage: the run.
      leftover: the directory.
      clock: unix seconds.
      stale_after: seconds after its last heartbeat when an owner on another machine counts as dead.
      has_lock: whether locks work on this storage, at least on this machine.
    """
    name = leftover.name
    names = [entry.name for entry in storage.entries(name)]
    is_old = leftover.unix < clock() - stale_after
    if FACTS_FILE not in names and MANIFEST not in names:
        return is_old or (has_lock and _has_lease_in_part(names))
    key, now = join(name, FACTS_FILE if FACTS_FILE in names else MANIFEST), lease_clock(storage, clock)
    try:
        record = storage.read(key) if FACTS_FILE in names else read_facts(storage, name)
        writer = decode_facts(record, storage.url(name)).writer
    except (FormatError, CheckpointNotFoundError):
        return is_old
    owner = parse_owner(writer)
    if owner is None:
        # A crash in the commit leaves the finished manifest. That of a copy names the writer of the source, hence the lock.
        written = storage.modified(key)
        is_old = (leftover.unix if written is None else written) < now() - stale_after
        return is_old or (has_lock and has_ended(writer))
    return dated(storage, key, owner).is_dead(now, stale_after)
