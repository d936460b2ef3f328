"""Opens the chunk files of an array, and reads byte ranges of them into buffers; the blocks that a chunk is read in.

``reading/checkpoint_files.py`` opens each component of a path separately, so a symbolic link out of the checkpoint is followed
only on request.

A range of a file is read into many addresses with one system call (``preadv``). ``os.preadv`` takes a buffer object for each
address, which costs more than the read of a row of a few KB, so an array of addresses is passed to libc.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import numpy as np

from t5ckpt.core.text import CURE_OF_DAMAGE
from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.format.chunk_grid import Box, ChunkGrid
from t5ckpt.format.file_checksums import size_text
from t5ckpt.reading.checkpoint_files import ContainedDirectory
from t5ckpt.reading.local.native_chunks import NativeChunks

_IOV_MAX = 1024
_MAX_ZARRAY_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes in bytes.

    Attributes:
      task: the least that one task reads.
      scratch: a block that is copied; fits a core's cache.
      scatter: a block that is read into many buffers with one system call.
      min_run: shorter runs are copied, since each address of a scatter read costs as much as a copy of some hundred bytes.
    """

    task: int = 8 * 2**20
    scratch: int = 2**20
    scatter: int = 8 * 2**20
    min_run: int = 512


class Blocks:
    """The blocks of a chunk: each is a contiguous range of bytes and a box of some rows of one axis, whole in all later axes."""

    def __init__(self, chunks: NativeChunks, limit: int):
        self._is_scalar = not chunks.grid.chunk_shape
        shape = chunks.grid.chunk_shape or (1,)
        axis, row = len(shape) - 1, chunks.itemsize
        while axis > 0 and row * shape[axis] <= limit:
            row *= shape[axis]
            axis -= 1
        self._row = row
        self._rows = min(shape[axis], limit // row)
        self._axis_rows = shape[axis]
        self._grid = ChunkGrid(shape, (*[1] * axis, self._rows, *shape[axis + 1 :]))
        self._per_lead = self._grid.grid_shape[axis]
        self.count = self._grid.num_chunks

    def ranges(self, size: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Ranges of blocks of about ``size`` bytes that cover the bytes from ``first`` to ``last``.

        Damaged metadata may describe a huge chunk, so the blocks are not enumerated.
        """
        step = max(1, size // (self._rows * self._row))
        begin, end = self._block_at(first), self._block_at(last - 1) + 1
        return ((start, min(start + step, end)) for start in range(begin, end, step))

    def _block_at(self, offset: int) -> int:
        lead, row = divmod(offset // self._row, self._axis_rows)
        return lead * self._per_lead + row // self._rows

    def offset(self, index: int) -> int:
        """The offset of a block in the file, in bytes."""
        lead, rest = divmod(index, self._per_lead)
        return (lead * self._axis_rows + rest * self._rows) * self._row

    def box(self, index: int) -> Box:
        """A block in the chunk's coordinates."""
        return Box() if self._is_scalar else self._grid.box(self._grid.index_at(index))


@functools.cache
def _preadv() -> Callable[..., int]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    libc.preadv.restype = ctypes.c_ssize_t
    return libc.preadv


@functools.cache
def can_scatter() -> bool:
    """Whether this system has a libc whose argument types this module knows."""
    return sys.platform == 'linux' and sys.maxsize > 2**32 and hasattr(ctypes.CDLL(None), 'preadv')


def runs_in(shape: Sequence[int], strides: Sequence[int], itemsize: int, base: int) -> tuple[np.ndarray, int]:
    """The contiguous runs of a box.

    Args:
      shape: of the box.
      strides: in bytes.
      itemsize: bytes of an element.
      base: the offset or address of the first element.

    Returns:
      The start of each run, in C order, and the bytes of each.
    """
    axis, length = len(shape), itemsize
    while axis > 0 and strides[axis - 1] == length:
        axis -= 1
        length *= shape[axis]
    starts = np.array(base, np.int64)
    for size, stride in zip(shape[:axis], strides[:axis], strict=True):
        starts = starts[..., None] + np.arange(size, dtype=np.int64) * stride
    return starts.reshape(-1), length


def read_runs(
    fd: int, offset: int, addresses: np.ndarray, lengths: np.ndarray, preadv: Callable[..., int] | None = None
) -> None:
    """Reads the bytes of a file at ``offset`` into memory at ``addresses``, ``lengths`` bytes each.

    The caller must keep this memory allocated until the function returns.

    Raises:
      EOFError: the file is too short.
      OSError: it cannot be read.
    """
    call = _preadv() if preadv is None else preadv
    vector = np.empty((len(addresses), 2), np.int64)
    vector[:, 0] = addresses
    vector[:, 1] = lengths
    ends = np.cumsum(lengths)
    first, done = 0, 0
    while first < len(vector):
        count = min(_IOV_MAX, len(vector) - first)
        read = call(fd, vector[first:].ctypes.data, count, offset + done)
        if read < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        if read == 0:
            raise EOFError
        done += read
        # A short read may end inside a run, where the next read continues.
        first = int(np.searchsorted(ends, done, side='right'))
        if first < len(vector):
            missing = int(ends[first]) - done
            vector[first] = int(addresses[first]) + int(lengths[first]) - missing, missing


@dataclasses.dataclass(frozen=True)
class ChunkFile:
    """An open chunk file.

    Attributes:
      fd: its descriptor, which ``close`` closes.
      path: of the file, for messages.
      name: of the leaf, for messages.
      base: the offset of the chunk in the file; other offsets are relative to it.
    """

    fd: int
    path: str
    name: str
    base: int = 0

    def announce(self, start: int, stop: int) -> None:
        """Asks the kernel to read a range of bytes ahead, if the system supports it."""
        if hasattr(os, 'posix_fadvise'):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.fd, self.base + start, stop - start, os.POSIX_FADV_WILLNEED)

    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self.fd).st_size

    def read(self, into: memoryview, offset: int) -> None:
        """Fills a buffer with the bytes at an offset.

        Raises:
          CorruptCheckpointError: the file is too short.
          OSError: it cannot be read.
        """
        offset += self.base
        while into:
            count = os.preadv(self.fd, [into], offset)
            if count == 0:
                raise self._cut_off()
            offset, into = offset + count, into[count:]

    def read_runs(self, offset: int, addresses: np.ndarray, lengths: np.ndarray) -> None:
        """Fills several buffers with consecutive bytes of the file; see :func:`read_runs`. Raises as ``read``."""
        try:
            read_runs(self.fd, self.base + offset, addresses, lengths)
        except EOFError as error:
            raise self._cut_off() from error

    def _cut_off(self) -> CorruptCheckpointError:
        return CorruptCheckpointError(f'{self.name}: {self.path} became shorter while it was read. {CURE_OF_DAMAGE}')

    def close(self) -> None:
        """Closes the descriptor; to be called once."""
        os.close(self.fd)


class ChunkFiles:
    """The files of one array, in its directory."""

    def __init__(self, root: str, location: str, name: str, *, follow_links: bool = False):
        """Opens the array's directory; with ``follow_links`` a symbolic link may lead out of the checkpoint."""
        self._contained = ContainedDirectory(root, follow_links=follow_links)
        self._root = root
        self._location = location
        self._name = name
        self._fd = self._contained.open_dir(location, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        os.close(self._fd)

    def path(self, file: str) -> str:
        """The path of a file, for messages."""
        return os.path.join(self._root, self._location, file)

    def metadata(self) -> bytes:
        """The ``.zarray``; at most 1 MiB of it."""
        fd, _ = self._open('.zarray')
        try:
            return os.read(fd, _MAX_ZARRAY_BYTES)
        finally:
            os.close(fd)

    def open_chunk(self, file: str, size: int | None) -> int:
        """A descriptor of a chunk file, which the caller closes.

        Raises:
          CorruptCheckpointError: it is not a regular file, or not of ``size`` bytes.
          UnsafeSpecError: a symbolic link leads out of the checkpoint.
          OSError: it cannot be read.
        """
        try:
            fd, file_size = self._open(file)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(
                f'{self._name}: the chunk {self.path(file)} is missing. {CURE_OF_DAMAGE}'
            ) from error
        if size is None or file_size == size:
            return fd
        os.close(fd)
        raise CorruptCheckpointError(
            f'{self._name}: {self.path(file)} {size_text(file_size, size)}. It is truncated or damaged. {CURE_OF_DAMAGE}'
        )

    def _open(self, file: str) -> tuple[int, int]:
        return self._contained.open_file(self._fd, self._location, file, self._name)
