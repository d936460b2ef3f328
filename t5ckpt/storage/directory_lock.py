"""The lock of a directory: ``flock`` on the directory itself.

The kernel releases it when the process ends, even by SIGKILL, and there is no lock file to remove. A forked process closes its
copy of the open directory, with which it would keep the lock after the end of its parent.
"""

from __future__ import annotations

import fcntl
import os
import weakref

from t5ckpt.storage.base import Lock
from t5ckpt.storage.durable import leads_to

_open_locks: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_open_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


class DirectoryLock(Lock):
    """An open directory, and whether its flock is held, or the reason why not; ``close`` releases it."""

    def __init__(self, fd: int, path: str, is_held: bool, reason: str = ''):
        """Takes the open directory, and its path."""
        self._fd = fd
        self._path = path
        self.is_held = is_held
        self.reason = reason
        _open_locks.add(self)

    def is_current(self) -> bool:
        """Whether the path still leads to the locked directory. A disk that cannot be read does not end the lock."""
        if self._fd < 0:
            return False
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Releases the lock."""
        # Taken out first: after an interrupt in os.close, another file may have the descriptor.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def lock_directory(path: str) -> DirectoryLock | None:
    """Locks a directory without waiting.

    Returns:
      None if the directory does not exist or another process has the lock. On a file system without locks, a lock with
      ``is_held`` False.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_removed = not leads_to(path, os.fstat(fd))
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError as error:
        return DirectoryLock(fd, path, False, error.strerror or '')
    if is_removed:
        # Another process removed the directory between the open and the lock.
        os.close(fd)
        return None
    return DirectoryLock(fd, path, True)
