"""npz files read in place: each array is a range of bytes of the file."""

import contextlib
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import serialization
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file
from support import partitioner
from support.cli import t5ckpt_cli

import t5ckpt
from t5ckpt import errors

ARRAYS = {
    'params/w': np.arange(64 * 48, dtype=np.float32).reshape(64, 48),
    'params/b': np.arange(5, dtype=np.int8),
    'params/none': np.zeros((0, 3), np.float16),
    'step': np.int64(7),
}


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    np.savez(tmp_path / 'x.npz', **ARRAYS)
    return tmp_path / 'x.npz'


def test_a_view_reads_each_array_and_slices_of_it(file):
    view = t5ckpt.open_checkpoint(file)
    assert set(view) == set(ARRAYS)
    for name, values in ARRAYS.items():
        np.testing.assert_array_equal(view[name][...], values, strict=True)
    np.testing.assert_array_equal(view['params/w'][3:5, ::7], ARRAYS['params/w'][3:5, ::7])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_numpy_writes_is_what_is_read(tmp_path_factory, data):
    dtypes = (
        hnp.boolean_dtypes()
        | hnp.integer_dtypes(endianness='<')
        | hnp.floating_dtypes(endianness='<', sizes=(16, 32, 64))
    )
    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
    arrays = data.draw(st.dictionaries(st.sampled_from('abcde'), hnp.arrays(dtypes, shapes), min_size=1))
    file = tmp_path_factory.mktemp('npz') / 'x.npz'
    np.savez(file, **arrays)
    state = t5ckpt.load_t5x_checkpoint(file)
    assert state.keys() == arrays.keys()
    for name, values in arrays.items():
        np.testing.assert_array_equal(state[name], values, strict=True)


def test_dtypes_that_npz_lacks_come_back_as_exported(tmp_path):
    state = {
        'w': np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
        'q': np.arange(4).astype(ml_dtypes.int4),
        'f': np.ones(3, ml_dtypes.float8_e4m3fn),
        'step': np.int32(3),
    }
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run').save(state)
    t5ckpt.export_npz(tmp_path / 'run', tmp_path / 'out.npz')
    view = t5ckpt.open_checkpoint(tmp_path / 'out.npz')
    for name, values in state.items():
        np.testing.assert_array_equal(view[name][...], values, strict=True)


def test_a_restore_places_the_parts_on_devices(file):
    sharding = NamedSharding(partitioner.mesh((4,), ('x',)), PartitionSpec(None, 'x'))
    template = {
        'params': {
            'w': jax.ShapeDtypeStruct((64, 48), jnp.float32, sharding=sharding),
            'b': np.zeros(5, np.int8),
            'none': np.zeros((0, 3), np.float16),
        },
        'step': 0,
    }
    restored = t5ckpt.Checkpointer(template, checkpoints_dir=file.parent / 'run').restore(path=file)
    assert restored['params']['w'].sharding == sharding
    np.testing.assert_array_equal(restored['params']['w'], ARRAYS['params/w'])
    assert restored['step'] == 7


@pytest.mark.parametrize(
    ('save', 'reason'),
    [
        (lambda path: np.savez_compressed(path, w=np.ones((2, 3)), v=np.ones(2)), 'w is compressed'),
        (lambda path: np.savez(path, w=np.asfortranarray(np.ones((2, 3)))), 'w is in Fortran order'),
        (lambda path: np.savez(path, w=np.arange(3, dtype='>i4')), 'w is big-endian'),
        (lambda path: np.savez(path, w=np.array(['text'])), r'w \(<U4\)'),
        (lambda path: np.savez(path, w=np.array([{}], object)), r'w \(object\)'),
    ],
)
def test_an_array_that_cannot_be_read_in_place_is_named(tmp_path, save, reason):
    save(tmp_path / 'x.npz')
    with pytest.raises(errors.UnsupportedFormatError, match=reason):
        t5ckpt.open_checkpoint(tmp_path / 'x.npz')


def test_an_array_that_numpy_writes_and_does_not_read(tmp_path, caplog):
    np.savez(tmp_path / 'x.npz', a=np.ones(3, ml_dtypes.float8_e5m2), b=np.arange(3))
    np.testing.assert_array_equal(t5ckpt.open_checkpoint(tmp_path / 'x.npz')['b'][...], np.arange(3))
    assert "left out: a ('<f1')" in caplog.text


@pytest.mark.parametrize('name', ['x.npz', 'x.safetensors', 'x.safetensors.index.json'])
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
    (tmp_path / name).write_text(f'version https://git-lfs.github.com/spec/v1\noid sha256:{"0" * 64}\nsize 12345\n')
    with pytest.raises(errors.UnsupportedFormatError, match='pointer of Git LFS'):
        t5ckpt.open_checkpoint(tmp_path / name)


def test_two_names_of_one_place_are_an_error(tmp_path):
    np.savez(tmp_path / 'x.npz', **{'a': np.ones(1), 'a/b': np.ones(1)})
    with pytest.raises(errors.UnsupportedFormatError, match='a/b'):
        t5ckpt.open_checkpoint(tmp_path / 'x.npz')


@pytest.mark.parametrize('at', range(0, 1800, 37))
def test_a_damaged_file_is_an_error_of_ours_or_has_the_right_shapes(tmp_path, at):
    np.savez(tmp_path / 'x.npz', w=np.arange(100.0), v=np.ones((3, 3), np.int8))
    data = bytearray((tmp_path / 'x.npz').read_bytes())
    data[at % len(data)] ^= 0x55
    (tmp_path / 'x.npz').write_bytes(data)
    state = {}
    with contextlib.suppress(errors.CorruptCheckpointError, errors.UnsupportedFormatError):
        state = t5ckpt.load_t5x_checkpoint(tmp_path / 'x.npz')
    # zip keeps a checksum of each member, which a read in place does not compare.
    assert all(values.nbytes == {'w': 800, 'v': 9}.get(name, values.nbytes) for name, values in state.items())


def test_a_file_that_is_cut_off_is_damaged(file):
    data = file.read_bytes()
    for length in (0, 10, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(errors.CorruptCheckpointError, match=r'x\.npz'):
            t5ckpt.open_checkpoint(file)


def test_a_replaced_file_is_noticed(file):
    view = t5ckpt.open_checkpoint(file)
    np.savez(file.with_name('y.npz'), **ARRAYS | {'params/b': np.zeros(5, np.int8)})
    shutil.move(file.with_name('y.npz'), file)
    with pytest.raises(errors.CheckpointNotFoundError, match='was replaced while it was being read'):
        _ = view['params/w'][...]


def test_a_bucket_says_to_copy_the_file(bucket, file):
    url = bucket.url()
    bucket.put(f'{url}/x.npz', file.read_bytes())
    with pytest.raises(errors.UnsupportedFormatError, match='Copy it to a disk'):
        t5ckpt.open_checkpoint(f'{url}/x.npz')


def test_the_command_line_shows_it(file):
    assert 'params' in t5ckpt_cli('show', file)
    assert t5ckpt_cli('cat', file, 'params/b[1:3]').strip() == '[1 2]'
    assert 'params/w' in t5ckpt_cli('stats', file)
    assert '4 the same' in t5ckpt_cli('diff', file, file)


@pytest.mark.parametrize('name', ['x.npz', 'x.safetensors', 'x.msgpack'])
def test_a_link_that_is_the_path_itself_is_followed(tmp_path, name):
    """As in the cache of Hugging Face, where each file is a link to a blob."""
    arrays = {'w': np.arange(3, dtype=np.float32)}
    np.savez(tmp_path / 'blob.npz', **arrays)
    save_file(arrays, tmp_path / 'blob.safetensors')
    (tmp_path / 'blob.msgpack').write_bytes(serialization.to_bytes(arrays))
    (tmp_path / 'snapshot').mkdir()
    path = tmp_path / 'snapshot' / name
    path.symlink_to(f'../blob{path.suffix}')
    np.testing.assert_array_equal(t5ckpt.open_checkpoint(path)['w'][...], arrays['w'])
    restored = t5ckpt.Checkpointer({'w': np.zeros(3, np.float32)}, checkpoints_dir=tmp_path / 'run').restore(path=path)
    np.testing.assert_array_equal(restored['w'], arrays['w'])
