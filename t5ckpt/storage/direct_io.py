"""Writes the files of chunks, with the checksum of their bytes; large ones with ``O_DIRECT`` (open(2)), past the page cache.

Another thread may change the bytes meanwhile. Each piece is copied, and the copy is hashed and written.

A chunk is not read again soon. Caching its pages takes more processor time than the write itself (``benchmarks/page_cache.py``)
and evicts data that the training reads. The file system requires addresses, offsets and sizes that are multiples of the disk's
block size, which those of the copies are. The remainder at the end of the file is written through the cache, as is every file if
the file system refuses ``O_DIRECT``.

The checkpoint is not visible yet, so a file has its name before it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from typing import Any

import numpy as np
import xxhash

from t5ckpt.format.file_checksums import FileEntry

# A multiple of the block size of all disks (statx's dio_offset_align is 512 or 4096), and the size of a page.
_ALIGN = 4096
# Fits the processor's cache. With four threads or more, larger pieces are not faster.
_PIECE = 512 * 2**10
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECT = getattr(os, 'O_DIRECT', 0)
# Has the buffer of each thread: new memory for each file takes more processor time than the copies into it.
_LOCAL = threading.local()


def write_new(path: str, data: Any, *, is_direct: bool) -> FileEntry:
    """Writes a new file durably, except for its directory entry, and creates its directory.

    Args:
      path: of the file. An existing file of this name keeps its other hard links.
      data: a contiguous buffer of bytes.
      is_direct: whether to bypass the page cache.

    Returns:
      The length and the checksum of what was written.

    Raises:
      OSError: the file could not be written; a part of it may be there.
    """
    fd, is_direct = _create(path, _DIRECT if is_direct else 0)
    try:
        entry = _write(fd, np.frombuffer(data, np.uint8), is_direct=is_direct)
        os.fsync(fd)
        return entry
    finally:
        os.close(fd)


def _create(path: str, flag: int) -> tuple[int, bool]:
    """A new file, and whether it is written without the page cache."""
    is_made = False
    while True:
        try:
            return os.open(path, _NEW | flag, 0o666), bool(flag)
        except FileNotFoundError:
            if is_made:
                raise
            is_made = True
            # Another thread may create it. ``exist_ok`` would look at it, and hide why it cannot be looked at.
            with contextlib.suppress(FileExistsError):
                os.makedirs(os.path.dirname(path))
        except FileExistsError:
            # A link whose reply was lost.
            os.unlink(path)
        except OSError as error:
            if not flag or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            # The file system refuses the flag, possibly after it created the file.
            flag = 0


def _write(fd: int, data: np.ndarray, *, is_direct: bool) -> FileEntry:
    state = xxhash.xxh3_64()
    # Taken out, since a signal handler may write another file meanwhile.
    scratch = vars(_LOCAL).pop('scratch', None)
    if scratch is None:
        # Aligned. Private, since a forked process would also write to memory that is mapped shared, the default.
        memory = mmap.mmap(-1, _PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        scratch = np.frombuffer(memory, np.uint8)
    for start in range(0, data.size, _PIECE):
        piece = scratch[: min(_PIECE, data.size - start)]
        piece[:] = data[start : start + piece.size]
        state.update(piece.data)
        offset = 0
        while offset < piece.size:
            size = piece.size - offset
            if is_direct and (offset % _ALIGN or size < _ALIGN):
                is_direct = _use_cache(fd)
            if is_direct:
                size -= size % _ALIGN
            try:
                written = os.pwrite(fd, piece[offset : offset + size].data, start + offset)
            except OSError as error:
                if not is_direct or error.errno != errno.EINVAL:
                    raise
                # This file system accepts the flag but refuses the write.
                is_direct = _use_cache(fd)
                continue
            if written == 0:
                raise OSError(errno.EIO, 'nothing more can be written')
            offset += written
    _LOCAL.scratch = scratch
    return data.size, state.hexdigest()


def _use_cache(fd: int) -> bool:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT)
    return False
