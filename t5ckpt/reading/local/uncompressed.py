"""Recognises and opens the chunk files of a local checkpoint that are uncompressed, or compressed with blosc.

The file of a zarr chunk without codec and filters, in native byte order, has the bytes of a C-order array.
``reading/local/mmap_reader.py`` maps such files, and ``reading/local/direct_reader.py`` reads them into buffers; it also decodes
chunks of blosc. TensorStore reads all others.

Files are opened by ``reading/checkpoint_files.py``, so a symbolic link out of the checkpoint is followed only on request.
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
from t5ckpt.format.array_spec import ArrayLayout, StoredArray
from t5ckpt.format.chunk_grid import Box, ChunkGrid, ChunkIndex
from t5ckpt.format.codecs import is_decoded_natively
from t5ckpt.format.dtypes import dtype_from_name, zarr_typestr
from t5ckpt.reading.checkpoint_files import ContainedDirectory

_MAX_ZARRAY_BYTES = 2**20
_ALWAYS_BYTES = 256 * 2**20
# The dtypes with whole bytes per element and the same bits in NumPy and TensorStore.
_DTYPES = (
    *('bool', 'int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32', 'uint64'),
    *('float16', 'bfloat16', 'float32', 'float64', 'complex64', 'complex128'),
    *('float8_e3m4', 'float8_e4m3b11fnuz', 'float8_e4m3fn', 'float8_e4m3fnuz', 'float8_e5m2', 'float8_e5m2fnuz'),
)
_TYPESTRS = {dtype_from_name(name): zarr_typestr(dtype_from_name(name)) for name in _DTYPES}


def has_plain_chunks(array: StoredArray) -> bool:
    """Whether an array's chunks are uncompressed according to the manifest; its ``.zarray`` decides."""
    return has_chunks_to_decode(array) and array.metadata.get('compressor') is None


def has_chunks_to_decode(array: StoredArray) -> bool:
    """Whether an array's chunks are uncompressed, or of a codec that is decoded without TensorStore."""
    compressor = array.metadata.get('compressor')
    return (
        array.layout is ArrayLayout.ZARR
        and array.dtype in _TYPESTRS
        and (compressor is None or is_decoded_natively(compressor))
        and sys.byteorder == 'little'
        and sys.maxsize > 2**32
    )


@dataclasses.dataclass(frozen=True)
class PlainChunks:
    """The chunks of an array whose bytes in the file, or after decoding, are those of a C-order array.

    Attributes:
      grid: of the chunks.
      itemsize: bytes per element.
      file: the file with the only chunk, relative to the checkpoint's directory, as in safetensors; empty if each chunk is a
        file in the array's directory.
      file_bytes: size of each file; None if the chunks are compressed.
      offset: of the chunk in the file, in bytes.
    """

    grid: ChunkGrid
    itemsize: int
    file: str
    file_bytes: int | None
    offset: int

    @property
    def chunk_bytes(self) -> int:
        """Size of each chunk; chunks at the end of an axis are stored in full."""
        return math.prod(self.grid.chunk_shape) * self.itemsize

    def name(self, chunk_index: ChunkIndex) -> str:
        """The file of a chunk."""
        return self.file or self.grid.key(chunk_index)


def chunk_of_file(array: StoredArray) -> PlainChunks:
    """The only chunk of an array that is a range of bytes of one file."""
    grid = ChunkGrid(array.shape, tuple(max(1, size) for size in array.shape))
    metadata = array.metadata
    return PlainChunks(grid, array.dtype.itemsize, array.location, metadata['file_bytes'], metadata['offset'])


def plain_chunks_of(text: bytes, array: StoredArray) -> PlainChunks | None:
    """The chunks that a ``.zarray`` describes; None if they are not uncompressed, or it contradicts the manifest."""
    chunks = chunks_to_decode(text, array)
    return None if chunks is None or chunks.file_bytes is None else chunks


def chunks_to_decode(text: bytes, array: StoredArray) -> PlainChunks | None:
    """As :func:`plain_chunks_of`; also the chunks of a codec that is decoded without TensorStore."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, Mapping):
        return None
    chunks = found.get('chunks')
    separator = found.get('dimension_separator', '.')
    compressor = found.get('compressor')
    plain = compressor is None or is_decoded_natively(compressor)
    plain = plain and not found.get('filters') and found.get('order') == 'C'
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
    # Reads of chunks that are mostly outside their array would waste memory.
    if chunk_bytes > max(_ALWAYS_BYTES, 2 * array.nbytes):
        return None
    return PlainChunks(grid, array.dtype.itemsize, '', chunk_bytes if compressor is None else None, 0)


def range_of(box: Box, shape: Sequence[int]) -> tuple[int, bool]:
    """The offset of a box in a C-order array, in elements, and whether the box is contiguous."""
    offset, stride, cut, contiguous = 0, 1, False, True
    for (start, stop), size in zip(reversed(box), reversed(shape), strict=True):
        length = stop - start
        contiguous = contiguous and (length == 1 or not cut)
        cut = cut or length < size
        offset += start * stride
        stride *= size
    return offset, contiguous


class ChunkFiles:
    """The files of one array; every component of a path is opened separately, to detect symbolic links."""

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
        """The path of a file, for messages."""
        return os.path.join(self._root, self._location, name)

    def metadata(self) -> bytes:
        """The ``.zarray``; at most 1 MiB of it."""
        fd, _ = self._open('.zarray')
        try:
            return os.read(fd, _MAX_ZARRAY_BYTES)
        finally:
            os.close(fd)

    def open_chunk(self, name: str, size: int | None) -> int:
        """A descriptor of a chunk file, which the caller closes.

        Raises:
          CorruptCheckpointError: it is not a regular file, or not of ``size`` bytes.
          UnsafeSpecError: a symbolic link leads out of the checkpoint.
          OSError: it cannot be read.
        """
        try:
            fd, found = self._open(name)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(
                f'{self.leaf}: the chunk {self.path(name)} is missing. Restore an older step, or copy the checkpoint again.'
            ) from error
        if size is None or found == size:
            return fd
        os.close(fd)
        raise CorruptCheckpointError(
            f'{self.leaf}: {self.path(name)} has {found:,} bytes, expected {size:,}. It is truncated or damaged; restore '
            'an older step, or copy the checkpoint again.'
        )

    def _open(self, name: str) -> tuple[int, int]:
        return self._contained.open_file(self._fd, self._location, name, self.leaf)
