"""The lock of a local directory: ``flock`` on the directory, which one checkpointer of one process has at a time."""

from __future__ import annotations

import gc
import os
import weakref

from t5ckpt.errors import LocalDirError
from t5ckpt.storage import Storage
from t5ckpt.storage.base import Lock


class LocalLock:
    """The lock of one checkpointer, from :meth:`take` to :meth:`release`.

    A forked process does not have the lock of its parent, see ``storage/directory_lock.py``.
    """

    def __init__(self, local: Storage):
        """Takes no lock yet."""
        self._local = local
        self._lock: Lock | None = None
        self._process = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that took the lock."""
        return self._lock is not None and self._process != os.getpid()

    def check_not_forked(self) -> None:
        """Raises LocalDirError in a process that was forked from the one that took the lock."""
        if self.is_forked:
            raise LocalDirError(
                f'{self._local.url()} is in use by process {self._process}, from which this process was forked. Save and delete '
                'steps in that process, or pass another local_dir.'
            )

    def is_of_removed(self) -> bool:
        """Whether the lock was taken, and the directory has been removed since."""
        return self._lock is not None and not self.is_forked and not self._lock.is_current()

    def take(self) -> None:
        """Locks the directory, unless it is locked already.

        Raises:
          LocalDirError: another process or checkpointer has it, or it cannot be locked.
        """
        if self._lock is not None:
            return
        local = self._local
        self._lock = _locked(local)
        if self._lock is None:
            raise LocalDirError(
                f'{local.url()} is in use by another process, or by another checkpointer of this one. End that process, '
                'close that checkpointer, or pass another local_dir; several processes of a machine need one each.'
            )
        if not self._lock.is_held:
            reason = self._lock.reason or 'flock'
            self.release()
            raise LocalDirError(
                f'{local.url()} cannot be locked ({reason}), so another process could use it at the same time. Pass a '
                'local_dir on a disk of this machine or in its memory.'
            )
        self._process = os.getpid()
        weakref.finalize(self, self._lock.close)

    def release(self) -> None:
        """Releases the lock, if it was taken."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _locked(local: Storage) -> Lock | None:
    lock = local.try_lock('')
    if lock is None:
        # A notebook may have replaced a checkpointer without closing it.
        gc.collect()
        lock = local.try_lock('')
    return lock
