"""Write leases: the record of the process that writes or deletes a step, and the thread that renews it.

On object stores, where a step is written in place, a lease of ``checkpoint_<step>`` is the object
``.t5ckpt/busy/<step>.<nonce>``. On file systems, the lease of a save is in its temporary directory, and a process that hides
or replaces a step has the file ``deleting_<step>.<nonce>``. A lease names the process, its machine and the time of the last
heartbeat; a thread renews it every minute. The lease is written before anything else and removed last. All files that remain
after a crash have a lease, and garbage collection removes nothing without one.

    save     +lease, [only savers beside?], files, [is the lease still there?], manifest if there is none, -lease
    delete   +lease, [alone? no read lease? no pin?], -manifest, [is the lease still there?], -files, -lease
    read     +read lease, [no deleter?], [is the manifest there?], ..., -read lease

``commit/step_lease.py`` acquires the lease of a step, and excludes other owners.

A lease ends with its process, which other processes on the same machine can check. On other machines it expires without a
heartbeat: after ten minutes for a deleter of the same step, and after an hour for garbage collection. The process that
takes the step over first removes the expired record, so its owner, if it still runs, detects the loss. If the manifest exists
then, the step is committed; otherwise its files are removed. Another save of the step leaves the record.

While an owner lives, it ends its lease in one of four ways:

    way      the owner                                    the record
    release  has finished                                 is removed
    leave    has changed nothing                          is removed
    linger   has failed: a request may still arrive       gets no owner, and expires after 40 minutes
    close    cannot reach the storage, or lost the step   stays, as after a crash

On an object store, a request that a process has given up may arrive later. A record that lingers has no owner, so that another
process may take the step at once. Garbage collection takes the step when the record is an hour old (it is written as twenty
minutes old). It removes the files that have arrived by then, unless their manifest has arrived.

Requests of dead owners may arrive late as well. So after a takeover, ``leave`` lets the record linger, and ``release`` does so
if the takeover came within an hour of the last heartbeat. In that hour, a request may arrive after the files were listed.

Where the store compares versions, a heartbeat replaces the version that the one before it wrote. So a record that was removed
does not come back, and a record that is there shows that no process has taken the step over, however long the heartbeat took.

Whatever the dead owner did, garbage collection removes the files that the manifest does not name, or all without a manifest.

``commit/lease_time.py`` has the clock by which leases expire.

Notes: a process that is stopped for longer than its lease cannot be excluded by a lease. On an object store, the condition of the
manifest's write decides then, see ``commit/by_manifest.py``. Where directories can be renamed, its rename fails, since garbage
collection gives the directory another name first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

from t5ckpt.catalog.listing import catalog_of
from t5ckpt.commit.lease_owner import EXPIRED, SAVE, Owner, end_owner, new_owner, read_owner
from t5ckpt.commit.lease_time import CLOCK_SECONDS
from t5ckpt.core.interrupt_safe_event import InterruptSafeEvent
from t5ckpt.core.protocols import Clock
from t5ckpt.core.thread_pool import start_thread
from t5ckpt.errors import CheckpointNotFoundError, T5CkptError
from t5ckpt.format.facts import Facts, encode_facts
from t5ckpt.storage import Storage

TAKE_OVER_SECONDS = 600.0
_BEAT_SECONDS = 60.0
SETTLED_SECONDS = 3600.0
"""The age of a lease at which garbage collection takes its step. Requests that its owner sent have arrived or failed by then."""
# The age of a record that lingers: dead for another owner of the step, whose clock may be behind, and not for garbage collection.
_LINGERING_SECONDS = TAKE_OVER_SECONDS + CLOCK_SECONDS
# Attempts to replace a record; each but the first follows a write of this lease that was applied after its error.
_REPLACEMENTS = 5
_log = logging.getLogger('t5ckpt')


def writer_record(writer: Mapping[str, Any], step: int) -> Callable[[Mapping[str, Any]], bytes]:
    """Returns a function that encodes an owner, merged with ``writer``, as the facts of an unfinished directory."""
    return lambda owner: encode_facts(Facts(writer={**writer, **owner}, step=step))


def write_lingering(storage: Storage, step: int, clock: Clock) -> str | None:
    """Writes a record that lingers on an object store, for a change of a step that needs no lease; returns its key.

    Writes nothing on a file system, where a request of a process that has ended cannot arrive later.
    """
    key = catalog_of(storage).write_lease_key(step, secrets.token_hex(8))
    return key if _linger(storage, key, clock) else None


def _linger(storage: Storage, key: str, clock: Clock) -> bool:
    """Writes a record that lingers, if a request may arrive later; returns whether it may."""
    may_arrive = catalog_of(storage).may_arrive_late
    if may_arrive:
        owner = dataclasses.replace(EXPIRED, last_beat=clock() - _LINGERING_SECONDS)
        storage.write(key, _encode_record(owner.record()))
    return may_arrive


def _encode_record(owner: Mapping[str, Any]) -> bytes:
    return json.dumps(owner).encode()


class WriteLease:
    """The write lease of this process on a step or a directory: the record, the heartbeat and the directory lock.

    A thread rewrites the record each minute until the lease is closed or taken over.

    Attributes:
      nonce: identifies the lease.
      action: its purpose, see ``commit/lease_owner.py``.
      read_steps: for a lease of a step, the steps with a read lease, as listed after the record was written.
      predecessors: for a lease of a step, the dead owners whose records were removed.
    """

    read_steps: frozenset[int] = frozenset()
    predecessors: tuple[Owner, ...] = ()

    def __init__(
        self,
        storage: Storage,
        key: str | Callable[[str], str],
        clock: Clock,
        dir_lock: Any,
        encode: Callable[[Mapping[str, Any]], bytes] = _encode_record,
        action: str = SAVE,
    ):
        """Writes the record, which ``encode`` makes of the owner; ``key`` is its name, or a function of the nonce."""
        self.nonce = secrets.token_hex(8)
        self.key = key if isinstance(key, str) else key(self.nonce)
        self._storage = storage
        self._clock = clock
        self._dir_lock = dir_lock
        self._encode = encode
        self.action = action
        self._ended = InterruptSafeEvent()
        self._lock = threading.Lock()
        self._acquired = self._beat = -math.inf
        self._version: Any = None
        self._has_expired = self._is_lost = False
        try:
            self._write()
        except BaseException:
            end_owner(self.nonce)
            raise

    def _write(self) -> None:
        before, beat = self._beat, self._clock()
        record = self._encode(new_owner(self.nonce, beat, self.action).record())
        if not self._is_of_step:
            self._storage.write(self.key, record)
        elif before == -math.inf:
            self._create(record)
            self._acquired = beat
        elif not self._storage.compares_versions:
            self._storage.write(self.key, record)
        elif not self._replace(record):
            self._is_lost = True
            return
        self._beat = beat
        if self._is_of_step and self._is_expired(before):
            # The process or the request was stopped, and the record may have been removed before it was written.
            self._has_expired = True
            self._is_lost |= not self._storage.compares_versions

    @property
    def _is_of_step(self) -> bool:
        """Whether it is the lease of a step, which has the nonce in its name; that of a temporary directory has not."""
        return self.nonce in self.key

    def _create(self, record: bytes) -> None:
        """Writes the record of a step for the first time.

        The first conditional write of a process shows whether the store checks conditions. No other process creates this name, so
        a store that refuses it gets it without a condition.
        """
        try:
            self._version = self._storage.replace(self.key, record, None)
        except CheckpointNotFoundError:
            # Garbage collection removed the file while it was empty, as that of a dead process.
            self._version = None
        if self._version is None:
            self._storage.write(self.key, record)
            self._version = self._storage.version(self.key)

    def _replace(self, record: bytes) -> bool:
        """Writes the record if it is there; returns False if another process has removed it."""
        for _ in range(_REPLACEMENTS):
            if self._version is None:
                break
            version = self._storage.replace(self.key, record, self._version)
            if version is not None:
                self._version = version
                return True
            # It is there if a write of this lease was applied after its error.
            self._version = self._storage.version(self.key)
        return False

    def _is_expired(self, beat: float) -> bool:
        return -math.inf < beat < self._clock() - TAKE_OVER_SECONDS

    def start(self) -> None:
        """Starts a thread that renews the record. If no thread can be started, the lease expires without renewal."""
        if start_thread(self._renew, 't5ckpt-heart', daemon=True) is None:
            _log.info('t5ckpt: %s is not renewed: no thread could be started', self._storage.url(self.key))

    def _renew(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            try:
                with self._lock:
                    if self._ended.is_set() or not self.is_ours() or not self._beat_once():
                        return
            except T5CkptError as error:
                _log.warning('t5ckpt: could not renew %s: %s', self._storage.url(self.key), error)

    def _beat_once(self) -> bool:
        """Renews the record. Returns False if another process may have taken the step over."""
        if self._is_of_step and not self._storage.compares_versions and self._is_expired(self._beat):
            # A process that takes the step over removes the record, which must not be written again after that.
            return False
        self._write()
        return not self._is_lost

    @property
    def last_beat(self) -> float:
        """The time of the last write of the record, or -inf if it was not renewed in time.

        Another process may take the lease over ``TAKE_OVER_SECONDS`` after this time.
        """
        return -math.inf if self._has_expired else self._beat

    def is_ours(self) -> bool:
        """Returns whether the record on storage is that of this lease. An expired lease may be taken over at any time."""
        owner = None if self._is_lost else read_owner(self._storage, self.key)
        return owner is not None and owner.nonce == self.nonce

    def update(self, action: str) -> None:
        """Rewrites the record with another ``action``."""
        with self._lock:
            self.action = action
            self._write()

    def release(self) -> None:
        """Ends the lease of an owner that has finished the step. Only requests of a dead owner may still arrive."""
        sent = max((owner.last_beat for owner in self.predecessors), default=-math.inf)
        self._end(lingers=self._acquired - sent <= SETTLED_SECONDS)

    def leave(self) -> None:
        """Ends the lease of an owner that has changed nothing. The files of a dead owner stay for the next owner."""
        self._end(lingers=bool(self.predecessors))

    def linger(self) -> None:
        """Ends the lease of an owner that has failed: its requests may still arrive, and its files may be left."""
        try:
            with contextlib.suppress(T5CkptError):
                if not self._ended.is_set() and not self.is_ours():
                    # The owner that has taken the step over keeps its own record.
                    self.close()
        except BaseException:
            # An interrupt must not leave a heartbeat that keeps the step from others.
            self.close()
            raise
        self._end(lingers=True)

    def close(self) -> None:
        """Ends the lease as a crash does."""
        self._stop()
        end_owner(self.nonce)
        self._dir_lock.close()

    def _stop(self) -> None:
        self._ended.set()
        with self._lock:
            # Waits for a heartbeat that is being written.
            pass

    def _end(self, *, lingers: bool) -> None:
        if self._ended.is_set():
            return
        self._stop()
        try:
            if not (lingers and _linger(self._storage, self.key, self._clock)):
                self._storage.delete_file(self.key)
        except T5CkptError as error:
            _log.warning('t5ckpt: %s stays for the next save: %s', self.key, error)
        finally:
            end_owner(self.nonce)
            self._dir_lock.close()
