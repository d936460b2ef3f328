"""Reads the files of a checkpoint such that nothing outside its directory is read, and computes their checksums.

Names from a manifest are checked when they are parsed. Symbolic links and special files are checked here: each component is
opened with ``O_NOFOLLOW``. A link whose target is inside the checkpoint is followed; a link out of it is refused, unless the
caller asks to follow links. Only regular files are read, since a FIFO would block the reader and a device might never end.

On a local file system, a thread reads a file in blocks that fit the processor's cache and hashes each block there. On other
storage, a file is read in one request. Reading and hashing both release the GIL, so the threads are as fast as the disk or,
for cached files, as memory.

Notes: 10.8 GB/s of cached files on two cores, of which one hashes 24 GB/s. Each thread takes 1 MiB of memory on a file
system, and the size of the largest file on other storage.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
import xxhash

from t5ckpt.catalog.locate import Located
from t5ckpt.core.keys import join
from t5ckpt.core.text import CURE_OF_DAMAGE
from t5ckpt.core.thread_pool import Future, Pool
from t5ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    T5CkptError,
    UnsafeSpecError,
    UnsupportedFormatError,
)
from t5ckpt.storage import Storage, foreign_errors
from t5ckpt.storage.memory_limit import check_whole_read

_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_DIRECTORY = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY
_MAX_DEPTH = 64
# The .zarray of an array with 32 dimensions has less than a kilobyte.
_MAX_ZARRAY_BYTES = 2**20
_BLOCK = 2**20
_PAGE = 4096
_MIN_THREADS = 8
_AHEAD = 8


def open_source(path: str) -> BinaryIO:
    """Opens a file that the user named, or a file of another program's checkpoint; follows links.

    Raises:
      UnsupportedFormatError: it is not a regular file. A FIFO would block the reader, a device may never end.
      OSError: it cannot be opened.
    """
    # Non-blocking, since opening a FIFO waits for its writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(fd, 'rb')
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise UnsupportedFormatError(f'{path} is not a regular file (mode {stat.filemode(mode)}). Copy it to one first.')


def read_source(path: str, limit: int) -> bytes:
    """Reads all of a small file, such as an index.

    Raises:
      CorruptCheckpointError: the file has more than ``limit`` bytes; nothing was read.
      UnsupportedFormatError, OSError: as for :func:`open_source`.
    """
    with open_source(path) as file:
        check_size(os.fstat(file.fileno()).st_size, limit, path)
        return file.read(limit)


def check_size(size: int, limit: int, where: str) -> None:
    """Rejects a file that is too large for its kind."""
    if size > limit:
        raise CorruptCheckpointError(f'{where} has {size:,} bytes, expected at most {limit:,}. Copy it again.')


class ContainedDirectory:
    """Opens the files of one checkpoint's directory. Safe from any thread."""

    def __init__(self, root: str, *, follow_links: bool = False):
        """Takes the checkpoint's directory; with ``follow_links`` symbolic links may lead out of it."""
        self._root = root
        self._follow = follow_links

    def open_dir(self, name: str, where: str) -> int:
        """A descriptor of a directory below the root, which the caller closes.

        Raises:
          UnsafeSpecError: a symbolic link leads out of the checkpoint.
          OSError: it cannot be opened.
        """
        fd = os.open(self._root, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        try:
            return self._below(fd, '', name, where, _DIRECTORY) if name else os.dup(fd)
        finally:
            os.close(fd)

    def open(self, name: str, where: str) -> tuple[int, int]:
        """As :meth:`open_file`, for a name below the root."""
        directory = self.open_dir('', where)
        try:
            return self.open_file(directory, '', name, where)
        finally:
            os.close(directory)

    def open_file(self, directory: int, above: str, name: str, where: str) -> tuple[int, int]:
        """A descriptor of a file, which the caller closes, and the file's size.

        Args:
          directory: a descriptor of an open directory.
          above: the directory's name below the root.
          name: relative to that directory.
          where: for messages, such as the name of a leaf.

        Raises:
          CorruptCheckpointError: it is not a regular file.
          UnsafeSpecError: a symbolic link leads out of the checkpoint.
          OSError: it cannot be opened.
        """
        fd = self._below(directory, above, name, where, _FILE)
        try:
            info = os.fstat(fd)
        except OSError:
            os.close(fd)
            raise
        if stat.S_ISREG(info.st_mode):
            return fd, info.st_size
        os.close(fd)
        raise self._irregular(where, self._path(above, name))

    def check(self, name: str, where: str) -> None:
        """Checks a name and everything below it for links out of the checkpoint, before another library opens it.

        Raises:
          CorruptCheckpointError: an entry is neither a file nor a directory.
          UnsafeSpecError: a symbolic link leads out of the checkpoint.
          OSError: a directory cannot be read; a missing one is not an error.
        """
        parts = name.split('/') if name else []
        for length in range(1, len(parts)):
            self._check_link('/'.join(parts[:length]), where)
        for below in self._tree(name):
            mode = self._check_link(below, where)
            if mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise self._irregular(where, self._path(below))
        # TensorStore allocates memory of the size of the file, and ends the process if this fails.
        metadata = os.path.join(self._path(name), '.zarray')
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            check_size(os.stat(metadata).st_size, _MAX_ZARRAY_BYTES, f'{where}: {metadata}')

    @staticmethod
    def _irregular(where: str, path: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f'{where}: {path} is not a regular file. {CURE_OF_DAMAGE}')

    def _tree(self, name: str, depth: int = 0) -> Iterator[str]:
        yield name
        try:
            with os.scandir(self._path(name)) as scan:
                # A fast path for regular files, which most entries are.
                irregular = (item for item in scan if not item.is_file(follow_symlinks=False))
                entries = [(item.name, item.is_dir(follow_symlinks=False)) for item in irregular]
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry, is_dir in entries:
            below = os.path.join(name, entry)
            if is_dir and depth < _MAX_DEPTH:
                yield from self._tree(below, depth + 1)
            else:
                yield below

    def _check_link(self, name: str, where: str) -> int | None:
        """The mode of the file with a name; None if there is none."""
        path = self._path(name)
        try:
            if stat.S_ISLNK(os.lstat(path).st_mode):
                path = self._resolved(name, where)
            return os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _path(self, *names: str) -> str:
        return os.path.join(self._root, *(name for name in names if name))

    def _below(self, fd: int, above: str, name: str, where: str, flags: int) -> int:
        *parents, last = name.split('/')
        opened = [fd]
        try:
            for parent in parents:
                opened.append(os.open(parent, _DIRECTORY, dir_fd=opened[-1]))
            return os.open(last, flags, dir_fd=opened[-1])
        except OSError as error:
            # A link itself gives ELOOP, or ENOTDIR if a directory was requested.
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            return os.open(self._resolved(f'{above}/{name}' if above else name, where), flags)
        finally:
            for descriptor in opened[1:]:
                os.close(descriptor)

    def _resolved(self, name: str, where: str) -> str:
        """The target of a link, if it is inside the checkpoint or links may be followed."""
        root = os.path.realpath(self._root)
        path = os.path.join(root, name)
        real = os.path.realpath(path)
        if not self._follow and os.path.commonpath([root, real]) != root:
            raise UnsafeSpecError(
                f'{where}: {path} is a symbolic link that leads to {real}, outside the checkpoint. Copy the file here, or, '
                'if you trust who made the link, pass follow_links=True.'
            )
        return real


class CheckpointFiles(abc.ABC):
    """Reads files of one checkpoint. Safe from any thread."""

    def __init__(self, storage: Storage, directory: str):
        """Takes the checkpoint's directory; see :meth:`at`."""
        self.storage = storage
        self.directory = directory

    @staticmethod
    def at(storage: Storage, directory: str, *, follow_links: bool = False) -> CheckpointFiles:
        """The files of a directory; with ``follow_links`` symbolic links may lead out of it."""
        root = storage.local_path(directory)
        if root is None:
            return _RemoteFiles(storage, directory)
        return _LocalFiles(storage, directory, ContainedDirectory(root, follow_links=follow_links))

    @staticmethod
    def of(located: Located) -> CheckpointFiles:
        """The files of a located checkpoint."""
        return CheckpointFiles.at(located.storage, located.directory, follow_links=located.follow_links)

    @abc.abstractmethod
    def check(self, name: str, where: str) -> None:
        """Checks a name and everything below it for links out and special files, before another library reads it.

        Raises:
          FormatError: there is such a link or file.
          StorageError: a directory cannot be read.
        """

    @abc.abstractmethod
    def read(self, file: str, limit: int | None = None) -> bytes:
        """All bytes of a small file.

        Raises:
          CheckpointNotFoundError, StorageError, FormatError: from the storage or from ``reading/checkpoint_files.py``.
          CorruptCheckpointError: the file has more than ``limit`` bytes. In a bucket its size is known only after the read.
          NotEnoughMemoryError: it does not fit in memory.
        """

    @abc.abstractmethod
    def read_with_version(self, file: str) -> tuple[bytes, Any]:
        """All bytes of a small file, and its ``Storage.version``."""

    @abc.abstractmethod
    def read_if_there(self, file: str) -> tuple[bytes, Any] | None:
        """As :meth:`read_with_version`; None if there is no such file."""

    def digest(self, file: str) -> tuple[int, str]:
        """A file's length and its xxh3-64."""
        state, size = xxhash.xxh3_64(), 0
        for block in self._blocks(file):
            state.update(block)
            size += len(block)
        return size, state.hexdigest()

    def zeros(self, file: str) -> tuple[int, int] | None:
        """The range in bytes from the first to the last page of zeros in a file, as a hole reads."""
        first = last = None
        offset = 0
        for block in self._blocks(file):
            pages = np.frombuffer(block, np.uint8)[: len(block) // _PAGE * _PAGE].reshape(-1, _PAGE)
            for page in np.flatnonzero(~pages.any(axis=1)).tolist():
                first = offset + page * _PAGE if first is None else first
                last = offset + (page + 1) * _PAGE
            offset += len(block)
        return None if first is None or last is None else (first, last)

    @abc.abstractmethod
    def _blocks(self, file: str) -> Iterable[memoryview]:
        """The blocks of a file; each block may be overwritten by the next."""

    def _key(self, file: str) -> str:
        return join(self.directory, file)


class _RemoteFiles(CheckpointFiles):
    """Files in memory or in a bucket, which has no links. A file is read in one request."""

    def check(self, name: str, where: str) -> None:
        pass

    def read(self, file: str, limit: int | None = None) -> bytes:  # noqa: ARG002
        return self.storage.read(self._key(file))

    def read_with_version(self, file: str) -> tuple[bytes, Any]:
        return self.storage.read_with_version(self._key(file))

    def read_if_there(self, file: str) -> tuple[bytes, Any] | None:
        # The read itself reports a missing file.
        try:
            return self.read_with_version(file)
        except CheckpointNotFoundError:
            return None

    def _blocks(self, file: str) -> Iterable[memoryview]:
        return (memoryview(self.read(file)),)


class _LocalFiles(CheckpointFiles):
    """Files in a directory of a local file system."""

    def __init__(self, storage: Storage, directory: str, contained: ContainedDirectory):
        super().__init__(storage, directory)
        self._contained = contained
        self._local = threading.local()

    def check(self, name: str, where: str) -> None:
        with foreign_errors(self.storage.url(self._key(name))):
            self._contained.check(name, where)

    def read(self, file: str, limit: int | None = None) -> bytes:
        url, size = self.storage.url(self._key(file)), self.storage.size(self._key(file)) or 0
        if limit is not None:
            check_size(size, limit, url)
        check_whole_read(size, url)
        return b''.join(bytes(block) for block in self._blocks(file))

    def read_with_version(self, file: str) -> tuple[bytes, Any]:
        version = self.storage.version(self._key(file))
        return self.read(file), version

    def read_if_there(self, file: str) -> tuple[bytes, Any] | None:
        # A file may be deleted between the check and the read, which is an error.
        return self.read_with_version(file) if self.storage.is_file(self._key(file)) else None

    def _blocks(self, file: str) -> Iterator[memoryview]:
        with foreign_errors(self.storage.url(self._key(file))):
            fd, _ = self._contained.open(file, file)
            try:
                yield from self._file_blocks(fd)
            finally:
                os.close(fd)

    def _file_blocks(self, fd: int) -> Iterator[memoryview]:
        if not hasattr(self._local, 'block'):
            self._local.block = memoryview(bytearray(_BLOCK))
        if hasattr(os, 'posix_fadvise'):
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while (count := os.readv(fd, [self._local.block])) > 0:
            yield self._local.block[:count]


def in_threads(items: Iterable[Any], work: Callable[[Any], Any], threads: int = 0) -> Iterator[tuple[Any, Any]]:
    """Maps a function over items in threads, a few items ahead, since there may be millions.

    Yields:
      (item, result) in the order of the items, or (item, error) for a T5CkptError.
    """
    count = threads or max(_MIN_THREADS, 2 * (os.cpu_count() or 1))
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
