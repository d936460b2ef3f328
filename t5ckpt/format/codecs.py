"""The codecs of chunks: their names, and how chunks are encoded and decoded, in the calling thread.

numcodecs releases the GIL, and decodes into a buffer of the caller. TensorStore reads and writes the same bytes, but allocates
a file's bytes and a chunk's values for each chunk, which costs more than the codec (docs/decisions.md).
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from t5ckpt.errors import UnsupportedFormatError

AUTO: dict[str, Any] = {'id': 'auto'}
"""Placeholder for a codec that is chosen during the save; never written."""

# Levels by measurement (docs/decisions.md): lz4 is as fast at every level, and zstd 3 of shuffled bits is faster than zstd 1.
BIT_LZ4: dict[str, Any] = {'id': 'blosc', 'cname': 'lz4', 'clevel': 9, 'shuffle': 2, 'blocksize': 0}
"""lz4 after a shuffle of bits: the bits of all exponents lie together, which are nearly the same in weights."""
BIT_ZSTD: dict[str, Any] = {**BIT_LZ4, 'cname': 'zstd', 'clevel': 3}
ZSTD: dict[str, Any] = {'id': 'zstd', 'level': 1}

CODECS: Mapping[str | None, dict[str, Any] | None] = {
    None: None,
    'auto': AUTO,
    'lz4': BIT_LZ4,
    'zstd': ZSTD,
    'gzip': {'id': 'gzip', 'level': 1},
    'blosc': {'id': 'blosc', 'cname': 'lz4', 'clevel': 5, 'shuffle': -1, 'blocksize': 0},
}
"""zarr v2 compressors, by the name a user gives; the levels of zstd, gzip and blosc are T5X's."""

# The header of a blosc chunk (README_CHUNK_FORMAT.rst of c-blosc): four bytes, the sizes of the values, a block and the chunk.
_BLOSC_HEADER = struct.Struct('<4B3I')
# numcodecs is built without snappy.
_BLOSC_CODECS = ('blosclz', 'lz4', 'lz4hc', 'zlib', 'zstd')
# BLOSC_MAX_BUFFERSIZE of c-blosc.
_BLOSC_BYTES = 2**31 - 17
_DAMAGED = (ValueError, RuntimeError, OSError, EOFError, zlib.error, struct.error, IndexError)
WORDS = {size: np.dtype(f'u{size}') for size in (1, 2, 4, 8)}
"""The unsigned dtype of each size, to copy or shuffle elements whatever their dtype."""


def codec_text(compressor: Any) -> str:
    """A zarr compressor as text for messages, such as ``'blosc lz4'``; ``'none'`` without one."""
    names = [compressor.get('id', '?'), compressor.get('cname')] if isinstance(compressor, Mapping) else ['none']
    return ' '.join(map(str, filter(None, names)))


def takes(compressor: Any, nbytes: int) -> bool:
    """Whether a codec can encode a chunk of ``nbytes`` bytes."""
    return nbytes <= _BLOSC_BYTES or not isinstance(compressor, Mapping) or compressor.get('id') != 'blosc'


def encode(values: np.ndarray, compressor: Mapping[str, Any] | None) -> Any:
    """The bytes of a chunk with these values, an array in C order: a flat view of them without a codec."""
    flat = values.reshape(-1)
    if compressor is None:
        return flat.view(np.uint8)
    # The codec shuffles by the size of an element, which it takes from the buffer; elements of extension dtypes have none.
    words: Any = flat.view(WORDS.get(flat.dtype.itemsize, flat.dtype))
    if compressor['id'] == 'gzip':
        # numcodecs writes the time into the header, so that unchanged chunks would differ.
        return gzip.compress(words, compressor['level'], mtime=0)
    return _codec(dict(compressor)).encode(words)


def is_decodable(codec: Mapping[str, Any]) -> bool:
    """Whether :func:`decode` knows a compressor of zarr v2: those that TensorStore writes, and so T5X, without blosc's snappy."""
    kind = codec.get('id')
    return kind in _STREAMS or kind == 'zstd' or (kind == 'blosc' and codec.get('cname', 'lz4') in _BLOSC_CODECS)


def decode(data: memoryview, codec: Mapping[str, Any], out: memoryview) -> None:
    """Decodes a chunk into a buffer of its exact size.

    Raises:
      ValueError: the data is damaged, or its values have another size.
      UnsupportedFormatError: a zstd frame does not say how many values it has.
      MemoryError: the process cannot get the memory that the codec needs.
    """
    kind = codec['id']
    try:
        values = _streamed(kind, data, len(out)) if kind in _STREAMS else None
        size = _SIZES[kind](data) if values is None else len(values)
        if size == len(out) and values is None:
            _codec({'id': kind}).decode(data, out)
    except UnsupportedFormatError:
        raise
    except _DAMAGED as error:
        raise ValueError(f'{type(error).__name__}: {error}') from error
    if size != len(out):
        raise ValueError(f'it has {size:,} bytes of values, expected {len(out):,}')
    if values is not None:
        # Without the GIL.
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(values, np.uint8))


def _streamed(kind: str, data: memoryview, most: int) -> bytes:
    """The values of a stream, or of several that follow each other (RFC 1952, 2.2): at most one byte more than ``most``."""
    values, left = b'', data
    while True:
        stream = _STREAMS[kind]()
        values += stream.decompress(left, most + 1 - len(values))
        if not stream.eof and len(values) <= most:
            raise ValueError('it is cut off')
        # Tools that write whole blocks add zeros, which gzip skips.
        left = stream.unused_data.lstrip(b'\0')
        if not left or kind == 'zlib' or len(values) > most:
            return values


def _blosc_size(data: memoryview) -> int:
    """The size of the values in a blosc chunk, by its header, which also has that of the data."""
    *_, size, _, total = _BLOSC_HEADER.unpack_from(data)
    if total != len(data):
        raise ValueError(f'its header describes {total:,} bytes, and it has {len(data):,}')
    return size


def _zstd_size(data: memoryview) -> int:
    """The size of the values in a zstd frame, by its header (RFC 8878, 3.1.1.1)."""
    flags = data[4]
    is_single = flags >> 5 & 1
    start = 6 - is_single + (0, 1, 2, 4)[flags & 3]
    length = (is_single, 2, 4, 8)[flags >> 6]
    if not length:
        # numcodecs does not decode it, and a decoder of streams would end at no limit.
        raise UnsupportedFormatError('its zstd frame does not say how many values it has; TensorStore reads it')
    return int.from_bytes(data[start : start + length], 'little') + 256 * (length == 2)


_SIZES: Mapping[str, Callable[[memoryview], int]] = {'blosc': _blosc_size, 'zstd': _zstd_size}
# Of the codecs whose chunks do not say how many values they have.
_STREAMS: Mapping[str, Callable[[], Any]] = {
    'bz2': bz2.BZ2Decompressor,
    'gzip': lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
    'zlib': zlib.decompressobj,
}


def _codec(fields: dict[str, Any]) -> Any:
    return importlib.import_module('numcodecs').get_codec(fields)
