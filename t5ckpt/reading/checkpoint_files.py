"""Reads many files whole and computes their checksums.

On a local file system, a thread reads a file in blocks that fit the processor's cache and hashes each block there. On other
storage, a file is read in one request. Reading and hashing both release the GIL, so the threads are as fast as the disk or,
for cached files, as memory.

Notes: 10.8 GB/s of cached files on two cores, of which one hashes 24 GB/s. Each thread takes 1 MiB of memory on a file
system, and the size of the largest file on other storage.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import xxhash

from t5ckpt.catalog.locate import Located
from t5ckpt.core.keys import join
from t5ckpt.core.thread_pool import Pool
from t5ckpt.errors import T5CkptError
from t5ckpt.reading.contained_open import ContainedDirectory, check_size
from t5ckpt.storage import Storage, foreign_errors
from t5ckpt.storage.memory_limit import check_whole_read

_BLOCK = 2**20
_PAGE = 4096
_MIN_THREADS = 8
_AHEAD = 8


class CheckpointFiles:
    """Reads files of one checkpoint. Safe from any thread."""

    def __init__(self, storage: Storage, directory: str, *, follow_links: bool = False):
        """Takes the checkpoint's directory; with ``follow_links`` symbolic links may lead out of it."""
        self.storage = storage
        self.directory = directory
        root = storage.local_path(directory)
        self._contained = None if root is None else ContainedDirectory(root, follow_links=follow_links)
        self._local = threading.local()

    @classmethod
    def of(cls, located: Located) -> CheckpointFiles:
        """The files of a located checkpoint."""
        return cls(located.storage, located.directory, follow_links=located.follow_links)

    def check(self, name: str, leaf: str) -> None:
        """Checks a name and everything below it for links out and special files, before another library reads it.

        Raises:
          FormatError: there is such a link or file.
          StorageError: a directory cannot be read.
        """
        if self._contained is not None:
            with foreign_errors(self.storage.url(join(self.directory, name))):
                self._contained.check(name, leaf)

    def read(self, file: str, limit: int | None = None) -> bytes:
        """All bytes of a small file.

        Raises:
          CheckpointNotFoundError, StorageError, FormatError: from the storage or from ``reading/contained_open.py``.
          CorruptCheckpointError: the file has more than ``limit`` bytes. In a bucket its size is known only after the read.
          NotEnoughMemoryError: it does not fit in memory.
        """
        if self._contained is not None:
            key = join(self.directory, file)
            size = self.storage.size(key) or 0
            if limit is not None:
                check_size(size, limit, self.storage.url(key))
            check_whole_read(size, self.storage.url(key))
        return b''.join(bytes(block) for block in self._blocks(file))

    def read_with_version(self, file: str) -> tuple[bytes, Any]:
        """All bytes of a small file, and its ``Storage.version``."""
        key = join(self.directory, file)
        if self._contained is None:
            return self.storage.read_with_version(key)
        version = self.storage.version(key)
        return self.read(file), version

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

    def _blocks(self, file: str) -> Iterator[memoryview]:
        """Yields the blocks of a file; each block is overwritten by the next."""
        key = join(self.directory, file)
        if self._contained is None:
            yield memoryview(self.storage.read(key))
            return
        with foreign_errors(self.storage.url(key)):
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
    with Pool(count, 't5ckpt-scan') as pool:
        waiting: collections.deque[tuple[Any, concurrent.futures.Future[Any]]] = collections.deque()
        try:
            for item in items:
                waiting.append((item, pool.submit(work, item)))
                if len(waiting) >= _AHEAD * count:
                    yield _outcome(*waiting.popleft())
            while waiting:
                yield _outcome(*waiting.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _outcome(item: Any, future: concurrent.futures.Future[Any]) -> tuple[Any, Any]:
    error = future.exception()
    if error is None:
        return item, future.result()
    if isinstance(error, T5CkptError):
        return item, error
    raise error
