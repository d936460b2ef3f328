"""Markers of unfinished work on a step of an object store, where nothing can be renamed.

    save       +marker, files, manifest if there is none, T5X's names of positions, -marker
    overwrite  +marker, files, marker: hides, [no pin? no hold?], manifest over the old version, marker: done, -old files
    delete     +marker: hides, [no pin? no hold?], -manifest in the version that was read, marker: done, -files
    hold       +hold, [no deleter?], [is the manifest there?], reads, -hold

A marker, ``.t5ckpt/busy/<step>.<unix s>.<nonce>``, names the directories below the step whose files its work writes or removes.
It is written before the first of these files, and before the manifest is replaced or deleted. Its owner acts for its horizon H,
an hour, or longer if the bytes need it, by its own clock, and fails after that. A request may arrive for another H. After 2 H,
the time in the name, any process removes the files that the marker names and the manifest does not, and then the marker. So
nothing has to be renewed or taken over, and a process that was stopped for hours cannot publish what was removed.

A deleter writes its marker and then looks for holds; a reader writes its hold and then looks for markers. One of the two sees the
other. A deleter decides within a minute, and its request may arrive for two horizons. So long, the step of a deleter that died in
this minute cannot be held.

Only garbage collection removes the marker of work that removed files, since requests for these files may still arrive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import secrets
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from t5ckpt.commit.run_clock import CLOCK_SECONDS
from t5ckpt.commit.writers import has_ended, is_local, open_work, writer_facts
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import CheckpointNotFoundError, StorageError, T5CkptError
from t5ckpt.format.names import (
    DELETING_PREFIX,
    INDEX,
    MarkerName,
    busy_key,
    deleting_file,
    generation_dir,
    parse_marker,
)
from t5ckpt.storage import Storage

SAVE = 'save'
"""The owner writes files, or has published or removed what it announced; no reader needs to wait for it."""
HIDE = 'hide'
"""The owner is about to delete or replace the manifest, or positions of data iterators."""

HORIZON_SECONDS = 3600.0
SLOWEST_RATE = 2e6
"""The bytes in a second that every process writes at least; more bytes have a longer horizon."""
_DECIDES_SECONDS = 60.0
# Afterwards, a request to delete or replace a manifest that was sent within that time has arrived.
_DECIDED_SECONDS = 2 * HORIZON_SECONDS
_log = logging.getLogger('t5ckpt')


def seconds_for(nbytes: int, rate: float = SLOWEST_RATE) -> float:
    """The horizon of the write of so many bytes in one process, at this rate or a higher one."""
    return max(HORIZON_SECONDS, nbytes / rate)


class Marker:
    """A marker that this process has written.

    Attributes:
      directory: the directory below the step in which its owner writes.
    """

    def __init__(
        self,
        storage: Storage,
        step: int,
        clock: Clock,
        action: str = SAVE,
        directories: Collection[str] = (),
        seconds: float = HORIZON_SECONDS,
    ):
        """Writes the marker.

        Args:
          storage: the run.
          step: that is written or deleted.
          clock: unix seconds.
          action: one of those above.
          directories: below the step, in addition to its own one, whose files the owner removes; '' for the files beside them.
          seconds: the horizon.
        """
        nonce = secrets.token_hex(8)
        self.directory = generation_dir(nonce)
        self._storage = storage
        self._clock = clock
        self._action = action
        self._directories = {self.directory, *directories}
        self._seconds = seconds
        self._born = self._since = self._clocks()
        if storage.commits_by_rename:
            self._key = deleting_file(step, nonce)
            open_work.add(self._key)
            try:
                self._write_file()
            except BaseException:
                open_work.discard(self._key)
                raise
            return
        self._key = busy_key(step, int(clock() + 2 * self._seconds) + 1, nonce)
        # The first conditional write of a process shows whether the server checks conditions. The name is unique.
        self._write(None)

    def _write(self, version: Any) -> None:
        self._version = self._storage.replace(self._key, self._record(), version)
        if self._version is None:
            self._storage.write(self._key, self._record())

    def _write_file(self) -> None:
        # Garbage collection may remove the file while it is empty, as that of a dead process.
        with contextlib.suppress(CheckpointNotFoundError):
            self._storage.write(self._key, self._record())
            return
        self._storage.write(self._key, self._record())

    def _clocks(self) -> tuple[float, float]:
        # The second one counts the time in which the machine sleeps, and is not set by anybody.
        return self._clock(), time.clock_gettime(getattr(time, 'CLOCK_BOOTTIME', time.CLOCK_MONOTONIC))

    def _age(self, since: tuple[float, float]) -> float:
        return max(now - then for now, then in zip(self._clocks(), since, strict=True))

    def _record(self) -> bytes:
        return _encoded(Record(self._action, frozenset(self._directories), self._since[0]))

    def update(self, action: str, directories: Iterable[str] = ()) -> None:
        """Writes it again, with another action and more directories."""
        self._action, self._since = action, self._clocks()
        self._directories |= {*directories}
        # This shows whether the server compares the versions of existing keys.
        self._write(self._version)

    def end(self) -> None:
        """Ends the announcement of work that has hidden or replaced a manifest; readers would wait for a failure for minutes."""
        try:
            self.update(SAVE)
        except T5CkptError as error:
            _log.warning('t5ckpt: %s could not be written: %s', self._storage.url(self._key), error)

    def check(self) -> None:
        """Called before a manifest is written or deleted.

        Raises:
          StorageError: this process was stopped, or too slow, so that others may collect its files or ignore its marker.
        """
        age, announced = self._age(self._born), self._age(self._since)
        if age > self._seconds:
            raise self._error(f'took {age:.0f} s, and at most {self._seconds:.0f} s are allowed')
        if self._action == HIDE and announced > _DECIDES_SECONDS:
            raise self._error(
                f'was stopped for {announced:.0f} s between its announcement and the change of the manifest'
            )

    def _error(self, what: str) -> StorageError:
        text = f'{self._storage.url(self._key)}: this write or deletion {what}, so it was given up. Try again.'
        return StorageError(errno.ETIMEDOUT, text)

    @property
    def may_be_collected(self) -> bool:
        """Whether other processes may have removed the files that it names and no manifest does."""
        return self._age(self._born) > 2 * self._seconds - CLOCK_SECONDS

    def remove(self) -> None:
        """Ends work that has removed no files, or has finished; a failure leaves the marker to garbage collection."""
        open_work.discard(self._key)
        try:
            self._storage.delete_file(self._key)
        except T5CkptError as error:
            _log.warning('t5ckpt: %s stays for an hour or two: %s', self._storage.url(self._key), error)
            if self._action == HIDE and not self._storage.commits_by_rename:
                self.end()


@dataclasses.dataclass(frozen=True)
class Record:
    """The contents of a marker.

    Attributes:
      action: one of those above.
      directories: below the step.
      unix: when the action began, by the clock of the owner.
      owner: the process, see ``commit/writers.py``.
    """

    action: str
    directories: frozenset[str]
    unix: float
    owner: Mapping[str, Any] = dataclasses.field(default_factory=writer_facts)


def _encoded(record: Record) -> bytes:
    return json.dumps({**vars(record), 'directories': sorted(record.directories)}).encode()


def read_marker(storage: Storage, key: str) -> Record | None:
    """Reads a marker; None if it is gone.

    Raises:
      StorageError: it is not a marker that this program knows.
    """
    try:
        data = json.loads(storage.read(key))
        return Record(
            str(data['action']), frozenset(map(str, data['directories'])), float(data['unix']), dict(data['owner'])
        )
    except CheckpointNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        text = f'{storage.url(key)} is of another program, or damaged. If no program writes the step, remove it.'
        raise StorageError(errno.EINVAL, text) from error


def is_about_to_hide(storage: Storage, step: int, clock: Clock) -> bool:
    """Whether a process is about to delete or replace the manifest of a step, or to rename its directory."""
    directory, prefix = ('', DELETING_PREFIX) if storage.commits_by_rename else (f'{INDEX}/busy', '')
    names = storage.names(directory, f'{prefix}{step}.')
    markers = [parse_marker(join(directory, name)) for name in names]
    return any(marker is not None and _may_hide(storage, marker, clock) for marker in markers)


def _may_hide(storage: Storage, marker: MarkerName, clock: Clock) -> bool:
    key, written = marker.key, storage.modified(marker.key)
    try:
        record = read_marker(storage, key)
    except StorageError:
        # Of another user, or written in part.
        return clock() < marker.due + CLOCK_SECONDS if written is None else clock() - written < _DECIDED_SECONDS
    if record is None or record.action != HIDE:
        return False
    if storage.commits_by_rename and is_local(record.owner):
        return not has_ended(record.owner, key)
    return clock() - (record.unix if written is None else written) < _DECIDED_SECONDS


def is_due(storage: Storage, key: str, now: Clock) -> bool:
    """Whether the marker of a file system was left by a process that has ended, or may act no more."""
    written = storage.modified(key)
    with contextlib.suppress(StorageError):
        record = read_marker(storage, key)
        if record is not None and is_local(record.owner):
            return has_ended(record.owner, key)
        if record is not None and written is None:
            written = record.unix
    return written is not None and now() - written > 2 * HORIZON_SECONDS
