"""Markers of unfinished work on a step.

    save       +marker, files, manifest if there is none, T5X's names of positions, -marker
    overwrite  +marker, files, marker: hides, [no pin? no hold?], manifest over the old version, marker: done, -old files
    delete     +marker: hides, [no pin? no hold?], -manifest in the version that was read, marker: done, -files
    hold       +hold, [no deleter?], [is the manifest there?], reads, -hold

A marker, ``.t5ckpt/busy/<step>.<unix s>.<nonce>`` in a bucket, names the directories below the step whose files its work writes
or removes. On a disk, ``busy_...`` names two directories by its nonce (``format/names.work_dirs``), and a rename is what is said
here of a manifest.
It is written before the first of these files, and before the manifest is replaced or deleted. Its owner acts for its horizon H,
an hour, or longer if the bytes need it, by its own clock, and fails after that. A request may arrive for another H. After 2 H,
the time in the name, any process removes the files that the marker names and the manifest does not, and then the marker. So
nothing has to be renewed or taken over, and a process that was stopped for hours cannot publish what was removed.

A deleter writes its marker and then looks for holds; a reader writes its hold and then looks for markers. One of the two sees the
other. A deleter that has neither hidden the step nor given up may do so until its marker is due; until then, the step cannot be
held.

Only garbage collection removes the marker of work that removed files, since requests for these files may still arrive.

On a file system, holds and markers expire by the modification times of their files. The current time is that of a file that the
observer has just written beside them. The file server sets both times, so the clocks of hosts do not matter. Where it cannot be
read, as on a full disk, nothing expires. TensorStore does not return the modification times of objects. On an object store, the
time in the hold or marker, by the clock of its owner, is compared with the clock of the observer; the two may differ by ten
minutes.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import secrets
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from t5ckpt.catalog.listing import step_names
from t5ckpt.commit.writers import has_ended, is_local, open_nonces, writer_facts
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import AccessDeniedError, CheckpointNotFoundError, NoSpaceError, StorageError, T5CkptError
from t5ckpt.format.names import (
    BUSY_PREFIX,
    HOLD_PREFIX,
    INDEX,
    PARTIAL_SUFFIX,
    Hold,
    MarkerName,
    busy_key,
    generation_dir,
    parse_hold,
    parse_marker,
    work_dirs,
)
from t5ckpt.storage import Storage

SAVE = 'save'
"""The owner writes files, or has published or removed what it announced; no reader needs to wait for it."""
HIDE = 'hide'
"""The owner is about to delete or replace the manifest, or positions of data iterators."""

HORIZON_SECONDS = 3600.0
_MAX_SECONDS = 1e8
SLOWEST_RATE = 2e6
"""The bytes in a second that every process writes at least; more bytes have a longer horizon."""
CLOCK_SECONDS = 600.0
"""The most by which the clocks of machines that share a run on an object store may differ."""
_log = logging.getLogger('t5ckpt')


def run_clock(storage: Storage, clock: Clock) -> Clock:
    """Returns the clock by which the holds and markers of a run expire; on file systems it writes its file at the first call.

    Args:
      storage: the run.
      clock: unix seconds of this machine, for object stores and for a run that may only be read.
    """
    offset: float | None = None

    def now() -> float:
        nonlocal offset
        if offset is None:
            try:
                server_time = storage.server_time(f'{HOLD_PREFIX}{secrets.token_hex(8)}{PARTIAL_SUFFIX}')
            except AccessDeniedError:
                return clock()
            except StorageError:
                server_time = None
            if server_time is None:
                return -math.inf if storage.commits_by_rename else clock()
            offset = server_time - time.monotonic()
        return time.monotonic() + offset

    return now


@dataclasses.dataclass(frozen=True)
class RunListing:
    """The holds and markers in one listing, including expired ones; on an object store, the names in the run, too.

    Attributes:
      markers: of unfinished work.
      holds: of readers.
      partial: the names of those that a process is writing, or was writing when it was killed.
      names: on an object store, those that may be steps, complete or not.
    """

    markers: tuple[MarkerName, ...]
    holds: tuple[Hold, ...]
    partial: tuple[str, ...]
    names: tuple[str, ...]


def announcement_directory(storage: Storage) -> str:
    """The directory of the holds and, on file systems, the markers."""
    return '' if storage.commits_by_rename else INDEX


def list_run(storage: Storage) -> RunListing:
    """The holds and markers of the run, from one listing; on an object store, the names that may be steps, from another."""
    at_top = storage.commits_by_rename
    names = () if at_top else tuple(step_names(storage))
    keys = storage.names('', (HOLD_PREFIX, BUSY_PREFIX)) if at_top else [key for key, _ in storage.walk(INDEX)]
    return RunListing(
        tuple(filter(None, map(parse_marker, keys))),
        tuple(filter(None, (parse_hold(key.removeprefix(f'{INDEX}/')) for key in keys))),
        tuple(key for key in keys if key.endswith(PARTIAL_SUFFIX)),
        names,
    )


def seconds_for(nbytes: int, rate: float = SLOWEST_RATE) -> float:
    """The horizon of the write of so many bytes in one process, at this rate or a higher one."""
    return max(HORIZON_SECONDS, nbytes / rate)


class Marker:
    """A marker that this process has written.

    Attributes:
      directory: in which its owner writes: below the step or, where directories can be renamed, beside it.
      aside: where they can, the directory of a step that the owner hides; else ''.
    """

    def __init__(
        self,
        storage: Storage,
        step: int,
        clock: Clock,
        action: str = SAVE,
        directories: Collection[str] = (),
        seconds: float = HORIZON_SECONDS,
        is_shared: bool = False,
    ):
        """Writes the marker.

        Args:
          storage: the run.
          step: that is written or deleted.
          clock: unix seconds.
          action: one of those above.
          directories: below the step, in addition to its own one, whose files the owner removes; '' for the files beside them.
          seconds: the horizon.
          is_shared: whether other processes write into its directory, perhaps after the end of this one.
        """
        self._nonce = nonce = secrets.token_hex(8)
        self.directory, self.aside = generation_dir(nonce), ''
        if storage.commits_by_rename:
            self.directory, self.aside = work_dirs(step, nonce)
        self._storage = storage
        self._clock = clock
        self._action = action
        self._directories = {self.directory, *directories}
        self._seconds = seconds
        self._born = self._clocks()
        self._owner = {} if is_shared else writer_facts()
        self._version: Any = None
        self._key = busy_key(step, int(clock() + 2 * seconds) + 1, nonce, in_bucket=not storage.commits_by_rename)
        open_nonces.add(nonce)
        try:
            # The first one of a process shows whether the server checks conditions: it is repeated, which a unique name allows.
            self._write(None)
        except BaseException:
            self.release()
            raise

    def _write(self, version: Any) -> None:
        record = {
            'action': self._action,
            'directories': sorted(self._directories),
            'seconds': self._seconds,
            'owner': self._owner,
        }
        data = json.dumps(record).encode()
        try:
            self._version = self._storage.replace(self._key, data, version)
            if self._version is None:
                self._storage.write(self._key, data)
        except NoSpaceError:
            if self._action != HIDE or not self._storage.commits_by_rename:
                raise
            # A deletion frees space; the name of its marker suffices.
            self._storage.write(self._key, b'')

    def _clocks(self) -> tuple[float, float]:
        # The second one counts the time in which the machine sleeps, and is not set by anybody.
        return self._clock(), time.clock_gettime(getattr(time, 'CLOCK_BOOTTIME', time.CLOCK_MONOTONIC))

    def _age(self) -> float:
        return max(now - then for now, then in zip(self._clocks(), self._born, strict=True))

    def update(self, action: str, directories: Iterable[str] = ()) -> None:
        """Writes it again, with another action and more directories."""
        self._action = action
        self._directories |= {*directories}
        # This shows whether the server compares the versions of existing keys.
        self._write(self._version)

    def end(self) -> None:
        """Ends the announcement of work that has hidden or replaced a manifest; else readers would wait until it is due."""
        if self._action == HIDE:
            try:
                self.update(SAVE)
            except NoSpaceError:
                # That of a deletion, which frees it.
                pass
            except T5CkptError as error:
                _log.warning('t5ckpt: %s could not be written: %s', self._storage.url(self._key), error)

    def check(self) -> None:
        """Called before a manifest is written or deleted.

        Raises:
          StorageError: this process was stopped, or too slow, so that others may collect its files or ignore its marker.
        """
        age = self._age()
        if age > self._seconds:
            raise StorageError(
                errno.ETIMEDOUT,
                f'{self._storage.url(self._key)}: this write or deletion took {age:.0f} s, and at most {self._seconds:.0f} s are '
                'allowed, so it was given up. Try again.',
            )

    @property
    def may_be_collected(self) -> bool:
        """Whether other processes may have removed the files that it names and no manifest does."""
        return self._age() > 2 * self._seconds - CLOCK_SECONDS

    def release(self) -> None:
        """Leaves the marker, and what it names, to garbage collection."""
        open_nonces.discard(self._nonce)

    def remove(self) -> None:
        """Ends work that has removed no files, or has finished; a failure leaves the marker to garbage collection."""
        self.release()
        try:
            if not any(self._storage.kind(name) for name in (self.directory, self.aside) if self.aside):
                self._storage.delete_file(self._key)
        except T5CkptError as error:
            _log.warning('t5ckpt: %s stays for an hour or two: %s', self._storage.url(self._key), error)
            if not self._storage.commits_by_rename:
                self.end()


@dataclasses.dataclass(frozen=True)
class Record:
    """The contents of a marker.

    Attributes:
      action: one of those above.
      directories: below the step.
      seconds: the horizon.
      owner: the process, see ``commit/writers.py``.
    """

    action: str
    directories: frozenset[str]
    seconds: float
    owner: Mapping[str, Any]


def read_marker(storage: Storage, key: str) -> Record | None:
    """Reads a marker; None if it is gone. An empty one is that of a deletion on a full disk.

    Raises:
      StorageError: it is not a marker that this program knows.
    """
    try:
        text = storage.read(key)
        if not text:
            return Record(HIDE, frozenset(), HORIZON_SECONDS, {})
        data = json.loads(text)
        seconds = float(data['seconds'])
        # Not of NaN, either: such a marker would count for ever.
        if not 0 <= seconds <= _MAX_SECONDS:
            raise ValueError  # noqa: TRY301 - with the others
        return Record(str(data['action']), frozenset(map(str, data['directories'])), seconds, dict(data['owner']))
    except CheckpointNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        text = f'{storage.url(key)} is of another program, or damaged. If no program writes the step, remove it.'
        raise StorageError(errno.EINVAL, text) from error


def is_about_to_hide(storage: Storage, step: int, clock: Clock) -> bool:
    """Whether a process is about to delete or replace the manifest of a step, or to rename its directory."""
    directory, prefix = ('', BUSY_PREFIX) if storage.commits_by_rename else (f'{INDEX}/busy', '')
    markers = [parse_marker(join(directory, name)) for name in storage.names(directory, f'{prefix}{step}.')]
    return any(marker is not None and not _has_decided(storage, marker, clock) for marker in markers)


def _has_decided(storage: Storage, marker: MarkerName, clock: Clock) -> bool:
    """Whether the owner of a marker will not hide or replace its step: it announces nothing, has ended, or may act no more."""
    try:
        record = read_marker(storage, marker.key)
    except StorageError:
        # Of another user. The time in its name is by the clock of the owner.
        written = storage.modified(marker.key) or 0.0
        return clock() > max(marker.due + CLOCK_SECONDS, written + 2 * HORIZON_SECONDS)
    return record is None or record.action != HIDE or is_due(storage, marker, record, clock)


def is_due(storage: Storage, marker: MarkerName, record: Record, clock: Clock) -> bool:
    """Whether other processes may remove what a marker names; ``clock`` is that of :func:`run_clock`."""
    if not storage.commits_by_rename:
        return marker.due < clock()
    if is_local(record.owner):
        return has_ended(record.owner, marker.nonce)
    written = storage.modified(marker.key)
    return written is not None and clock() - written > 2 * record.seconds
