"""Recognises the arrays of a local checkpoint whose chunks are read without TensorStore: uncompressed and blosc chunks.

The file of a zarr chunk without codec and filters, in native byte order, has the bytes of a C-order array.
``reading/local/mmap_reader.py`` maps such files, and ``reading/local/direct_reader.py`` reads them into buffers. It also decodes
chunks of blosc.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt.format.array_spec import StoredArray, is_list_of_sizes
from t5ckpt.format.chunk_grid import Box, ChunkGrid, ChunkIndex, separator_of
from t5ckpt.format.codecs import is_decoded_natively
from t5ckpt.format.dtypes import DTYPES, zarr_typestr

_ALWAYS_BYTES = 256 * 2**20
# The dtypes with whole bytes per element and the same bits in NumPy and TensorStore.
_DTYPES = (
    *('bool', 'int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32', 'uint64'),
    *('float16', 'bfloat16', 'float32', 'float64', 'complex64', 'complex128'),
    *('float8_e3m4', 'float8_e4m3b11fnuz', 'float8_e4m3fn', 'float8_e4m3fnuz', 'float8_e5m2', 'float8_e5m2fnuz'),
)
_TYPESTRS = {DTYPES[name]: zarr_typestr(DTYPES[name]) for name in _DTYPES}


def is_uncompressed(array: StoredArray) -> bool:
    """Whether an array's chunks are uncompressed according to the manifest; its ``.zarray`` decides."""
    return is_read_natively(array) and array.metadata.get('compressor') is None


def is_read_natively(array: StoredArray) -> bool:
    """Whether an array's chunks are uncompressed, or of blosc, according to the manifest."""
    compressor = array.metadata.get('compressor')
    return (
        array.is_zarr_directory
        and array.disk_dtype in _TYPESTRS
        and (compressor is None or is_decoded_natively(compressor))
        and sys.byteorder == 'little'
        and sys.maxsize > 2**32
    )


@dataclasses.dataclass(frozen=True)
class NativeChunks:
    """The chunks of an array, whose bytes in the file, or after decoding, are those of a C-order array.

    Attributes:
      grid: of the chunks.
      itemsize: bytes per element.
      file: the file with the only chunk, relative to the checkpoint's directory, as in safetensors; empty if each chunk is a
        file in the array's directory.
      file_bytes: size of each file; None if the chunks are compressed.
      offset: of the chunk in the file, in bytes.
      has_fill: whether the array has a fill value, which TensorStore gives to absent chunks.
    """

    grid: ChunkGrid
    itemsize: int
    file: str
    file_bytes: int | None
    offset: int
    has_fill: bool = False

    @property
    def chunk_bytes(self) -> int:
        """Size of each chunk; chunks at the end of an axis are stored in full."""
        return math.prod(self.grid.chunk_shape) * self.itemsize

    def name(self, chunk_index: ChunkIndex) -> str:
        """The file of a chunk."""
        return self.file or self.grid.key(chunk_index)


def chunk_of_file(array: StoredArray) -> NativeChunks:
    """The only chunk of an array that is a range of bytes of one file."""
    grid = ChunkGrid(array.shape, tuple(max(1, size) for size in array.shape))
    metadata = array.metadata
    return NativeChunks(grid, array.disk_dtype.itemsize, array.location, metadata['file_bytes'], metadata['offset'])


def uncompressed_chunks(text: bytes, array: StoredArray) -> NativeChunks | None:
    """The chunks that a ``.zarray`` describes; None if they are not uncompressed, or it contradicts the manifest."""
    chunks = native_chunks(text, array)
    return None if chunks is None or chunks.file_bytes is None else chunks


def native_chunks(text: bytes, array: StoredArray) -> NativeChunks | None:
    """As :func:`uncompressed_chunks`; also chunks of blosc."""
    try:
        metadata: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(metadata, Mapping):
        return None
    chunks: Any = metadata.get('chunks')
    separator = separator_of(metadata)
    compressor = metadata.get('compressor')
    plain = compressor is None or is_decoded_natively(compressor)
    plain = plain and not metadata.get('filters') and metadata.get('order') == 'C'
    agrees = (
        metadata.get('zarr_format') == 2
        and metadata.get('shape') == list(array.shape)
        and metadata.get('dtype') == _TYPESTRS[array.disk_dtype]
    )
    if not plain or not agrees or separator not in ('.', '/') or not is_list_of_sizes(chunks):
        return None
    if len(chunks) != len(array.shape) or 0 in chunks:
        return None
    grid = ChunkGrid(array.shape, tuple(chunks), separator)
    chunk_bytes = math.prod(chunks) * array.disk_dtype.itemsize
    # Reads of chunks that are mostly outside their array would waste memory.
    if chunk_bytes > max(_ALWAYS_BYTES, 2 * array.nbytes):
        return None
    file_bytes = chunk_bytes if compressor is None else None
    return NativeChunks(grid, array.disk_dtype.itemsize, '', file_bytes, 0, metadata.get('fill_value') is not None)


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
