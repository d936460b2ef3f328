"""Memory-maps chunk files instead of reading them.

The file of a zarr chunk without codec and filters, in native byte order, has the bytes of a C-order array, so it can be mapped
as the array. Two kinds of boxes can be mapped:

- a box inside one chunk whose rows are contiguous;
- a box that is the concatenation of whole chunk files. They are mapped next to each other into one reserved range
  (``MAP_FIXED``), which needs chunks of a whole number of pages. Chunks that divide only the first axis are such a case.

For any other box the result is None, and the caller reads it: other codecs, orders and byte orders, dtypes that TensorStore and
NumPy lay out differently, a missing file, a file system that cannot map. The read then reports the error, if there is one. Two
cases are errors here: a file of the wrong size, because an access beyond the end of a mapped file kills the process (SIGBUS),
and a symbolic link that leads out of the checkpoint.

Maps are private (``MAP_PRIVATE``): a write copies the page, so a change of an array never reaches the file. A checkpoint larger
than memory can be mapped: maps do not reserve memory or swap (``MAP_NORESERVE``). At most half of the kernel's limit on maps per
process is used (``vm.max_map_count``), since the allocator needs some, too. Files are mapped through libc, because Python's
``mmap`` keeps a duplicate of every file descriptor, and one open file per chunk would be too many.

Notes: 15 us a file. A map exists as long as any array on it, including arrays that JAX holds.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import functools
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box
from t5ckpt.reading.aligned_memory import ALIGNMENT
from t5ckpt.reading.local.chunk_file import ChunkFiles
from t5ckpt.reading.local.native_chunks import NativeChunks, is_uncompressed, range_of, uncompressed_chunks

_DEFAULT_MAX_MAPS = 65530

_MAP_FIXED = 0x10

_PROT_NONE = 0

_NORESERVE = getattr(mmap, 'MAP_NORESERVE', 0x4000 if sys.platform == 'linux' else 0)

_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int64),
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


@functools.cache
def max_maps() -> int:
    """Half of the kernel's limit on the maps of one process."""
    try:
        with open('/proc/sys/vm/max_map_count', encoding='ascii') as file:
            return int(file.read()) // 2
    except (OSError, ValueError):
        return _DEFAULT_MAX_MAPS // 2


class _MapCount:
    """The number of live maps of this module; the kernel's limit is per process."""

    def __init__(self) -> None:
        self._count = 0
        # Reentrant, since Python's garbage collector may delete a region while the lock is held.
        self._guard = threading.RLock()

    def take(self, maps: int) -> None:
        with self._guard:
            if self._count + maps > max_maps():
                raise OSError(errno.ENOMEM, 'half of all maps are taken')
            self._count += maps

    def give(self, maps: int) -> None:
        with self._guard:
            self._count -= maps


_count = _MapCount()


class AddressRange:
    """A range of addresses that is unmapped when the last array on it is deleted.

    Not ``weakref.finalize``, which would also unmap at the interpreter's exit, while threads of JAX may still read.
    """

    def __init__(self, size: int, maps: int):
        """Prepares a region of ``size`` bytes in ``maps`` maps; nothing is mapped yet.

        Raises:
          OSError: this process has too many maps.
        """
        _count.take(maps)
        self._maps = maps
        self._size = size
        self._address: int | None = None
        # Module globals may be None when ``__del__`` runs at the interpreter's exit.
        self._libc = _libc()
        self._give = _count.give
        self.__array_interface__: dict[str, Any] = {}

    def reserve(self) -> None:
        """Reserves the range of addresses, for more than one map."""
        self._map(None, self._size, _PROT_NONE, mmap.MAP_ANON, -1)

    def map(self, fd: int, offset: int, size: int) -> None:
        """Maps the first ``size`` bytes of a file, ``offset`` bytes into the region: a multiple of the page size.

        Raises:
          OSError: the file system cannot map, or the address space is full.
        """
        address, fixed = (None, 0) if self._address is None else (self._address + offset, _MAP_FIXED)
        self._map(address, size, mmap.PROT_READ | mmap.PROT_WRITE, fixed, fd)

    def _map(self, fixed_address: int | None, size: int, protection: int, flags: int, fd: int) -> None:
        address = self._libc.mmap(fixed_address, size, protection, flags | mmap.MAP_PRIVATE | _NORESERVE, fd, 0)
        if address is None or address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f'mmap of {size:,} bytes: {os.strerror(code)}')
        if self._address is None:
            self._address = address

    def array(self) -> np.ndarray:
        """The bytes, as an array that keeps the region alive."""
        data = (self._address, False)
        self.__array_interface__ = {'data': data, 'shape': (self._size,), 'typestr': '|u1', 'version': 3}
        return np.asarray(self)

    def __del__(self) -> None:
        if getattr(self, '_maps', 0):
            if self._address is not None:
                self._libc.munmap(self._address, self._size)
            self._give(self._maps)


class ArrayMapper:
    """Maps the arrays of one checkpoint in a local directory. Safe from any thread."""

    def __init__(self, root: str, *, follow_links: bool = False):
        """Takes the checkpoint's directory; with ``follow_links`` symbolic links may lead out of it."""
        self._root = root
        self._follow_links = follow_links
        # Many arrays of a model have the same metadata and the same boxes, so the runs are cached.
        self._runs: dict[Any, dict[Box, _Run] | None] = {}

    def map_boxes(
        self, array: StoredArray, name: str, boxes: Sequence[Box], *, strided: bool = False
    ) -> dict[Box, np.ndarray] | None:
        """Maps parts of an array.

        Args:
          array: the array as the manifest describes it; must agree with its ``.zarray``.
          name: of the leaf, for errors.
          boxes: (start, stop) per dimension.
          strided: also maps boxes that are not contiguous, for a caller that copies them.

        Returns:
          By box, writable arrays on private maps, in the dtype on disk. Without ``strided`` they are in C order and aligned to
          64 bytes, as XLA requires. Boxes in the same files share a map. None if a box cannot be mapped.

        Raises:
          CorruptCheckpointError: a chunk file does not have the size of its chunk.
          UnsafeSpecError: a symbolic link leads out of the checkpoint.
        """
        if not is_uncompressed(array):
            return None
        try:
            with ChunkFiles(self._root, array.location, name, follow_links=self._follow_links) as files:
                runs = (_runs if strided else self._kept_runs)(files.metadata(), array, boxes)
                if runs is None or not (strided or all(run.contiguous for run in runs.values())):
                    return None
                distinct = {run.names: run for run in runs.values()}
                regions = {names: _map_run(files, run) for names, run in distinct.items()}
        except OSError:
            return None
        return {box: run.cut(regions[run.names], array.disk_dtype) for box, run in runs.items()}

    def _kept_runs(self, text: bytes, array: StoredArray, boxes: Sequence[Box]) -> dict[Box, _Run] | None:
        key = (text, array.shape, array.disk_dtype, tuple(boxes))
        if key not in self._runs:
            self._runs[key] = _runs(text, array, boxes)
        return self._runs[key]


# --- which files, in which order -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Run:
    """Chunk files whose concatenation is a C-order array of ``shape``, and the position of a box in it.

    Attributes:
      names: of the files.
      chunk_bytes: of each file.
      shape: of all of them together.
      box: the box in that shape.
      offset: of the box, in bytes.
      contiguous: whether the box is one aligned range of bytes.
    """

    names: tuple[str, ...]
    chunk_bytes: int
    shape: tuple[int, ...]
    box: Box
    offset: int
    contiguous: bool

    def cut(self, region: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """The box, from the bytes of the files."""
        if not self.contiguous:
            return np.ndarray(self.shape, dtype, region)[self.box.slices]
        return np.ndarray(self.box.shape, dtype, region, self.offset)


def _runs(text: bytes, array: StoredArray, boxes: Sequence[Box]) -> dict[Box, _Run] | None:
    chunks = uncompressed_chunks(text, array)
    if chunks is None or chunks.has_fill:
        return None
    runs: dict[Box, _Run] = {}
    for box in boxes:
        run = _run(chunks, box)
        if run is None:
            return None
        runs[box] = run
    return runs


def _run(chunks: NativeChunks, box: Box) -> _Run | None:
    """The run of chunk files that holds a box; None if it cannot be mapped.

    The concatenated chunks are the region in C order only if every axis before the last divided one has chunks of size 1.
    """
    if box.is_empty:
        return None
    grid = chunks.grid
    ranges = grid.ranges(box)
    divided = [axis for axis, indices in enumerate(ranges) if len(indices) > 1]
    if divided and (any(size != 1 for size in grid.chunk_shape[: divided[-1]]) or chunks.chunk_bytes % mmap.PAGESIZE):
        return None
    if grid.count(box) > max_maps():
        return None
    names = tuple(map(grid.key, grid.chunks_of(box)))
    box_in_run = box.relative_to(grid.full_box([indices.start for indices in ranges]))
    shape = tuple(len(indices) * size for indices, size in zip(ranges, grid.chunk_shape, strict=True))
    offset, contiguous = range_of(box_in_run, shape)
    offset *= chunks.itemsize
    return _Run(names, chunks.chunk_bytes, shape, box_in_run, offset, contiguous and offset % ALIGNMENT == 0)


# --- maps -------------------------------------------------------------------------------------------------------------


def _map_run(files: ChunkFiles, run: _Run) -> np.ndarray:
    region = AddressRange(run.chunk_bytes * len(run.names), len(run.names))
    if len(run.names) > 1:
        region.reserve()
    for position, name in enumerate(run.names):
        fd = files.open_chunk(name, run.chunk_bytes)
        try:
            region.map(fd, position * run.chunk_bytes, run.chunk_bytes)
        finally:
            os.close(fd)
    return region.array()
