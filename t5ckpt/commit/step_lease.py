"""Acquires the write lease of a step, which keeps those away whose requests would meet those of its owner.

Two processes never hold leases of one step at once, except two that save it, of which one creates the manifest, and two deleters
on a file system, of which one renames the directory; the other finds out. A save on a store that does not compare versions
excludes all others. Each process writes a record with its own nonce in the name, and then lists the records: the later of two
sees the other's. If both see each other, the one with the smaller nonce waits until
the other has removed its record. A process gives a step up only if it finds the record of another one after it has removed its
own, so not all of them give it up. A reader and a deleter exclude each other in the same way before the step is hidden: see
``commit/read_lease.py``.

``commit/write_lease.py`` has the record, and how a lease ends.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping

from t5ckpt.catalog.listing import catalog_of
from t5ckpt.catalog.run_catalog import Leases
from t5ckpt.commit.lease_files import live_steps, write_leases_of
from t5ckpt.commit.lease_owner import COLLECT, DELETE, REPLACE, SAVE, UNKNOWN, Owner, read_owner
from t5ckpt.commit.lease_time import lease_clock, time_text, warn_if_ahead
from t5ckpt.commit.write_lease import TAKE_OVER_SECONDS, WriteLease
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError
from t5ckpt.format.names import MANIFEST, WriteLeaseName, step_dir
from t5ckpt.storage import Storage

# How long to wait for another process that begins or hides the same step, and for one that gives it up: a few requests.
_RIVAL_SECONDS, _GIVE_UP_SECONDS = 5.0, 1.0
# Attempts after that time, if the other process has given the step up as well.
_LATE_ATTEMPTS = 10
# The pauses between attempts.
_FIRST_SECONDS, _LAST_SECONDS = 0.005, 0.1


class StepTakenError(Exception):
    """The step cannot be written, because another process has written it or is writing or deleting it."""


class AlreadyCommittedError(StepTakenError):
    """The step has a complete checkpoint."""


class BeingWrittenError(StepTakenError):
    """Another writer or deleter has the write lease of the step."""


@contextlib.contextmanager
def taken_step_exists(cure: str) -> Generator[None]:
    """Raises a StepTakenError as the error of the public functions, with the sentence that says what to do."""
    try:
        yield
    except StepTakenError as error:
        raise CheckpointExistsError(f'{error}. {cure}') from error


class _NoLock:
    """The lock of a directory that does not exist, or that another process has locked."""

    def close(self) -> None:
        """Does nothing."""


def acquire_lease(
    storage: Storage,
    step: int,
    clock: Clock,
    action: str = SAVE,
    *,
    stale_after: float = TAKE_OVER_SECONDS,
) -> WriteLease:
    """Acquires the write lease of a step.

    Args:
      storage: the run.
      step: the step.
      clock: unix seconds.
      action: the purpose of the lease, see ``commit/lease_owner.py``. All but ``COLLECT`` wait a few seconds for another owner.
      stale_after: an owner on another machine counts as dead after so many seconds without a heartbeat.

    Raises:
      BeingWrittenError: another process has a lease that has not expired.
      CheckpointNotFoundError: the step to delete was deleted by that process meanwhile.
    """
    times = attempts(0.0 if action == COLLECT else _RIVAL_SECONDS)
    late_attempts = 0
    while True:
        if not next(times, False):
            late_attempts += 1
        try:
            return _acquire(storage, step, clock, action, stale_after)
        except BeingWrittenError as error:
            key = join(step_dir(step), MANIFEST)
            if action == DELETE and not storage.is_file(key):
                raise CheckpointNotFoundError(f'{storage.url(key)}: another process has deleted it') from error
            if late_attempts == 0:
                continue
            if action == COLLECT or late_attempts == _LATE_ATTEMPTS or _has_owner(storage, step, clock, stale_after):
                raise


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


def leases_to_hide(storage: Storage, steps: Iterable[int], clock: Clock) -> dict[int, WriteLease]:
    """Acquires the write leases of many steps of a file system with one listing; those of others are left out.

    The leases are not renewed, so the caller ends them within minutes. The locks of the directories, which are for garbage
    collection, would need a file descriptor each.
    """
    leases: dict[int, WriteLease] = {}
    try:
        for step in steps:
            key = functools.partial(catalog_of(storage).write_lease_key, step)
            leases[step] = WriteLease(storage, key, clock, _NoLock(), action=DELETE)
        listed = catalog_of(storage).leases()
        for step, lease in [*leases.items()]:
            try:
                _await_alone(storage, step, lease, clock, TAKE_OVER_SECONDS, listed)
            except BeingWrittenError:
                leases.pop(step).leave()
    except BaseException:
        for lease in leases.values():
            lease.leave()
        raise
    return leases


def _acquire(storage: Storage, step: int, clock: Clock, action: str, stale_after: float) -> WriteLease:
    # For garbage collection. The leases alone exclude others, also where the directory does not exist.
    lock = storage.try_lock(step_dir(step)) or _NoLock()
    try:
        key = functools.partial(catalog_of(storage).write_lease_key, step)
        lease = WriteLease(storage, key, clock, lock, action=action)
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


def _await_alone(
    storage: Storage, step: int, lease: WriteLease, clock: Clock, stale_after: float, first: Leases | None = None
) -> None:
    """Waits until no other lease of the step is live, removes dead ones, and records the read leases.

    ``first`` are the leases as they were listed after that of this process was written.
    """
    now = lease_clock(storage, clock)
    for has_time in attempts(_GIVE_UP_SECONDS):
        listed, first = first or catalog_of(storage).leases(), None
        if all(other.key != lease.key for other in listed.of_writers):
            # This process was stopped for longer than a lease lasts.
            raise BeingWrittenError(f'{storage.url(step_dir(step))}: another process has taken over the write lease')
        other_leases = [other for other in listed.of_writers if other.step == step and other.key != lease.key]
        owners = _owners(storage, other_leases)
        if (lease.action == SAVE and storage.compares_versions) or (
            lease.action == DELETE and storage.commits_by_rename
        ):
            # Of several writers, one creates the manifest. Of several deleters, one renames the directory.
            owners = {key: owner for key, owner in owners.items() if owner.action != lease.action}
        live = _first_live(owners, now, stale_after)
        if live is None:
            lease.predecessors = tuple(owners.values())
            for key in owners:
                storage.delete_file(key)
            lease.read_steps = frozenset(live_steps(storage, listed.of_readers, clock))
            return
        if live[1].nonce < lease.nonce or not has_time:
            raise BeingWrittenError(_owned_by_other(storage, step, *live))


def _owners(storage: Storage, leases: Iterable[WriteLeaseName]) -> dict[str, Owner]:
    """Returns the owners by the keys of their leases."""
    return {lease.key: owner for lease in leases if (owner := read_owner(storage, lease.key)) is not None}


def _has_owner(storage: Storage, step: int, clock: Clock, stale_after: float) -> bool:
    """Whether another process has the step. One that gives it up looks after it has removed its own record.

    So if two processes have found each other's records, and each has given up an attempt, one of them tries again.
    """
    owners = _owners(storage, write_leases_of(storage, step))
    return _first_live(owners, lease_clock(storage, clock), stale_after) is not None


def _first_live(owners: Mapping[str, Owner], clock: Clock, stale_after: float) -> tuple[str, Owner] | None:
    """Returns the key of the lease and the live owner with the smallest nonce; None where there is none."""
    live = ((key, owner) for key, owner in owners.items() if not owner.is_dead(clock, stale_after))
    return min(live, key=lambda item: item[1].nonce, default=None)


def has_live_lease(storage: Storage, leases: Iterable[WriteLeaseName], clock: Clock, stale_after: float) -> bool:
    """Returns whether one of the leases is of a process that has not ended."""
    now = lease_clock(storage, clock)
    live = [(key, owner) for key, owner in _owners(storage, leases).items() if not owner.is_dead(now, stale_after)]
    for key, owner in live:
        if not owner.is_local and owner is not UNKNOWN:
            warn_if_ahead(storage, key, owner.last_beat + TAKE_OVER_SECONDS, TAKE_OVER_SECONDS, now())
    return bool(live)


def actions_of_others(storage: Storage, step: int, lease: WriteLease) -> set[str]:
    """Returns the actions of the other leases of a step, lingering records apart. The owners of expired ones may go on."""
    other_leases = [other for other in write_leases_of(storage, step) if other.key != lease.key]
    return {owner.action for owner in _owners(storage, other_leases).values() if owner.pid}


def is_being_deleted(storage: Storage, step: int, clock: Clock) -> bool:
    """Returns whether a process is about to hide or replace the step, or has hidden it and removes its files.

    ``clock`` is a :func:`~t5ckpt.commit.lease_time.lease_clock`.
    """
    return any(
        owner.action in (DELETE, REPLACE) and not owner.is_dead(clock, TAKE_OVER_SECONDS)
        for owner in _owners(storage, write_leases_of(storage, step)).values()
    )


def _owned_by_other(storage: Storage, step: int, key: str, owner: Owner) -> str:
    """The owner of a lease, and how to write the step if it has ended: only this machine sees that at once."""
    text = f'{storage.url(step_dir(step))} is being written or deleted by'
    if owner.is_local:
        call = 'another call of this process'
        return f'{text} {call if owner.pid == os.getpid() else f"process {owner.pid} of this machine"}'
    if owner is UNKNOWN:
        return f'{text} another program, whose lease cannot be read. If it has ended, remove {storage.url(key)}'
    return (
        f'{text} process {owner.pid} on {owner.host}. If that process has ended, remove its lease {storage.url(key)}, or wait '
        f'until it expires at {time_text(owner.last_beat + TAKE_OVER_SECONDS)}'
    )


def attempts(seconds: float) -> Iterator[bool]:
    """Yields at once and then after growing pauses: True while there is time for another attempt, and False at the last one."""
    deadline, pause = time.monotonic() + seconds, _FIRST_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        yield True
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LAST_SECONDS)
    yield False
