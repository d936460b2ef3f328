"""Chunk files of a local checkpoint that hold plain bytes: which they are, and how they are opened.

A zarr chunk without codec, filters and foreign byte order is the bytes of a C-order array. ``_map.py`` makes such files
the array, ``_direct.py`` reads them into its buffers; everything else is TensorStore's.

They are opened behind a fence (``_fence.py``), so that a symbolic link leads out of the checkpoint only where the caller
asks for it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

from t5ckpt._dtypes import dtype_from_name, zarr_typestr
from t5ckpt._fence import Fence
from t5ckpt._specs import StoredArray
from t5ckpt.errors import CorruptCheckpointError

__all__ = ['ChunkFiles', 'Grid', 'RangeGrid', 'grid_of', 'has_plain_chunks', 'range_grid', 'range_of']

_MAX_ZARRAY_BYTES = 2**20
_ALWAYS_BYTES = 256 * 2**20
# One byte or more an element, and the same bits for numpy and for TensorStore; with the names in ``.zarray``.
_DTYPES = (
    *('bool', 'int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32', 'uint64'),
    *('float16', 'bfloat16', 'float32', 'float64', 'complex64', 'complex128'),
    *('float8_e3m4', 'float8_e4m3b11fnuz', 'float8_e4m3fn', 'float8_e4m3fnuz', 'float8_e5m2', 'float8_e5m2fnuz'),
)
_TYPESTRS = {dtype_from_name(name): zarr_typestr(dtype_from_name(name)) for name in _DTYPES}


def has_plain_chunks(array: StoredArray) -> bool:
    """Whether the manifest lets hope that an array's chunks are plain bytes; its ``.zarray`` decides."""
    return (
        array.driver == 'zarr'
        and array.container == 'dir'
        and array.dtype in _TYPESTRS
        and array.metadata.get('compressor') is None
        and sys.byteorder == 'little'
        and sys.maxsize > 2**32
    )


@dataclasses.dataclass(frozen=True)
class Grid:
    """The shape of a chunk, and how its files are named."""

    chunks: tuple[int, ...]
    separator: str
    itemsize: int

    @property
    def size_on_disk(self) -> int:
        """Of each file that holds a chunk."""
        return self.cell_bytes

    @property
    def cell_bytes(self) -> int:
        """Of each chunk file: also chunks at the edge have the full shape."""
        return math.prod(self.chunks) * self.itemsize

    def name(self, cell: Sequence[int]) -> str:
        """The file of the chunk at a position in the grid."""
        return self.separator.join(map(str, cell)) or '0'


@dataclasses.dataclass(frozen=True)
class RangeGrid(Grid):
    """An array that is a range of bytes of one file, as in safetensors: one chunk, in C order."""

    file: str
    file_bytes: int
    base: int

    @property
    def size_on_disk(self) -> int:
        """Of the file."""
        return self.file_bytes

    def name(self, cell: Sequence[int]) -> str:
        """The file, below the checkpoint's directory."""
        del cell
        return self.file


def range_grid(array: StoredArray) -> RangeGrid:
    """The grid of an array in a ``'file'``."""
    chunks = tuple(max(1, size) for size in array.shape)
    metadata = array.metadata
    return RangeGrid(chunks, '.', array.dtype.itemsize, array.location, metadata['file_bytes'], metadata['offset'])


def grid_of(text: bytes, array: StoredArray) -> Grid | None:
    """The chunk grid of an array whose chunks are plain bytes; None also for metadata that contradicts the manifest."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
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
    grid = Grid(tuple(chunks), separator, array.dtype.itemsize)
    # Chunks that are mostly outside their array are nothing to plan reads by.
    return grid if grid.cell_bytes <= max(_ALWAYS_BYTES, 2 * array.nbytes) else None


def range_of(within: Sequence[slice], shape: Sequence[int]) -> tuple[int, bool]:
    """Where a box begins in a C-order array, in elements, and whether its elements lie one after another."""
    offset, stride, cut, contiguous = 0, 1, False, True
    for part, size in zip(reversed(within), reversed(shape), strict=True):
        length = part.stop - part.start
        contiguous = contiguous and (length == 1 or not cut)
        cut = cut or length < size
        offset += part.start * stride
        stride *= size
    return offset, contiguous


class ChunkFiles:
    """The files of one array, opened component by component so that no symbolic link is followed unseen."""

    def __init__(self, root: str, location: str, leaf: str, *, follow_links: bool = False):
        """Opens the array's directory; with ``follow_links`` a symbolic link may lead out of the checkpoint."""
        self._fence = Fence(root, follow_links=follow_links)
        self._root = root
        self._location = location
        self.leaf = leaf
        self._fd = self._fence.open_dir(location, leaf)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        os.close(self._fd)

    def path(self, name: str) -> str:
        """For messages."""
        return os.path.join(self._root, self._location, name)

    def metadata(self) -> bytes:
        """The ``.zarray``, or the part of it that is not absurdly long."""
        fd, _ = self._open('.zarray')
        try:
            return os.read(fd, _MAX_ZARRAY_BYTES)
        finally:
            os.close(fd)

    def open_chunk(self, name: str, size: int) -> int:
        """A descriptor of a chunk file, which the caller closes.

        Raises:
          CorruptCheckpointError: no regular file of ``size`` bytes there.
          UnsafeSpecError: a symbolic link leads out of the checkpoint.
          OSError: it cannot be read.
        """
        try:
            fd, found = self._open(name)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(
                f'{self.leaf}: the chunk {self.path(name)} is missing. Restore an older step, or copy the checkpoint again.'
            ) from error
        if found == size:
            return fd
        os.close(fd)
        raise CorruptCheckpointError(
            f'{self.leaf}: {self.path(name)} has {found:,} bytes, expected {size:,}. It is truncated or damaged; restore '
            'an older step, or copy the checkpoint again.'
        )

    def _open(self, name: str) -> tuple[int, int]:
        return self._fence.open_file((self._fd, self._location), name, self.leaf)
