"""Encodes the chunks of an array in memory, so that their checksums are known before they are written.

numcodecs encodes with blosc and zstd in the calling thread (``format/codecs.py``). TensorStore encodes everything else, into a
store in memory: other codecs, and dtypes with less than a byte per element.
"""

from __future__ import annotations

import numpy as np
import tensorstore as ts

from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.checksum import digest
from t5ckpt.format.codecs import encode, is_native
from t5ckpt.format.dtypes import name_of, zarr_typestr
from t5ckpt.format.file_checksums import FileEntry

# Dtypes whose elements have other bits on disk than in NumPy.
_SUB_BYTE = frozenset({'float4_e2m1fn', 'int2', 'int4'})


def plain_entry(array: StoredArray, values: np.ndarray) -> FileEntry | None:
    """The size and digest of a chunk's file if it holds the plain values; None if the chunk has to be encoded."""
    # A chunk at the end of an axis is padded on disk.
    is_whole = values.shape == tuple(array.metadata['chunks'])
    if array.metadata['compressor'] is not None or name_of(array.dtype) in _SUB_BYTE or not is_whole:
        return None
    return values.nbytes, digest(values)


def encode_chunk(array: StoredArray, values: np.ndarray) -> bytes:
    """The bytes of the file of a chunk; ``values`` are those inside the array, in C order and the dtype on disk."""
    compressor, chunks = array.metadata['compressor'], tuple(array.metadata['chunks'])
    if name_of(array.dtype) in _SUB_BYTE or not (compressor is None or is_native(compressor)):
        return _encoded_by_tensorstore(array, values)
    if values.shape != chunks:
        # A chunk at the end of an axis is stored in full.
        full = np.zeros(chunks, values.dtype)
        full[tuple(map(slice, values.shape))] = values
        values = full
    return values.tobytes() if compressor is None else encode(values, compressor)


def _encoded_by_tensorstore(array: StoredArray, values: np.ndarray) -> bytes:
    chunks = list(array.metadata['chunks'])
    spec = {
        'driver': 'zarr',
        'kvstore': {'driver': 'memory'},
        'metadata': {
            'shape': chunks,
            'chunks': chunks,
            'dtype': zarr_typestr(array.dtype),
            'compressor': array.metadata['compressor'],
        },
        'store_data_equal_to_fill_value': True,
    }
    context = ts.Context()
    store = ts.open(spec, create=True, context=context).result()
    store[tuple(map(slice, values.shape))].write(values).result()
    key = '.'.join(['0'] * len(chunks)) or '0'
    return ts.KvStore.open({'driver': 'memory'}, context=context).result().read(key).result().value
