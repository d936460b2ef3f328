"""Large files of Flax: the arrays stay in the file, and what comes out is what Flax itself reads."""

import pathlib
import random
import subprocess
import sys

import flax.serialization
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from hypothesis import HealthCheck, given, settings, strategies as st

import t5ckpt
from t5ckpt import errors
from t5ckpt.catalog.locate import locate
from t5ckpt.convert.files.flax_msgpack import read_large

TREE = {
    'params': {
        'w': np.arange(6000, dtype=np.float32).reshape(60, 100),
        'h': np.arange(900).astype(jax.numpy.bfloat16).reshape(30, 30),
        'small': np.arange(3),
        'empty': np.zeros((0, 4), np.int8),
        'scalar': np.float32(3),
    },
    'opt': [np.ones(5000, np.int16), {'count': np.int32(3)}, ()],
    'text': 'a text',
    'number': 4,
    'none': None,
    'complex': 1 + 2j,
}


def in_pieces(tree, size):
    """Arrays above ``size`` bytes as flax/serialization.py (``_chunk``) lays out those above 1 GiB; Flax puts them together."""
    if isinstance(tree, dict):
        return {key: in_pieces(value, size) for key, value in tree.items()}
    if not isinstance(tree, np.ndarray) or tree.nbytes <= size:
        return tree
    flat, count = tree.reshape(-1), max(1, size // tree.itemsize)
    pieces = [flat[start : start + count] for start in range(0, flat.size, count)]
    return {'__msgpack_chunked_array__': True, 'shape': numbered(tree.shape), 'chunks': numbered(pieces)}


def numbered(parts):
    return {str(at): part for at, part in enumerate(parts)}


def decoded(path, limit):
    """The leaves by path, arrays read."""
    found = read_large(locate(path), str(path), limit)
    leaves = flatten_dict(found.contents.manifest.state, keep_empty_nodes=True)
    return {
        key: found.arrays[leaf].get() if isinstance(leaf, str) and leaf in found.arrays else leaf
        for key, leaf in leaves.items()
    }, found


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, (np.ndarray, np.generic)):
            assert actual[key].dtype == value.dtype
            np.testing.assert_array_equal(actual[key], value)
        elif value is not None and not isinstance(value, (str, dict)):
            assert actual[key] == value
        else:
            assert actual[key] is value or actual[key] == value


@pytest.mark.parametrize('limit', [0, 100, 5000, 10**9])
@pytest.mark.parametrize('piece', [2**30, 4000, 777])
def test_what_flax_wrote(tmp_path, limit, piece):
    """Also arrays that Flax splits, because msgpack's lengths end at 2^32."""
    path = tmp_path / 'checkpoint_5'
    state = flax.serialization.to_state_dict(TREE)
    path.write_bytes(flax.serialization.msgpack_serialize(in_pieces(state, piece)))
    expected = flatten_dict(flax.serialization.msgpack_restore(path.read_bytes()), keep_empty_nodes=True)
    actual, found = decoded(path, limit)
    assert_same(
        {'/'.join(key): leaf for key, leaf in actual.items()}, {'/'.join(key): v for key, v in expected.items()}
    )
    assert bool(found.arrays) == (limit < min(piece, 10**5))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=st.tuples(st.slices(60), st.slices(100)), piece=st.sampled_from([2**30, 4000, 777]))
def test_slices(tmp_path, index, piece):
    path = tmp_path / 'checkpoint_5'
    w = TREE['params']['w']
    path.write_bytes(flax.serialization.msgpack_serialize(in_pieces({'w': w}, piece)))
    found = read_large(locate(path), str(path), 100)
    array = found.arrays[found.contents.manifest.state['w']]
    np.testing.assert_array_equal(array[index], w[index])


def test_every_truncation_is_an_error(tmp_path):
    path = tmp_path / 'checkpoint_5'
    data = flax.serialization.to_bytes(TREE)
    rng = random.Random(1)
    for length in {0, 1, len(data) - 1, *(rng.randrange(len(data)) for _ in range(60))}:
        path.write_bytes(data[:length])
        with pytest.raises(errors.FormatError):
            read_large(locate(path), str(path), 100)
    path.write_bytes(data + b'\0')
    with pytest.raises(errors.CorruptCheckpointError, match='follow the end'):
        read_large(locate(path), str(path), 100)


@pytest.mark.slow
def test_a_large_file_is_converted_in_little_memory(tmp_path):
    """400 MB through a process that grows by less than half of that."""
    rng = np.random.default_rng(0)
    params = {str(number): rng.standard_normal((5000, 2500), dtype=np.float32) for number in range(8)}
    (tmp_path / 'checkpoint_3').write_bytes(flax.serialization.to_bytes({'params': params}))
    code = (
        'import resource, t5ckpt, tensorstore, jax, numpy\n'
        'peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n'
        'before = peak()\n'
        f't5ckpt.convert_checkpoint("flax", {str(tmp_path / "checkpoint_3")!r}, {str(tmp_path / "run")!r},'
        ' t5ckpt.ConvertOptions(concurrent_gb=0.05))\n'
        'print((peak() - before) / 1024)\n'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 200
    run = pathlib.Path(tmp_path, 'run')
    loaded = t5ckpt.load_t5x_checkpoint(run)
    for name, value in params.items():
        np.testing.assert_array_equal(loaded['params'][name], value)
