"""Restore transformations that take the state apart and put it together again."""

import copy
import itertools

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import core, nnx, serialization, traverse_util
from safetensors.numpy import save_file

import t5ckpt
from t5ckpt import Checkpointer, errors


def _copied(state):
    """As users write it, by the type."""
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in state.items()}


REBUILT = {
    'flatten_dict': lambda state: traverse_util.unflatten_dict(traverse_util.flatten_dict(state)),
    'flatten_dict with names': lambda state: traverse_util.unflatten_dict(
        traverse_util.flatten_dict(state, sep='.'), sep='.'
    ),
    'flatten_mapping': lambda state: nnx.traversals.unflatten_mapping(nnx.traversals.flatten_mapping(state)),
    'nnx.State': nnx.State,
    'freeze': core.freeze,
    'unfreeze': lambda state: core.unfreeze(core.freeze(state)),
    'a copy by hand': _copied,
    'deepcopy': copy.deepcopy,
    'copies of the leaves': lambda state: jax.tree.map(copy.copy, state),
    'jax.tree.map': lambda state: jax.tree.map(lambda leaf: leaf, state),
    'to_state_dict': serialization.to_state_dict,
}


OF_OTHERS = itertools.product(('a copy by hand', 'deepcopy'), ('orbax', 'safetensors'))


@pytest.mark.slow
@pytest.mark.parametrize(('how', 'layout'), [*((how, 't5x') for how in REBUILT), *OF_OTHERS])
def test_a_transformation_may_rebuild_the_dicts(tmp_path, how, layout):
    """A stored array is one leaf to every function, and what is known of it (the kind of its keys) stays with it."""
    large = np.arange(20_000, dtype=np.float32)
    state = {'params': {'w': large, 'b': np.ones(3, np.float32)}}
    if layout != 'safetensors':
        state['rng'] = jax.random.split(jax.random.key(0, impl='unsafe_rbg'), 2_000)
    if layout == 't5x':
        state['seed'] = 7
        Checkpointer(state, checkpoints_dir=tmp_path).save(state, step=1)
        path = tmp_path / 'checkpoint_1'
    elif layout == 'orbax':
        path = tmp_path / 'orbax'
        with ocp.StandardCheckpointer() as writer:
            writer.save(path, state)
    else:
        path = tmp_path / 'weights.safetensors'
        save_file({f'params/{name}': value for name, value in state['params'].items()}, path)
    template = {'params': jax.tree.map(np.zeros_like, state['params'])}
    if 'seed' in state:
        template['seed'] = 0
    if 'rng' in state:
        template['rng'] = jax.random.split(jax.random.key(1, impl='unsafe_rbg'), 2_000)
    restored = Checkpointer(template, checkpoints_dir=tmp_path / 'new').restore(
        path=path, state_transformation_fns=[lambda checkpoint, _: REBUILT[how](checkpoint)]
    )
    np.testing.assert_array_equal(restored['params']['w'], large)
    if 'rng' in state:
        np.testing.assert_array_equal(jax.random.key_data(restored['rng']), jax.random.key_data(state['rng']))
    assert restored.get('seed') == state.get('seed')
    loaded = t5ckpt.load_t5x_checkpoint(path, state_transformation_fns=[lambda checkpoint, _: REBUILT[how](checkpoint)])
    np.testing.assert_array_equal(loaded['params']['w'], large)


def test_an_array_of_another_checkpoint_is_refused(tmp_path):
    """Its place is relative, so it would be read from this one."""
    for name, value in (('one', 1), ('two', 2)):
        state = {'w': np.full(20_000, value, np.float32)}
        Checkpointer(state, checkpoints_dir=tmp_path / name).save(state, step=1)
    held = []
    t5ckpt.load_t5x_checkpoint(tmp_path / 'two', state_transformation_fns=[lambda s, _: held.append(s['w']) or s])
    with pytest.raises(errors.UnsupportedFormatError, match='w: a state transformation put an array of another'):
        t5ckpt.load_t5x_checkpoint(tmp_path / 'one', state_transformation_fns=[lambda s, _: {'w': held[0]}])
