"""Msgpack files of Flax: what comes out is what Flax itself reads."""

import json
import random

import flax.serialization
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from support.cli import t5ckpt_cli

import t5ckpt
from t5ckpt import errors

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


@pytest.mark.parametrize('piece', [2**30, 4000, 777])
def test_what_flax_wrote(tmp_path, piece):
    """Also arrays that Flax splits, because msgpack's lengths end at 2^32."""
    path = tmp_path / 'checkpoint_5'
    state = flax.serialization.to_state_dict(TREE)
    path.write_bytes(flax.serialization.msgpack_serialize(in_pieces(state, piece)))
    expected = flatten_dict(flax.serialization.msgpack_restore(path.read_bytes()), keep_empty_nodes=True)
    t5ckpt.convert_checkpoint('flax', path, tmp_path / 'run')
    for source in (path, tmp_path / 'run'):
        actual = flatten_dict(t5ckpt.load_t5x_checkpoint(source), keep_empty_nodes=True)
        assert_same({'/'.join(key): v for key, v in actual.items()}, {'/'.join(key): v for key, v in expected.items()})


def test_every_truncation_is_an_error(tmp_path):
    path = tmp_path / 'checkpoint_5'
    data = flax.serialization.to_bytes(TREE)
    rng = random.Random(1)
    for length in {0, 1, len(data) - 1, *(rng.randrange(len(data)) for _ in range(60))}:
        path.write_bytes(data[:length])
        with pytest.raises(errors.FormatError):
            t5ckpt.open_checkpoint(path)
    path.write_bytes(data + b'\0')
    with pytest.raises(
        errors.CorruptCheckpointError, match=r'does not decode .*it is truncated, or not a T5X manifest'
    ):
        t5ckpt.open_checkpoint(path)


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
    with pytest.raises(errors.CheckpointNotFoundError, match='t5ckpt convert flax'):
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
    with pytest.raises(errors.UnsupportedLeafError, match=r'tokenizer: bytes .* t5ckpt cp --leave'):
        t5ckpt.convert_checkpoint('flax', path, tmp_path / 'run', t5ckpt.ConvertOptions(step=1))
    t5ckpt_cli('cp', path, tmp_path / 'run', '--leave', 'tokenizer', '--as-step', 1)
    np.testing.assert_array_equal(t5ckpt.load_t5x_checkpoint(tmp_path / 'run')['w'], w)
