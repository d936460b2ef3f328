"""jax.Arrays whose memory somebody else may write to: what is saved is what was there when save was called."""

import threading

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
    with t5ckpt.Checkpointer({'w': np.zeros(SIZE)}, checkpoints_dir=tmp_path, compression=compression) as ck:
        for step in range(3):
            # JAX copies in asarray; numpy.asarray(leaf) would have it remember the values.
            wanted = np.ones(SIZE) if made == 'asarray' else values.copy()
            ck.save({'w': leaf}, step=step)
            np.testing.assert_array_equal(t5ckpt.load_t5x_checkpoint(tmp_path, step=step)['w'], wanted)
            values += 5


@pytest.mark.parametrize('compression', [None, 'zstd', 'auto'])
def test_an_alias_that_did_not_change_is_linked(tmp_path, compression):
    leaf = jax.device_put(values_of())
    with t5ckpt.Checkpointer({'w': leaf}, checkpoints_dir=tmp_path, compression=compression) as ck:
        for step in range(3):
            ck.save({'w': leaf}, step=step)
    assert len({(tmp_path / f'checkpoint_{step}/w/0').stat().st_ino for step in range(3)}) == 1


def lazy(values):
    """A LazyArray over a buffer that changes; it can be sliced."""
    return t5ckpt.LazyThreadPoolArray(values.shape, values.dtype, lambda: values, lambda index: values[index])


def lazy_whole(values):
    return t5ckpt.LazyThreadPoolArray(values.shape, values.dtype, lambda: values)


WRITTEN = {name: MADE[name] for name in ('device_put', 'sharded', 'composed', 'numpy')} | {
    'lazy': lazy,
    'lazy_whole': lazy_whole,
    'another order': lambda values: values.reshape(-1, 4).T,
}


@pytest.mark.parametrize('compression', [None, 'lz4'])
@pytest.mark.parametrize('made', WRITTEN)
def test_what_another_thread_writes_to_is_saved_as_it_was_at_one_time(tmp_path, made, compression):
    """Each step that a save returned restores and verifies, also those with chunks of the step before."""
    values = values_of(2**20)
    is_over = threading.Event()

    def write():
        while not is_over.is_set():
            for start in range(0, values.size, 2**17):
                values[start : start + 2**17] += 1

    leaf = WRITTEN[made](values)
    state, template = {'w': leaf}, {'w': np.zeros(leaf.shape, np.float32)}
    thread = threading.Thread(target=write)
    thread.start()
    try:
        with t5ckpt.Checkpointer(template, checkpoints_dir=tmp_path, compression=compression, chunk_bytes=2**21) as ck:
            for step in range(0, 8, 2):
                assert ck.save(state, step=step) is not None
                assert ck.save_async(state, step=step + 1).result() is not None
    finally:
        is_over.set()
        thread.join()
    for step in range(8):
        assert t5ckpt.verify(tmp_path, step=step, full=True).ok
        t5ckpt.load_t5x_checkpoint(tmp_path, step=step)
