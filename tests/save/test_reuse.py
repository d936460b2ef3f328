"""Unchanged arrays are linked, chosen codecs pay, and every checkpoint stands by itself."""

import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.states import key_of

import t5ckpt
from t5ckpt.format.codecs import BIT_LZ4, BIT_ZSTD
from t5ckpt.save.encoding import CodecSelection, beginning_of
from t5ckpt.storage.open import open_storage


def state_of(head):
    return {'frozen': {'w': jnp.arange(100_000, dtype=jnp.float32)}, 'head': jnp.full((50_000,), head, jnp.float32)}


def inode(run, step, name):
    return os.stat(run / f'checkpoint_{step}' / name).st_ino


@pytest.mark.parametrize('compression', [None, 'zstd', 'auto'])
def test_the_same_array_is_linked(tmp_path, compression):
    frozen = state_of(0)['frozen']
    ck = t5ckpt.Checkpointer(
        state_of(0), checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(compression=compression)
    )
    for step in range(3):
        ck.save({'frozen': frozen, 'head': jnp.full((50_000,), step, jnp.float32)}, step=step)
    assert len({inode(tmp_path, step, 'frozen.w/0') for step in range(3)}) == 1
    assert len({inode(tmp_path, step, 'head/0') for step in range(3)}) == 3
    shutil.rmtree(tmp_path / 'checkpoint_0')
    for step in (1, 2):
        assert np.array_equal(ck.restore(step=step)['head'], np.full(50_000, step))
        assert np.array_equal(ck.restore(step=step)['frozen']['w'], np.arange(100_000))


@pytest.mark.parametrize('compression', [None, 'zstd'])
@pytest.mark.parametrize('index', [0, -1])
def test_a_chunk_with_one_changed_value_is_written(tmp_path, compression, index):
    values = np.arange(200_000, dtype=np.float32)
    with t5ckpt.Checkpointer(
        {'x': values}, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(compression=compression)
    ) as ck:
        for step in range(3):
            values[index] = step
            ck.save({'x': values}, step=step)
            assert np.array_equal(ck.restore()['x'], values)
    assert len({inode(tmp_path, step, 'x/0') for step in range(3)}) == 3


def test_equal_values_are_linked_across_a_donating_step_and_a_restart(tmp_path):
    step_fn = jax.jit(lambda s: {**s, 'head': s['head'] + 1}, donate_argnums=0)
    state = state_of(0)
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path).save(state, step=0)
    state = step_fn(state)
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path).save(state, step=1)
    assert inode(tmp_path, 0, 'frozen.w/0') == inode(tmp_path, 1, 'frozen.w/0')
    assert inode(tmp_path, 0, 'head/0') != inode(tmp_path, 1, 'head/0')
    assert np.array_equal(t5ckpt.load_t5x_checkpoint(tmp_path, 1)['head'], np.ones(50_000))


def test_opting_out(tmp_path):
    state = state_of(0)
    ck = t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(reuse_unchanged=False))
    for step in range(2):
        ck.save(state, step=step)
    assert inode(tmp_path, 0, 'head/0') != inode(tmp_path, 1, 'head/0')


@pytest.mark.slow
@pytest.mark.parametrize('damage', ['gone', 'truncated', 'flipped', 'symbolic link', 'zarray', 'directory gone'])
def test_a_damaged_previous_checkpoint_is_written_anew(tmp_path, damage):
    state = state_of(5)
    ck = t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path)
    ck.save(state, step=0)
    chunk = tmp_path / 'checkpoint_0' / 'frozen.w' / '0'
    if damage == 'gone':
        chunk.unlink()
    elif damage == 'truncated':
        os.truncate(chunk, 17)
    elif damage == 'flipped':
        contents = bytearray(chunk.read_bytes())
        contents[1000] ^= 4
        chunk.write_bytes(contents)
    elif damage == 'symbolic link':
        os.rename(chunk, tmp_path / 'elsewhere')
        chunk.symlink_to(tmp_path / 'elsewhere')
    elif damage == 'zarray':
        zarray = chunk.with_name('.zarray')
        zarray.write_text(zarray.read_text().replace('"order":"C"', '"order":"F"'))
    else:
        shutil.rmtree(tmp_path / 'checkpoint_0')
    ck.save(state, step=1)
    (tmp_path / 'elsewhere').unlink(missing_ok=True)
    assert np.array_equal(ck.restore(step=1)['frozen']['w'], np.arange(100_000))
    assert '"order":"C"' in (tmp_path / 'checkpoint_1' / 'frozen.w' / '.zarray').read_text()


def test_another_layout_is_not_linked(tmp_path):
    state = state_of(0)
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path).save(state, step=0)
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(chunk_bytes=40_000)).save(
        state, step=1
    )
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(compression='zstd')).save(
        state, step=2
    )
    for step in range(3):
        assert np.array_equal(t5ckpt.load_t5x_checkpoint(tmp_path, step)['frozen']['w'], np.arange(100_000))


def test_auto_compresses_what_pays():
    """Weights and optimizer states become smaller than the codecs of other checkpointers make them; noise stays plain."""
    rng = np.random.default_rng(0)
    weights = 0.02 * rng.standard_normal(300_000, dtype=np.float32)
    state = {
        'noise': rng.integers(0, 256, 1_200_000, np.uint8),
        'float32': weights,
        'bfloat16': weights.astype(jnp.bfloat16),
        'master': weights.astype(jnp.bfloat16).astype(np.float32),
        'moment': np.square(weights) * rng.random(300_000, dtype=np.float32),
        'zeros': np.zeros(300_000, np.float32),
        'tiny': np.zeros(3),
        'four': np.zeros(100_000, jnp.int4),
    }
    url = 'memory://auto'
    with t5ckpt.Checkpointer(state, checkpoints_dir=url, options=t5ckpt.CheckpointerOptions(compression='auto')) as ck:
        ck.save(state, step=0)
    storage, sizes = open_storage(url), {}
    for name in state.keys() - {'tiny'}:
        codec = json.loads(storage.read(key_of(storage, f'/{name}/.zarray', 'checkpoint_0')))['compressor']
        assert (codec is None) == (name == 'noise')
        sizes[name] = storage.size(key_of(storage, f'/{name}/0', 'checkpoint_0')) / state[name].nbytes
    limits = {'float32': 0.9, 'bfloat16': 0.8, 'master': 0.42, 'moment': 0.9, 'zeros': 0.01, 'four': 0.01, 'noise': 1}
    assert all(size <= limits[name] for name, size in sizes.items()), sizes
    loaded = t5ckpt.load_t5x_checkpoint(url)
    assert all(np.array_equal(loaded[name], state[name]) for name in state)


@pytest.mark.slow
@pytest.mark.parametrize('shape', [(1, 1, 4096, 256), (3, 5, 7), (10**6,), (1, 10**6), (0, 4), ()])
@pytest.mark.parametrize('limit', [10, 4096, 2**30])
@pytest.mark.parametrize('library', [np, jnp])
def test_a_sample_is_small_and_a_copy(shape, limit, library):
    """Also of a shard with one row, such as one expert's or one layer's."""
    data = library.ones(shape, np.float32)
    sample = beginning_of(data, limit)
    assert sample.ndim == data.ndim
    assert sample.nbytes <= max(4, min(limit, 2**18))
    assert sample.nbytes > 0 or data.nbytes == 0
    assert sample is not data
    assert library is jnp or not np.shares_memory(sample, data)


def selection(tmp_path, rate):
    chosen = CodecSelection(open_storage(tmp_path))
    chosen.measured(2**26, 2**26 / rate)
    return chosen


def test_the_sample_looks_past_the_beginning(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, 10**6, np.uint8)
    assert selection(tmp_path, 1e8).choose(noise) is None
    assert selection(tmp_path, 1e8).choose(np.concatenate([noise, np.zeros(10**6, np.uint8)])) is not None
    assert selection(tmp_path, 1e8).choose(np.zeros((3, 0), np.float32)) is None


def test_the_storage_decides_what_pays(tmp_path):
    """Storage that takes bytes faster than a codec makes them gets plain ones; for slow storage the smallest are chosen."""
    weights = np.random.default_rng(0).standard_normal(100_000, dtype=np.float32)
    assert selection(tmp_path, 1e12).choose(weights) is None
    assert selection(tmp_path, 1e7).choose(weights) == BIT_LZ4
    assert selection(tmp_path, 1e7).choose(1.1 * weights.astype(np.float64)) == BIT_ZSTD


def test_a_codec_is_kept_until_another_is_far_better(tmp_path):
    doubles = 1.1 * np.random.default_rng(0).standard_normal(100_000, dtype=np.float32).astype(np.float64)
    assert selection(tmp_path, 1e7).choose(doubles, BIT_LZ4) == BIT_LZ4
    assert selection(tmp_path, 1e12).choose(doubles, BIT_LZ4) is None
    half = np.where(np.arange(100_000) % 1000 < 500, 0, doubles)
    assert selection(tmp_path, 1e7).choose(half, {'id': 'gzip', 'level': 1}) == selection(tmp_path, 1e7).choose(half)


def test_the_rate_is_that_of_the_last_saves(tmp_path):
    """Small saves measure requests, not bytes."""
    found = CodecSelection(open_storage(tmp_path))
    typical = found.rate
    found.measured(1000, 10)
    assert found.rate == typical
    for _ in range(20):
        found.measured(10**9, 10)
    assert found.rate == pytest.approx(1e8)
    found.measured(10**9, 1)
    found.measured(10**9, 1)
    assert 1.5e8 < found.rate < 1e9
    assert CodecSelection(open_storage('memory://rates')).rate < typical


@pytest.mark.parametrize('compression', ['zstd', 'gzip', 'lz4'])
def test_encoded_chunks_are_linked_after_a_restart(tmp_path, compression):
    """The codec is that of the previous checkpoint, so equal values give equal files."""
    values = np.random.default_rng(0).standard_normal((512, 256)).astype(jnp.bfloat16)
    state = {'w': values.astype(np.float32), 'zeros': np.zeros(100_000, np.float32)}
    for step in range(3):
        with t5ckpt.Checkpointer(
            state, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(compression=compression)
        ) as ck:
            ck.save(state, step=step)
    for name in ('w/0.0', 'zeros/0'):
        assert len({inode(tmp_path, step, name) for step in range(3)}) == 1, name


def test_untouched_files_are_not_read_again(tmp_path):
    """Within one process a file that nobody changed since its write is linked by its stamp alone."""
    frozen = jax.device_put(np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32))

    def read_so_far() -> int:
        return int(pathlib.Path('/proc/self/io').read_text().splitlines()[0].split()[1])

    with t5ckpt.Checkpointer({'w': frozen}, checkpoints_dir=tmp_path) as ck:
        ck.save({'w': frozen}, step=1)
        before = read_so_far()
        ck.save({'w': frozen}, step=2)
        assert read_so_far() - before < 100_000
        before = read_so_far()
        os.utime(tmp_path / 'checkpoint_2' / 'w' / '0.0')
        ck.save({'w': frozen}, step=3)
        assert read_so_far() - before > frozen.nbytes
        # Other bytes under the old time: whoever copies in place and keeps the times does that.
        chunk = tmp_path / 'checkpoint_3' / 'w' / '0.0'
        info = chunk.stat()
        with chunk.open('r+b') as file:
            file.write(bytes(64))
        os.utime(chunk, ns=(info.st_atime_ns, info.st_mtime_ns))
        ck.save({'w': frozen}, step=4)
        np.testing.assert_array_equal(t5ckpt.load_t5x_checkpoint(tmp_path, step=4)['w'], frozen)
    assert len({(tmp_path / f'checkpoint_{step}' / 'w' / '0.0').stat().st_ino for step in (1, 2, 3)}) == 1
