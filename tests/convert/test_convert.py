"""From Orbax, Flax and JAX, and the command line of all conversions."""

import json
import re
import shutil
import subprocess
import sys
import tarfile

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from support import golden as cases
from support.bits import assert_same
from support.cli import t5ckpt_cli
from support.golden import flatten

import t5ckpt
from t5ckpt import errors
from t5ckpt.convert import ConvertOptions, convert_checkpoint as convert
from t5ckpt.convert.seqax import read_seqax, write_seqax

TREE = {
    'params': {'dense': {'kernel': np.arange(60000, dtype=np.float32).reshape(200, 300), 'bias': np.ones(3, jnp.bfloat16)}},
    'opt_state': [{'mu': np.full((50, 700), 2, np.float32)}, np.array(3, np.int32)],
    'none': None,
    'step': np.array(7, np.int32),
}  # fmt: skip


def leaves_of(path):
    return {
        name: np.asarray(leaf) for name, leaf in flatten(t5ckpt.load_t5x_checkpoint(path)).items() if leaf is not None
    }


def expected(tree=None):
    flat = flatten(flax.serialization.to_state_dict(TREE if tree is None else tree))
    return {name: leaf for name, leaf in flat.items() if leaf is not None}


def check(path, wanted):
    held = leaves_of(path)
    assert set(held) == set(wanted)
    for name, leaf in wanted.items():
        assert_same(held[name], leaf, name)


def write(kind, folder):
    """A checkpoint of step 12 and its path."""
    if kind == 'cp':
        state = TREE | {'step': np.array(12, np.int32)}
        t5ckpt.Checkpointer(state, checkpoints_dir=folder).save(state)
        return folder
    if kind == 'seqax':
        write_seqax(folder, 12, {'w': np.ones((4, 4))})
        return folder
    if kind == 'zarr':
        source = write('cp', folder.with_name('t5x')) / 'checkpoint_12'
        shutil.copytree(next(source.glob('*kernel')), folder / 'step-12' / 'kernel')
        (folder / 'step-12' / 'metadata.json').write_text('{"step": 12, "timestamp": "2026-01-01T00:00:00"}')
        return folder
    if kind == 'orbax':
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(folder / '12', TREE)
        return folder
    folder.mkdir()
    for step in (9, 12):
        data = flax.serialization.to_bytes(TREE | {'step': np.array(7 if step == 12 else 1, np.int32)})
        (folder / f'checkpoint_{step}').write_bytes(data)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize('asked', ['flax', 'seqax', 'orbax'])
@pytest.mark.parametrize('kind', ['cp', 'flax', 'orbax', 'seqax', 'zarr'])
def test_the_error_for_another_format_names_the_verb_that_opens_it(tmp_path, kind, asked):
    source = write(kind, tmp_path / 'source')
    sources = [source, *source.glob('*12')] if kind in ('orbax', 'zarr') else [source]
    if kind == asked or (asked == 'orbax' and kind in ('flax', 'zarr')):
        convert(asked, source, tmp_path / 'run')
        return
    for path in sources:
        with pytest.raises(errors.T5CkptError, match=f't5ckpt (convert )?{kind}\\b') as caught:
            convert(asked, path, tmp_path / 'run')
        assert 'Give the path' not in str(caught.value)
        t5ckpt_cli(*(['cp'] if kind == 'cp' else ['convert', kind]), path, tmp_path / f'from_{path.name}')


@pytest.mark.parametrize('kind', ['seqax'])
def test_a_path_that_is_no_checkpoint_is_described(tmp_path, kind):
    (tmp_path / 'file').write_text('text')
    (tmp_path / 'empty').mkdir()
    for name, text in (('file', 'is a file'), ('empty', 'it is empty'), ('absent', 'no such file or directory')):
        with pytest.raises(errors.CheckpointNotFoundError, match=f'{tmp_path}/{name}.*{text}'):
            convert(kind, tmp_path / name, tmp_path / 'run')


@pytest.mark.parametrize('kind', ['orbax', 'flax'])
def test_what_others_write(tmp_path, kind):
    source = write(kind, tmp_path / 'source')
    done = convert(kind, source, tmp_path / 'run')
    assert (done.step, done.added, done.dropped) == (12, (), ())
    check(tmp_path / 'run', expected())
    assert t5ckpt.load_t5x_checkpoint(tmp_path / 'run')['none'] is None
    with pytest.raises(errors.CheckpointExistsError):
        convert(kind, source, tmp_path / 'run')
    smaller = convert(
        kind, source, tmp_path / 'weights', ConvertOptions(leave=t5ckpt.OPTIMIZER, save_dtype='bfloat16', step=1)
    )
    assert smaller.dropped == ('opt_state/0/mu', 'opt_state/1')
    held = leaves_of(tmp_path / 'weights')
    assert set(held) == {'params/dense/kernel', 'params/dense/bias', 'step'}
    assert_same(held['params/dense/kernel'], TREE['params']['dense']['kernel'].astype(jnp.bfloat16))


def test_what_orbax_wrote_for_t5x(golden, tmp_path):
    """Converted, the golden Orbax directory holds what real T5X read from it."""
    case = cases.by_name('case10')
    done = convert('orbax', case.run_dir(golden), tmp_path)
    assert done.step == case.step
    held = t5ckpt.load_t5x_checkpoint(tmp_path)
    flat = flatten(held)
    wanted = case.expected(golden)
    assert set(flat) == {*wanted.arrays, *wanted.none_keys, *wanted.empty_keys}
    for name, leaf in wanted.arrays.items():
        assert_same(flat[name], leaf, name)


def test_what_seqax_writes(tmp_path):
    with tarfile.open(cases.TESTDATA / 'seqax_run.tar.gz') as archive:
        archive.extractall(tmp_path, filter='data')
    source = tmp_path / 'seqax' / 'run'
    done = convert('seqax', source, tmp_path)
    table, step = read_seqax(source)
    assert done.step == step
    held = leaves_of(tmp_path / f'checkpoint_{step}')
    assert set(held) == {'/'.join(path) for path in table}
    for path, leaf in table.items():
        assert_same(held['/'.join(path)], leaf.get(), str(path))


def test_a_checkpoint_of_ours_is_not_orbax(golden, tmp_path):
    with pytest.raises(errors.UnsupportedFormatError, match='t5ckpt cp'):
        convert('orbax', cases.by_name('case01').step_dir(golden), tmp_path)


def test_orbax_directories_have_their_step(tmp_path):
    """By their number, also through an item; and what was converted to Orbax comes back, empty tuples too."""
    state = {'params': {'w': np.ones((64, 64), np.float32)}, 'opt_state': ({'mu': np.zeros(3, np.float32)}, (), [])}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run') as ck:
        ck.save(state, step=12)
    t5ckpt.convert_checkpoint('to-orbax', tmp_path / 'run', tmp_path / 'orbax' / '12')
    done = t5ckpt.convert_checkpoint('orbax', tmp_path / 'orbax' / '12', tmp_path / 'back')
    assert done.step == 12
    loaded = t5ckpt.load_t5x_checkpoint(tmp_path / 'back')
    assert loaded['opt_state']['1'] == ()
    np.testing.assert_array_equal(loaded['opt_state']['0']['mu'], np.zeros(3))
    with ocp.CheckpointManager(tmp_path / 'manager') as manager:
        manager.save(7, args=ocp.args.StandardSave({'w': np.ones(4)}))
    for number, path in enumerate(('7', '7/default', '7/')):
        source, target = f'{tmp_path}/manager/{path}', tmp_path / f'run{number}'
        assert t5ckpt.convert_checkpoint('orbax', source, target).step == 7
    # A number above a checkpoint that has none is not that of a step.
    shutil.copytree(tmp_path / 'manager' / '7', tmp_path / '3' / 'best')
    ocp.PyTreeCheckpointer().save(tmp_path / '3' / 'final', state)
    for name in ('best', 'final'):
        with pytest.raises(ValueError, match='names no step'):
            t5ckpt.convert_checkpoint('orbax', tmp_path / '3' / name, tmp_path / name)
        assert (
            t5ckpt.convert_checkpoint('orbax', tmp_path / '3' / name, tmp_path / name, ConvertOptions(step=9)).step == 9
        )


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:Sharding info not provided')
def test_orbax_restores_into_the_state(tmp_path):
    """With the tuples, lists and named tuples of optax, and without a target as it restores its own steps."""
    params = {'layers': [{'w': np.full((2, 3), i, np.float32)} for i in range(12)], 'skipped': (None, 0.5)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = {'params': params, 'opt_state': optimizer.init(params), 'empty': [(), [], {}], 'step': np.array(12)}
    roots = {'dict': state, 'tuple': (params, optimizer.init(params), np.array(12)), 'list': [params['layers']]}
    for name, root in roots.items():
        with t5ckpt.Checkpointer(root, checkpoints_dir=tmp_path / name / 'run') as ck:
            ck.save(root, step=12)
        t5ckpt.convert_checkpoint('to-orbax', tmp_path / name / 'run', tmp_path / name / 'steps/12')
        ocp.PyTreeCheckpointer().save(tmp_path / name / 'own', root)
        with ocp.CheckpointManager(tmp_path / name / 'steps') as manager:
            of_step = manager.restore(12, args=ocp.args.StandardRestore(root))
        bare, own = (ocp.PyTreeCheckpointer().restore(tmp_path / name / path) for path in ('steps/12/default', 'own'))
        into = ocp.PyTreeCheckpointer().restore(tmp_path / name / 'steps/12/default', item=root)
        assert_same_tree(of_step, root)
        assert_same_tree(into, root)
        # Without a target, Orbax returns None for an empty named tuple that it saved itself.
        paths, paths_of_own = ([path for path, _ in jax.tree.leaves_with_path(tree)] for tree in (bare, own))
        assert paths == paths_of_own
        done = t5ckpt.convert_checkpoint('orbax', tmp_path / name / 'steps', tmp_path / name / 'back')
        with t5ckpt.Checkpointer(root) as ck:
            assert_same_tree(ck.restore(path=done.path), root)


def test_dicts_of_nnx_are_restored_as_the_page_says(tmp_path):
    state = nnx.to_pure_dict(nnx.state({'layers': nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(0)) for _ in range(12)])}))
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run') as ck:
        ck.save(state, step=1)
    t5ckpt.convert_checkpoint('to-orbax', tmp_path / 'run', tmp_path / 'orbax')
    restored = ocp.PyTreeCheckpointer().restore(tmp_path / 'orbax/default')
    assert_same_tree(nnx.restore_int_paths(flax.serialization.to_state_dict(restored)), state)


def assert_same_tree(restored, wanted):
    assert jax.tree.structure(restored) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, restored, wanted)


@pytest.mark.parametrize(('kind', 'says'), [('orbax', 'empty'), ('flax', 'no file of Flax')])
def test_nothing_there(tmp_path, kind, says):
    (tmp_path / 'source').mkdir()
    with pytest.raises(errors.CheckpointNotFoundError, match=says):
        convert(kind, tmp_path / 'source', tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    'options', [{'save_dtype': 'int8'}, {'compression': 'rar'}, {'concurrent_gb': 0}, {'step': -1}, {'step': 10**18}]
)
def test_options_that_make_no_sense(options):
    with pytest.raises(ValueError, match=next(iter(options)).partition('_')[0]):
        ConvertOptions(**options)


def test_a_tree_without_a_step(tmp_path):
    (tmp_path / 'weights').write_bytes(flax.serialization.to_bytes({'w': np.ones(3)}))
    with pytest.raises(ValueError, match=r'ConvertOptions\(step='):
        convert('flax', tmp_path / 'weights', tmp_path / 'run')
    assert convert('flax', tmp_path / 'weights', tmp_path / 'run', ConvertOptions(step=0)).step == 0


# ---- back to Orbax ----


def test_orbax_reads_what_is_written_back(tmp_path):
    state = TREE | {'name': 'run', 'count': 5, 'half': 0.5, 'empty': {}}
    t5ckpt.Checkpointer(
        state, checkpoints_dir=tmp_path / 'run', options=t5ckpt.CheckpointerOptions(chunk_bytes=2**16)
    ).save(state)
    seen = []
    options = ConvertOptions(progress=lambda *numbers: seen.append(numbers))
    done = t5ckpt.convert_checkpoint('to-orbax', tmp_path / 'run', tmp_path / 'orbax' / '7', options)
    assert (done.step, done.path) == (7, str(tmp_path / 'orbax' / '7'))
    assert [path.name for path in (tmp_path / 'orbax').iterdir()] == ['7']
    with ocp.PyTreeCheckpointer() as checkpointer:
        back = checkpointer.restore(tmp_path / 'orbax' / '7' / 'default')
    flat, wanted = (flatten(flax.serialization.to_state_dict(tree)) for tree in (back, state))
    assert set(flat) == set(wanted)
    for name, leaf in wanted.items():
        if isinstance(leaf, np.ndarray):
            assert_same(flat[name], leaf, name)
        else:
            assert flat[name] == leaf, name
    assert seen[-1][0] == seen[-1][1] > 0
    again = convert('orbax', tmp_path / 'orbax', tmp_path / 'again')
    assert again.step == 7
    assert_same(leaves_of(tmp_path / 'again')['params/dense/bias'], TREE['params']['dense']['bias'])


def test_arrays_without_values_and_dtypes_of_other_names_on_disk_go_to_orbax(tmp_path):
    state = {'a': np.zeros((0, 4)), 'b': np.zeros(0), 'w': np.ones((100, 200), np.uint16), 'c': 1j}
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run').save(state, step=1)
    done = t5ckpt.convert_checkpoint('to-orbax', tmp_path / 'run', tmp_path / 'orbax/1')
    assert sorted(done.mapped) == ['a', 'b', 'c', 'w']
    with ocp.CheckpointManager(tmp_path / 'orbax') as manager:
        restored = manager.restore(1, args=ocp.args.PyTreeRestore())
    for name, leaf in state.items():
        assert_same(np.asarray(restored[name]), np.asarray(leaf), name)
    assert not t5ckpt.diff(tmp_path / 'run', tmp_path / 'orbax')


@pytest.mark.parametrize('dtype', ['uint4', 'float8_e4m3'])
def test_to_orbax_names_a_leaf_of_a_dtype_that_tensorstore_lacks(tmp_path, dtype):
    state = {'w': np.ones(4_096, getattr(ml_dtypes, dtype)), 'b': np.ones(3)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run') as ck:
        ck.save(state, step=1)
    with pytest.raises(errors.UnsupportedLeafError, match=rf'w: Orbax cannot hold {dtype}'):
        t5ckpt.convert_checkpoint('to-orbax', tmp_path / 'run', tmp_path / 'orbax')
    assert [*tmp_path.glob('orbax/*')] == []


@pytest.mark.slow
def test_arrays_are_written_for_orbax_in_bounded_memory(tmp_path):
    state = {'params': {str(i): np.full((512, 1024), i, np.float32) for i in range(40)}}
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run').save(state, step=1)
    code = (
        'import resource\n'
        'import t5ckpt.convert.to_orbax\n'
        'before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n'
        'options = t5ckpt.ConvertOptions(concurrent_gb=0.01)\n'
        f't5ckpt.convert_checkpoint("to-orbax", {str(tmp_path / "run")!r}, {str(tmp_path / "orbax")!r}, options)\n'
        'print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)\n'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 60, 'of 84 MB'


def test_what_is_there_is_not_replaced_by_orbax_unasked(tmp_path):
    t5ckpt.Checkpointer(TREE, checkpoints_dir=tmp_path / 'run').save(TREE)
    target = tmp_path / 'orbax'
    assert t5ckpt.convert_checkpoint('to-orbax', tmp_path / 'run', target, ConvertOptions(dry_run=True)).nbytes == 0
    assert not target.exists()
    t5ckpt.convert_checkpoint('to-orbax', tmp_path / 'run', target)
    with pytest.raises(errors.OutputExistsError):
        t5ckpt.convert_checkpoint('to-orbax', tmp_path / 'run', target)
    t5ckpt.convert_checkpoint(
        'to-orbax', tmp_path / 'run', target, ConvertOptions(overwrite=True, leave=t5ckpt.OPTIMIZER)
    )
    assert not any('opt_state' in name for name in leaves_of(target))
    (target / 'mine.txt').write_text('')
    with pytest.raises(errors.OutputExistsError, match=r'mine\.txt'):
        t5ckpt.convert_checkpoint('to-orbax', tmp_path / 'run', target, ConvertOptions(overwrite=True))


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:Sharding info not provided')
def test_typed_keys_go_to_orbax_and_back(tmp_path):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0, dropout=1))
    keys = {impl: jax.random.key(3, impl=impl) for impl in ('threefry2x32', 'rbg', 'unsafe_rbg')}
    state = {
        'model': nnx.to_pure_dict(nnx.state((model, nnx.Dropout(0.1, rngs=nnx.Rngs(2))))),
        'keys': keys,
        'many': jax.random.split(keys['unsafe_rbg'], (50, 100)),
        'raw': np.zeros(2, np.uint32),
    }
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run').save(state, step=1)
    t5ckpt.convert_checkpoint('to-orbax', tmp_path / 'run', tmp_path / 'orbax' / '1')
    with ocp.CheckpointManager(tmp_path / 'orbax') as manager:
        restored = manager.restore(1, args=ocp.args.PyTreeRestore())
    assert {name: str(jax.random.key_impl(key)) for name, key in restored['keys'].items()} == {
        name: name for name in keys
    }
    assert (restored['many'] == state['many']).all()
    assert restored['raw'].dtype == np.uint32
    flat = flatten(flax.serialization.to_state_dict(restored))
    for name, leaf in flatten(flax.serialization.to_state_dict(state)).items():
        assert flat[name].dtype == leaf.dtype
        assert (flat[name] == leaf).all()
    convert('orbax', tmp_path / 'orbax' / '1', tmp_path / 'back')
    for path in (tmp_path / 'orbax', tmp_path / 'back'):
        with t5ckpt.Checkpointer(jax.eval_shape(lambda: state)) as ck:
            again = ck.restore(path=path)
            assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a == b).all(), again, state)))
        for name, other in (('rbg', 'unsafe_rbg'), ('unsafe_rbg', 'rbg')):
            template = {**state, 'keys': keys | {name: keys[other]}}
            with pytest.raises(
                errors.DtypeMismatch, match=f'keys/{name}: checkpoint PRNG keys of {name}, template .* {other}'
            ):
                t5ckpt.Checkpointer(template).restore(path=path)


@pytest.mark.parametrize(
    'state',
    [
        {'a.b': np.ones((50, 60)), 'a': {'b': np.zeros((50, 60))}},
        {'layers.0': np.ones(3), 'layers': [np.zeros(3), np.ones(3)]},
        {'t.u': 'one text', 't': {'u': 'another'}},
        {'n.m': 1, 'n': {'m': 0.5}},
    ],
)
def test_leaves_that_orbax_would_store_under_one_name(tmp_path, state):
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run').save(state, step=1)
    first, second = sorted(name for name in flatten(flax.serialization.to_state_dict(state)) if name != 'layers/1')
    with pytest.raises(errors.UnsupportedLeafError, match=f'({first}|{second}).* and .*({first}|{second}).*t5ckpt cp'):
        t5ckpt.convert_checkpoint('to-orbax', tmp_path / 'run', tmp_path / 'orbax')
    assert not (tmp_path / 'orbax').exists()
    t5ckpt_cli('cp', tmp_path / 'run', tmp_path / 'renamed', '--rename', re.escape(first), 'other')
    t5ckpt.convert_checkpoint('to-orbax', tmp_path / 'renamed', tmp_path / 'orbax')
    assert not t5ckpt.diff(tmp_path / 'renamed', tmp_path / 'orbax')


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    ['a b', '100%', '%20', 'é', '#1', 'a&b=c', "it's", 'a:b', '$5', 'a$', '~', 'x' * 200, '[1,2]', '[!a]', 'a*', 'a?'],
)
def test_targets_with_odd_names(tmp_path, monkeypatch, name):
    state = {
        'w': np.arange(5000.0),
        'odd': {name: np.ones(3), 'mlp/linear': np.ones(2)},
    }
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run').save(state, step=7)
    (tmp_path / 'link').symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for target in (tmp_path / name / '7', f'./{name}-relative', tmp_path / 'link' / f'{name}-linked'):
        t5ckpt.convert_checkpoint('to-orbax', 'run', target)
        assert not t5ckpt.diff('run', target), target
        with ocp.PyTreeCheckpointer() as checkpointer:
            assert_same(checkpointer.restore((tmp_path / target / 'default').absolute())['w'], state['w'], 'w')


# Orbax warns of a sharding that it takes from its file.
@pytest.mark.filterwarnings('ignore:Sharding info not provided')
def test_typed_keys_are_not_converted_to_where_orbax_reads_them_as_numbers(tmp_path):
    state = {'key': jax.random.key(1), 'w': np.ones(3)}
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run').save(state, step=7)
    with pytest.raises(errors.UnsupportedFormatError, match=r'seed=\[1,2\].* pattern'):
        t5ckpt.convert_checkpoint('to-orbax', tmp_path / 'run', tmp_path / 'seed=[1,2]/7')
    assert not (tmp_path / 'seed=[1,2]').exists()
    # The reason: Orbax looks for the file with the implementations by a pattern.
    t5ckpt.convert_checkpoint('to-orbax', tmp_path / 'run', tmp_path / 'plain/7')
    shutil.copytree(tmp_path / 'plain/7', tmp_path / 'seed=[1,2]/7')
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = [checkpointer.restore(tmp_path / name / '7/default')['key'].dtype for name in ('plain', 'seed=[1,2]')]
    assert found == [state['key'].dtype, np.uint32]


@pytest.mark.parametrize('name', ['/a', 'b//c', '../d'])
def test_names_that_lead_out_of_a_directory_of_orbax_are_refused(tmp_path, name):
    state = {name: np.ones(4)}
    t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'run').save(state, step=7)
    with pytest.raises(errors.UnsupportedLeafError, match='Rename the leaf'):
        t5ckpt.convert_checkpoint('to-orbax', tmp_path / 'run', tmp_path / 'orbax')
    assert not (tmp_path / 'orbax').exists()


# ---- the command line ----


def test_the_verb(tf_golden, tmp_path):
    source, run = tf_golden / 'tf_t5_1_1_gated', tmp_path / 'run'
    would = json.loads(t5ckpt_cli('convert', 'tf', source, run, '--dry-run', '--json'))
    assert (would['dry_run'], would['step'], len(would['mapped']), len(would['added'])) == (True, 1000700, 105, 156)
    assert not run.exists()
    text = t5ckpt_cli('convert', 'tf', source, run, '--save-dtype', 'float32', '--leave', 'OPTIMIZER')
    for word in ('checkpoint_1000700 written', 'renamed: ', 'dropped: ', 'k_slot_v'):
        assert word in text
    assert '--force' in t5ckpt_cli('convert', 'tf', source, run, code=1)
    t5ckpt_cli('convert', 'tf', source, run, '--save-dtype', 'float32', '--force')
    check(run, leaves_of(source / 'converted'))


def test_the_verb_with_wrong_words(tf_golden, tmp_path):
    source, run = tf_golden / 'tf_decoder_only', tmp_path / 'run'
    rules = tmp_path / 'rules.py'
    rules.write_text('translator = 3')
    for words in (
        ('gguf', source, run),
        ('tf', source, run, '--save-dtype', 'int8'),
        ('tf', source, run, '--rules', rules),
        ('orbax', source, run, '--rules', rules),
    ):
        t5ckpt_cli('convert', *words, code=2)
    assert 'the prefix of a TensorFlow checkpoint' in t5ckpt_cli('convert', 'tf', tmp_path / 'nothing', run, code=3)
    assert not run.exists()


def test_the_verb_with_rules(tf_golden, tmp_path):
    rules = tmp_path / 'rules.py'
    rules.write_text(
        'import t5ckpt\n'
        'translator = t5ckpt.CheckpointTranslator()\n'
        "translator.add('.*_slot_.*')(lambda options, key, value: (None, None))\n"
        "translator.add('(.*)')(lambda options, key, value, name: (f'target/{name}', value))\n"
    )
    words = ('tf', tf_golden / 'tf_decoder_only', tmp_path / 'run', '--rules', rules, '--json')
    done = json.loads(t5ckpt_cli('convert', *words))
    assert done['mapped']['transformer/embedding'] == 'target/transformer/embedding'
    assert len(done['dropped']) > 10
    held = cases.load_npz(tf_golden / 'tf_decoder_only' / 'tf_vars.npz')
    assert_same(leaves_of(tmp_path / 'run')['target/transformer/embedding'], held['transformer/embedding'])
