"""Write leases: the record of the process that writes or deletes a step, and the thread that renews it.

On object stores, where a step is written in place, a lease of ``checkpoint_<step>`` is the object
``.t5ckpt/busy/<step>.<nonce>``. On file systems, the lease of a save is in its temporary directory, and a process that hides
or replaces a step has the file ``deleting_<step>.<nonce>``. A lease names the process, its machine and the time of the last
heartbeat; a thread renews it every minute. The lease is written before anything else and removed last. All files that remain
after a crash have a lease, and garbage collection removes nothing without one.

    save     +lease, [alone?], arrays, sidecar, [is the lease still there?], manifest, steps marker, -lease
    delete   +lease, [alone? no read lease?], -manifest, [no pin?], -steps marker, [is the lease still there?], -files, -lease
    read     +read lease, [no deleter?], [is the manifest there?], ..., -read lease

Two processes never hold leases of one step at once. Each writes a record with its own nonce in the name, and then lists the
records: the later of the two sees the other's. If both see each other, the one with the smaller nonce waits until the other
has removed its record. A reader and a deleter exclude each other in the same way before the step is hidden: see
``commit/read_lease.py``.

A lease ends with its process, which other processes on the same machine can check. On other machines it expires without a
heartbeat: after ten minutes for another writer of the same step, and after an hour for garbage collection. The process that
takes the step over first removes the expired record, so its owner, if it still runs, detects the loss. If the manifest exists
then, the step is committed and gets its steps marker; otherwise its files are removed.

While an owner lives, it ends its lease in one of four ways:

    way      the owner                                    the record
    release  has finished                                 is removed
    leave    has changed nothing                          is removed
    linger   has failed: a request may still arrive       is that of nobody, for an hour
    close    cannot reach the storage, or lost the step   stays as it is, as after a crash

On an object store, a request that a process has given up may arrive later. A record that lingers has no owner, so that another
process may take the step at once. Garbage collection takes the step when the record is an hour old (it is written as twenty
minutes old): it removes what has arrived by then, or marks the step if its manifest has. The same holds for requests of dead
owners. So ``release`` and ``leave`` let the record linger, too, if they took over that of a dead owner and cannot know that
nothing of it is left: ``release`` in the first hour after its last heartbeat, ``leave`` always.

An overwrite in place sets ``replaces`` in its lease, so that garbage collection removes the files that it left.

``commit/lease_time.py`` has the clock by which leases expire.

Notes: a process that is stopped for longer than its lease cannot be excluded by a lease. On an object store, the condition of the
manifest's write decides then, see ``commit/by_manifest.py``. Where directories can be renamed, its rename fails, since garbage
collection gives the directory another name first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import math
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from t5ckpt.catalog.run_catalog import Index
from t5ckpt.commit.lease_files import list_leases, live_steps, write_lease_key, write_leases_of
from t5ckpt.commit.lease_owner import (
    DELETE,
    EXPIRED,
    MEND,
    REPLACE,
    SAVE,
    UNKNOWN,
    Owner,
    end_owner,
    new_owner,
    read_owner,
)
from t5ckpt.commit.lease_time import CLOCK_SECONDS, lease_clock, warn_if_ahead
from t5ckpt.core.keys import join
from t5ckpt.core.polling import attempts
from t5ckpt.core.protocols import Clock
from t5ckpt.core.thread_pool import start_thread
from t5ckpt.errors import CheckpointNotFoundError, StorageError, T5CkptError
from t5ckpt.format.names import MANIFEST, WriteLeaseName, step_dir
from t5ckpt.format.sidecar import Sidecar, encode_sidecar
from t5ckpt.storage import Storage

__all__ = [
    'TAKE_OVER_SECONDS',
    'AlreadyCommittedError',
    'BeingWrittenError',
    'StepTakenError',
    'WriteLease',
    'acquire_lease',
    'acquire_to_hide',
    'has_live_lease',
    'is_being_deleted',
    'sidecar_record',
]

TAKE_OVER_SECONDS = 600.0
_BEAT_SECONDS = 60.0
SETTLED_SECONDS = 3600.0
"""After so long, no request of an owner is on its way to a server."""
# The age of a record that lingers: dead for another owner of the step, whose clock may be behind, and not for garbage collection.
_LINGERING_SECONDS = TAKE_OVER_SECONDS + CLOCK_SECONDS
# How long to wait for another process that begins or hides the same step, and for one that steps back: a few requests.
_RIVAL_SECONDS, _STEP_BACK_SECONDS = 5.0, 1.0
_log = logging.getLogger('t5ckpt')


class StepTakenError(Exception):
    """The step cannot be written, because another process has written it or is writing or deleting it."""


class AlreadyCommittedError(StepTakenError):
    """The step has a complete checkpoint."""


class BeingWrittenError(StepTakenError):
    """Another writer or deleter has the write lease of the step."""


def sidecar_record(writer: Mapping[str, Any], step: int) -> Callable[[Mapping[str, Any]], bytes]:
    """Returns a function that encodes an owner, merged with ``writer``, as the sidecar of an unfinished directory."""
    return lambda owner: encode_sidecar(Sidecar(writer={**writer, **owner}, step=step))


def _encode_record(owner: Mapping[str, Any]) -> bytes:
    return json.dumps(owner).encode()


class WriteLease:
    """The write lease of this process on a step or a directory: the record, the heartbeat and the directory lock.

    The record is written anew each minute until the lease is closed or taken over.

    Attributes:
      nonce: which lease it is.
      read_steps: for a lease of a step, the steps with a read lease, as listed after the record was written.
      replaces: whether an overwrite in place, by this owner or a dead one, may have left files.
      predecessors: for a lease of a step, the dead owners whose records were removed.
    """

    read_steps: frozenset[int] = frozenset()
    predecessors: tuple[Owner, ...] = ()
    replaces = False

    def __init__(
        self,
        storage: Storage,
        key: str | Callable[[str], str],
        clock: Clock,
        dir_lock: Any,
        encode: Callable[[Mapping[str, Any]], bytes] = _encode_record,
        action: str = SAVE,
    ):
        """Writes the record, which ``encode`` makes of the owner's facts; ``key`` is its name, or gives it for the nonce."""
        self.nonce = secrets.token_hex(8)
        self.key = key if isinstance(key, str) else key(self.nonce)
        self._storage = storage
        self._clock = clock
        self._dir_lock = dir_lock
        self._encode = encode
        self._action = action
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._beat = -math.inf
        self._is_lost = False
        try:
            self._write()
        except BaseException:
            end_owner(self.nonce)
            raise

    def _write(self) -> None:
        beat = self._clock()
        owner = dataclasses.replace(new_owner(self.nonce, beat, self._action), replaces=self.replaces)
        record = self._encode(dataclasses.asdict(owner))
        try:
            if self._beat == -math.inf and self.nonce in self.key:
                # The first conditional write of a process shows whether the store checks conditions. No other process creates
                # this name, so a store that refuses it gets it without a condition.
                is_written = self._storage.replace(self.key, record, None) is not None
            else:
                is_written = False
            if not is_written:
                self._storage.write(self.key, record)
        except CheckpointNotFoundError:
            if self.nonce not in self.key:
                raise
            # Garbage collection removed the file while it was empty, as that of a dead process.
            self._storage.write(self.key, record)
        self._beat = beat

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
        before, is_alone = self._beat, self.nonce not in self.key
        if not is_alone and self._clock() - before > TAKE_OVER_SECONDS:
            # A process that takes the step over removes the record, which must not be written again after that.
            return False
        self._write()
        if not is_alone and self._clock() - before > TAKE_OVER_SECONDS:
            # The process was stopped meanwhile, and the record may have been removed before it was written.
            self._is_lost = True
            return False
        return True

    def is_ours(self) -> bool:
        """Returns whether this lease wrote the record on storage, and no other process can have taken the step over."""
        return not self._is_lost and self.rival() is None

    def rival(self) -> Owner | None:
        """Returns the owner that overwrote the record; None if it is ours, ``UNKNOWN`` if the record was deleted."""
        owner = read_owner(self._storage, self.key)
        return None if owner is not None and owner.nonce == self.nonce else owner or UNKNOWN

    def actions_of_others(self, step: int) -> set[str]:
        """Returns the actions of the other live leases of the step."""
        others = [each for each in write_leases_of(self._storage, step) if each.key != self.key]
        now = lease_clock(self._storage, self._clock)
        return {owner.action for owner in _owners(self._storage, others) if not owner.is_dead(now, TAKE_OVER_SECONDS)}

    def note(self, *, action: str | None = None, replaces: bool | None = None) -> None:
        """Writes the record with another ``action``, or with ``replaces``."""
        with self._lock:
            self._action = self._action if action is None else action
            self.replaces = self.replaces if replaces is None else replaces
            self._write()

    def release(self) -> None:
        """Ends the lease of an owner that has finished: the step needs nothing else, but for requests of a dead owner."""
        sent = max((owner.beat for owner in self.predecessors), default=-math.inf)
        self._end(lingers=self.replaces or self._clock() - sent <= SETTLED_SECONDS)

    def leave(self) -> None:
        """Ends the lease of an owner that has finished nothing: what a dead owner left is left to the next one."""
        self._end(lingers=self.replaces or bool(self.predecessors))

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
            if lingers and not self._storage.commits_by_rename:
                beat = self._clock() - _LINGERING_SECONDS
                record = dataclasses.replace(EXPIRED, beat=beat, replaces=self.replaces)
                self._storage.write(self.key, self._encode(dataclasses.asdict(record)))
            else:
                self._storage.delete_file(self.key)
        except T5CkptError as error:
            _log.warning('t5ckpt: %s stays for the next save: %s', self.key, error)
        finally:
            end_owner(self.nonce)
            self._dir_lock.close()


class _NoLock:
    """The lock of a directory that does not exist."""

    def close(self) -> None:
        """Does nothing."""


def acquire_lease(
    storage: Storage,
    step: int,
    clock: Clock,
    action: str = SAVE,
    *,
    index: Index | None = None,
    stale_after: float = TAKE_OVER_SECONDS,
) -> WriteLease:
    """Acquires the write lease of a step.

    Args:
      storage: the run.
      step: the step.
      clock: unix seconds.
      action: the purpose of the lease, see ``commit/lease_owner.py``. All but ``MEND`` wait a few seconds for another owner.
      index: the markers as they were listed before. If they show a save of the step, this function does not wait.
      stale_after: an owner on another machine counts as dead after so many seconds without a heartbeat.

    Raises:
      BeingWrittenError: another process has a lease that has not expired.
      CheckpointNotFoundError: the step to delete was deleted by that process meanwhile.
    """
    if index is not None:
        owners = _owners(storage, (each for each in index.write_leases if each.step == step))
        owner = _first_live(owners, clock, stale_after)
        if owner is not None and owner.action == SAVE:
            raise BeingWrittenError(_owned_by_other(storage, step, owner))
    for has_time in attempts(0.0 if action == MEND else _RIVAL_SECONDS, clock):
        try:
            return _acquire(storage, step, clock, action, stale_after)
        except BeingWrittenError as error:
            key = join(step_dir(step), MANIFEST)
            if action == DELETE and not storage.is_file(key):
                raise CheckpointNotFoundError(f'{storage.url(key)}: another process has deleted it') from error
            if not has_time:
                raise
    raise AssertionError('the last attempt returns or raises')


def acquire_to_hide(storage: Storage, step: int, clock: Clock) -> WriteLease:
    """Acquires the write lease of a step to hide; the caller checks ``read_steps`` before it hides the step.

    Raises:
      StorageError: another process is writing or deleting the step.
      CheckpointNotFoundError: another process has deleted it.
    """
    try:
        return acquire_lease(storage, step, clock, DELETE)
    except BeingWrittenError as error:
        raise StorageError(errno.EBUSY, str(error)) from error


def _acquire(storage: Storage, step: int, clock: Clock, action: str, stale_after: float) -> WriteLease:
    lock = storage.try_lock(step_dir(step))
    if lock is None and not storage.commits_by_rename:
        raise BeingWrittenError(f'{storage.url(step_dir(step))} is being written by another save of this process')
    lock = _NoLock() if lock is None else lock
    try:
        lease = WriteLease(storage, lambda nonce: write_lease_key(storage, step, nonce), clock, lock, action=action)
    except BaseException:
        lock.close()
        raise
    try:
        _await_alone(storage, step, lease, clock, stale_after)
    except BaseException:
        lease.leave()
        raise
    lease.start()
    return lease


def _await_alone(storage: Storage, step: int, lease: WriteLease, clock: Clock, stale_after: float) -> None:
    """Waits until no other lease of the step is live, removes dead ones, and notes the read leases."""
    now = lease_clock(storage, clock)
    for has_time in attempts(_STEP_BACK_SECONDS, clock):
        listed = list_leases(storage)
        others = [each for each in listed.of_writers if each.step == step and each.key != lease.key]
        owners = _owners(storage, others)
        owner = _first_live(owners, now, stale_after)
        if owner is None:
            lease.predecessors = tuple(owners)
            if any(each.replaces for each in owners):
                lease.note(replaces=True)
            for each in others:
                storage.delete_file(each.key)
            lease.read_steps = frozenset(live_steps(storage, listed.of_readers, clock))
            return
        if owner.nonce < lease.nonce or not has_time:
            raise BeingWrittenError(_owned_by_other(storage, step, owner))


def _owners(storage: Storage, leases: Iterable[WriteLeaseName]) -> list[Owner]:
    return [owner for each in leases if (owner := read_owner(storage, each.key)) is not None]


def _first_live(owners: Iterable[Owner], clock: Clock, stale_after: float) -> Owner | None:
    """Returns the live owner with the smallest nonce; None where there is none."""
    live = [owner for owner in owners if not owner.is_dead(clock, stale_after)]
    return min(live, key=lambda owner: owner.nonce, default=None)


def has_live_lease(storage: Storage, leases: Iterable[WriteLeaseName], clock: Clock, stale_after: float) -> bool:
    """Returns whether one of the leases is of a process that has not ended."""
    now = lease_clock(storage, clock)
    live = [
        (lease, owner)
        for lease in leases
        if (owner := read_owner(storage, lease.key)) is not None and not owner.is_dead(now, stale_after)
    ]
    for lease, owner in live:
        if not owner.is_local and owner is not UNKNOWN:
            warn_if_ahead(storage, lease.key, owner.beat + TAKE_OVER_SECONDS, TAKE_OVER_SECONDS, now())
    return bool(live)


def is_being_deleted(storage: Storage, step: int, clock: Clock) -> bool:
    """Returns whether a process is about to hide or replace the step, or has hidden it and removes its files.

    ``clock`` is a :func:`~t5ckpt.commit.lease_time.lease_clock`.
    """
    owners = _owners(storage, write_leases_of(storage, step))
    return any(owner.action in (DELETE, REPLACE) and not owner.is_dead(clock, TAKE_OVER_SECONDS) for owner in owners)


def _owned_by_other(storage: Storage, step: int, owner: Owner) -> str:
    who = 'another writer' if owner is UNKNOWN else f'process {owner.pid} on {owner.host}'
    return (
        f'{storage.url(step_dir(step))} is being written or deleted by {who}; if that process is dead, '
        f'its write lease expires {TAKE_OVER_SECONDS / 60:g} minutes after its last heartbeat'
    )
