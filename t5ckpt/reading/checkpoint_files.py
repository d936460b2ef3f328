"""Reads the files of a checkpoint such that nothing outside its directory is read, and compares their checksums.

Names from a manifest are checked when they are parsed. Symbolic links and special files are checked here: the directory of a
file is resolved, and the file is opened with ``O_NOFOLLOW``. A link whose target is inside the checkpoint is followed; a link out
of it is refused, unless the caller asks to follow links. Only regular files are read, since a FIFO would block the reader and a
device might never end.

On a local file system, a file is read in blocks that fit a core's cache and hashed there. Elsewhere a whole file is one request,
and so is a range of a file.

Notes: 10.8 GB/s of cached files on two cores, of which one hashes 24 GB/s. Each thread takes 1 MiB of memory on a file
system, and the size of a file on other storage.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import xxhash

from t5ckpt.catalog.locate import Located
from t5ckpt.core.keys import join
from t5ckpt.core.text import CURE_OF_DAMAGE
from t5ckpt.core.thread_pool import Future, Pool
from t5ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    T5CkptError,
    UnsafeSpecError,
)
from t5ckpt.format.file_checksums import FileChecksums, FileEntry
from t5ckpt.reading.aligned_memory import SpareMemory
from t5ckpt.storage import Storage, foreign_errors
from t5ckpt.storage.memory_limit import check_whole_read

Checksums: TypeAlias = FileChecksums | Callable[[], FileChecksums | None] | None
"""The file checksums of a checkpoint, or a function that reads them; None if none are compared."""
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MAX_DEPTH = 64
BLOCK_BYTES = 2**20
"""Of a block, which fits a core's cache."""
_MIN_THREADS = 8
_AHEAD = 8
_CURE = (
    f'{CURE_OF_DAMAGE} "t5ckpt verify --full" lists all that is damaged. "t5ckpt cp --leave" copies the step without these '
    'leaves.'
)


def check_size(size: int, limit: int, where: str) -> None:
    """Rejects a file that is too large for its kind."""
    if size > limit:
        raise CorruptCheckpointError(f'{where} has {size:,} bytes, expected at most {limit:,}. Copy it again.')


def local_threads() -> int:
    """Several reads in flight keep a disk busy, and copies from the page cache keep every core busy."""
    return max(_MIN_THREADS, 2 * (os.cpu_count() or 1))


class OpenFile(abc.ABC):
    """An open file; ``size`` is its bytes, None for a part of a file in a bucket, and ``descriptor`` that of a local file."""

    size: int | None
    descriptor = -1

    @abc.abstractmethod
    def read(self, start: int, stop: int, into: memoryview | None = None) -> memoryview:
        """The bytes of a range, in ``into`` or in memory that the next read of this thread may overwrite.

        Raises:
          EOFError: the file is shorter.
        """

    def blocks(self) -> Iterator[memoryview]:
        """All bytes of a file whose size is known, in blocks; each may be overwritten by the next."""
        size = self.size or 0
        return (self.read(start, min(size, start + BLOCK_BYTES)) for start in range(0, size, BLOCK_BYTES))


class _Scratch(threading.local):
    """Memory of each thread for the block that it reads, which fits a core's cache."""

    def __init__(self) -> None:
        self.bytes = np.empty(BLOCK_BYTES, np.uint8)


_scratch = _Scratch()


class _LocalFile(OpenFile):
    def __init__(self, fd: int, size: int):
        self.descriptor, self.size = fd, size

    def read(self, start: int, stop: int, into: memoryview | None = None) -> memoryview:
        if into is None:
            size = stop - start
            into = (_scratch.bytes[:size] if size <= BLOCK_BYTES else np.empty(size, np.uint8)).data
        filled = 0
        while filled < stop - start:
            count = os.preadv(self.descriptor, [into[filled:]], start + filled)
            if count == 0:
                raise EOFError
            filled += count
        return into


class _RemoteFile(OpenFile):
    """A file in memory or in a bucket: all of it, or ranges that are requested one by one."""

    def __init__(self, storage: Storage, key: str, *, whole: bool):
        self._storage, self._key = storage, key
        self._data = storage.read(key) if whole else None
        self.size = None if self._data is None else len(self._data)

    def read(self, start: int, stop: int, into: memoryview | None = None) -> memoryview:
        if self._data is None:
            data = memoryview(self._storage.read(self._key, start, stop))
        else:
            data = memoryview(self._data)[start:stop]
        if len(data) != stop - start:
            raise EOFError(f'ends before byte {stop:,}')
        if into is None:
            return data
        into[:] = data
        return into


class CheckpointFiles(abc.ABC):
    """Reads files of one checkpoint. Safe from any thread.

    Attributes:
      block_bytes: of a range of a file that is read at once.
      gap_bytes: that are read in addition, where this is faster than another read.
      task_bytes: the least that a task for a thread reads.
      threads: that read at once.
      memory: for encoded chunks.
      cure_of_missing: the last sentences of the error that a file is missing, if they are not those of a damage.
    """

    block_bytes: int
    gap_bytes: int
    task_bytes: int
    threads: int

    def __init__(self, storage: Storage, directory: str, checksums: Checksums = None):
        """Takes the checkpoint's directory, and its file checksums if files are to be compared with them; see :meth:`at`."""
        self.cure_of_missing = ''
        self.storage = storage
        self.directory = directory
        self.memory = SpareMemory()
        self._checksums = checksums
        self._lock = threading.RLock()

    @staticmethod
    def at(
        storage: Storage, directory: str, checksums: Checksums = None, *, follow_links: bool = False
    ) -> CheckpointFiles:
        """The files of a directory; with ``follow_links`` symbolic links may lead out of it."""
        root = storage.local_path(directory)
        if root is None:
            return _RemoteFiles(storage, directory, checksums)
        return _LocalFiles(storage, directory, checksums, root, follow_links=follow_links)

    @classmethod
    def of(cls, located: Located, checksums: Checksums = None, cure_of_missing: str = '') -> CheckpointFiles:
        """The files of a located checkpoint."""
        files = cls.at(located.storage, located.directory, checksums, follow_links=located.follow_links)
        files.cure_of_missing = cure_of_missing
        return files

    @property
    def checksums(self) -> FileChecksums | None:
        """The file checksums, which are read at the first use if they were not read before."""
        with self._lock:
            if callable(self._checksums):
                self._checksums = self._checksums()
            return self._checksums

    def check(self, name: str, where: str) -> None:  # noqa: B027 - only file systems have links
        """Checks a name and everything below it for links out and special files, before another library reads it.

        Raises:
          FormatError: there is such a link or file.
          StorageError: a directory cannot be read.
        """

    @abc.abstractmethod
    def opened(self, file: str, name: str = '', *, whole: bool = True) -> contextlib.AbstractContextManager[OpenFile]:
        """Opens a file, of which ranges are read or, with ``whole``, all bytes; ``name`` is that of a leaf, for errors.

        Raises:
          CheckpointNotFoundError: there is no such file; of a part of a file in a bucket, its first read raises this.
          CorruptCheckpointError: it is not a regular file, or became shorter while it was read.
          UnsafeSpecError: a symbolic link leads out of the checkpoint.
          StorageError: it cannot be read.
        """

    def read(self, file: str, name: str = '', limit: int | None = None) -> bytes:
        """All bytes of a small file, of the leaf of a name if there is one.

        Raises:
          CheckpointNotFoundError, StorageError, FormatError: as :meth:`opened`.
          CorruptCheckpointError: the file has more than ``limit`` bytes. In a bucket its size is known only after the read.
          NotEnoughMemoryError: it does not fit in memory.
        """
        with self.opened(file, name) as opened:
            size = opened.size or 0
            if limit is not None:
                check_size(size, limit, self.where(file, name))
            check_whole_read(size, self.where(file, name))
            return bytes(opened.read(0, size))

    def read_with_version(self, file: str) -> tuple[bytes, Any]:
        """All bytes of a small file, and its ``Storage.version`` from before."""
        version = self.storage.version(self.key(file))
        return self.read(file), version

    def digest(self, file: str) -> FileEntry:
        """A file's length and its xxh3-64."""
        state = xxhash.xxh3_64()
        with self.opened(file) as opened:
            for block in opened.blocks():
                state.update(block)
            return opened.size or 0, state.hexdigest()

    def compare(self, file: str, name: str, entry: FileEntry) -> None:
        """Compares a file of a leaf with its recorded checksum, if checksums are to be compared.

        Raises:
          CorruptCheckpointError: they differ, or the file has none.
        """
        checksums = self.checksums
        if checksums is None:
            return
        if file not in checksums:
            raise CorruptCheckpointError(f'{self.where(file, name)} has no checksum in this checkpoint. {_CURE}')
        checksums.check(file, entry, self.where(file, name), _CURE)

    def verify(self, file: str, name: str) -> None:
        """Reads a file and compares it with its recorded checksum.

        Raises:
          CorruptCheckpointError: as for :meth:`compare`, or the file is missing.
          StorageError: the file cannot be read.
        """
        try:
            self.compare(file, name, self.digest(file))
        except CheckpointNotFoundError as error:
            raise self.missing(file, name) from error

    def missing(self, file: str, name: str) -> CorruptCheckpointError:
        """The error that a file of a leaf is missing."""
        cure = self.cure_of_missing or (CURE_OF_DAMAGE if self.checksums is None else _CURE)
        return CorruptCheckpointError(f'{self.where(file, name)} is missing. {cure}')

    def where(self, file: str, name: str) -> str:
        """A file, of the leaf of this name if there is one, for messages."""
        return f'{name}: {self.url(file)}' if name else self.url(file)

    def key(self, file: str) -> str:
        """The key of a file in the storage."""
        return join(self.directory, file)

    def url(self, file: str) -> str:
        """The path or URL of a file."""
        return self.storage.url(self.key(file))


class _RemoteFiles(CheckpointFiles):
    """Files in memory or in a bucket, which has no links."""

    # A server takes a few milliseconds to the first byte, in which it transfers a few hundred kilobytes.
    block_bytes, gap_bytes, task_bytes, threads = 16 * 2**20, 256 * 2**10, 1, 32

    @contextlib.contextmanager
    def opened(self, file: str, name: str = '', *, whole: bool = True) -> Generator[OpenFile]:
        try:
            yield _RemoteFile(self.storage, self.key(file), whole=whole)
        except EOFError as error:
            raise CorruptCheckpointError(f'{self.where(file, name)} {error}. {CURE_OF_DAMAGE}') from error
        except StorageError as error:
            # It names the key.
            raise type(error)(error.errno, f'{name}: {error.strerror}' if name else error.strerror) from error

    def read_with_version(self, file: str) -> tuple[bytes, Any]:
        return self.storage.read_with_version(self.key(file))


class _LocalFiles(CheckpointFiles):
    """Files in a directory of a local file system."""

    block_bytes, gap_bytes, task_bytes = BLOCK_BYTES, 1024, 8 * 2**20

    def __init__(self, storage: Storage, directory: str, checksums: Checksums, root: str, *, follow_links: bool):
        super().__init__(storage, directory, checksums)
        self.threads = local_threads()
        self._follow = follow_links
        self._root = os.path.realpath(root)
        self._directories: dict[str, str] = {}

    @contextlib.contextmanager
    def opened(self, file: str, name: str = '', *, whole: bool = True) -> Generator[OpenFile]:
        where = self.where(file, name)
        with foreign_errors(where):
            fd = self._open(file, where)
            try:
                info = os.fstat(fd)
                if not stat.S_ISREG(info.st_mode):
                    raise _irregular(where)
                if whole and info.st_size > BLOCK_BYTES and hasattr(os, 'posix_fadvise'):
                    with contextlib.suppress(OSError):
                        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                yield _LocalFile(fd, info.st_size)
            except EOFError as error:
                raise CorruptCheckpointError(f'{where} became shorter while it was read. {CURE_OF_DAMAGE}') from error
            finally:
                os.close(fd)

    def _open(self, file: str, where: str) -> int:
        directory, _, name = file.rpartition('/')
        # Many files of a directory are opened, which is resolved once.
        if directory not in self._directories:
            above = [directory[: end.start()] for end in re.finditer('/|$', directory)]
            has_links = any(os.path.islink(f'{self._root}/{each}') for each in above)
            self._directories[directory] = (
                self._resolved(directory, where) if has_links else f'{self._root}/{directory}'
            )
        try:
            return os.open(f'{self._directories[directory]}/{name}', _FILE)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            return os.open(self._resolved(file, where), _FILE)

    def _resolved(self, name: str, where: str) -> str:
        """The target of a path with links, if it is inside the checkpoint or links may be followed."""
        path = os.path.join(self._root, name)
        real = os.path.realpath(path)
        if not self._follow and os.path.commonpath([self._root, real]) != self._root:
            raise UnsafeSpecError(
                f'{where}: {path} is a symbolic link that leads to {real}, outside the checkpoint. Copy the file here, or, '
                'if you trust who made the link, pass follow_links=True, or --follow-links; t5ckpt cp makes a copy without links.'
            )
        return real

    def check(self, name: str, where: str) -> None:
        with foreign_errors(where):
            self._check(name, where, 0)

    def _check(self, name: str, where: str, depth: int) -> None:
        path = self._resolved(name, where)
        try:
            mode = os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            raise _irregular(f'{where}: {path}')
        # What a link inside the checkpoint leads to is below another name, too.
        if stat.S_ISDIR(mode) and depth < _MAX_DEPTH and not os.path.islink(os.path.join(self._root, name)):
            with os.scandir(path) as entries:
                # Most entries are regular files.
                names = [entry.name for entry in entries if not entry.is_file(follow_symlinks=False)]
            for below in names:
                self._check(join(name, below), where, depth + 1)


def _irregular(where: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f'{where} is not a regular file. {CURE_OF_DAMAGE}')


def in_threads(items: Iterable[Any], work: Callable[[Any], Any], threads: int = 0) -> Iterator[tuple[Any, Any]]:
    """Maps a function over items in threads, a few items ahead, since there may be millions.

    Yields:
      (item, result) in the order of the items, or (item, error) for a T5CkptError.
    """
    count = threads or local_threads()
    with Pool(count) as pool:
        waiting: collections.deque[tuple[Any, Future[Any]]] = collections.deque()
        for item in items:
            waiting.append((item, pool.submit(work, item)))
            if len(waiting) >= _AHEAD * count:
                yield _outcome(*waiting.popleft())
        while waiting:
            yield _outcome(*waiting.popleft())


def _outcome(item: Any, future: Future[Any]) -> tuple[Any, Any]:
    error = future.exception()
    if error is None:
        return item, future.result()
    if isinstance(error, T5CkptError):
        return item, error
    raise error
