"""A user's storage in the simulator: each of its operations is a point of the schedule, and may fail.

The class is not changed. It should keep its data in memory, and its modules are not simulated: an operation of it may wait for no
other process, and reads no clock that the schedule should decide.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from simulation.scheduler import active, current_task
from t5ckpt.errors import StorageError
from t5ckpt.format.file_checksums import FileEntry, entry_of
from t5ckpt.storage import Storage
from t5ckpt.storage.base import Lock
from t5ckpt.testing.faulty import FaultyStorage

_FAILED = 'injected: the storage failed'


def point(operation: str) -> None:
    """One more point of the schedule, within a method that writes or deletes. It does nothing outside of a simulation.

    Args:
      operation: its text in the trace.

    Raises:
      StorageError: the schedule lets the method fail here.
    """
    scheduler = active()
    if scheduler is not None and scheduler.point(operation) is not None:
        raise StorageError(errno.EIO, _FAILED)


class OwnServer:
    """The storage as the world sees it, without points.

    Attributes:
      storage: of the class that is tested.
      changed: called with the keys after each change.
    """

    def __init__(self, make: Callable[[], Storage], before: OwnServer | None = None):
        """Makes an empty storage, or one with the files of another."""
        self.storage = make()
        self.changed: Callable[[tuple[str, ...]], None] = lambda keys: None
        self._known: dict[str, bytes] = {}
        for key, data in ({} if before is None else before.files()).items():
            self.storage.make_dir(key.rpartition('/')[0])
            self.storage.write(key, data)
        self._known = self.files()

    def files(self) -> dict[str, bytes]:
        """All files by key."""
        return {key: self.storage.read(key) for key, _ in self.storage.walk('')}

    def read(self, key: str) -> bytes | None:
        """The bytes of a key as they were after the last operation."""
        return self._known.get(key)

    def notice(self) -> None:
        """Calls ``changed`` with the keys that have changed since the last call."""
        before, self._known = self._known, self.files()
        keys = sorted(key for key in {*before, *self._known} if before.get(key) != self._known.get(key))
        if keys:
            self.changed(tuple(keys))


class _Lock(Lock):
    """A lock of a directory, which ends with its process."""

    def __init__(self, lock: Lock):
        self._lock: Lock | None
        self._lock, self.is_held, self.reason = lock, lock.is_held, lock.reason
        current_task().process.on_death.append(self.close)

    def is_current(self) -> bool:
        return self._lock is not None and self._lock.is_current()

    def close(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()


def _pointed(name: str, convert: Callable[[Any], Any] = lambda found: found) -> Any:
    """A method of a storage, with a point before it; ``convert`` is applied to its result."""

    def call(self: OwnStorage, *args: Any, **options: Any) -> Any:
        scheduler = active()
        method = getattr(self.server.storage, name)
        if scheduler is None:
            return method(*args, **options)
        fault = scheduler.point(' '.join([name, *map(str, args[:1])]))
        if fault is not None and fault.action != 'lost':
            raise StorageError(errno.EIO, _FAILED)
        result = convert(method(*args, **options))
        self.server.notice()
        if fault is not None:
            raise StorageError(errno.EIO, _FAILED)
        return result

    return call


class OwnStorage(FaultyStorage):
    """A user's storage, as a process of the simulation opens it. Chunks are written and read through it (``arrays.py``)."""

    read = _pointed('read')
    read_with_version = _pointed('read_with_version')
    write = _pointed('write')
    replace = _pointed('replace')
    version = _pointed('version')
    delete_unchanged = _pointed('delete_unchanged')
    copy_unchanged = _pointed('copy_unchanged')
    kind = _pointed('kind')
    is_file = _pointed('is_file')
    are_files = _pointed('are_files')
    heads = _pointed('heads')
    names = _pointed('names')
    size = _pointed('size')
    entries = _pointed('entries')
    walk = _pointed('walk', lambda result: iter(list(result)))
    make_dir = _pointed('make_dir')
    sync_tree = _pointed('sync_tree')
    publish = _pointed('publish')
    exchange = _pointed('exchange')
    link = _pointed('link')
    delete_files = _pointed('delete_files')
    delete_tree = _pointed('delete_tree')
    _try_lock = _pointed('try_lock')

    def __init__(self, server: OwnServer):
        """Takes the server of the world."""
        super().__init__(server.storage)
        self.server = server

    def array_kvstore(self, key: str) -> dict[str, Any]:
        return {'driver': 'simulated', 'path': f'{key}/', 'storage': self}

    def context(self) -> Any:
        return None

    def try_lock(self, key: str) -> Any:
        if active() is None:
            return self.server.storage.try_lock(key)
        lock = self._try_lock(key)
        return None if lock is None else _Lock(lock)

    def write_chunk(self, key: str, data: Any) -> tuple[FileEntry, Any]:
        self.make_dir(key.rpartition('/')[0])
        self.write(key, bytes(data))
        return entry_of(data), self.stamp(key)
