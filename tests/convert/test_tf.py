"""From TensorFlow checkpoints, read without TensorFlow: what T5X makes of them, to the bit."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support import golden as cases, partitioner
from support.bits import assert_same
from support.cli import t5ckpt_cli
from support.golden import flatten, nest
from support.options import with_options

import t5ckpt
from t5ckpt import errors
from t5ckpt.convert.tf import TfCheckpoint, open_tf, tf_leaves
from t5ckpt.lazy import LazyArray
from t5ckpt.storage import open_storage

NAMES = ('tf_encdec_shared_relpos', 'tf_t5_1_1_gated', 'tf_decoder_only')
STEP = 1000700
each_case = pytest.mark.parametrize('name', NAMES)


def names_of(table):
    return {'/'.join(path): value for path, value in table.items()}


def value_of(leaf):
    return leaf.get() if isinstance(leaf, LazyArray) else leaf


def expected_of(tf_golden, name):
    return cases.load_npz(tf_golden / name / 'expected.npz')


# ---- the files ----


@each_case
def test_every_variable_is_read_whole_and_in_slices(tf_golden, name):
    held = cases.load_npz(tf_golden / name / 'tf_vars.npz')
    tensors = open_tf(tf_golden / name).tensors
    assert set(tensors) == set(held)
    for key, array in held.items():
        assert_same(tensors[key].get(), array, key)
        assert tensors[key].is_sliceable
        if array.ndim == 2:
            assert_same(tensors[key][3:7, 1::2], array[3:7, 1::2], key)
            assert_same(tensors[key][1:, 2:3], array[1:, 2:3], key)
            assert_same(tensors[key][2:3, :], array[2:3, :], key)
            assert_same(tensors[key][5:5, :], array[5:5, :], key)
        elif array.ndim == 1:
            assert_same(tensors[key][-2:], array[-2:], key)


def test_every_way_to_name_it(tf_golden, tmp_path):
    folder = tf_golden / NAMES[0]
    prefix = folder / f'model.ckpt-{STEP}'
    for path in (folder, str(folder), prefix, f'{prefix}.index', f'{prefix}.data-00000-of-00001'):
        assert open_tf(path).prefix == str(prefix)
    # Without the state file the only checkpoint is taken; with one that was written elsewhere, by its last name.
    copy = shutil.copytree(folder, tmp_path / 'copy', ignore=shutil.ignore_patterns('converted', 'checkpoint'))
    assert open_tf(copy).prefix == str(copy / f'model.ckpt-{STEP}')
    for file in folder.glob('model.*'):
        shutil.copy(file, copy / file.name.replace(str(STEP), '5'))
    with pytest.raises(errors.CheckpointNotFoundError, match=r'model\.ckpt-1000700, model\.ckpt-5'):
        open_tf(copy)
    (copy / 'checkpoint').write_text('model_checkpoint_path: "gs://elsewhere/model.ckpt-5"\n')
    assert open_tf(copy).prefix == str(copy / 'model.ckpt-5')


@pytest.mark.parametrize('ending', ['', '.index', '.data-00000-of-00001'])
def test_what_reads_checkpoints_names_the_verb_that_converts_it(tf_golden, tmp_path, ending):
    path = f'{tf_golden / NAMES[2] / "model.ckpt-"}{STEP}{ending}'
    for read in (t5ckpt.open_checkpoint, t5ckpt.load_t5x_checkpoint):
        with pytest.raises(errors.UnsupportedFormatError, match=r'a file of TensorFlow.*t5ckpt convert tf'):
            read(path)
    t5ckpt_cli('convert', 'tf', path, tmp_path / 'run')
    assert t5ckpt.latest_step(tmp_path / 'run') == STEP


def test_a_bucket(tf_golden, request):
    folder, bucket = tf_golden / NAMES[0], f'memory://{request.node.name}/model'
    storage = open_storage(bucket)
    for file in folder.iterdir():
        if file.is_file():
            storage.write(file.name, file.read_bytes())
    for path in (bucket, f'{bucket}/model.ckpt-{STEP}', f'{bucket}/model.ckpt-{STEP}.index'):
        found, wanted = read_all(path), read_all(folder)
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            assert_same(found[name], array, name)


@pytest.mark.parametrize('path', ['nothing', 'nothing/model.ckpt-1', '.'])
def test_nothing_there(tmp_path, path):
    with pytest.raises(errors.CheckpointNotFoundError, match=r'TensorFlow checkpoint|no file'):
        open_tf(tmp_path / path)


def read_all(folder):
    return {name: tensor.get() for name, tensor in open_tf(folder).tensors.items()}


def test_a_checkpoint_that_needs_no_conversion(tmp_path):
    with t5ckpt.Checkpointer({'w': np.ones(3)}, checkpoints_dir=tmp_path / 'run') as checkpointer:
        checkpointer.save({'w': np.ones(3)}, step=1)
    for path in (tmp_path / 'run', tmp_path / 'run/checkpoint_1'):
        with pytest.raises(
            errors.CheckpointNotFoundError, match=r'no file \*\.index\. .* layout of t5x: use t5ckpt cp'
        ):
            t5ckpt.convert_checkpoint('tf', path, tmp_path / 'out')


def test_damage_anywhere_in_the_index_is_seen(tf_golden, tmp_path):
    """Whichever byte is another: an error of ours, or, where the byte means nothing, the same tensors."""
    folder = shutil.copytree(tf_golden / NAMES[2], tmp_path / 'copy', ignore=shutil.ignore_patterns('converted'))
    index = folder / f'model.ckpt-{STEP}.index'
    whole, tensors = index.read_bytes(), read_all(folder)
    raised = 0
    for at in [*range(0, len(whole) - 48, 7), *range(len(whole) - 48, len(whole))]:
        index.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            found = open_tf(folder)
        except errors.T5CkptError:
            raised += 1
        else:
            assert set(found.tensors) == set(tensors)
    assert raised > len(whole) // 8
    for length in (0, 47, 48, len(whole) // 2, len(whole) - 1):
        index.write_bytes(whole[:length])
        with pytest.raises(errors.FormatError, match='index'):
            open_tf(folder)


def test_damage_in_the_data_names_the_variable(tf_golden, tmp_path):
    folder = shutil.copytree(tf_golden / NAMES[2], tmp_path / 'copy', ignore=shutil.ignore_patterns('converted'))
    data = folder / f'model.ckpt-{STEP}.data-00000-of-00001'
    whole = data.read_bytes()
    data.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    with pytest.raises(errors.CorruptCheckpointError, match=r'(state|target)/.*: |transformer/.*CRC'):
        t5ckpt.convert_checkpoint('tf', folder, tmp_path / 'run')
    assert not any((tmp_path / 'run').iterdir())
    for content in (whole[:-1], b''):
        data.write_bytes(content)
        with pytest.raises(errors.CorruptCheckpointError, match='too short'):
            read_all(folder)
    data.unlink()
    with pytest.raises(errors.CheckpointNotFoundError, match='data-00000'):
        read_all(folder)


# ---- translation ----


@each_case
def test_leaves_are_those_of_t5x(tf_golden, name):
    expected = expected_of(tf_golden, name)
    found = tf_leaves(open_tf(tf_golden / name))
    leaves = names_of(found.table)
    assert set(leaves) == set(expected)
    for key, array in expected.items():
        assert_same(value_of(leaves[key]), array, key)
    variables = open_tf(tf_golden / name).tensors
    assert set(found.mapped) == set(variables)
    assert {*found.mapped.values(), *found.added} == set(expected)
    assert found.dropped == ()
    assert found.step == STEP


@pytest.mark.parametrize('compression', [None, 'zstd'])
@each_case
def test_what_is_written_reads_as_what_t5x_wrote(tf_golden, tmp_path, name, compression):
    done = t5ckpt.convert_checkpoint(
        'tf', tf_golden / name, tmp_path, t5ckpt.ConvertOptions(save_dtype=np.float32, compression=compression)
    )
    assert (done.step, done.path) == (STEP, str(tmp_path / f'checkpoint_{STEP}'))
    ours = flatten(t5ckpt.load_t5x_checkpoint(tmp_path))
    theirs = flatten(t5ckpt.load_t5x_checkpoint(tf_golden / name / 'converted'))
    assert set(ours) == set(theirs)
    for key, array in theirs.items():
        assert_same(ours[key], array, key)
        assert type(ours[key]) is type(array), key


def test_without_the_optimizer(tf_golden, tmp_path):
    done = t5ckpt.convert_checkpoint(
        'tf', tf_golden / NAMES[0], tmp_path, t5ckpt.ConvertOptions(leave=t5ckpt.OPTIMIZER)
    )
    leaves = flatten(t5ckpt.load_t5x_checkpoint(tmp_path))
    expected = expected_of(tf_golden, NAMES[0])
    assert set(leaves) == {key for key in expected if not key.startswith('state/param_states')}
    assert done.added == ()
    assert 'shared/embedding_slot_vr' in done.dropped
    assert not set(done.dropped) & set(done.mapped)


def test_a_dry_run_writes_nothing(tf_golden, tmp_path):
    done = t5ckpt.convert_checkpoint('tf', tf_golden / NAMES[0], tmp_path / 'run', t5ckpt.ConvertOptions(dry_run=True))
    assert (done.step, done.nbytes, len(done.mapped)) == (STEP, 0, 128)
    assert not (tmp_path / 'run').exists()
    t5ckpt.convert_checkpoint('tf', tf_golden / NAMES[0], tmp_path / 'run')
    with pytest.raises(errors.CheckpointExistsError):
        t5ckpt.convert_checkpoint('tf', tf_golden / NAMES[0], tmp_path / 'run', t5ckpt.ConvertOptions(dry_run=True))
    t5ckpt.convert_checkpoint('tf', tf_golden / NAMES[0], tmp_path / 'run', t5ckpt.ConvertOptions(overwrite=True))
    t5ckpt.convert_checkpoint('tf', tf_golden / NAMES[0], tmp_path / 'run', t5ckpt.ConvertOptions(step=3))
    assert t5ckpt.all_steps(tmp_path / 'run') == [3, STEP]


def tensors_of(shapes, prefix='dir/model.ckpt-7'):
    """A checkpoint of these names, without files."""
    values = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    lazy = {
        name: t5ckpt.LazyThreadPoolArray(value.shape, value.dtype, lambda value=value: value)
        for name, value in values.items()
    }
    return TfCheckpoint(prefix, lazy)


def block(number, tower='encoder'):
    base = f'{tower}/block_{number:03d}'
    names = {f'{base}/layer_000/SelfAttention/{p}': (4, 4) for p in 'qkvo'}
    names |= {f'{base}/layer_000/rms_norm/scale': (4,), f'{base}/layer_001/layer_norm/scale': (4,)}
    return names | {f'{base}/layer_001/DenseReluDense/{w}/kernel': (4, 4) for w in ('wi_0', 'wi_1', 'wo')}


def without(shapes, word):
    return {name: shape for name, shape in shapes.items() if word not in name}


TINY = block(0) | block(1) | {'encoder/embedding': (8, 4), 'encoder/rms_norm/scale': (4,)}


def test_a_step_is_taken_from_the_name_where_there_is_no_variable():
    found = tf_leaves(tensors_of(TINY))
    assert (found.step, found.added) == (7, ('state/step',))
    assert names_of(found.table)['state/step'] == 7
    nameless = tf_leaves(tensors_of(TINY, 'dir/model'))
    assert (nameless.step, nameless.added) == (None, ())


def test_a_rule_may_give_the_step_another_name(tmp_path, tf_golden):
    rules = t5ckpt.CheckpointTranslator()
    rules.add('global_step')(lambda _, key, value: ('step', value))
    rules.add('(.*)')(lambda _, key, value, name: (f'params/{name}', value))
    source = tf_golden / NAMES[2] / f'model.ckpt-{STEP}'
    done = t5ckpt.convert_checkpoint('tf', source, tmp_path / 'run', t5ckpt.ConvertOptions(translator=rules))
    assert (done.step, done.added) == (STEP, ())
    assert set(t5ckpt.load_t5x_checkpoint(tmp_path / 'run')) == {'params', 'step'}


def test_the_command_line_names_the_option_that_takes_rules(tmp_path, tf_golden):
    source = str(tf_golden / NAMES[2] / f'model.ckpt-{STEP}')
    (tmp_path / 'rules.py').write_text('import t5ckpt\ntranslator = t5ckpt.CheckpointTranslator()\n')
    said = t5ckpt_cli('convert', 'tf', source, tmp_path / 'run', '--rules', tmp_path / 'rules.py', code=1)
    assert 'Add or correct a rule of translator= (--rules FILE.py)' in said
    with pytest.raises(errors.TreeMismatchError, match='Add or correct a rule of translator='):
        t5ckpt.convert_checkpoint(
            'tf', source, tmp_path / 'run', t5ckpt.ConvertOptions(translator=t5ckpt.CheckpointTranslator())
        )


def test_a_step_that_is_nowhere(tmp_path, tf_golden):
    folder = tf_golden / NAMES[2]
    for kind in ('index', 'data-00000-of-00001'):
        shutil.copy(folder / f'model.ckpt-{STEP}.{kind}', tmp_path / f'model.{kind}')
    rules = t5ckpt.CheckpointTranslator()
    rules.add('global_step')(lambda *_: (None, None))
    rules.add('(.*)')(lambda _, key, value, name: (f'target/{name}', value))
    with pytest.raises(ValueError, match=r'ConvertOptions\(step='):
        t5ckpt.convert_checkpoint('tf', tmp_path / 'model', tmp_path / 'run', t5ckpt.ConvertOptions(translator=rules))
    done = t5ckpt.convert_checkpoint(
        'tf', tmp_path / 'model', tmp_path / 'run', t5ckpt.ConvertOptions(step=4, translator=rules)
    )
    assert (done.step, done.dropped) == (4, ('global_step',))
    held = cases.load_npz(folder / 'tf_vars.npz')
    leaves = flatten(t5ckpt.load_t5x_checkpoint(tmp_path / 'run'))
    for key, array in held.items():
        if key != 'global_step':
            assert_same(leaves[f'target/{key}'], array)


@pytest.mark.parametrize(
    ('shapes', 'error', 'says'),
    [
        (TINY | {'encoder/what': (4,)}, errors.TreeMismatchError, r'no rule for encoder/what\.'),
        (TINY | {'encoder/embedding_slot_x': (4,)}, errors.TreeMismatchError, 'no rule for encoder/embedding_slot_x'),
        (TINY | {'encoder/embedding\n': (4,)}, errors.TreeMismatchError, r'no rule for encoder/embedding\\n'),
        (
            TINY | {'encoder/final_layer_norm/scale': (4,)},
            errors.TreeMismatchError,
            'target/encoder/encoder_norm/scale: encoder/rms_norm/scale and encoder/final_layer_norm/scale would both',
        ),
        (
            TINY | {'encoder/block_000/layer_002/rms_norm/scale': (4,)},
            errors.UnsupportedFormatError,
            'a block of the encoder has 2 layers, but this one has the number 2',
        ),
        (TINY | block(3), errors.MissingLeaves, 'target/encoder/layers_2: the whole layer'),
        (without(TINY, 'block_000'), errors.MissingLeaves, 'target/encoder/layers_0: the whole layer'),
        (without(TINY, 'block_001/layer_001/DenseReluDense/wo'), errors.MissingLeaves, 'layers_1/mlp/wo/kernel: missing'),
        (
            TINY | {'encoder/embedding_slot_vr': (4,), 'encoder/embedding_slot_vc': (8,)},
            errors.MissingLeaves,
            'state/param_states/encoder/encoder_norm/scale: the slots of this parameter are missing, but others have them',
        ),
        (TINY | {'shared/embedding_slot_v': (4,)}, errors.MissingLeaves, 'token_embedder/embedding: missing, but its slots'),
    ],
)  # fmt: skip
def test_other_models_than_t5(shapes, error, says):
    with pytest.raises(error, match=says):
        tf_leaves(tensors_of(shapes))


def test_all_that_is_wrong_is_named_at_once():
    shapes = TINY | {f'x{i}': (1,) for i in range(30)} | {'encoder/final_layer_norm/scale': (4,)}
    with pytest.raises(errors.TreeMismatchError) as error:
        tf_leaves(tensors_of(shapes))
    for word in ('x0', 'x19', 'and 10 more', 'would both become it'):
        assert word in str(error.value)


def test_the_momentum_of_adafactor_is_kept():
    shapes = {f'{name}{slot}': shape for name, shape in TINY.items() for slot in ('', '_slot_v', '_slot_m')}
    found = tf_leaves(tensors_of(shapes))
    leaves = names_of(found.table)
    assert leaves['state/param_states/encoder/encoder_norm/scale/m'].shape == (4,)
    assert leaves['state/param_states/encoder/encoder_norm/scale/v_row'].shape == (1,)
    assert not any(name.endswith('/m') for name in found.added)


def test_biases_of_every_layer_and_of_the_first_alone():
    bias = {'encoder/block_000/layer_000/SelfAttention/relative_attention_bias': (4, 8)}
    shared = tf_leaves(tensors_of(TINY | bias))
    assert 'target/encoder/relpos_bias/rel_embedding' in names_of(shared.table)
    assert shared.mapped[next(iter(bias))] == 'target/encoder/relpos_bias/rel_embedding'
    each = bias | {'encoder/block_001/layer_000/SelfAttention/relative_attention_bias': (4, 8)}
    names = names_of(tf_leaves(tensors_of(TINY | each)).table)
    assert {f'target/encoder/layers_{i}/relpos_bias/rel_embedding' for i in (0, 1)} <= set(names)


def test_a_step_that_t5x_cannot_hold():
    checkpoint = tensors_of(TINY)
    big = t5ckpt.LazyThreadPoolArray((), np.int64, lambda: np.int64(2**31))
    with pytest.raises(errors.UnsupportedFormatError, match=r'global_step.*32-bit'):
        tf_leaves(dataclasses.replace(checkpoint, tensors=checkpoint.tensors | {'global_step': big}))


# ---- for a model that is at hand ----


def model_of(expected, change=lambda key, array: array):
    arrays = {key: change(key, array) for key, array in expected.items()}
    return partitioner.T5XState(
        nest({key: jax.ShapeDtypeStruct(array.shape, array.dtype) for key, array in arrays.items()})
    )


def checkpointer(state, run_dir='unused', **options):
    mesh = jax.make_mesh((4, 2), ('data', 'model'))

    def rules(name, shape):
        return PartitionSpec('data', 'model') if len(shape) == 2 and name.endswith('kernel') else None

    return t5ckpt.Checkpointer(state, partitioner.Partitioner(mesh, rules), run_dir, **with_options(**options))


@each_case
def test_restore_onto_a_mesh(tf_golden, name):
    expected = expected_of(tf_golden, name)
    state = checkpointer(model_of(expected)).restore_from_tf_checkpoint(tf_golden / name)
    leaves = flatten(state.tree)
    assert set(leaves) == set(expected)
    for key, array in expected.items():
        assert isinstance(leaves[key], jax.Array)
        assert_same(leaves[key], array, key)
    kernel = leaves['target/decoder/layers_0/mlp/wo/kernel']
    assert kernel.addressable_shards[0].data.shape == (kernel.shape[0] // 4, kernel.shape[1] // 2)


def test_restore_casts_floats_of_target_on_request(tf_golden):
    expected = expected_of(tf_golden, NAMES[1])
    ck = checkpointer(model_of(expected), restore_dtype=np.float32)
    leaves = flatten(ck.restore_from_tf_checkpoint(tf_golden / NAMES[1]).tree)
    for key, array in expected.items():
        assert_same(leaves[key], array.astype(np.float32) if key.startswith('target') else array, key)


def test_restore_is_strict_about_what_the_model_lacks(tf_golden):
    expected = expected_of(tf_golden, NAMES[0])
    inference = {key: array for key, array in expected.items() if not key.startswith('state/param_states')}
    ck = checkpointer(model_of(inference))
    with pytest.raises(errors.UnexpectedLeaves, match=r'state/param_states/.* not in the template'):
        ck.restore_from_tf_checkpoint(tf_golden / NAMES[0])
    leaves = flatten(ck.restore_from_tf_checkpoint(tf_golden / NAMES[0], strict=False).tree)
    assert set(leaves) == set(inference)


def test_restore_says_what_does_not_fit(tf_golden):
    expected = expected_of(tf_golden, NAMES[0])

    def change(key, array):
        return np.zeros((3, 3), np.float32) if key == 'target/token_embedder/embedding' else array

    model = model_of(expected | {'target/encoder/new': np.ones(2, np.float32)}, change)
    with pytest.raises(errors.TreeMismatchError) as error:
        checkpointer(model).restore_from_tf_checkpoint(tf_golden / NAMES[0], strict=False)
    for word in (
        'target/token_embedder/embedding: checkpoint (160, 32), template (3, 3)',
        'target/encoder/new: not in',
    ):
        assert word in str(error.value)


def test_convert_for_a_model(tf_golden, tmp_path, caplog):
    expected = expected_of(tf_golden, NAMES[1])
    inference = {key: array for key, array in expected.items() if not key.startswith('state/param_states')}
    ck = checkpointer(model_of(inference), tmp_path, save_dtype=np.float32)
    done = ck.convert_from_tf_checkpoint(tf_golden / NAMES[1], concurrent_gb=0.001)
    assert done.step == STEP
    leaves = flatten(t5ckpt.load_t5x_checkpoint(tmp_path))
    assert set(leaves) == set(inference)
    for key, array in inference.items():
        assert_same(leaves[key], array.astype(np.float32) if key.startswith('target') else array, key)
    assert ck.convert_from_tf_checkpoint(tf_golden / NAMES[1]) is None
    assert 'Skipping' in caplog.text
    restored = flatten(ck.restore().tree)
    assert set(restored) == set(inference)


def test_the_dtype_of_a_conversion_is_that_of_the_verb(tf_golden, tmp_path):
    ck = checkpointer(model_of(expected_of(tf_golden, NAMES[1])), tmp_path / 'run', save_dtype='bfloat16')
    ck.convert_from_tf_checkpoint(tf_golden / NAMES[1])
    t5ckpt_cli('convert', 'tf', tf_golden / NAMES[1], tmp_path / 'verb', '--save-dtype', 'bfloat16')
    found, wanted = (flatten(t5ckpt.load_t5x_checkpoint(tmp_path / name)) for name in ('run', 'verb'))
    assert set(found) == set(wanted)
    for name, leaf in wanted.items():
        assert_same(found[name], leaf, name)
    assert str(found['target/token_embedder/embedding'].dtype) == 'bfloat16'


def test_convert_for_a_model_with_transforms(tf_golden, tmp_path):
    def halve(state, infos):
        return {'target': state['target'], 'state': {'step': state['state']['step']}}, {
            'target': infos['target'],
            'state': {'step': infos['state']['step']},
        }

    ck = checkpointer(model_of(expected_of(tf_golden, NAMES[2])), tmp_path)
    ck.convert_from_tf_checkpoint(tf_golden / NAMES[2], state_transformation_fns=[halve])
    assert sorted(flatten(t5ckpt.load_t5x_checkpoint(tmp_path))['state/step'].shape) == []
    assert not any('param_states' in key for key in t5ckpt.open_checkpoint(tmp_path))


def test_a_saved_model_names_the_checkpoint_in_it(tmp_path):
    (tmp_path / 'model' / 'variables').mkdir(parents=True)
    (tmp_path / 'model' / 'variables' / 'variables.index').write_bytes(b'')
    with pytest.raises(
        errors.CheckpointNotFoundError, match=r'SavedModel, whose checkpoint is .*/variables/variables\.'
    ):
        open_tf(tmp_path / 'model')
