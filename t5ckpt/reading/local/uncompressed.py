"""Chunk files of a local checkpoint that hold plain bytes: which they are, and how they are opened.

A zarr chunk without codec, filters and foreign byte order is the bytes of a C-order array.
``reading/local/mmap_reader.py`` makes such files the array, ``reading/local/direct_reader.py`` reads them into its
buffers; everything else is TensorStore's.

They are opened behind a fence (``reading/contained_open.py``), so that a symbolic link leads out of the checkpoint only
where the caller asks for it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box, ChunkGrid, ChunkIndex
from t5ckpt.format.dtypes import dtype_from_name, zarr_typestr
from t5ckpt.reading.contained_open import ContainedDirectory

__all__ = ['ChunkFiles', 'PlainChunks', 'chunk_of_file', 'has_plain_chunks', 'plain_chunks_of', 'range_of']

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
class PlainChunks:
    """The chunks of an array whose bytes in the file are those of a C-order array.

    Attributes:
      grid: of the chunks.
      itemsize: bytes per element.
      file: the one file that holds the only chunk, below the checkpoint's directory, as in safetensors; empty where each chunk
        is a file of its own in the array's directory.
      file_bytes: size of each file.
      offset: bytes in the file before the chunk.
    """

    grid: ChunkGrid
    itemsize: int
    file: str
    file_bytes: int
    offset: int

    @property
    def chunk_bytes(self) -> int:
        """Size of each chunk; also chunks at the array's end are stored in full."""
        return math.prod(self.grid.chunk_shape) * self.itemsize

    def name(self, chunk_index: ChunkIndex) -> str:
        """The file of a chunk."""
        return self.file or self.grid.key(chunk_index)


def chunk_of_file(array: StoredArray) -> PlainChunks:
    """The only chunk of an array that is a range of bytes of one file (container ``'file'``)."""
    grid = ChunkGrid(array.shape, tuple(max(1, size) for size in array.shape))
    metadata = array.metadata
    return PlainChunks(grid, array.dtype.itemsize, array.location, metadata['file_bytes'], metadata['offset'])


def plain_chunks_of(text: bytes, array: StoredArray) -> PlainChunks | None:
    """The chunks that a ``.zarray`` describes; None where they are not plain, or it contradicts the manifest."""
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
    grid = ChunkGrid(array.shape, tuple(chunks), separator)
    chunk_bytes = math.prod(chunks) * array.dtype.itemsize
    # Chunks that are mostly outside their array are nothing to plan reads by.
    if chunk_bytes > max(_ALWAYS_BYTES, 2 * array.nbytes):
        return None
    return PlainChunks(grid, array.dtype.itemsize, '', chunk_bytes, 0)


def range_of(box: Box, shape: Sequence[int]) -> tuple[int, bool]:
    """Where a box begins in a C-order array, in elements, and whether its elements lie one after another."""
    offset, stride, cut, contiguous = 0, 1, False, True
    for (start, stop), size in zip(reversed(box), reversed(shape), strict=True):
        length = stop - start
        contiguous = contiguous and (length == 1 or not cut)
        cut = cut or length < size
        offset += start * stride
        stride *= size
    return offset, contiguous


class ChunkFiles:
    """The files of one array, opened component by component so that no symbolic link is followed unseen."""

    def __init__(self, root: str, location: str, leaf: str, *, follow_links: bool = False):
        """Opens the array's directory; with ``follow_links`` a symbolic link may lead out of the checkpoint."""
        self._contained = ContainedDirectory(root, follow_links=follow_links)
        self._root = root
        self._location = location
        self.leaf = leaf
        self._fd = self._contained.open_dir(location, leaf)

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
        return self._contained.open_file(self._fd, self._location, name, self.leaf)
