"""The local directory of a run: its lock, and the id that it shares with the run.

    <directory>/.t5ckpt/tier.json       the run's URL and id
    <directory>/.t5ckpt/to_persist/     one file per step that waits for its upload, see ``tiers/waiting.py``
    <run>/.t5ckpt/run_id                the id, written before the first upload

A run without an id is a new one, or one whose bucket was emptied: its local steps are restored and uploaded. A directory with the
steps of a run with another id, or at another URL, is refused. ``flock`` on the directory keeps other processes out.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from t5ckpt.catalog.listing import steps_in
from t5ckpt.errors import CheckpointNotFoundError, LocalDirError, StorageError
from t5ckpt.format.names import INDEX, TIER_RECORD as _RECORD
from t5ckpt.storage import PathOrStorage, Storage, open_storage
from t5ckpt.storage.base import Lock

_RUN_ID = f'{INDEX}/run_id'
_FORMAT = 1
_OUTAGE_SECONDS = 60.0
_T = TypeVar('_T')
_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class TierRecord:
    """The file ``tier.json``.

    Attributes:
      run: the URL of the run.
      id: of the run.
      keep: of the ``LocalTier`` of the process that wrote the record.
    """

    run: str
    id: str
    keep: int = 2


def read_record(local: Storage) -> TierRecord | None:
    """Reads the record of a local directory; None if it has none.

    Raises:
      LocalDirError: the record is damaged, or of a newer version.
    """
    if not local.is_file(_RECORD):
        return None
    try:
        fields: dict[str, Any] = json.loads(local.read(_RECORD))
        version = fields.pop('format')
        if version == _FORMAT:
            return TierRecord(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LocalDirError(
            f'{local.url(_RECORD)} is damaged ({error}), so the run of its steps is unknown. {_cures(local)}'
        ) from error
    raise LocalDirError(f'{local.url(_RECORD)} has format {version}, and this program knows {_FORMAT}. Update t5ckpt.')


def read_run_id(run: Storage) -> str:
    """The id of a run; '' if its storage has none, or it is damaged.

    Raises:
      StorageError: the storage does not answer.
    """
    try:
        found = run.read(_RUN_ID).decode(errors='replace')
    except CheckpointNotFoundError:
        return ''
    return found if re.fullmatch('[0-9a-f]{16}', found) else ''


class LocalDirectory:
    """The local directory of one checkpointer.

    A process that was forked from the one that took the lock reads, and writes nothing.
    """

    def __init__(self, path: PathOrStorage, run: Storage, keep: int, *, read_only: bool):
        """Reads and creates nothing; the directory need not exist.

        Raises:
          ValueError: it is not on a file system, or it is the run's directory, lies in it, or contains it.
        """
        self.storage, self.run = open_storage(path), run
        where, other = self.storage.local_path(''), run.local_path('')
        if where is None:
            raise ValueError(f'LocalTier: directory must be a directory of this machine, got {self.storage.url()}.')
        paths = [os.path.realpath(each) for each in (where, other) if each is not None]
        if other is not None and os.path.commonpath(paths) in paths:
            raise ValueError(f'LocalTier: directory={where} and checkpoints_dir={other} must not contain each other.')
        self.read_only = read_only
        self._keep = keep
        self._guard = threading.RLock()
        self._record: TierRecord | None = None
        self._lock: Lock | None = None
        self._process = os.getpid()
        # Whether the run's storage has answered that its id is that of the record.
        self._is_checked = False
        # Why it has not answered; and when it is asked again.
        self._outage: StorageError | None = None
        self._next_query = 0.0

    @property
    def id(self) -> str:
        """The id in the record; '' without one."""
        return '' if self._record is None else self._record.id

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that took the lock."""
        return self._lock is not None and self._process != os.getpid()

    def open(self, *, create: bool = False) -> bool:
        """Locks the directory and checks its record. Returns False if it does not exist and is not to be created.

        Raises:
          LocalDirError: it is a file, another process has it, it cannot be locked, or its steps are those of another run. In a
            forked process, the directory is to be created.
        """
        local = self.storage
        kind = local.kind('')
        if kind == 'file':
            raise LocalDirError(f'{local.url()} is a file. Pass a directory to LocalTier, or move the file away.')
        if create:
            self.check_not_forked()
            local.make_dir('')
        elif kind is None or self.is_forked:
            # Another thread may have had the lock when the process was forked.
            return kind is not None
        with self._guard:
            if not self.read_only:
                self._take_lock()
            try:
                self._record = self._record or self._checked_record()
            except LocalDirError:
                self._release()
                raise
        return True

    def check_not_forked(self) -> None:
        """Raises LocalDirError in a process that was forked from the one that took the lock."""
        if self.is_forked:
            raise LocalDirError(
                f'{self.storage.url()} is in use by process {self._process}, from which this process was forked. Save and delete '
                'steps in that process, or pass another directory to LocalTier.'
            )

    def _take_lock(self) -> None:
        is_removed = self._lock is not None and not self._lock.is_current()
        if is_removed:
            _log.error('t5ckpt: %s was removed while it was in use, and its steps with it', self.storage.url())
            self._release()
        if self._lock is not None:
            return
        url, lock = self.storage.url(), self.storage.try_lock('')
        if lock is None:
            # A notebook may have replaced a checkpointer without closing it.
            gc.collect()
            lock = self.storage.try_lock('')
        if lock is None:
            raise LocalDirError(
                f'{url} is in use by another process, or by another checkpointer of this one. End that process, close that '
                'checkpointer, or pass another directory to LocalTier; several processes of a machine need one each.'
            )
        if not lock.is_held:
            lock.close()
            raise LocalDirError(
                f'{url} cannot be locked ({lock.reason or "flock"}), so another process could use it at the same time. Pass a '
                'directory on a disk of this machine or in its memory to LocalTier.'
            )
        self._lock, self._process = lock, os.getpid()
        weakref.finalize(self, lock.close)
        if is_removed:
            self._write(self.id)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _checked_record(self) -> TierRecord | None:
        local, url = self.storage, self.storage.url()
        record = read_record(local)
        if record is None and steps_in(local):
            raise LocalDirError(
                f'{url} has checkpoints, but no {_RECORD} that names their run. It may be the directory of a run itself. Pass '
                'another directory to LocalTier.'
            )
        if record is not None and record.run != self.run.url():
            if read_run_id(self.run) != record.id:
                raise LocalDirError(
                    f'{url} has the local checkpoints of {record.run}, and this run is {self.run.url()}. {_cures(local)}'
                )
            # The run was moved.
            if not self.read_only:
                self._write(record.id)
        return record

    def query_run(self, query: Callable[[], _T], local: _T | None) -> _T:
        """Asks the run's storage, after its id was compared. If it does not answer, it is not asked again for a minute.

        Args:
          query: returns the answer.
          local: that of the local steps, which are all there are during an outage. The log says so once.

        Raises:
          LocalDirError: the local directory is of another run.
          StorageError: it does not answer, and ``local`` is None.
        """
        outage = self._outage
        if outage is None or time.monotonic() >= self._next_query:
            try:
                self.check_run()
                answer = query()
            except StorageError as error:
                if outage is None:
                    _log.warning('t5ckpt: only the steps of %s are used: %s', self.storage.url(), error)
                outage, self._next_query = error, time.monotonic() + _OUTAGE_SECONDS
                self._outage = outage
            else:
                self._outage = None
                return answer
        if local is None:
            raise outage
        return local

    def check_run(self) -> None:
        """Compares the id of the directory with that of the run, which one request reads until they are known to be the same.

        Raises:
          LocalDirError: they differ, and the directory has steps.
          StorageError: the run's storage does not answer.
        """
        if self.id and not self._is_checked and (found := read_run_id(self.run)):
            self.adopt(found)
            self._is_checked = True

    def _other_run(self, found: str) -> LocalDirError:
        return LocalDirError(
            f'{self.storage.url()} has the local checkpoints of another run at {self.run.url()}: their run has the id {self.id}, '
            f'and the run there has the id {found}: it is a new run, or another job began it at the same time. '
            f'{_cures(self.storage)}'
        )

    def agreed_id(self, known: Sequence[str]) -> str:
        """The id of a job, from those in the records of its processes ('' without a record): that of the run, if it has one."""
        found = self.query_run(lambda: self.id if self._is_checked else read_run_id(self.run), '')
        return found or next((each for each in known if each), '') or secrets.token_hex(8)

    def adopt(self, found: str) -> None:
        """Takes the id of the run, or of a job that begins it, into the record.

        Raises:
          LocalDirError: the directory has steps of a run with another id.
        """
        with self._guard:
            if self.id != found:
                if self.id and (self.read_only or steps_in(self.storage)):
                    raise self._other_run(found)
                self._write(found)

    def share_id(self) -> None:
        """Writes the id to the run's storage, if it has none; before each upload.

        Raises:
          LocalDirError: it has another one.
          StorageError: the run's storage does not answer.
        """
        was_there, self._is_checked = self._is_checked, False
        self.check_run()
        if not self._is_checked:
            if was_there:
                text = 't5ckpt: %s was emptied, or is another storage than before; uploads begin it again'
                _log.warning(text, self.run.url())
            self.run.make_dir(INDEX)
            if self.run.replace(_RUN_ID, self.id.encode(), None) is None:
                self.check_run()
                if not self._is_checked:
                    # It is damaged.
                    self.run.write(_RUN_ID, self.id.encode())
        self._is_checked, self._outage = True, None

    def _write(self, identity: str) -> None:
        record = TierRecord(self.run.url(), identity, self._keep)
        self.storage.make_dir(INDEX)
        self.storage.write(_RECORD, json.dumps({'format': _FORMAT, **dataclasses.asdict(record)}).encode())
        self.storage.sync_tree('', [])
        self._record = record

    def close(self) -> None:
        """Releases the lock; later calls only read."""
        self.read_only = True
        if not self.is_forked:
            self._release()


def _cures(local: Storage) -> str:
    return (
        'Pass another directory to LocalTier, or move this one away, to start without its steps. Keep it: they may be the only '
        f'copies. The steps of one process can be copied to a run (t5ckpt cp {local.url()}@STEP).'
    )
