"""Selections of the weights of Flax NNX: parameters and batch statistics, without RNG streams."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.bits import assert_same

import t5ckpt


class Model(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(params=seed, dropout=seed + 1, noise=seed + 2)
        self.hidden = nnx.Linear(8, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.rngs = rngs
        self.noise = rngs.noise.fork()
        # Not a stream: parameters called key and count.
        self.memory = nnx.Dict(key=nnx.Param(jnp.ones(3)), count=nnx.Param(jnp.ones(2)))


WEIGHTS = {
    *(f'params/hidden/{name}/value' for name in ('kernel', 'bias')),
    *(f'params/norm/{name}/value' for name in ('scale', 'bias', 'mean', 'var')),
    *(f'params/memory/{name}/value' for name in ('key', 'count')),
}


def objects(seed):
    model = Model(seed)
    return {'params': model, 'opt_state': nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)}


def test_a_warm_start_takes_the_weights_and_not_the_streams(tmp_path):
    old = nnx.state(objects(0))
    with t5ckpt.Checkpointer(old, checkpoints_dir=tmp_path / 'old') as ck:
        ck.save(old, step=3)
    new = nnx.state(objects(10))
    start = t5ckpt.WarmStart(tmp_path / 'old', take=t5ckpt.MODEL)
    with t5ckpt.Checkpointer(new, checkpoints_dir=tmp_path / 'new') as ck:
        state = t5ckpt.restore_or_init(ck, lambda: new, initial_checkpoint=start)
    assert_same(
        np.asarray(state['params']['hidden']['kernel'][...]), np.asarray(old['params']['hidden']['kernel'][...])
    )
    for source in (new, state):
        key = source['params']['rngs']['dropout']['key'][...]
        assert_same(
            np.asarray(jax.random.key_data(key)),
            np.asarray(jax.random.key_data(new['params']['rngs']['dropout']['key'][...])),
        )


@pytest.mark.parametrize(
    ('name', 'is_weight'),
    [
        ('params/dense/kernel', True),
        ('target/encoder/layers_0/kernel', True),
        ('params/attention/key/kernel/value', True),
        ('params/memory/key/value', True),
        ('params/rngs/kernel', True),
        ('params/dropout/rngs/key/value', False),
        ('params/dropout/rngs/count', False),
        ('params/rngs/params/key/value', False),
        ('opt_state/mu', False),
    ],
)
def test_names_that_the_pattern_of_the_model_matches(name, is_weight):
    assert bool(re.fullmatch(t5ckpt.MODEL, name)) == is_weight
