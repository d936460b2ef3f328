"""Garbage collection: the next save, or start on a disk, removes what dead writers, deleters and readers have left.

Whatever a save or a deletion writes or hides has a name that its marker states before (``commit/markers.py``), so only these
are looked at: what one names is removed when it is due, and then the marker. On a file system it is due when its owner, a process
of this machine, has ended; else two horizons after it was written, by the clock of ``markers.run_clock``. Expired holds are
removed. So is a file that was written in part, after an hour: until then, its writer may be alive. T5X's temporary directories
have no marker, and stay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from t5ckpt.commit.deletion import remove_pin
from t5ckpt.commit.holds import expiry
from t5ckpt.commit.markers import (
    HORIZON_SECONDS,
    Record,
    RunListing,
    announcement_directory,
    is_due,
    list_run,
    read_marker,
    run_clock,
)
from t5ckpt.commit.removal import end_work, remove_unnamed
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import AccessDeniedError, StorageError, T5CkptError
from t5ckpt.format.names import MarkerName, step_dir, work_dirs
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')


def collect(storage: Storage, clock: Clock) -> RunListing:
    """Removes what dead writers, deleters and readers have left; what cannot be removed is logged, and does not stop the rest.

    Returns:
      What it has listed.
    """
    listed = list_run(storage)
    now = run_clock(storage, clock)
    directory = announcement_directory(storage)
    expired = [join(directory, hold.name) for hold in listed.holds if expiry(storage, hold) < now()]
    _remove_files(storage, expired + [name for name in listed.partial if _is_old(storage, name, now)])
    # By step; a failed save of many processes leaves one marker of each.
    due: dict[int, dict[MarkerName, Record]] = {}
    for marker in listed.markers:
        record = _due_record(storage, marker, now)
        if record is not None:
            due.setdefault(marker.step, {})[marker] = record
    for step, work in sorted(due.items()):
        try:
            if storage.commits_by_rename:
                for marker in work:
                    end_work(storage, step, *work_dirs(step, marker.nonce), clock)
            elif remove_unnamed(storage, step, frozenset[str]().union(*(each.directories for each in work.values()))):
                remove_pin(storage, step, clock)
            storage.delete_files([marker.key for marker in work])
        except T5CkptError as error:
            _log.warning('t5ckpt: could not collect %s: %s', storage.url(step_dir(step)), error)
            if isinstance(error, AccessDeniedError) and not storage.commits_by_rename:
                break
        else:
            _log.info('t5ckpt: removed what was left of %s', storage.url(step_dir(step)))
    return listed


def _remove_files(storage: Storage, keys: Iterable[str]) -> None:
    """Removes expired holds, and what was written in part."""
    for key in keys:
        try:
            storage.delete_file(key)
        except T5CkptError as error:
            _log.warning('t5ckpt: could not remove %s: %s', storage.url(key), error)


def _is_old(storage: Storage, name: str, now: Clock) -> bool:
    written = storage.modified(name)
    return written is not None and written < now() - HORIZON_SECONDS


def _due_record(storage: Storage, marker: MarkerName, now: Clock) -> Record | None:
    """The contents of a marker that is due; else None."""
    try:
        # The time in its name suffices on an object store.
        if storage.commits_by_rename or marker.due < now():
            record = read_marker(storage, marker.key)
            return record if record is not None and is_due(storage, marker, record, now) else None
    except AccessDeniedError:
        # Of another user, whose own next save collects it.
        pass
    except StorageError as error:
        _log.warning('t5ckpt: could not collect %s: %s', storage.url(step_dir(marker.step)), error)
    return None
