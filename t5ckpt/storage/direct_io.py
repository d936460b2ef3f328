"""Writes a file with ``O_DIRECT`` (open(2)), bypassing the page cache.

A chunk that is written in the background is not read again soon. Caching its pages takes more processor time than the write
itself (``benchmarks/page_cache.py``) and evicts data that the training reads. The file system requires addresses, offsets and
sizes that are multiples of the disk's block size, so the bytes are copied through a small aligned buffer. The remainder at the
end of the file is written through the cache, as is every file if the file system refuses ``O_DIRECT``.

A file gets its name when it is complete and durable. Unfinished files have the name that TensorStore uses, so either can resume
a killed conversion.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading

import numpy as np

# A multiple of the block size of all disks (statx's dio_offset_align is 512 or 4096), and the size of a page.
_ALIGN = 4096
# Fits the processor's cache. With four threads or more, larger pieces are not faster.
_PIECE = 2 * 2**20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECT = getattr(os, 'O_DIRECT', 0)


class _Scratch(threading.local):
    """Aligned memory of each thread, which is freed when the thread ends."""

    def __init__(self) -> None:
        # Private, since a forked process would also write to memory that is mapped shared, the default.
        self.bytes = np.frombuffer(mmap.mmap(-1, _PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


_scratch = _Scratch()


def write_direct(path: str, data: np.ndarray) -> None:
    """Writes a file durably, except for its directory entry; an existing file of this name keeps its other hard links.

    Args:
      path: of the file; creates its directory if necessary.
      data: uint8 (n,), contiguous.

    Raises:
      OSError: the file could not be written; the directory has no file of this name, or the previous one.
    """
    partial = f'{path}.__lock'
    fd, is_direct = _create(partial)
    try:
        try:
            _write(fd, data, is_direct=is_direct)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _create(path: str) -> tuple[int, bool]:
    """A new file, and whether it is written without the page cache."""
    flag = _DIRECT
    while True:
        try:
            return os.open(path, _NEW | flag, 0o666), bool(flag)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        except FileExistsError:
            # A killed writer left this file.
            os.unlink(path)
        except OSError as error:
            if not flag or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            # The file system refuses the flag, possibly after it created the file.
            flag = 0


def _write(fd: int, data: np.ndarray, *, is_direct: bool) -> None:
    offset = 0
    while offset < data.size:
        size = min(_PIECE, data.size - offset)
        if is_direct and (offset % _ALIGN or size < _ALIGN):
            is_direct = _use_cache(fd)
        source = data[offset : offset + size]
        if is_direct:
            size -= size % _ALIGN
            source = _scratch.bytes[:size]
            source[:] = data[offset : offset + size]
        try:
            written = os.pwrite(fd, source.data, offset)
        except OSError as error:
            if not is_direct or error.errno != errno.EINVAL:
                raise
            # This file system accepts the flag but refuses the write.
            is_direct = _use_cache(fd)
            continue
        if written == 0:
            raise OSError(errno.EIO, 'nothing more can be written')
        offset += written


def _use_cache(fd: int) -> bool:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT)
    return False
