"""Garbage collection: what dead writers, deleters and readers left is removed at the next save.

A leftover of ours has a write lease, see ``commit/write_lease.py``: the boot, the process and its last heartbeat. It goes
when its lock is free and its owner is dead: its process has ended, which can be seen on the same machine, or the
heartbeat is older than an hour. Neither host names nor locks alone decide: hosts may have equal names, and locks may be
those of one node. A directory that was being deleted or is empty goes when its lock is free. What has no such record (T5X
takes no lock) goes when the second in its name is older than an hour. Read leases that have expired go ten minutes later,
since clocks differ. Stores without rename have rules of their own (``commit/write_lease.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable

from t5ckpt.catalog.step_index import Index, read_index
from t5ckpt.commit.deletion import remove_checkpoint, renamed_for_deletion
from t5ckpt.commit.in_place import sweep_in_place
from t5ckpt.commit.read_lease import leased_directory, list_read_leases
from t5ckpt.commit.replacement import is_still_kept, put_back
from t5ckpt.commit.write_lease import TAKE_OVER_SECONDS, has_ended, parse_owner
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import CheckpointNotFoundError, FormatError, T5CkptError
from t5ckpt.format.names import SIDECAR, Leftover, ReadLease, parse_leftover
from t5ckpt.format.sidecar import decode_sidecar
from t5ckpt.storage import Storage

__all__ = ['STALE_AFTER_SECONDS', 'collect', 'collect_leftovers', 'is_abandoned']

STALE_AFTER_SECONDS = 3600.0
_log = logging.getLogger('t5ckpt')


def collect_leftovers(storage: Storage, clock: Clock, stale_after: float = STALE_AFTER_SECONDS) -> list[str]:
    """Removes leftovers of dead writers and deleters.

    Returns:
      The names that were removed. One that cannot be removed is logged and does not stop the rest.
    """
    return collect(storage, clock, stale_after)[0]


def collect(storage: Storage, clock: Clock, stale_after: float = STALE_AFTER_SECONDS) -> tuple[list[str], Index | None]:
    """The same; also returns the index of an object store, which one listing shows together with the read leases."""
    index = None if storage.renames else read_index(storage)
    expired = clock() - TAKE_OVER_SECONDS
    doomed = [hold for hold in (list_read_leases(storage) if index is None else index.holds) if hold.until < expired]
    _remove_read_leases(storage, doomed)
    if index is not None:
        return sweep_in_place(storage, dataclasses.replace(index, is_fresh=not doomed), clock, stale_after)
    removed: list[str] = []
    for entry in storage.entries():
        leftover = parse_leftover(entry.name) if entry.is_dir else None
        if leftover is None:
            continue
        try:
            if _sweep_one(storage, leftover, clock(), stale_after):
                removed.append(entry.name)
        except CheckpointNotFoundError:
            # Another sweep has removed it.
            continue
        except T5CkptError as error:
            _log.warning('t5ckpt: could not sweep %s: %s', storage.url(entry.name), error)
    if removed:
        _log.info('t5ckpt: swept %s from %s', ', '.join(removed), storage.url())
    return removed, None


def _remove_read_leases(storage: Storage, holds: Iterable[ReadLease]) -> None:
    """Removes the leases of readers that were killed."""
    for key in (join(leased_directory(storage), hold.name) for hold in holds):
        try:
            storage.delete_file(key)
        except T5CkptError as error:
            _log.warning('t5ckpt: could not remove %s: %s', storage.url(key), error)


def _sweep_one(storage: Storage, leftover: Leftover, now: float, stale_after: float) -> bool:
    claim = storage.claim(leftover.name)
    if claim is None:
        return False
    with contextlib.closing(claim):
        if leftover.state != 'tmp' and claim.is_held:
            is_dead = True
        elif leftover.state != 'tmp':
            # Without a lock that works only the age says anything.
            is_dead = leftover.unix < now - stale_after
        else:
            is_dead = is_abandoned(storage, leftover, now, stale_after, has_lock=claim.is_held)
        is_replaced = is_dead and leftover.state == 'replaced'
        if is_replaced and (put_back(storage, leftover) or is_still_kept(storage, leftover, now)):
            return False
        if is_dead:
            name = leftover.name
            if leftover.state != 'deleted':
                # A removal that is killed may have taken what the rest is known by.
                name = renamed_for_deletion(storage, name, leftover.step, lambda: leftover.unix)
            remove_checkpoint(storage, name, leftover.step, lambda: leftover.unix)
        return is_dead


def is_abandoned(storage: Storage, leftover: Leftover, now: float, stale_after: float, *, has_lock: bool) -> bool:
    """Whether nobody writes a temporary directory any more; for one who holds its claim.

    Args:
      storage: the run.
      leftover: the directory.
      now: unix seconds.
      stale_after: the seconds after which an owner elsewhere that gave no sign is dead.
      has_lock: whether the claim is a lock that works, at least on this machine.
    """
    name = leftover.name
    entries = [entry.name for entry in storage.entries(name)]
    is_old = leftover.unix < now - stale_after
    if SIDECAR not in entries:
        # The crash came while the first file was being written; T5X and Orbax never make such a name.
        return is_old or (has_lock and all(entry.startswith(SIDECAR) for entry in entries))
    try:
        writer = decode_sidecar(storage.read(join(name, SIDECAR)), storage.url(name)).extra.get('writer')
    except FormatError:
        return is_old
    owner = parse_owner(writer)
    if owner is None:
        # The finished sidecar, which a crash in the commit leaves. A copy's names the writer of its source, hence the lock.
        return is_old or (has_lock and has_ended(writer))
    return owner.is_dead(now, stale_after)
