"""TensorStore reads the chunks that ``encode`` makes, and writes the same bytes where there is no codec."""

import numpy as np
import pytest
import tensorstore as ts

from t5ckpt.format.codecs import BIT_ZSTD, CODECS, encode
from t5ckpt.format.dtypes import DTYPES, STORED_AS, zarr_typestr

_STORED = [dtype for name, dtype in DTYPES.items() if name not in STORED_AS]
_CODECS = [codec for name, codec in CODECS.items() if name != 'auto'] + [BIT_ZSTD]


def open_array(dtype, shape, codec):
    """An array of one chunk, and the kvstore with its file '0.0'."""
    metadata = {'shape': shape, 'chunks': shape, 'dtype': zarr_typestr(dtype), 'compressor': codec, 'fill_value': None}
    spec = {'driver': 'zarr', 'kvstore': {'driver': 'memory'}, 'metadata': metadata}
    context = ts.Context()
    array = ts.open(spec | {'store_data_equal_to_fill_value': True}, create=True, context=context).result()
    return array, ts.KvStore.open({'driver': 'memory'}, context=context).result()


def every_byte(dtype):
    """Values with each byte: also NaN of each payload, and the unused bits of an int4 and others of less than a byte."""
    words = np.arange(256 * dtype.itemsize, dtype=np.uint8).reshape(16, -1)
    return words.view(dtype) if dtype.kind != 'b' else words % 2 == 1


@pytest.mark.parametrize('dtype', _STORED, ids=str)
def test_tensorstore_reads_what_is_written(dtype):
    values = every_byte(dtype)
    for codec in _CODECS:
        array, files = open_array(dtype, list(values.shape), codec)
        files.write('0.0', bytes(encode(values, codec))).result()
        read = array.read().result()
        assert read.dtype == dtype
        assert read.tobytes() == values.tobytes(), codec


@pytest.mark.parametrize('dtype', _STORED, ids=str)
def test_tensorstore_writes_the_same_bytes(dtype):
    values = every_byte(dtype)
    array, files = open_array(dtype, list(values.shape), None)
    array.write(values).result()
    assert files.read('0.0').result().value == bytes(encode(values, None))
