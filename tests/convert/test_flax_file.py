"""Large files of Flax: the arrays stay in the file, and what comes out is what Flax itself reads."""

import json
import pathlib
import random
import subprocess
import sys

import flax.serialization
import jax
import msgpack
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from hypothesis import HealthCheck, given, settings, strategies as st
from support.cli import t5ckpt_cli

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


def stream(tree):
    """As EasyLM's StreamingCheckpointer writes (checkpoint.py, save_train_state_to_file)."""
    leaves = flatten_dict(flax.serialization.to_state_dict(tree))
    return b''.join(msgpack.packb((key, flax.serialization.to_bytes(value))) for key, value in leaves.items())


def test_streams_of_easylm(tmp_path):
    path, tree = tmp_path / 'streaming_params_7', {name: TREE[name] for name in ('params', 'opt', 'number')}
    path.write_bytes(stream(tree))
    expected = flatten_dict(flax.serialization.msgpack_restore(flax.serialization.to_bytes(tree)))
    for limit in (0, 5000, 10**9):
        assert_same(decoded(path, limit)[0], expected)
    np.testing.assert_array_equal(t5ckpt.load_t5x_checkpoint(path)['params']['w'], tree['params']['w'])
    for source in (path, tmp_path):
        assert t5ckpt.convert_checkpoint('flax', source, tmp_path / f'run of {source.name}').step == 7
    data = path.read_bytes()
    for damaged in (data[:-1], data[:1], data + data[:40], data + data, data + b'\x01', b'\x92\x91\xa1a\xa1b'):
        path.write_bytes(damaged)
        with pytest.raises(errors.FormatError):
            read_large(locate(path), str(path), 100)
        with pytest.raises(errors.FormatError):
            t5ckpt.load_t5x_checkpoint(path)


def test_flax_weights_of_transformers(tmp_path):
    """One file or, above its limit, several with an index (modeling_flax_utils.py); a part is never taken for the whole."""
    model, single = tmp_path / 'model', tmp_path / 'single'
    model.mkdir()
    single.mkdir()
    weights = {'shared/embedding': TREE['params']['h'], 'encoder/block/0/kernel': TREE['params']['w']}
    files = {name: f'flax_model-0000{number}-of-00002.msgpack' for number, name in enumerate(weights, 1)}
    for name, file in files.items():
        tree = unflatten_dict({name: weights[name]}, sep='/')
        (model / file).write_bytes(flax.serialization.to_bytes(tree))
    index = model / 'flax_model.msgpack.index.json'
    index.write_text(json.dumps({'metadata': {}, 'weight_map': files}))
    tree = unflatten_dict(weights, sep='/')
    (single / 'flax_model.msgpack').write_bytes(flax.serialization.to_bytes(tree))
    expected = {tuple(name.split('/')): values for name, values in weights.items()}
    for number, source in enumerate((model, index, single, single / 'flax_model.msgpack')):
        t5ckpt.convert_checkpoint('flax', source, tmp_path / 'run', t5ckpt.ConvertOptions(step=number))
        assert_same(flatten_dict(t5ckpt.load_t5x_checkpoint(tmp_path / 'run', step=number)), expected)
    assert_same(flatten_dict(t5ckpt.load_t5x_checkpoint(single)), expected)
    # A leaf in a file that the index does not name for it.
    stray = unflatten_dict({**weights, 'shared/embedding': weights['shared/embedding'] * 0}, sep='/')
    (model / files['encoder/block/0/kernel']).write_bytes(flax.serialization.to_bytes(stray))
    t5ckpt.convert_checkpoint('flax', model, tmp_path / 'run', t5ckpt.ConvertOptions(step=9))
    assert_same(flatten_dict(t5ckpt.load_t5x_checkpoint(tmp_path / 'run', step=9)), expected)
    for part in (t5ckpt.load_t5x_checkpoint, lambda path: t5ckpt.convert_checkpoint('flax', path, tmp_path / 'no')):
        with pytest.raises(errors.UnsupportedFormatError, match='is one of 2 files of a model'):
            part(model / files['shared/embedding'])
    with pytest.raises(errors.CheckpointNotFoundError, match=r"convert_checkpoint\('flax', path, directory\)"):
        t5ckpt.load_t5x_checkpoint(model)
    index.write_text(json.dumps({'weight_map': {**files, 'more/kernel': files['shared/embedding']}}))
    with pytest.raises(errors.CorruptCheckpointError, match='the files lack more/kernel in flax_model-00001'):
        t5ckpt.convert_checkpoint('flax', model, tmp_path / 'no')
    (model / files['shared/embedding']).unlink()
    with pytest.raises(errors.T5CkptError, match='flax_model-00001-of-00002'):
        t5ckpt.convert_checkpoint('flax', model, tmp_path / 'no')
    assert not (tmp_path / 'no').exists()


def test_a_leaf_that_no_checkpoint_holds_is_left_out_by_the_cure(tmp_path):
    path, w = tmp_path / 'state.msgpack', np.ones(3, np.float32)
    path.write_bytes(flax.serialization.msgpack_serialize({'w': w, 'tokenizer': b'\x00'}))
    with pytest.raises(errors.UnsupportedLeafError, match=r'tokenizer: bytes .* t5ckpt cp --drop'):
        t5ckpt.convert_checkpoint('flax', path, tmp_path / 'run', t5ckpt.ConvertOptions(step=1))
    t5ckpt_cli('cp', path, tmp_path / 'run', '--drop', 'tokenizer', '--as-step', 1)
    np.testing.assert_array_equal(t5ckpt.load_t5x_checkpoint(tmp_path / 'run')['w'], w)


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
