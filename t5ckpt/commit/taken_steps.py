"""The errors of a step that another process has written or is about to hide, and waits for it."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Generator, Iterator

from t5ckpt.errors import StorageError
from t5ckpt.storage import Storage

# The pauses between attempts.
_FIRST_SECONDS, _LAST_SECONDS = 0.005, 0.1
# How long to wait for another process that hides the same step: a few requests.
_RIVAL_SECONDS = 5.0


class StepTakenError(Exception):
    """The step cannot be written, because another process has written it or is replacing or deleting it."""


class BeingHiddenError(StorageError, StepTakenError):
    """Another process is replacing or deleting the step."""


def attempts(seconds: float) -> Iterator[None]:
    """Yields at once, and then after growing pauses while there is time for another attempt; the last time at the end of it."""
    deadline, pause = time.monotonic() + seconds, _FIRST_SECONDS
    while time.monotonic() < deadline:
        yield
        time.sleep(pause)
        pause = min(2 * pause, _LAST_SECONDS)
    yield


@contextlib.contextmanager
def locked(storage: Storage, directory: str) -> Generator[None]:
    """Locks a directory; does nothing if there is none, as on object stores.

    A process that wants to hide a step locks its directory for a moment, perhaps after another one has renamed it.

    Raises:
      BeingHiddenError: another process has the lock.
    """
    for _ in attempts(_RIVAL_SECONDS):
        if not storage.commits_by_rename or storage.kind(directory) != 'dir':
            yield
            return
        lock = storage.try_lock(directory)
        if lock is not None:
            with contextlib.closing(lock):
                if lock.is_current():
                    yield
                    return
    raise BeingHiddenError(
        errno.EBUSY, f'{storage.url(directory)} is being replaced or deleted by another process. Try again.'
    )
