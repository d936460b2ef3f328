"""Saves while threads write to the leaves all the time: each step that a save returned restores and verifies.

Every element only grows, so a saved value lies between those of just before the call and just after it returned.
"""

import contextlib
import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.options import with_options

import t5ckpt

SIZE = 2**16
ALIGNMENT = 64


def buffer_of(size=SIZE, dtype=np.float32):
    """Zeros that begin where JAX on the CPU takes over the memory."""
    memory = np.zeros(size * np.dtype(dtype).itemsize + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : memory.size - ALIGNMENT + start].view(dtype)


def device_put(values):
    array = jax.device_put(values)
    assert array.unsafe_buffer_pointer() == values.ctypes.data
    return array


def sharded(values):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:4]), ('x',)), PartitionSpec('x'))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def lazy(values):
    return t5ckpt.LazyThreadPoolArray(values.shape, values.dtype, lambda: values, lambda index: values[index])


def lazy_whole(values):
    return t5ckpt.LazyThreadPoolArray(values.shape, values.dtype, lambda: values)


class Duck:
    """An array by its looks."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype

    def __array__(self, dtype=None, copy=None):
        return self.values


#: Each with the view of the buffer whose values it has.
LEAVES = {
    'numpy': (lambda values: values, lambda values: values),
    'in columns': (lambda values: values.reshape(-1, 64).T, lambda values: values.reshape(-1, 64).T),
    'every other': (lambda values: values[::2], lambda values: values[::2]),
    'device_put': (device_put, lambda values: values),
    'sharded': (sharded, lambda values: values),
    'duck': (Duck, lambda values: values),
    'inline': (lambda values: values[:50], lambda values: values[:50]),
    'scalar': (lambda values: values[:1].reshape(()), lambda values: values[:1].reshape(())),
    'lazy': (lazy, lambda values: values),
    'lazy whole': (lazy_whole, lambda values: values),
}


@contextlib.contextmanager
def written(*buffers):
    """Adds to the buffers, in two threads, until the block ends."""
    is_over = threading.Event()

    def write(part):
        while not is_over.is_set():
            for values in buffers:
                half = np.array_split(values, 2)[part]
                for start in range(0, half.size, SIZE // 16):
                    half[start : start + SIZE // 16] += 1

    threads = [threading.Thread(target=write, args=(part,)) for part in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@pytest.fixture(params=['disk', 's3'])
def place(request, tmp_path):
    return str(tmp_path / 'run') if request.param == 'disk' else request.getfixturevalue('s3').url()


def save_both_ways(ck, state, buffers, steps, **options):
    """Saves pairs of steps, blocking and not; the values before and after each call, by step."""
    taken = {}
    for step in range(0, steps, 2):
        before = [values.copy() for values in buffers]
        assert ck.save(state, step=step, **options) is not None
        between = [values.copy() for values in buffers]
        pending = ck.save_async(state, step=step + 1, **options)
        after = [values.copy() for values in buffers]
        assert pending.result() is not None
        taken |= {step: (before, between), step + 1: (between, after)}
    return taken


@pytest.mark.slow
@pytest.mark.parametrize('compression', [None, 'lz4', 'gzip'])
@pytest.mark.parametrize('concurrent_gb', [128, 0.0001])
def test_every_step_restores_and_verifies(place, compression, concurrent_gb):
    """Also in waves of a tenth of a megabyte, and with chunks that are linked or copied from the step before."""
    buffers = {name: buffer_of() for name in LEAVES}
    state = {name: LEAVES[name][0](values) for name, values in buffers.items()} | {'still': buffer_of()}
    template = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in state.items()}
    with t5ckpt.Checkpointer(
        template, checkpoints_dir=place, options=t5ckpt.CheckpointerOptions(compression=compression, chunk_bytes=2**16)
    ) as ck:
        with written(*buffers.values()):
            taken = save_both_ways(ck, state, list(buffers.values()), 4, concurrent_gb=concurrent_gb)
        for step, (before, after) in taken.items():
            assert t5ckpt.verify(place, step=step, full=True).ok
            restored = ck.restore(step)
            for number, name in enumerate(buffers):
                first, last = (LEAVES[name][1](values[number]) for values in (before, after))
                assert (restored[name] >= first).all(), name
                # A lazy array that is saved in the background is fetched there.
                assert 'lazy' in name or (restored[name] <= last).all(), name
            assert not restored['still'].any()


@pytest.mark.slow
@pytest.mark.parametrize('options', [{'save_dtype': 'bfloat16', 'cast_leaves': '.*'}, {'reuse_unchanged': False}])
def test_with_a_cast_and_without_reuse(place, options):
    buffers = {'numpy': buffer_of(), 'aliased': buffer_of()}
    state = {'numpy': buffers['numpy'], 'aliased': device_put(buffers['aliased'])}
    with t5ckpt.Checkpointer(state, checkpoints_dir=place, **with_options(chunk_bytes=2**16, **options)) as ck:
        with written(*buffers.values()):
            taken = save_both_ways(ck, state, list(buffers.values()), 6)
        for step in taken:
            assert t5ckpt.verify(place, step=step, full=True).ok
            ck.restore(step)


def test_large_files_that_bypass_the_page_cache(tmp_path):
    """They are written with O_DIRECT, from memory that is aligned as theirs."""
    values = buffer_of(2**22)
    state = {'numpy': values, 'aliased': device_put(values)}
    options = {'storage_options': {'direct_bytes': 1}}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, **with_options(**options)) as ck, written(values):
        taken = save_both_ways(ck, state, [values], 4)
    for step, ([before], [after]) in taken.items():
        assert t5ckpt.verify(tmp_path, step=step, full=True).ok
        for saved in t5ckpt.load_t5x_checkpoint(tmp_path, step=step).values():
            assert (before <= saved).all()
            assert (saved <= after).all()
