"""The codecs of chunks: their names, and how chunks are encoded and decoded, in the calling thread.

numcodecs releases the GIL, and decodes into a buffer of the caller. TensorStore reads and writes the same bytes, but allocates
a file's bytes and a chunk's values for each chunk, which costs more than the codec (docs/decisions.md).
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.errors import UnsupportedFormatError
from t5ckpt.format.dtypes import TYPESTRS

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
_BLOSC_CODECS = ('blosclz', 'lz4', 'lz4hc', 'snappy', 'zlib', 'zstd')
# BLOSC_MAX_BUFFERSIZE of c-blosc.
_BLOSC_BYTES = 2**31 - 17
_NUMCODECS = {
    'adler32',
    'astype',
    'bitround',
    'blosc',
    'bz2',
    'crc32',
    'delta',
    'fixedscaleoffset',
    'fletcher32',
    'gzip',
    'jenkins_lookup3',
    'lz4',
    'lzma',
    'packbits',
    'quantize',
    'shuffle',
    'zlib',
    'zstd',
}
_NUMCODECS_ERRORS = (
    *(ValueError, TypeError, RuntimeError, OSError, EOFError, ArithmeticError, IndexError),
    *(lzma.LZMAError, zlib.error, struct.error),
)
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
    return _codec(compressor).encode(words)


def is_decodable(codec: Mapping[str, Any]) -> bool:
    """Whether :func:`decode` knows a codec or a filter of zarr v2; none of them calls pickle or allocates by a header alone."""
    is_known = (
        codec.get('id') in _NUMCODECS
        and codec.get('cname', 'lz4') in _BLOSC_CODECS
        and all(str(codec[key]) in TYPESTRS for key in codec if key.endswith(('dtype', 'astype')))
    )
    try:
        return is_known and bool(_codec(codec))
    except TypeError:
        # A newer numcodecs may have more parameters.
        return False


def decode(data: memoryview, codecs: Sequence[Mapping[str, Any]], out: memoryview) -> None:
    """Decodes a chunk with codecs, in this order, into a buffer of its exact size.

    Raises:
      ValueError: the data is damaged, or its values have another size.
      UnsupportedFormatError: a zstd frame does not say how many values it has.
      MemoryError: the process cannot get the memory that the codecs need.
    """
    values: Any = data
    try:
        # Kilobytes may be gigabytes of values. Filters make them smaller, by 16 times at most.
        limit = 16 * len(out) + 2**20
        for position, codec in enumerate(codecs, 1):
            is_last = position == len(codecs)
            most = len(out) if is_last else limit
            if codec['id'] in _STREAMS:
                values = _streamed(codec, values, most)
                continue
            size = _SIZES[codec['id']](values) if codec['id'] in _SIZES else None
            if (size or 0) > most or (is_last and size not in (None, most)):
                raise ValueError(f'its header describes {size:,} bytes of values, expected {len(out):,}')
            if position > 1 and memoryview(values).nbytes > limit:
                raise ValueError(f'it has more than {limit:,} bytes before its last filter')
            # The others do not say how much of a buffer they have filled.
            values = _codec(codec).decode(values, *([out] if is_last and size is not None else []))
        decoded = memoryview(values).cast('B')
    except UnsupportedFormatError:
        raise
    except _NUMCODECS_ERRORS as error:
        raise ValueError(f'{type(error).__name__}: {error}') from error
    if len(decoded) != len(out):
        raise ValueError(f'it has {len(decoded):,} bytes of values, expected {len(out):,}')
    if decoded.obj is not out.obj:
        # Without the GIL.
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(decoded, np.uint8))


def _streamed(codec: Mapping[str, Any], data: Any, most: int) -> bytes:
    """The values of a stream, or of several that follow each other (RFC 1952, 2.2): at most one byte more than ``most``."""
    values, left = b'', data
    while True:
        stream = _STREAMS[codec['id']](codec)
        values += stream.decompress(left, most + 1 - len(values))
        if not stream.eof and len(values) <= most:
            raise ValueError('it is cut off')
        # Tools that write whole blocks add zeros, which gzip skips.
        left = stream.unused_data.lstrip(b'\0')
        if not left or codec['id'] == 'zlib' or len(values) > most:
            return values


def _blosc_size(data: Any) -> int:
    """The size of the values in a blosc chunk, by its header, which also has that of the data."""
    encoded = memoryview(data).cast('B')
    *_, size, _, total = _BLOSC_HEADER.unpack_from(encoded)
    if total != len(encoded):
        raise ValueError(f'its header describes {total:,} bytes, and it has {len(encoded):,}')
    return size


def _zstd_size(data: Any) -> int:
    """The size of the values in a zstd frame, by its header (RFC 8878, 3.1.1.1)."""
    encoded = bytes(memoryview(data).cast('B')[:18])
    flags = encoded[4]
    is_single = flags >> 5 & 1
    start = 6 - is_single + (0, 1, 2, 4)[flags & 3]
    length = (is_single, 2, 4, 8)[flags >> 6]
    if not length:
        # numcodecs does not decode it, and a decoder of streams would end at no limit.
        raise UnsupportedFormatError('its zstd frame does not say how many values it has; TensorStore reads it')
    return int.from_bytes(encoded[start : start + length], 'little') + 256 * (length == 2)


def _lz4_size(data: Any) -> int:
    """The size of the values in a chunk of LZ4, which numcodecs writes before it."""
    return int.from_bytes(bytes(memoryview(data).cast('B')[:4]), 'little')


_SIZES: Mapping[str, Callable[[Any], int]] = {'blosc': _blosc_size, 'lz4': _lz4_size, 'zstd': _zstd_size}


# Of the codecs whose chunks do not say how many values they have.
_STREAMS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    'gzip': lambda _: zlib.decompressobj(16 + zlib.MAX_WBITS),
    'zlib': lambda _: zlib.decompressobj(),
    'bz2': lambda _: bz2.BZ2Decompressor(),
    'lzma': lambda codec: lzma.LZMADecompressor(codec.get('format', lzma.FORMAT_XZ), filters=codec.get('filters')),
}


class _Snappy:
    """Decodes blosc chunks of snappy, which c-blosc is built with in TensorStore and not in numcodecs."""

    @staticmethod
    def decode(data: Any, _: memoryview | None = None) -> memoryview:
        size = [_blosc_size(data)]
        metadata = {'shape': size, 'chunks': size, 'dtype': '|u1', 'compressor': {'id': 'blosc'}}
        tensorstore = importlib.import_module('tensorstore')
        store = tensorstore.open(
            {'driver': 'zarr', 'kvstore': {'driver': 'memory'}, 'metadata': metadata}, create=True
        ).result()
        store.kvstore['0'] = bytes(data)
        return store.read().result().data


def _codec(fields: Mapping[str, Any]) -> Any:
    return _Snappy if fields.get('cname') == 'snappy' else importlib.import_module('numcodecs').get_codec(dict(fields))
