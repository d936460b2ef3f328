"""A step in T5X's layout whose array has a fill value: its writer, TensorStore, leaves out the chunks that equal it."""

import pathlib

import flax.serialization
import numpy as np
import tensorstore as ts


def write_filled(
    run: pathlib.Path, fill: object, values: np.ndarray, dtype: str, compressor: object = None
) -> pathlib.Path:
    """Writes step 1, with the leaf target/w in chunks of a quarter of its rows; returns the directory of the array."""
    directory = pathlib.Path(run, 'checkpoint_1')
    metadata = {
        'shape': list(values.shape),
        'chunks': [values.shape[0] // 4, *values.shape[1:]],
        'compressor': compressor,
    }
    array = {'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': str(directory / 'target.w')}}
    ts.open({**array, 'metadata': {**metadata, 'dtype': dtype, 'fill_value': fill}, 'create': True}).result().write(
        values
    ).result()
    kvstore = {'driver': 'file', 'path': 'target.w'}
    spec = {'driver': 'zarr', 'dtype': values.dtype.name, 'kvstore': kvstore, 'metadata': metadata}
    state = {'target': {'w': spec}, 'state': {'step': np.int32(1)}}
    (directory / 'checkpoint').write_bytes(flax.serialization.msgpack_serialize({'version': 3, 'optimizer': state}))
    return directory / 'target.w'
