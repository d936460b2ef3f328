"""Unchanged arrays are linked, chosen codecs pay, and every checkpoint stands by itself."""

import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import t5ckpt
from t5ckpt.save.codec_selection import choose_codec


def state_of(head):
    return {'frozen': {'w': jnp.arange(100_000, dtype=jnp.float32)}, 'head': jnp.full((50_000,), head, jnp.float32)}


def inode(run, step, name):
    return os.stat(run / f'checkpoint_{step}' / name).st_ino


@pytest.mark.parametrize('compression', [None, 'zstd', 'auto'])
def test_the_same_array_is_linked(tmp_path, compression):
    frozen = state_of(0)['frozen']
    ck = t5ckpt.Checkpointer(state_of(0), checkpoints_dir=tmp_path, compression=compression)
    for step in range(3):
        ck.save({'frozen': frozen, 'head': jnp.full((50_000,), step, jnp.float32)}, step=step)
    assert len({inode(tmp_path, step, 'frozen.w/0') for step in range(3)}) == 1
    assert len({inode(tmp_path, step, 'head/0') for step in range(3)}) == 3
    shutil.rmtree(tmp_path / 'checkpoint_0')
    for step in (1, 2):
        assert np.array_equal(ck.restore(step=step)['head'], np.full(50_000, step))
        assert np.array_equal(ck.restore(step=step)['frozen']['w'], np.arange(100_000))


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
    ck = t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, reuse_unchanged=False)
    for step in range(2):
        ck.save(state, step=step)
    assert inode(tmp_path, 0, 'head/0') != inode(tmp_path, 1, 'head/0')


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
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, chunk_bytes=40_000).save(state, step=1)
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, compression='zstd').save(state, step=2)
    for step in range(3):
        assert np.array_equal(t5ckpt.load_t5x_checkpoint(tmp_path, step)['frozen']['w'], np.arange(100_000))


def test_auto_compresses_only_what_pays(tmp_path):
    rng = np.random.default_rng(0)
    state = {
        'noise': rng.standard_normal(200_000, dtype=np.float32),
        'zeros': np.zeros(200_000, np.float32),
        'bf16': rng.standard_normal(200_000).astype(jnp.bfloat16),
        'half': np.concatenate([np.zeros(300_000, np.float32), rng.standard_normal(100_000, dtype=np.float32)]),
        'tiny': np.zeros(3),
        'four': np.zeros(100_000, jnp.int4),
    }
    ck = t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, compression='auto')
    ck.save(state, step=0)
    used = {}
    for name in state:
        zarray = tmp_path / 'checkpoint_0' / name / '.zarray'
        used[name] = zarray.exists() and '"zstd"' in zarray.read_text()
    assert used == {'noise': False, 'zeros': True, 'bf16': False, 'half': True, 'tiny': False, 'four': True}
    loaded = t5ckpt.load_t5x_checkpoint(tmp_path)
    assert all(np.array_equal(loaded[name], state[name]) for name in state)


def test_the_sample_looks_past_the_beginning():
    late = np.concatenate(
        [np.zeros(70_000, np.float32), np.random.default_rng(0).standard_normal(10**6, dtype=np.float32)]
    )
    assert choose_codec(late) is None
    assert choose_codec(np.zeros((3, 0), np.float32)) is None


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
