"""Announces that a step is about to be hidden or changed, before looking for its readers."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Collection, Generator, Iterable

from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.markers import HIDE, Marker
from t5ckpt.commit.taken_steps import BeingHiddenError, attempts
from t5ckpt.core.protocols import Clock
from t5ckpt.format.names import step_dir
from t5ckpt.storage import Storage
from t5ckpt.storage.base import Lock

# How long to wait for another process that hides the same step: a few requests.
_RIVAL_SECONDS = 5.0


@contextlib.contextmanager
def announced(storage: Storage, step: int, clock: Clock) -> Generator[Collection[int]]:
    """Yields the steps that readers hold, after readers can see that this one is about to be hidden or changed.

    Where locks work, no other process of this machine hides or replaces the step meanwhile.

    Args:
      storage: the run.
      step: the step.
      clock: unix seconds.

    Raises:
      BeingHiddenError: another process replaces or deletes the step.
    """
    with contextlib.ExitStack() as stack:
        lock = lock_directory(storage, step_dir(step))
        if lock is not None:
            stack.callback(lock.close)
        yield stack.enter_context(announced_steps(storage, [step], clock))


@contextlib.contextmanager
def announced_steps(storage: Storage, steps: Iterable[int], clock: Clock) -> Generator[Collection[int]]:
    """As :func:`announced`, for many steps of a file system with one listing, and without their locks."""
    with contextlib.ExitStack() as stack:
        for step in steps:
            stack.callback(Marker(storage, step, clock, HIDE).remove)
        yield held_steps(storage, clock)


def lock_directory(storage: Storage, directory: str) -> Lock | None:
    """Locks a directory; None if there is none, as on object stores.

    A process that wants to hide a step locks its directory for a moment, perhaps after another one has renamed it.

    Raises:
      BeingHiddenError: another process has the lock.
    """
    for has_time in attempts(_RIVAL_SECONDS):
        if not storage.commits_by_rename or storage.kind(directory) != 'dir':
            return None
        lock = storage.try_lock(directory)
        if lock is not None and lock.is_current():
            return lock
        if lock is not None:
            lock.close()
        if not has_time:
            break
    raise BeingHiddenError(
        errno.EBUSY, f'{storage.url(directory)} is being replaced or deleted by another process. Try again.'
    )
