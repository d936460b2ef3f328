"""Garbage collection: the next save removes the leftovers of dead writers, deleters and readers.

A temporary directory has a record of its writer, see ``commit/writers.py``. It is removed when its lock is free and its writer is
dead: the process has ended, which is visible on the same machine, or it has signed two horizons ago (``commit/markers.py``), by
the clock of ``commit/run_clock.py``. Host names and locks alone do not decide: hosts may have equal names, and locks may be local
to a node. A directory that was being deleted or is empty is removed when its lock is free. A directory without a record (T5X
takes no lock) is removed when the time in its name is older than an hour. Markers of the dead and expired holds are removed.
Object stores have their own rules (``commit/markers.py``).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
from collections.abc import Collection, Iterable

from t5ckpt.catalog.listing import catalog_of, read_facts
from t5ckpt.catalog.run_catalog import BucketListing
from t5ckpt.commit.bucket_deletion import collect_in_bucket
from t5ckpt.commit.holds import expiry, warn_if_ahead
from t5ckpt.commit.markers import HORIZON_SECONDS, is_due, read_marker
from t5ckpt.commit.removal import check_removable, remove_checkpoint, rename_aside, unless_renameless
from t5ckpt.commit.replacement import is_still_kept, put_back
from t5ckpt.commit.run_clock import TIME_PREFIX, run_clock
from t5ckpt.commit.writers import has_ended, is_local
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import CheckpointNotFoundError, FormatError, StorageError, T5CkptError
from t5ckpt.format.facts import decode_facts
from t5ckpt.format.names import FACTS_FILE, HOLD_PREFIX, MANIFEST, Leftover, parse_leftover
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')


def collect(storage: Storage, clock: Clock) -> tuple[list[str], BucketListing | None]:
    """Removes leftovers of dead writers and deleters.

    Returns:
      The names that were removed (one that cannot be removed is logged and does not stop the rest), and the names,
      holds and markers that it has listed on an object store.
    """
    catalog = catalog_of(storage)
    listed = catalog.bucket_listing()
    announced = catalog.announcements() if listed is None else listed.announcements
    now = run_clock(storage, clock)
    live = [hold for hold in announced.holds if expiry(storage, hold) >= now()]
    for hold in live:
        warn_if_ahead(storage, hold, now())
    expired = [join(catalog.announcement_directory, hold.name) for hold in announced.holds if hold not in live]
    _remove_files(storage, expired)
    if listed is not None:
        return collect_in_bucket(storage, listed, clock), listed
    ended = [marker.key for marker in announced.markers if is_due(storage, marker.key, now)]
    _remove_files(storage, ended + [name for name in announced.partial if _is_torn(storage, name, now)])
    removed: list[str] = []
    for entry in storage.entries():
        leftover = parse_leftover(entry.name) if entry.is_dir else None
        if leftover is None:
            continue
        try:
            if _collect_one(storage, leftover, clock):
                removed.append(entry.name)
        except CheckpointNotFoundError:
            # Another process has removed it.
            continue
        except T5CkptError as error:
            _log.warning('t5ckpt: could not collect %s: %s', storage.url(entry.name), error)
    if removed:
        _log.info('t5ckpt: removed the leftovers %s from %s', ', '.join(removed), storage.url())
    return removed, None


def _remove_files(storage: Storage, keys: Iterable[str]) -> None:
    """Removes the holds and markers of readers and deleters that were killed."""
    for key in keys:
        try:
            storage.delete_file(key)
        except T5CkptError as error:
            _log.warning('t5ckpt: could not remove %s: %s', storage.url(key), error)


def _is_torn(storage: Storage, name: str, now: Clock) -> bool:
    """Whether a partial file belongs to a dead process: by its owner, or by its age if it has none.

    A live process writes a marker (``Marker``) and a time file again that are removed while they are incomplete.
    """
    if name.startswith(HOLD_PREFIX) and not name.startswith(TIME_PREFIX):
        written = storage.modified(name)
        return written is not None and written < now() - HORIZON_SECONDS
    try:
        read_marker(storage, name)
    except StorageError as error:
        return error.errno == errno.EINVAL
    return is_due(storage, name, now)


def _collect_one(storage: Storage, leftover: Leftover, clock: Clock) -> bool:
    lock = storage.try_lock(leftover.name)
    if lock is None:
        return False
    with contextlib.closing(lock):
        # Before the record is read: one that arrives later is found by the removal.
        names = [entry.name for entry in storage.entries(leftover.name)] if leftover.state == 'tmp' else ['']
        if leftover.state == 'tmp':
            is_dead = _is_abandoned(storage, leftover, names, clock, has_lock=lock.is_held)
        else:
            # Without a working lock, only the age decides.
            is_dead = lock.is_held or leftover.unix < clock() - HORIZON_SECONDS
        is_replaced = is_dead and leftover.state == 'replaced'
        if is_replaced and (put_back(storage, leftover) or is_still_kept(storage, leftover, clock)):
            return False
        if is_dead:
            name = leftover.name
            check_removable(storage, name)
            if _has_record_in_part(names):
                return _remove_without_record(storage, name, names)
            if leftover.state != 'deleted':
                # A removal that was killed may have removed the files that identify the directory.
                with unless_renameless():
                    name = rename_aside(storage, name, leftover.step, 'deleted', leftover.unix)
            remove_checkpoint(storage, name, leftover.step, leftover.unix)
        return is_dead


def _has_record_in_part(names: Collection[str]) -> bool:
    """Whether the writer of a directory has written at most a part of its record. T5X and Orbax never use such a name."""
    return FACTS_FILE not in names and all(name.startswith(FACTS_FILE) for name in names)


def _remove_without_record(storage: Storage, name: str, names: Iterable[str]) -> bool:
    """Removes a directory without a record, and returns whether it did: not if the record exists in the meantime.

    A live writer of another host, whose lock is not visible, begins again if it finds the directory gone before its record.
    """
    storage.delete_files([join(name, entry) for entry in names])
    return storage.delete_empty(name)


def _is_abandoned(
    storage: Storage, leftover: Leftover, names: Collection[str], clock: Clock, *, has_lock: bool
) -> bool:
    """Returns whether a temporary directory has no live writer; the caller holds the lock of the directory.

    Args:
      storage: the run.
      leftover: the directory.
      names: its entries.
      clock: unix seconds.
      has_lock: whether locks work on this storage, at least on this machine.
    """
    name = leftover.name
    is_old = leftover.unix < clock() - HORIZON_SECONDS
    if FACTS_FILE not in names and MANIFEST not in names:
        return is_old or (has_lock and _has_record_in_part(names))
    key, now = join(name, FACTS_FILE if FACTS_FILE in names else MANIFEST), run_clock(storage, clock)
    try:
        record = storage.read(key) if FACTS_FILE in names else read_facts(storage, name)
        writer = decode_facts(record, storage.url(name)).writer
    except (FormatError, CheckpointNotFoundError):
        return is_old
    is_unfinished, written = FACTS_FILE in names, storage.modified(key)
    if is_unfinished and is_local(writer):
        return has_ended(writer, storage.url(name))
    # A crash in the commit leaves the finished manifest. That of a copy names the writer of the source, hence the lock.
    lasts = writer.get('seconds')
    lasts = lasts if isinstance(lasts, (int, float)) and math.isfinite(lasts) else HORIZON_SECONDS
    seconds = 2 * lasts if is_unfinished else HORIZON_SECONDS
    is_old = (leftover.unix if written is None else written) < now() - seconds
    return is_old or (has_lock and has_ended(writer, storage.url(name)))
