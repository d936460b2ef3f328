"""jax.Arrays whose memory somebody else may write to: what is saved is what was there when save was called."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import t5ckpt
from t5ckpt.reading.aligned_memory import aligned_empty

SIZE = 200_000


class Duck:
    """An array by its looks, whose values are its owner's."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype

    def __array__(self, dtype=None, copy=None):
        return self.values


def sharded(values):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:4]), ('x',)), PartitionSpec('x'))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def composed(values):
    """Made of arrays that alias the values, one a device."""
    whole = sharded(values)
    parts = [shard.data for shard in whole.addressable_shards]
    return jax.make_array_from_single_device_arrays(values.shape, whole.sharding, parts)


MADE = {
    'device_put': jax.device_put,
    'from_dlpack': jax.dlpack.from_dlpack,
    'asarray': jnp.asarray,
    'sharded': sharded,
    'composed': composed,
    'a view of it': lambda values: jax.device_put(values).addressable_data(0),
    'numpy': lambda values: values,
    'a view of numpy': lambda values: values[:],
    'a duck': Duck,
}


def values_of(size=SIZE):
    values = aligned_empty((size,), np.dtype(np.float32))
    values[:] = 1
    return values


@pytest.mark.parametrize('size', [100, SIZE])
@pytest.mark.parametrize('made', MADE)
def test_a_save_in_the_background_takes_the_values_of_its_call(tmp_path, made, size):
    values = values_of(size)
    leaf = MADE[made](values)
    template = {'w': np.zeros(size), 'first': np.zeros(SIZE)}
    with t5ckpt.Checkpointer(template, checkpoints_dir=tmp_path) as ck:
        pending = ck.save_async({'w': leaf, 'first': np.zeros(SIZE)}, step=1)
        values += 5
        pending.result()
    np.testing.assert_array_equal(t5ckpt.load_t5x_checkpoint(tmp_path)['w'], np.ones(size))


@pytest.mark.parametrize('compression', [None, 'zstd'])
@pytest.mark.parametrize('made', MADE)
def test_a_save_after_a_change_has_the_new_values(tmp_path, made, compression):
    values = values_of()
    leaf = MADE[made](values)
    with t5ckpt.Checkpointer(
        {'w': np.zeros(SIZE)}, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(compression=compression)
    ) as ck:
        for step in range(3):
            # JAX copies in asarray; numpy.asarray(leaf) would have it remember the values.
            wanted = np.ones(SIZE) if made == 'asarray' else values.copy()
            ck.save({'w': leaf}, step=step)
            np.testing.assert_array_equal(t5ckpt.load_t5x_checkpoint(tmp_path, step=step)['w'], wanted)
            values += 5


@pytest.mark.parametrize('compression', [None, 'zstd', 'auto'])
def test_an_alias_that_did_not_change_is_linked(tmp_path, compression):
    leaf = jax.device_put(values_of())
    with t5ckpt.Checkpointer(
        {'w': leaf}, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(compression=compression)
    ) as ck:
        for step in range(3):
            ck.save({'w': leaf}, step=step)
    assert len({(tmp_path / f'checkpoint_{step}/w/0').stat().st_ino for step in range(3)}) == 1
