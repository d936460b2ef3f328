"""Orbax directories: what the installed Orbax writes, the layouts of its past, and layouts of others."""

import json
import shutil

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental.v1 import partial
from support.cli import t5ckpt_cli

import t5ckpt
from t5ckpt import errors

TREE = {
    'params': {
        'dense': {'kernel': np.arange(600, dtype=np.float32).reshape(20, 30), 'bias': jnp.ones(30, jnp.bfloat16)}
    },
    'opt': [np.int32(7), {'mu': np.zeros((3, 4), np.float64)}],
    'step': 5,
}


def check(loaded):
    assert np.array_equal(loaded['params']['dense']['kernel'], TREE['params']['dense']['kernel'])
    assert loaded['params']['dense']['bias'].dtype == jnp.bfloat16
    assert np.array_equal(loaded['params']['dense']['bias'], np.ones(30))
    assert int(loaded['opt']['0']) == 7
    assert np.array_equal(loaded['opt']['1']['mu'], np.zeros((3, 4)))
    assert int(loaded['step']) == 5


def write(path, **options):
    handler = ocp.PyTreeCheckpointHandler(**options)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, TREE)


@pytest.mark.parametrize(
    'options', [{}, {'use_ocdbt': False}, {'use_zarr3': True}, {'use_ocdbt': False, 'use_zarr3': True}]
)
def test_what_orbax_writes(tmp_path, options):
    write(tmp_path / '12', **options)
    check(t5ckpt.load_t5x_checkpoint(tmp_path / '12'))
    check(t5ckpt.load_t5x_checkpoint(tmp_path))
    check(t5ckpt.load_t5x_checkpoint(tmp_path, 12))
    view = t5ckpt.open_checkpoint(tmp_path, 12)
    assert np.array_equal(view['params/dense/kernel'][3:5, ::-2], TREE['params']['dense']['kernel'][3:5, ::-2])
    restored = t5ckpt.Checkpointer(TREE, checkpoints_dir=tmp_path / 'other').restore(path=tmp_path / '12')
    assert restored['step'] == 5
    assert np.array_equal(restored['params']['dense']['kernel'], TREE['params']['dense']['kernel'])


def test_items_of_a_checkpoint_manager(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave(TREE))
    check(t5ckpt.load_t5x_checkpoint(tmp_path, 3))


def test_items_that_are_not_read_are_named(tmp_path, caplog):
    items = {
        'state': ocp.args.StandardSave({'w': np.ones(3)}),
        'opt': ocp.args.StandardSave({'mu': np.ones(3)}),
        'extra': ocp.args.JsonSave({'a': 1}),
    }
    with ocp.CheckpointManager(tmp_path / 'run') as manager:
        manager.save(10, args=ocp.args.Composite(**items))
    caplog.clear()
    assert set(t5ckpt.open_checkpoint(tmp_path / 'run')) == {'w'}
    (record,) = [record for record in caplog.records if record.name == 't5ckpt']
    assert record.levelname == 'WARNING'
    assert 'state is read, extra, opt is not' in record.message
    assert f'{tmp_path}/run/10/opt' in record.message
    assert set(t5ckpt.open_checkpoint(tmp_path / 'run/10/opt')) == {'mu'}


def test_a_template_by_item_reads_the_items_that_it_names(tmp_path):
    items = {name: {'w': np.full(3, value), 'b': np.zeros(2)} for name, value in (('state', 1.0), ('ema', 2.0))}
    with ocp.CheckpointManager(tmp_path / 'run') as manager:
        saves = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        manager.save(7, args=ocp.args.Composite(**saves, config=ocp.args.JsonSave({'a': 1})))
    for template in (items, {'ema': items['ema']}):
        restored = t5ckpt.Checkpointer(template, checkpoints_dir=tmp_path / 'run').restore()
        assert {name: tree['w'].tolist() for name, tree in restored.items()} == {
            name: tree['w'].tolist() for name, tree in template.items()
        }
    # The item that is read by default goes first, if it has the keys of the template.
    assert t5ckpt.Checkpointer(items['state'], checkpoints_dir=tmp_path / 'run').restore()['w'].tolist() == [1.0] * 3
    for template in ({**items, 'step': 0}, {**items['state'], 'ema': items['ema']}):
        with pytest.raises(errors.TreeMismatchError, match='item of Orbax') as caught:
            t5ckpt.Checkpointer(template, checkpoints_dir=tmp_path / 'run').restore()
        # A rule would take the leaves of one item for those of the other.
        assert caught.value.rename == ()
        assert (
            f'(not read of it: ema; path={tmp_path}/run/7/ema reads this item of Orbax) does not fit the template'
            in str(caught.value)
        )


def test_the_only_tree_is_read_whatever_its_name(tmp_path, caplog):
    items = {'model': ocp.args.StandardSave({'w': np.ones(3)}), 'extra': ocp.args.JsonSave({'a': 1})}
    with ocp.CheckpointManager(tmp_path / 'run') as manager:
        manager.save(10, args=ocp.args.Composite(**items))
    caplog.clear()
    assert set(t5ckpt.open_checkpoint(tmp_path / 'run')) == {'w'}
    assert not [record for record in caplog.records if record.name == 't5ckpt' and record.levelname == 'WARNING']
    assert t5ckpt.convert_checkpoint('orbax', tmp_path / 'run', tmp_path / 'new').step == 10
    shutil.rmtree(tmp_path / 'run/10/model')
    with pytest.raises(errors.CorruptCheckpointError, match='model/_METADATA is missing'):
        t5ckpt.open_checkpoint(tmp_path / 'run')


def test_a_path_of_an_item_without_a_tree_names_the_step_around_it(tmp_path):
    items = {
        'state': ocp.args.StandardSave({'w': np.ones(3)}),
        'conf': ocp.args.JsonSave({'a': 1}),
        'nprng': ocp.args.NumpyRandomKeySave(np.random.get_state()),  # noqa: NPY002 - Orbax takes no other
    }
    step = tmp_path / 'run' / '10'
    with ocp.CheckpointManager(tmp_path / 'run') as manager:
        manager.save(10, args=ocp.args.Composite(**items))
    cures = {'conf': step, 'nprng': step / 'nprng' / 'np_random_key'}
    for item, cure in cures.items():
        for read in (t5ckpt.open_checkpoint, t5ckpt.verify, t5ckpt.Checkpointer({'w': np.ones(3)}).restore):
            with pytest.raises(
                errors.CheckpointNotFoundError,
                match=f'{item}: no complete checkpoint',
            ) as caught:
                read(path=step / item)
            assert str(caught.value).endswith(f': {cure}')
        assert len(t5ckpt.open_checkpoint(cure))
    assert set(t5ckpt.open_checkpoint(step)) == {'w'}


def test_several_trees_are_read_as_one_dict(tmp_path):
    state = {'model': {'w': np.ones((3, 4), np.float32)}, 'optimizer': {'mu': np.zeros(3), 'count': np.array(4)}}
    with ocp.CheckpointManager(tmp_path / 'run') as manager:
        for step in (10, 20):
            items = {name: ocp.args.StandardSave(tree) for name, tree in state.items()}
            manager.save(step, args=ocp.args.Composite(**items, extra=ocp.args.JsonSave({'a': 1})))
    assert set(t5ckpt.open_checkpoint(tmp_path / 'run')) == {'model/w', 'optimizer/mu', 'optimizer/count'}
    assert set(t5ckpt.open_checkpoint(tmp_path / 'run/10/optimizer')) == {'mu', 'count'}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run') as ck:
        restored = t5ckpt.restore_or_init(ck, lambda: None)
        assert ck.restored_step == 20
    assert np.array_equal(restored['model']['w'], state['model']['w'])
    assert restored['optimizer']['count'] == 4
    assert t5ckpt.convert_checkpoint('orbax', tmp_path / 'run', tmp_path / 'new').step == 20
    assert not t5ckpt.diff(tmp_path / 'run', tmp_path / 'new').leaves


def test_typed_keys_come_back_as_keys_after_a_conversion(tmp_path):
    state = {'w': np.ones(3, np.float32), 'rng': jax.random.key(3)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / 'orbax', state)
    t5ckpt.convert_checkpoint('orbax', tmp_path / 'orbax', tmp_path / 'run', t5ckpt.ConvertOptions(step=1))
    for path in (tmp_path / 'orbax', tmp_path / 'run'):
        with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'other') as ck:
            restored = ck.restore(path=path)
        assert restored['rng'].dtype == state['rng'].dtype
        assert np.array_equal(jax.random.key_data(restored['rng']), jax.random.key_data(state['rng']))


def test_a_checkpoint_without_a_run_is_distinguished_from_a_run(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / 'weights', TREE['params'])
    assert 'is a checkpoint, not a run' in t5ckpt_cli('ls', tmp_path / 'weights', code=3)
    t5ckpt_cli('show', tmp_path / 'weights')


def test_one_tree_beside_metrics_is_read_without_a_warning(tmp_path, caplog):
    with ocp.CheckpointManager(tmp_path / 'run') as manager:
        manager.save(10, args=ocp.args.StandardSave({'w': np.ones(3)}), metrics={'loss': 1.0})
    caplog.clear()
    assert set(t5ckpt.open_checkpoint(tmp_path / 'run')) == {'w'}
    assert [record for record in caplog.records if record.name == 't5ckpt' and record.levelname == 'WARNING'] == []


def as_placeholders(tree, prefix=()):
    if isinstance(tree, dict):
        return {key: as_placeholders(value, (*prefix, key)) for key, value in tree.items()}
    if isinstance(tree, list):
        return {str(i): as_placeholders(value, (*prefix, str(i))) for i, value in enumerate(tree)}
    return 'PLACEHOLDER://' + '.'.join(prefix)


def test_the_older_layout_with_placeholders(tmp_path):
    """The orbax of 2023: a zarr directory for each array, and Flax msgpack with a placeholder for each."""
    write(tmp_path / 'new', use_ocdbt=False)
    for name in ('_METADATA', '_sharding', '_CHECKPOINT_METADATA', 'array_metadatas'):
        path = tmp_path / 'new' / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    (tmp_path / 'new' / 'checkpoint').write_bytes(msgpack.packb(as_placeholders(TREE)))
    check(t5ckpt.load_t5x_checkpoint(tmp_path / 'new'))


@pytest.mark.parametrize('flag', [True, False, None])
def test_chunks_that_equal_the_fill_value(tmp_path, flag):
    """Without the flag in `_METADATA`, as in Orbax up to 0.8, or if it is false, such chunks of zarr3 are not stored."""
    path = tmp_path / '3'
    write(path, use_ocdbt=False, use_zarr3=True)
    metadata = json.loads((path / '_METADATA').read_text())
    assert metadata.pop('store_array_data_equal_to_fill_value') is True
    (path / '_METADATA').write_text(
        json.dumps(metadata | ({} if flag is None else {'store_array_data_equal_to_fill_value': flag}))
    )
    shutil.rmtree(path / 'opt.1.mu' / 'c')
    if flag:
        with pytest.raises(errors.CorruptCheckpointError, match=r'opt/1/mu.*missing'):
            t5ckpt.load_t5x_checkpoint(path)
        assert not t5ckpt.verify(path, full=True).ok
    else:
        check(t5ckpt.load_t5x_checkpoint(path))
        assert t5ckpt.verify(path, full=True).ok


BARE = np.arange(60_000, dtype=np.float32).reshape(200, 300)


@pytest.mark.parametrize('save', [ocp.args.ArraySave, ocp.args.PyTreeSave])
def test_a_bare_array(tmp_path, save):
    with ocp.CheckpointManager(tmp_path / 'run') as manager:
        manager.save(5, args=save(jnp.asarray(BARE)))
    for path in (tmp_path / 'run', tmp_path / 'run' / '5', tmp_path / 'run' / '5' / 'default'):
        assert list(t5ckpt.open_checkpoint(path)) == ['array']
        assert np.array_equal(t5ckpt.load_t5x_checkpoint(path)['array'], BARE)
        assert np.array_equal(t5ckpt.Checkpointer(jnp.zeros_like(BARE)).restore(path=path), BARE)
        assert np.array_equal(t5ckpt.Checkpointer({'array': np.zeros_like(BARE)}).restore(path=path)['array'], BARE)
        assert t5ckpt.verify(path, full=True).ok
    t5ckpt.convert_checkpoint('orbax', tmp_path / 'run', tmp_path / 'converted')
    assert np.array_equal(
        t5ckpt.Checkpointer(jnp.zeros_like(BARE), checkpoints_dir=tmp_path / 'converted').restore(), BARE
    )


def test_a_bare_array_as_an_item(tmp_path):
    items = {'weights': ocp.args.StandardSave({'w': BARE}), 'ema': ocp.args.ArraySave(jnp.asarray(BARE))}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=ocp.args.Composite(**items))
    assert sorted(t5ckpt.open_checkpoint(tmp_path)) == ['ema', 'weights/w']
    assert np.array_equal(t5ckpt.open_checkpoint(tmp_path)['ema'].get(), BARE)
    assert np.array_equal(t5ckpt.Checkpointer(jnp.zeros_like(BARE)).restore(path=tmp_path / '5' / 'ema'), BARE)
    (tmp_path / '5' / 'weights' / '_METADATA').unlink()
    with pytest.raises(errors.CorruptCheckpointError, match='5/weights/_METADATA is missing'):
        t5ckpt.open_checkpoint(tmp_path)
    shutil.rmtree(tmp_path / '5' / 'weights')
    assert list(t5ckpt.open_checkpoint(tmp_path)) == ['array']


@pytest.mark.parametrize('options', [{}, {'use_ocdbt': False}, {'use_zarr3': True}])
@pytest.mark.parametrize(
    ('state', 'leaves'),
    [
        (BARE, {'array': BARE}),
        (3, {'array': 3}),
        (np.float32(2.5), {'array': 2.5}),
        ('text', {'array': 'text'}),
        ([BARE], {'0': BARE}),
        ((BARE, None), {'0': BARE, '1': None}),
        ({'checkpoint': BARE}, {'checkpoint': BARE}),
        (
            {'w': 1, 'none': None, 'dict': {}, 'list': [], 'tuple': ()},
            {'w': 1, 'none': None, 'dict': {}, 'list': [], 'tuple': ()},
        ),
        ({'': BARE, '/': {'..': BARE}}, {'': BARE, '/': {'..': BARE}}),
    ],
)
def test_small_trees(tmp_path, state, leaves, options):
    if '/' in leaves and 'use_ocdbt' in options:
        pytest.skip('Orbax would write outside of the step')
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(tmp_path / '7', state)
    loaded = t5ckpt.load_t5x_checkpoint(tmp_path / '7')
    jax.tree.map(np.testing.assert_array_equal, loaded, leaves)
    assert t5ckpt.verify(tmp_path / '7', full=True).ok


def lose(*names):
    """Deletes files and directories below an item."""

    def change(item):
        for name in names:
            shutil.rmtree(item / name) if (item / name).is_dir() else (item / name).unlink()
        return names

    return change


def lose_largest(directory):
    """Deletes the largest file in a directory of an item."""

    def change(item):
        file = max((item / directory).iterdir(), key=lambda path: path.stat().st_size)
        file.unlink()
        return (f'{directory}/{file.name}',)

    return change


@pytest.mark.parametrize(
    ('change', 'named'),
    [
        (lose('manifest.ocdbt'), r'manifest\.ocdbt is missing'),
        (lose('manifest.ocdbt', 'd'), r'manifest\.ocdbt is missing'),
        (lose('d'), 'd/[0-9a-f]{32}'),
        (lose('ocdbt.process_0'), 'is missing or damaged'),
        (lose_largest('d'), 'd/[0-9a-f]{32}'),
        (lose_largest('ocdbt.process_0/d'), 'is missing or damaged'),
        (lose('_METADATA'), '_METADATA is missing'),
        (lose(''), 'default/_METADATA is missing'),
        (lose('manifest.ocdbt', 'd', 'ocdbt.process_0'), 'is missing'),
    ],
)
def test_an_incomplete_copy(tmp_path, change, named):
    run = tmp_path / 'run'
    state = {'w': BARE, 'b': np.ones(4, np.float32)}
    with ocp.CheckpointManager(run) as manager:
        for step in (3, 5):
            manager.save(step, args=ocp.args.StandardSave(state))
    change(run / '5' / 'default')
    checkpointer = t5ckpt.Checkpointer(state, checkpoints_dir=run)
    with pytest.raises(errors.CorruptCheckpointError, match=named):
        checkpointer.restore()
    with pytest.raises(errors.CorruptCheckpointError, match=named):
        t5ckpt.load_t5x_checkpoint(run / '5')
    (first, *_) = t5ckpt.verify(run / '5', full=True).damages
    assert 'is missing' in first.text
    assert first.file != '_METADATA'
    restored = t5ckpt.restore_or_init(checkpointer, lambda: pytest.fail('a new run'))
    assert checkpointer.restored_step == 3
    assert np.array_equal(restored['w'], BARE)
    assert sorted(path.name for path in run.iterdir()) == ['3', '5']


def test_an_item_of_the_older_layout_is_not_damaged(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave(TREE))
    (tmp_path / '3' / 'default' / '_METADATA').rename(tmp_path / '3' / 'default' / 'checkpoint')
    with pytest.raises(errors.UnsupportedFormatError, match='has no tree of Orbax'):
        t5ckpt.open_checkpoint(tmp_path)


def test_an_array_that_is_gone(tmp_path):
    write(tmp_path / '1', use_ocdbt=False)
    shutil.rmtree(tmp_path / '1' / 'params.dense.kernel')
    with pytest.raises(errors.CorruptCheckpointError, match=r'params\.dense\.kernel'):
        t5ckpt.load_t5x_checkpoint(tmp_path / '1')


def test_items_of_which_none_is_a_tree(tmp_path):
    write(tmp_path / '1')
    (tmp_path / '2' / 'weights').mkdir(parents=True)
    (tmp_path / '2' / '_CHECKPOINT_METADATA').write_text('{}')
    with pytest.raises(errors.UnsupportedFormatError, match=r'Orbax.*weights'):
        t5ckpt.load_t5x_checkpoint(tmp_path / '2')
    (tmp_path / '2' / 'weights').rmdir()
    shutil.move(tmp_path / '1', tmp_path / '2' / 'weights')
    check(t5ckpt.load_t5x_checkpoint(tmp_path / '2'))
    check(t5ckpt.load_t5x_checkpoint(tmp_path / '2' / 'weights'))


def test_metadata_that_is_damaged(tmp_path):
    write(tmp_path / '1')
    metadata = json.loads((tmp_path / '1' / '_METADATA').read_text())
    for damaged in ('{', '[]', '{"tree_metadata": {"x": {}}}', json.dumps(metadata)[:-40]):
        (tmp_path / '1' / '_METADATA').write_text(damaged)
        with pytest.raises(errors.CorruptCheckpointError, match='_METADATA'):
            t5ckpt.load_t5x_checkpoint(tmp_path / '1')


def test_a_partial_save_is_not_offered_as_a_checkpoint(tmp_path):
    """It has other files than a step; Orbax makes a step of it at the end."""
    partial.save(tmp_path / '5', {'a': np.ones(3)})
    partial.save(tmp_path / '5', {'b': np.ones(3)})
    for path in (tmp_path, tmp_path / '5.partial_save'):
        with pytest.raises(errors.CheckpointNotFoundError, match='a partial save of Orbax') as caught:
            t5ckpt.open_checkpoint(path)
        assert 'Give the path' not in str(caught.value)
    partial.finalize(tmp_path / '5')
    assert t5ckpt.all_steps(tmp_path) == [5]


@pytest.mark.parametrize(
    ('name', 'says'),
    [
        ('.metadata', 'torch.distributed'),
        ('model.ckpt-5.index', 'TensorFlow'),
        ('adapter_model-7.safetensors', 'safetensors'),
        ('pytorch_model.bin', 'PyTorch'),
        ('.zgroup', 'zarr group'),
        ('.zarray', 'one array of zarr'),
        ('zarr.json', 'one array of zarr'),
        ('notes.txt', 'notes.txt'),
    ],
)
def test_layouts_of_others_are_named(tmp_path, name, says):
    (tmp_path / name).write_text('')
    for read in (t5ckpt.load_t5x_checkpoint, t5ckpt.open_checkpoint):
        with pytest.raises(errors.CheckpointNotFoundError, match=says):
            read(tmp_path)
