"""Mapping chunk files instead of reading them.

A zarr chunk without codec, filters and foreign byte order is the bytes of a C-order array, so a chunk file can be the
array. What is mapped:

- a box inside one chunk, where its rows lie one after another;
- a run of whole chunk files whose bytes, one after the other, are the box: the files are mapped side by side into one
  reserved range (``MAP_FIXED``), which needs chunks of a whole number of pages. Chunks that divide only the first axis
  are such a run.

Everything else gives None, and the caller reads it: other codecs, orders and byte orders, dtypes that TensorStore and
numpy lay out differently, a missing file, a file system that cannot map. The reading path then also finds the words
for what is wrong. Two things are errors here: a file of the wrong size, because a map beyond the end of a file kills
the process when it is touched (SIGBUS), and a symbolic link that leads out of the checkpoint.

Maps are private (``MAP_PRIVATE``): a write copies the page, so nothing that is done to an array reaches the file.
A checkpoint larger than memory can be mapped.

Notes: 15 us a file. A map lives as long as any array on it, also one that JAX holds.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import math
import mmap
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt._chunks import Box
from t5ckpt._dtypes import dtype_from_name, zarr_typestr
from t5ckpt._mmap import Region, max_maps
from t5ckpt._specs import StoredArray
from t5ckpt.errors import CorruptCheckpointError, UnsafeSpecError

__all__ = ['ArrayMapper']

_ALIGNMENT = 64
_MAX_ZARRAY_BYTES = 2**20
# A FIFO or a device that stands where a chunk should be must not block the open.
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_DIRECTORY = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY
# One byte or more an element, and the same bits for numpy and for TensorStore; with the names in ``.zarray``.
_DTYPES = (
    *('bool', 'int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32', 'uint64'),
    *('float16', 'bfloat16', 'float32', 'float64', 'complex64', 'complex128'),
    *('float8_e3m4', 'float8_e4m3b11fnuz', 'float8_e4m3fn', 'float8_e4m3fnuz', 'float8_e5m2', 'float8_e5m2fnuz'),
)
_TYPESTRS = {dtype_from_name(name): zarr_typestr(dtype_from_name(name)) for name in _DTYPES}


class ArrayMapper:
    """Maps the arrays of one checkpoint that lies in a local directory. Safe from any thread."""

    def __init__(self, root: str):
        """Takes the checkpoint's directory."""
        self._root = root
        # Most arrays of a model have the metadata and the shards of many others: what follows from them is kept.
        self._runs: dict[Any, dict[Box, _Run] | None] = {}

    def map_boxes(
        self, array: StoredArray, leaf: str, boxes: Sequence[Box], *, strided: bool = False
    ) -> dict[Box, np.ndarray] | None:
        """Maps parts of an array.

        Args:
          array: what the manifest says of it; must agree with its ``.zarray``.
          leaf: its name, for errors.
          boxes: (start, stop) per dimension.
          strided: also maps boxes whose bytes do not lie one after another, for a caller who copies.

        Returns:
          By box, writable arrays on private maps, in the dtype on disk; without ``strided`` in C order and from a
          multiple of 64 bytes, as XLA wants its buffers. Boxes in the same files share a map. None when a box cannot
          be mapped.

        Raises:
          CorruptCheckpointError: a chunk file has another size than its chunk.
          UnsafeSpecError: a symbolic link leads out of the checkpoint.
        """
        if not _suits(array):
            return None
        try:
            files = _Files(self._root, array.location, leaf)
        except OSError:
            return None
        try:
            runs = (_runs if strided else self._kept_runs)(files.metadata(), array, boxes)
            if runs is None or not (strided or all(run.contiguous for run in runs.values())):
                return None
            distinct = {run.names: run for run in runs.values()}
            regions = {names: _map_run(files, run) for names, run in distinct.items()}
        except OSError:
            return None
        finally:
            files.close()
        return {box: run.cut(regions[run.names], array.dtype) for box, run in runs.items()}

    def _kept_runs(self, text: bytes, array: StoredArray, boxes: Sequence[Box]) -> dict[Box, _Run] | None:
        key = (text, array.shape, array.dtype, tuple(boxes))
        if key not in self._runs:
            self._runs[key] = _runs(text, array, boxes)
        return self._runs[key]


def _suits(array: StoredArray) -> bool:
    return (
        array.driver == 'zarr'
        and array.container == 'dir'
        and array.dtype in _TYPESTRS
        and sys.byteorder == 'little'
        and sys.maxsize > 2**32
    )


# --- which files, in which order -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Grid:
    chunks: tuple[int, ...]
    separator: str
    itemsize: int

    @property
    def cell_bytes(self) -> int:
        return math.prod(self.chunks) * self.itemsize


@dataclasses.dataclass(frozen=True)
class _Run:
    """Chunk files that, end to end, are a C-order array of ``shape``, and where in it a box lies.

    Attributes:
      names: of the files.
      cell_bytes: of each file.
      shape: of all of them together.
      within: the box in that shape.
      offset: bytes from the start to the box.
      contiguous: whether the box is one aligned range of bytes.
    """

    names: tuple[str, ...]
    cell_bytes: int
    shape: tuple[int, ...]
    within: tuple[slice, ...]
    offset: int
    contiguous: bool

    def cut(self, region: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """The box, from the bytes of the files."""
        if not self.contiguous:
            return np.ndarray(self.shape, dtype, region)[self.within]
        return np.ndarray([part.stop - part.start for part in self.within], dtype, region, self.offset)


def _parse(text: bytes, array: StoredArray) -> _Grid | None:
    """The chunk grid of an array whose chunks can be mapped; None also for metadata that contradicts the manifest."""
    try:
        found: Any = json.loads(text)
    except ValueError:
        return None
    if not isinstance(found, Mapping):
        return None
    chunks = found.get('chunks')
    separator = found.get('dimension_separator', '.')
    plain = found.get('compressor') is None and not found.get('filters') and found.get('order') == 'C'
    agrees = (
        found.get('zarr_format') == 2
        and found.get('shape') == list(array.shape)
        and found.get('dtype') == _TYPESTRS[array.dtype]
    )
    if not plain or not agrees or separator not in ('.', '/') or not isinstance(chunks, list):
        return None
    if len(chunks) != len(array.shape) or not all(type(size) is int and size > 0 for size in chunks):
        return None
    return _Grid(tuple(chunks), separator, array.dtype.itemsize)


def _runs(text: bytes, array: StoredArray, boxes: Sequence[Box]) -> dict[Box, _Run] | None:
    grid = _parse(text, array)
    if grid is None:
        return None
    runs: dict[Box, _Run] = {}
    for box in boxes:
        run = _run(grid, box)
        if run is None:
            return None
        runs[box] = run
    return runs


def _run(grid: _Grid, box: Box) -> _Run | None:
    """The run of chunk files that holds a box.

    Cells in C order are the region in C order exactly if every axis before the last divided one has chunks of size 1.
    """
    if any(start >= stop for start, stop in box):
        return None
    cells = [range(start // size, -(-stop // size)) for (start, stop), size in zip(box, grid.chunks, strict=True)]
    divided = [axis for axis, indices in enumerate(cells) if len(indices) > 1]
    if divided and (any(size != 1 for size in grid.chunks[: divided[-1]]) or grid.cell_bytes % mmap.PAGESIZE):
        return None
    if math.prod(map(len, cells)) > max_maps():
        return None
    names = tuple(grid.separator.join(map(str, cell)) or '0' for cell in itertools.product(*cells))
    firsts = [indices.start * size for indices, size in zip(cells, grid.chunks, strict=True)]
    within = tuple(slice(start - first, stop - first) for (start, stop), first in zip(box, firsts, strict=True))
    shape = tuple(len(indices) * size for indices, size in zip(cells, grid.chunks, strict=True))
    offset, contiguous = _range_of(within, shape)
    offset *= grid.itemsize
    return _Run(names, grid.cell_bytes, shape, within, offset, contiguous and offset % _ALIGNMENT == 0)


def _range_of(within: Sequence[slice], shape: Sequence[int]) -> tuple[int, bool]:
    """Where a box begins in a C-order array, in elements, and whether its elements lie one after another."""
    offset, stride, cut, contiguous = 0, 1, False, True
    for part, size in zip(reversed(within), reversed(shape), strict=True):
        length = part.stop - part.start
        contiguous = contiguous and (length == 1 or not cut)
        cut = cut or length < size
        offset += part.start * stride
        stride *= size
    return offset, contiguous


# --- opening files below the checkpoint's directory, and no others ---------------------------------------------------


class _Files:
    """The files of one array, opened component by component so that no symbolic link is followed unseen."""

    def __init__(self, root: str, location: str, leaf: str):
        """Opens the array's directory."""
        self._root = root
        self._location = location
        self.leaf = leaf
        fd = os.open(root, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        try:
            self._fd = self._open_below(fd, (), location, _DIRECTORY)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Closes it."""
        os.close(self._fd)

    def path(self, name: str) -> str:
        """For messages."""
        return os.path.join(self._root, self._location, name)

    def metadata(self) -> bytes:
        """The ``.zarray``, or the part of it that is not absurdly long."""
        fd = self.open('.zarray')
        try:
            return os.read(fd, _MAX_ZARRAY_BYTES)
        finally:
            os.close(fd)

    def open(self, name: str) -> int:
        """A descriptor of a file, which the caller closes."""
        return self._open_below(self._fd, (self._location,), name, _FILE)

    def _open_below(self, fd: int, above: tuple[str, ...], name: str, flags: int) -> int:
        *parents, last = name.split('/')
        opened = [fd]
        try:
            for parent in parents:
                opened.append(os.open(parent, _DIRECTORY, dir_fd=opened[-1]))
            return os.open(last, flags, dir_fd=opened[-1])
        except OSError as error:
            # A link itself gives ELOOP, or ENOTDIR where a directory was asked for.
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            return os.open(self._resolved('/'.join((*above, name))), flags)
        finally:
            for each in opened[1:]:
                os.close(each)

    def _resolved(self, below: str) -> str:
        """The file behind a link, if it is one of the checkpoint's own."""
        root = os.path.realpath(self._root)
        path = os.path.join(root, below)
        real = os.path.realpath(path)
        if os.path.commonpath([root, real]) != root:
            raise UnsafeSpecError(
                f'{self.leaf}: {path} is a symbolic link that leads to {real}, outside the checkpoint. Copy the file '
                'here, or, if you trust the link, pass mmap=False to read through it.'
            )
        return real


# --- maps -------------------------------------------------------------------------------------------------------------


def _map_run(files: _Files, run: _Run) -> np.ndarray:
    region = Region(run.cell_bytes * len(run.names), len(run.names))
    if len(run.names) > 1:
        region.reserve()
    for position, name in enumerate(run.names):
        fd = files.open(name)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise CorruptCheckpointError(f'{files.leaf}: {files.path(name)} is no regular file, expected a chunk.')
            if info.st_size != run.cell_bytes:
                raise CorruptCheckpointError(
                    f'{files.leaf}: {files.path(name)} has {info.st_size:,} bytes, expected {run.cell_bytes:,}. It is '
                    'truncated or damaged; restore an older step, or copy the checkpoint again.'
                )
            region.map(fd, position * run.cell_bytes, run.cell_bytes)
        finally:
            os.close(fd)
    return region.array()
