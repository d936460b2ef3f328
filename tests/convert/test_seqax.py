"""seqax's layout: read what zarr-python wrote as seqax does, write what zarr-python reads, and everything in between."""

import importlib.util
import itertools
import json
import os
import pathlib
import shutil
import tarfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec as P
from support import partitioner
from support.bits import assert_same
from support.golden import TESTDATA

import t5ckpt
from t5ckpt import errors
from t5ckpt.convert.seqax import read_seqax, seqax_steps, write_seqax
from t5ckpt.storage import open_storage
from t5ckpt.testing import FaultyStorage


@pytest.fixture
def seqax(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run that zarr-python wrote: steps 100 and 200, and 300, which has no end."""
    with tarfile.open(TESTDATA / 'seqax_run.tar.gz') as archive:
        archive.extractall(tmp_path, filter='data')
    return tmp_path / 'seqax' / 'run'


def expected(run: pathlib.Path) -> dict[str, np.ndarray]:
    """By keystr name."""
    with np.load(run.parent / 'expected.npz') as archive:
        return {name: archive[name] for name in archive.files}


@struct.dataclass
class Weights:
    """As seqax's Model: leaves are attributes."""

    embed: Any
    final_layer_norm: Any
    w_q: Any


@struct.dataclass
class State:
    """As seqax's State."""

    weights: Weights
    adam_mu: Weights
    adam_nu: Weights
    count: Any


# By rank, over the axes of seqax's mesh.
SPECS = {0: P(), 1: P('d'), 2: P('t', 'd'), 4: P(None, 'd', None, 't')}


def state_of(arrays: dict[str, Any]) -> State:
    """The state with these leaves."""
    parts = {
        part: Weights(**{name: arrays[f'.{part}.{name}'] for name in ('embed', 'final_layer_norm', 'w_q')})
        for part in ('weights', 'adam_mu', 'adam_nu')
    }
    return State(**parts, count=arrays['.count'])


# ---- reading ----


def test_complete_steps_are_listed(seqax):
    assert seqax_steps(seqax) == [100, 200]
    assert seqax_steps(seqax / 'absent') == []
    (seqax / '0000000400').mkdir()
    (seqax / '500').mkdir()
    (seqax / '0000000100' / '.zattrs').write_text('{')
    assert seqax_steps(seqax) == [200]


@pytest.mark.parametrize('step', [None, 200])
def test_leaves_are_lazy_and_read_to_the_bit(seqax, step):
    table, found = read_seqax(seqax, step)
    assert found == 200
    arrays = expected(seqax)
    assert {'.' + '.'.join(path) for path in table} == set(arrays)
    for path, lazy in table.items():
        assert isinstance(lazy, t5ckpt.LazyArray)
        assert_same(np.asarray(lazy.get()), arrays['.' + '.'.join(path)])
    assert_same(table['weights', 'embed'][3:5, :2], arrays['.weights.embed'][3:5, :2])


def test_a_step_directory_is_a_path_too(seqax):
    _, step = read_seqax(seqax / '0000000100')
    assert step == 100


def test_a_run_moves_over(seqax, run_dir):
    """The whole way: seqax's files, a checkpoint of ours, a sharded state."""
    done = t5ckpt.convert_checkpoint('seqax', seqax, run_dir)
    assert done.step == 200
    assert t5ckpt.all_steps(run_dir) == [200]
    arrays = expected(seqax)
    mesh = partitioner.mesh((4, 2), ('d', 't'))
    template = state_of(
        {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, SPECS[array.ndim]))
            for name, array in arrays.items()
        }
    )
    with t5ckpt.Checkpointer(template, checkpoints_dir=run_dir) as ck:
        restored = ck.restore()
    for got, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(state_of(arrays)), strict=True):
        assert_same(np.asarray(got), wanted)


def test_an_import_does_not_write_over_a_checkpoint(seqax, run_dir):
    t5ckpt.convert_checkpoint('seqax', seqax / '0000000100', run_dir)
    with pytest.raises(errors.CheckpointExistsError):
        t5ckpt.convert_checkpoint('seqax', seqax / '0000000100', run_dir)
    t5ckpt.convert_checkpoint('seqax', seqax / '0000000100', run_dir, t5ckpt.ConvertOptions(overwrite=True))


@pytest.mark.parametrize('step', [300, 7])
def test_a_step_that_is_not_complete_is_not_there(seqax, step):
    with pytest.raises(errors.CheckpointNotFoundError, match=r'complete steps: 100, 200'):
        read_seqax(seqax, step)


def test_a_directory_that_is_not_complete_says_why(seqax, tmp_path):
    with pytest.raises(errors.CheckpointNotFoundError, match='write_completed'):
        read_seqax(seqax / '0000000300')
    with pytest.raises(errors.CheckpointNotFoundError, match='no complete checkpoint of seqax'):
        read_seqax(tmp_path / 'absent')


def test_a_missing_chunk_is_an_error(seqax, run_dir):
    (seqax / '0000000200' / '.weights.embed' / '2.1').unlink()
    with pytest.raises(errors.CorruptCheckpointError, match='weights/embed'):
        t5ckpt.convert_checkpoint('seqax', seqax, run_dir)
    assert t5ckpt.all_steps(run_dir) == []


def test_a_missing_chunk_of_an_array_with_a_fill_value(seqax, run_dir):
    """zarr-python leaves such chunks out if it stores an array again."""
    wanted = read_seqax(seqax)[0]['weights', 'embed'].get().copy()
    array = seqax / '0000000200' / '.weights.embed'
    zarray = json.loads((array / '.zarray').read_text())
    (array / '.zarray').write_text(json.dumps(zarray | {'fill_value': 2.5}))
    (array / '2.1').unlink()
    rows, columns = zarray['chunks']
    wanted[2 * rows : 3 * rows, columns : 2 * columns] = 2.5
    t5ckpt.convert_checkpoint('seqax', seqax, run_dir)
    assert_same(t5ckpt.open_checkpoint(run_dir)['weights/embed'].get(), wanted)


@pytest.mark.parametrize(
    ('change', 'error', 'text'),
    [
        ({'dtype': '|O'}, errors.UnsupportedFormatError, 'dtype'),
        ({'dtype': [['a', '<f4']]}, errors.UnsupportedFormatError, 'dtype'),
        ({'shape': 'x'}, errors.CorruptCheckpointError, "has shape 'x', expected a list of sizes"),
    ],
)
def test_bad_metadata_is_named(seqax, change, error, text):
    path = seqax / '0000000200' / '.count' / '.zarray'
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error, match=text):
        read_seqax(seqax)


@pytest.mark.parametrize('name', ['plain', '.a[', ".a['b]", '.a[open]', '.a[1.5]', "['a'"])
def test_a_name_that_keystr_does_not_make_is_named(seqax, name):
    shutil.copytree(seqax / '0000000200' / '.count', seqax / '0000000200' / name)
    with pytest.raises(errors.UnsupportedFormatError):
        read_seqax(seqax)


def test_two_names_that_are_one_of_ours_are_named(seqax):
    shutil.copytree(seqax / '0000000200' / '.count', seqax / '0000000200' / "['count']")
    with pytest.raises(errors.UnsupportedFormatError, match='count'):
        read_seqax(seqax)


# ---- writing ----


def odd_state() -> dict[str, Any]:
    """Dicts, lists, attributes, odd keys, every rank, nothing, and sharded arrays."""
    mesh = partitioner.mesh((4, 2), ('d', 't'))
    return {
        'layers': [
            Weights(jnp.arange(64.0).reshape(8, 8), np.zeros((0, 3), np.float32), jnp.ones((2, 3, 4, 5))),
            {"it's": np.float64(2.5), 'a/b': np.arange(3, dtype=np.int16), 'dotted.key': np.bool_(True), '7': 3},
        ],
        'sharded': jax.device_put(jnp.arange(128.0).reshape(16, 8), NamedSharding(mesh, P('d', 't'))),
        'nothing': jnp.zeros((3, 0)),
        'none': None,
        'empty': {},
    }


def test_what_is_written_is_read_back_by_path(tmp_path):
    state = odd_state()
    written = pathlib.Path(write_seqax(tmp_path, 5, state))
    assert written == tmp_path / '0000000005'
    table, step = read_seqax(tmp_path)
    assert step == 5
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    assert len(table) == len(flat)
    assert table['layers', '1', "it's"].get() == 2.5
    assert table['layers', '1', '7'].get() == 3
    assert_same(table['layers', '1', 'a/b'].get(), np.arange(3, dtype=np.int16))
    assert_same(table['sharded',].get(), np.asarray(state['sharded']))
    # Chunks are shards, as seqax writes them.
    assert json.loads((written / "['sharded']" / '.zarray').read_text())['chunks'] == [4, 4]


@pytest.mark.parametrize('template', [False, True])
def test_a_run_moves_over_and_back(seqax, run_dir, tmp_path, template):
    t5ckpt.convert_checkpoint('seqax', seqax, run_dir)
    like = state_of({n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in expected(seqax).items()})
    t5ckpt.convert_checkpoint(
        'to-seqax', run_dir, tmp_path / 'back', t5ckpt.ConvertOptions(like=like if template else None)
    )
    back = tmp_path / 'back' / '0000000200'
    assert sorted(path.name for path in back.iterdir()) == sorted(
        path.name for path in (seqax / '0000000200').iterdir()
    )
    table, _ = read_seqax(back)
    for name, array in expected(seqax).items():
        assert_same(np.asarray(table[tuple(name[1:].split('.'))].get()), array)


def test_a_template_with_other_leaves_is_refused(seqax, run_dir, tmp_path):
    t5ckpt.convert_checkpoint('seqax', seqax, run_dir)
    with pytest.raises(errors.TreeMismatchError, match='adam_mu/embed'):
        t5ckpt.convert_checkpoint(
            'to-seqax', run_dir, tmp_path / 'back', t5ckpt.ConvertOptions(like={'weights': np.zeros(3)})
        )
    assert not (tmp_path / 'back').exists()


@pytest.mark.parametrize(
    'state', [{'a.b': np.ones(3), 'a': {'b': np.zeros(3)}}, {'x.y': np.ones(2)}, {'x[0]': np.ones(2)}, {'': np.ones(2)}]
)
def test_names_that_seqax_would_read_as_another_path(run_dir, tmp_path, state):
    t5ckpt.Checkpointer(state, checkpoints_dir=run_dir).save(state, step=1)
    with pytest.raises(errors.UnsupportedLeafError, match=r'as another path.* like='):
        t5ckpt.convert_checkpoint('to-seqax', run_dir, tmp_path / 'back')
    assert not (tmp_path / 'back').exists()
    t5ckpt.convert_checkpoint('to-seqax', run_dir, tmp_path / 'back', t5ckpt.ConvertOptions(like=state))
    table, _ = read_seqax(tmp_path / 'back')
    for path, leaf in flatten_dict(state).items():
        assert_same(table[path].get(), leaf)


def test_what_seqax_cannot_read_is_refused_before_anything_is_written(tmp_path):
    for state in ({'w': jnp.ones(2, jnp.bfloat16)}, {'w': np.array(['text'])}, {'w': np.array([object()])}):
        with pytest.raises(errors.UnsupportedLeafError, match=r"\['w'\]|\bw: "):
            write_seqax(tmp_path / 'run', 1, state)
    with pytest.raises(errors.UnsupportedLeafError, match='seqax would not find the array under the name'):
        write_seqax(tmp_path / 'run', 1, {'a\\b': np.ones(2)})
    with pytest.raises(ValueError, match='ten digits'):
        write_seqax(tmp_path / 'run', 10**10, {'w': np.ones(2)})
    assert not (tmp_path / 'run').exists()


def test_a_complete_step_is_replaced_only_when_asked_and_a_broken_one_always(tmp_path):
    write_seqax(tmp_path, 1, {'w': np.ones(2)})
    with pytest.raises(errors.CheckpointExistsError):
        write_seqax(tmp_path, 1, {'w': np.zeros(2)})
    assert_same(read_seqax(tmp_path)[0]['w',].get(), np.ones(2))
    write_seqax(tmp_path, 1, {'w': np.zeros(2)}, overwrite=True)
    assert_same(read_seqax(tmp_path)[0]['w',].get(), np.zeros(2))
    (tmp_path / '0000000001' / '.zattrs').unlink()
    write_seqax(tmp_path, 1, {'v': np.ones(3)})
    assert list(read_seqax(tmp_path)[0]) == [('v',)]


def test_other_directories_than_checkpoints_are_kept(tmp_path):
    (tmp_path / '0000000001').mkdir()
    (tmp_path / '0000000001' / 'thesis.tex').write_text('much work')
    for overwrite in (False, True):
        with pytest.raises(errors.CheckpointExistsError, match='not a checkpoint of seqax'):
            write_seqax(tmp_path, 1, {'w': np.ones(2)}, overwrite=overwrite)
    assert (tmp_path / '0000000001' / 'thesis.tex').read_text() == 'much work'


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    write_seqax(tmp_path, 1, {'w': np.ones(2)})

    def fail() -> np.ndarray:
        raise errors.CorruptCheckpointError('a chunk is gone')

    with pytest.raises(errors.CorruptCheckpointError, match='a chunk is gone'):
        write_seqax(tmp_path, 1, {'w': t5ckpt.LazyThreadPoolArray((2,), np.float64, fail)}, overwrite=True)
    assert seqax_steps(tmp_path) == [1]
    assert_same(read_seqax(tmp_path)[0]['w',].get(), np.ones(2))
    write_seqax(tmp_path, 1, {'w': np.zeros(2)}, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['0000000001']


def test_other_storages_are_written_in_place(request):
    place = f'memory://{request.node.name}/run'
    write_seqax(place, 1, {'w': np.ones(2)})
    write_seqax(place, 1, {'w': np.zeros(2)}, overwrite=True)
    assert_same(read_seqax(place)[0]['w',].get(), np.zeros(2))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec('zarr') is None and os.environ.get('CI') != 'true',
    reason='needs zarr: pip install "zarr<3"',
)
def test_zarr_python_reads_what_is_written(tmp_path):
    """As seqax's load_zarr does: open_group, write_completed, root[keystr], shape, dtype, a slice for each shard."""
    import zarr

    state = odd_state()
    written = write_seqax(tmp_path, 5, state)
    root = zarr.open_group(written, mode='r')
    assert 'write_completed' in root.attrs
    for keys, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        array = root[jax.tree_util.keystr(keys)]
        assert (array.shape, array.dtype) == (np.shape(leaf), np.asarray(leaf).dtype)
        sharding = getattr(leaf, 'sharding', None)
        if sharding is None:
            assert_same(array[...], np.asarray(leaf))
        else:
            loaded = jax.make_array_from_callback(leaf.shape, sharding, lambda index, array=array: array[index])
            assert_same(np.asarray(loaded), np.asarray(leaf))


def test_an_overwrite_that_fails_anywhere_leaves_the_old_or_the_new_checkpoint(tmp_path):
    outcomes = set()
    for fail_at in itertools.count():
        write_seqax(tmp_path, 1, {'w': np.zeros(2)}, overwrite=True)
        storage = FaultyStorage(open_storage(tmp_path), fail_at, sticky=True)
        try:
            write_seqax(storage, 1, {'w': np.ones(2)}, overwrite=True)
        except errors.StorageError:
            outcomes.add(read_seqax(tmp_path)[0]['w',].get()[0])
        else:
            break
    assert outcomes == {0, 1}
