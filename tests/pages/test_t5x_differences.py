"""docs/t5x-differences.md is complete: each row is tested, and what the signatures of T5X's say is on it.

The signatures below are T5X's, of t5x/checkpoints.py, checkpoints_utils.py, checkpoint_utils.py, checkpoint_importer.py and
state_utils.py; bodies and annotations are left out.
"""

# ruff: noqa: N805 - functions stand in a class, as they do in a module

import asyncio
import dataclasses
import inspect
import json
import logging
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from flax import serialization, traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import t5ckpt
from t5ckpt import apply_assignment_map
from t5ckpt.storage import open_storage

PAGE = (pathlib.Path(__file__).resolve().parents[2] / 'docs' / 't5x-differences.md').read_text(encoding='utf-8')
ROWS = {title: row for row, title in re.findall(r'^(\| \*\*(.*?)\*\* \|.*)$', PAGE, re.MULTILINE)}


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# ---- a test for each row ----


def test_each_row_has_a_test_of_its_name():
    names = [re.sub(r'[^a-z0-9]+', '_', title.lower().replace("'", '').replace('`', '')) for title in ROWS]
    assert len(names) == 39
    assert [name for name in names if f'test_{name}' not in globals()] == []


def save(directory, state, step, **options):
    with t5ckpt.Checkpointer(state, checkpoints_dir=directory, **options) as checkpointer:
        return checkpointer.save(state, step=step)


def restore(directory, state, **options):
    with t5ckpt.Checkpointer(state, checkpoints_dir=directory, **options) as checkpointer:
        return checkpointer.restore()


def test_nothing_is_cast_silently():
    state = {'target': {'w': jnp.ones(4, jnp.bfloat16)}}
    save('dtype', state, step=1)
    assert t5ckpt.load_t5x_checkpoint('dtype')['target']['w'].dtype == jnp.bfloat16


def test_a_cast_touches_only_floating_weights():
    state = {'target': {'w': jnp.ones(4), 'table': jnp.arange(4)}, 'state': {'step': jnp.int32(16_777_217)}}
    save('cast', state, step=16_777_217)
    loaded = t5ckpt.load_t5x_checkpoint('cast', restore_dtype=jnp.bfloat16)
    assert loaded['target']['w'].dtype == jnp.bfloat16
    assert loaded['target']['table'].dtype == jnp.int32
    assert loaded['state']['step'] == 16_777_217


def test_a_cast_needs_a_floating_dtype():
    for option in ('save_dtype', 'restore_dtype'):
        with pytest.raises(ValueError, match=f'{option} .*floating'):
            t5ckpt.Checkpointer({'w': jnp.ones(2)}, checkpoints_dir='integers', **{option: jnp.int8})


def test_step_0_is_a_step():
    state = {'target': {'w': jnp.zeros(2)}}
    save('zero', state, step=0)
    assert t5ckpt.latest_step('zero') == 0
    np.testing.assert_array_equal(restore('zero', state)['target']['w'], [0, 0])


def test_empty_containers_and_python_scalars_load():
    state = {'target': {'w': jnp.ones(2), 'none_yet': {}}, 'epoch': 3}
    save('empty', state, step=1)
    restored = restore('empty', state)
    assert restored['target']['none_yet'] == {}
    assert type(restored['epoch']) is int


def test_large_arrays_cannot_hang_a_save():
    state = {'target': {'w': jnp.ones((1024, 1024))}}
    with t5ckpt.Checkpointer(state, checkpoints_dir='budget') as checkpointer:
        checkpointer.save(state, step=1, concurrent_gb=0.001)


def test_every_shape_is_checked():
    save('shape', {'target': {'scale': jnp.ones(3)}}, step=1)
    with pytest.raises(ValueError, match='target/scale'):
        restore('shape', {'target': {'scale': jnp.ones(4)}})


def test_a_checkpoint_with_more_leaves_than_the_template():
    save('more', {'target': {'w': jnp.ones(2)}, 'state': {'v_row': jnp.ones(3)}}, step=1)
    with pytest.raises(t5ckpt.errors.UnexpectedLeaves, match='state/v_row'):
        restore('more', {'target': {'w': jnp.zeros(2)}})


def test_none_in_the_template_does_not_skip_a_leaf():
    save('nothing', {'target': {'w': jnp.ones(2), 'old': jnp.ones(3)}}, step=1)
    with pytest.raises(t5ckpt.errors.UnexpectedLeaves, match='The template has None there'):
        restore('nothing', {'target': {'w': jnp.zeros(2), 'old': None}})
    assert restore('nothing', {'target': {'w': jnp.zeros(2), 'old': ...}})['target']['old'] is ...
    assert t5ckpt.intersect_state({'a': 1, 'b': 2}, {'a': 0, 'b': None}) == {'a': 1}


def test_64_bit_leaves_are_not_narrowed_in_silence():
    save('wide', {'target': {'x': np.float64([1 / 3])}}, step=1)
    with pytest.warns(UserWarning, match='float64'):
        restore('wide', {'target': {'x': jnp.zeros(1)}})

    save('large', {'target': {'n': np.int64([2**40])}}, step=1)
    with pytest.warns(UserWarning, match='int64'), pytest.raises(ValueError, match='target/n: holds 1099511627776'):
        restore('large', {'target': {'n': jnp.zeros(1, jnp.int32)}})


def test_reads_work_inside_an_event_loop():
    async def read():
        return t5ckpt.open_checkpoint('loop')['target/scale'][:]

    save('loop', {'target': {'scale': jnp.ones(3)}}, step=1)
    np.testing.assert_array_equal(asyncio.run(read()), [1, 1, 1])


def test_pinned_steps_do_not_count():
    states = [{'target': {'w': jnp.full(2, i)}} for i in range(5)]
    with t5ckpt.Checkpointer(states[0], checkpoints_dir='pins', keep=2) as checkpointer:
        for step, state in enumerate(states):
            checkpointer.save(state, step=step)
            if step == 0:
                t5ckpt.pin_checkpoint('pins/checkpoint_0')
    assert t5ckpt.all_steps('pins') == [0, 3, 4]


def test_files_of_other_programs_are_never_deleted():
    theirs = pathlib.Path('theirs/checkpoint_5/model.safetensors')
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b'weights')
    save('theirs', {'target': {'w': jnp.ones(2)}}, step=5)
    assert t5ckpt.all_steps('theirs') == [5]
    assert [path.read_bytes() for path in pathlib.Path('theirs').glob('checkpoint_5.foreign-*/*')] == [b'weights']


def test_a_count_of_0_is_an_error():
    for option in ('keep', 'keep_dataset_checkpoints'):
        with pytest.raises(ValueError, match='None keeps all'):
            t5ckpt.Checkpointer({'w': jnp.ones(2)}, checkpoints_dir='none', **{option: 0})


def test_nan_is_never_best_and_every_value_of_an_event_counts():
    with t5ckpt.SaveBestCheckpointer({'w': jnp.ones(2)}, None, 'nan', keep=1) as checkpointer:
        for step, accuracy in enumerate([0.5, float('nan'), 0.25, 0.0]):
            checkpointer.save({'w': jnp.ones(2)}, step=step, metrics={'train/accuracy': accuracy})
    assert t5ckpt.all_steps('nan') == [0, 3]


def test_options_without_an_effect_cause_a_warning():
    with pytest.warns(t5ckpt.errors.NoEffectWarning, match='keep=None'):
        checkpointer = t5ckpt.SaveBestCheckpointer({'w': jnp.ones(2)}, None, 'period', force_keep_period=100)
    assert checkpointer.keep is None
    with pytest.warns(t5ckpt.errors.NoEffectWarning, match='there is no data iterator'):
        t5ckpt.Checkpointer({'w': jnp.ones(2)}, None, 'period', keep_dataset_checkpoints=1)

    save('fallback', {'target': {'w': jnp.ones(2)}}, step=1)
    with (
        t5ckpt.Checkpointer({'target': {'w': jnp.zeros(2)}}, None, 'fallback') as checkpointer,
        pytest.warns(t5ckpt.errors.NoEffectWarning, match='target/z'),
    ):
        checkpointer.restore(fallback_state={'target': {'z': jnp.ones(2)}})


def test_a_rule_of_an_assignment_map_wins():
    assert apply_assignment_map({'a': 1, 'b': 2}, {'a': 0}, [('a', 'b')]) == {'a': 2}


def test_a_pattern_matches_a_complete_name():
    translator = t5ckpt.CheckpointTranslator()

    @translator.add('a|b')
    def first(options, key, value):
        return 'target/x', value

    assert translator.apply({'a': 1}) == {'target/x': 1}
    with pytest.raises(ValueError, match='no rule for ax'):
        translator.apply({'ax': 1})
    with pytest.raises(ValueError, match='a and b would both become it'):
        translator.apply({'a': 1, 'b': 2})


def test_only_complete_checkpoints_are_steps():
    save('whole', {'w': jnp.ones(2)}, step=1)
    for name, manifest in (('checkpoint_2', b''), ('checkpoint_03', b'\x80')):
        pathlib.Path('whole', name).mkdir()
        pathlib.Path('whole', name, 'checkpoint').write_bytes(manifest)
    pathlib.Path('whole/checkpoint_4').mkdir()
    assert t5ckpt.all_steps('whole') == [1]

    with pytest.raises(FileNotFoundError, match='is not a checkpoint'):
        t5ckpt.pin_checkpoint('whole/checkpoint_4')
    with pytest.raises(ValueError, match='is a checkpoint, not a run'):
        t5ckpt.Checkpointer({'w': jnp.ones(2)}, None, 'whole/checkpoint_1')

    bucket = open_storage('memory://positions')
    save(bucket, {'w': jnp.ones(2)}, step=1)
    for directory in ('checkpoint_1', 'checkpoint_2'):
        bucket.write(f'{directory}/train_ds-000-of-001', b'3')
    assert t5ckpt.all_dataset_checkpoint_steps('memory://positions') == [1]


def test_leading_zeros_in_a_steps_directory():
    save('zeros', {'target': {'w': jnp.ones(2)}}, step=7)
    pathlib.Path('zeros/checkpoint_7').rename(t5ckpt.get_checkpoint_dir('zeros', 7, 8))
    assert t5ckpt.all_steps('zeros') == [7]
    np.testing.assert_array_equal(restore('zeros', {'target': {'w': jnp.zeros(2)}})['target']['w'], [1, 1])
    assert save('zeros', {'target': {'w': jnp.zeros(2)}}, step=7) is None
    with (
        t5ckpt.Checkpointer({}, checkpoints_dir='zeros') as checkpointer,
        pytest.raises(t5ckpt.errors.UnsupportedFormatError, match='Rename it to checkpoint_7 first'),
    ):
        checkpointer.delete(7)


def test_older_formats_are_read():
    pathlib.Path('flax/checkpoint_5').mkdir(parents=True)
    old = {'target': {'w': np.ones(2, np.float32)}, 'state': {'step': np.int32(5)}}
    pathlib.Path('flax/checkpoint_5/checkpoint').write_bytes(serialization.msgpack_serialize(old))
    template = {'target': {'w': jnp.zeros(2)}, 'state': {'step': jnp.int32(0)}}
    np.testing.assert_array_equal(restore('flax', template)['target']['w'], [1, 1])

    bits = np.arange(20_000, dtype=np.uint16)
    save('bits', {'target': {'bits': bits}}, step=1)
    np.testing.assert_array_equal(restore('bits', {'target': {'bits': np.zeros_like(bits)}})['target']['bits'], bits)


def test_a_file_is_one_checkpoint():
    save('file', {'w': jnp.ones(2)}, step=1)
    manifest = t5ckpt.find_checkpoint('file', step=1)
    assert t5ckpt.find_checkpoint(manifest, step=7) == manifest
    with pytest.raises(FileNotFoundError, match='step 7'):
        t5ckpt.load_t5x_checkpoint(manifest, step=7)


def test_a_leaf_without_axes_is_written_completely():
    class Partitioner:
        mesh = Mesh(np.array(jax.devices()), ('data',))
        params_on_devices = True

        def get_mesh_axes(self, train_state):
            return {'target': {'v_row': None}}

    rows = jax.device_put(jnp.arange(8192.0), NamedSharding(Partitioner.mesh, PartitionSpec('data')))
    with t5ckpt.Checkpointer({'target': {'v_row': rows}}, Partitioner(), 'axes') as checkpointer:
        checkpointer.save({'target': {'v_row': rows}}, step=1)
    contents = serialization.msgpack_restore(pathlib.Path('axes/checkpoint_1/checkpoint').read_bytes())
    np.testing.assert_array_equal(contents['optimizer']['target']['v_row'], rows)


def test_lazy_arrays_know_their_shape_and_dtype():
    with pytest.raises(TypeError):
        t5ckpt.LazyThreadPoolArray(None, None, lambda: np.ones(2))

    save('lazy', {'target': {'scale': jnp.ones(2)}}, step=1)
    leaf = t5ckpt.load_t5x_checkpoint('lazy', lazy_parameters=True)['target']['scale']
    assert isinstance(leaf, t5ckpt.LazyThreadPoolArray)
    assert not hasattr(leaf, 'executor')


def test_lazy_arrays_compare_by_element():
    ones = t5ckpt.LazyThreadPoolArray((2,), np.float32, lambda: np.ones(2, np.float32))
    np.testing.assert_array_equal(ones == np.float32([1, 2]), [True, False])
    with pytest.raises(TypeError, match='unhashable'):
        hash(ones)


def test_the_step_is_an_integer():
    for step in (7.5, -1):
        with pytest.raises(ValueError, match='one integer of at least 0'):
            save('whole-number', {'w': jnp.ones(2)}, step=step)
        with pytest.raises(ValueError, match='an integer of at least 0'):
            t5ckpt.get_checkpoint_dir('whole-number', step)
    save('whole-number', {'w': jnp.ones(2)}, step=7)
    for find in (t5ckpt.find_checkpoint, t5ckpt.load_t5x_checkpoint, t5ckpt.get_checkpoint_dir):
        find('whole-number', 7)
        with pytest.raises(ValueError, match="step must be an integer of at least 0, got '7'"):
            find('whole-number', '7')


def test_the_item_state_of_a_directory():
    save('item', {'target': {'w': jnp.ones(2)}}, step=1)
    pathlib.Path('item/checkpoint_2').mkdir()
    pathlib.Path('item/checkpoint_1').rename('item/checkpoint_2/state')
    with t5ckpt.Checkpointer({'target': {'w': jnp.zeros(2)}}, checkpoints_dir='item') as checkpointer:
        with pytest.raises(FileNotFoundError, match='it contains 1 entry: state'):
            checkpointer.restore(path='item/checkpoint_2')
        restored = checkpointer.restore(path='item/checkpoint_2/state')
    np.testing.assert_array_equal(restored['target']['w'], [1, 1])


def test_a_save_transform_only_sets_the_path():
    def elsewhere(state_dict, parameter_infos):
        info = parameter_infos['target']['w']
        spec = info.ts_spec.to_json()
        spec['kvstore']['path'] = 'elsewhere'
        spec['metadata']['chunks'] = [1, 1]
        parameter_infos['target']['w'] = dataclasses.replace(info, ts_spec=ts.Spec(spec))
        return state_dict, parameter_infos

    big = {'target': {'w': jnp.ones((128, 128))}}
    with t5ckpt.Checkpointer(big, checkpoints_dir='spec') as checkpointer:
        checkpointer.save(big, [elsewhere], step=1)
    assert [path.name for path in pathlib.Path('spec/checkpoint_1/elsewhere').glob('[0-9]*')] == ['0.0']


def test_a_restore_transform_gets_objects():
    def rebuilt(state, model):
        return traverse_util.unflatten_dict(traverse_util.flatten_dict(state))

    save('rebuilt', {'target': {'w': jnp.ones((128, 128))}}, step=1)
    loaded = t5ckpt.load_t5x_checkpoint('rebuilt', state_transformation_fns=[rebuilt])
    assert loaded['target']['w'].shape == (128, 128)


def test_a_checkpoint_without_a_position_in_the_data():
    class Batches:
        position = 3

        def get_state(self):
            return {'position': self.position}

        def set_state(self, state):
            self.position = state['position']

    save('position', {'target': {'w': jnp.ones(2)}}, step=1)
    batches = Batches()
    with t5ckpt.Checkpointer({'target': {'w': jnp.zeros(2)}}, None, 'position', batches) as checkpointer:
        np.testing.assert_array_equal(checkpointer.restore()['target']['w'], [1, 1])
    assert batches.position == 3


def test_additional_files():
    save('files', {'w': np.ones((256, 256))}, step=1)
    assert sorted(os.listdir('files/checkpoint_1')) == ['checkpoint', 'integrity.0.json', 'w']
    assert json.loads(pathlib.Path('files/checkpoint_1/w/.zarray').read_text())['compressor'] is None


def test_leftovers_of_a_crash_are_removed():
    pathlib.Path('crash/checkpoint_3.tmp-1600000000').mkdir(parents=True)
    save('crash', {'w': jnp.ones(2)}, step=5)
    assert sorted(os.listdir('crash')) == ['checkpoint_3.tmp-1600000000', 'checkpoint_5']


def test_a_path_may_be_a_runs_directory():
    save('run-path', {'target': {'w': jnp.ones(2)}}, step=5)
    with t5ckpt.Checkpointer({'target': {'w': jnp.zeros(2)}}, None, pathlib.Path('other')) as checkpointer:
        np.testing.assert_array_equal(checkpointer.restore(path='run-path')['target']['w'], [1, 1])
    assert checkpointer.checkpoints_dir == os.path.abspath('other')


def test_every_leaf_is_restored_as_in_the_template():
    class Replicated:
        mesh = Mesh(np.array(jax.devices()), ('data',))
        params_on_devices = True

        def get_mesh_axes(self, train_state):
            return jax.tree.map(lambda leaf: None, train_state)

    save('placed', {'target': {'w': jnp.ones(2)}, 'state': {'step': np.int32(1)}}, step=1)
    template = {'target': {'w': jnp.zeros(2), 'new': jnp.zeros(3)}, 'state': {'step': np.int32(0)}}
    with t5ckpt.Checkpointer(template, Replicated(), 'placed') as checkpointer:
        restored = checkpointer.restore(fallback_state={'target': {'new': np.ones(3, np.float32)}})
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))
        with pytest.raises(ValueError, match='target/new'):
            checkpointer.restore(fallback_state={'target': {}})


def test_a_state_that_does_not_fit_is_saved():
    with (
        t5ckpt.Checkpointer({'target': {'w': jnp.ones(2)}}, None, 'misfit') as checkpointer,
        pytest.warns(t5ckpt.errors.TemplateMismatchWarning, match='target/w'),
    ):
        checkpointer.save({'target': {'w': jnp.ones(3)}}, step=1)
    assert t5ckpt.all_steps('misfit') == [1]


def test_arguments_are_checked_by_the_call_that_receives_them():
    wrong = {'keep': '3', 'keep_dataset_checkpoints': -1, 'save_dtype': 'flot32', 'dataset_iterator': object()}
    for option, value in wrong.items():
        with pytest.raises(ValueError, match=option):
            t5ckpt.Checkpointer({'w': jnp.ones(2)}, None, 'wrong', **{option: value})


def test_errors_have_their_own_classes():
    for missing in (t5ckpt.find_checkpoint, t5ckpt.load_t5x_checkpoint):
        with pytest.raises(t5ckpt.errors.CheckpointNotFoundError) as caught:
            missing('missing')
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, FileNotFoundError)


def test_log_lines_and_events():
    lines, durations = [], []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logging.getLogger('t5ckpt').addHandler(handler)
    jax.monitoring.register_event_duration_secs_listener(lambda event, seconds, **_: durations.append(event))
    for _ in range(2):
        save('logged', {'w': jnp.ones(2)}, step=4)
    restore('logged', {'w': jnp.ones(2)})
    logging.getLogger('t5ckpt').removeHandler(handler)
    assert [level for level, text in lines if text.startswith('Skipping save checkpoint for step 4')] == ['WARNING']
    assert durations.count('/jax/checkpoint/write/durations_sec') == 1
    assert durations.count('/jax/checkpoint/read/durations_sec') == 1


def test_required_arguments_of_t5x_are_optional():
    with pytest.warns(t5ckpt.errors.NoEffectWarning, match='use_gda=True has no effect'):
        t5ckpt.Checkpointer({'w': jnp.ones(2)}, None, 'gda', use_gda=True)
    assert t5ckpt.Checkpointer({'w': jnp.ones(2)}, None, '').checkpoints_dir == ''
    assert save('returned', {'w': jnp.ones(2)}, step=3).step == 3
    assert save('returned', {'w': jnp.ones(2)}, step=3) is None


def test_metrics_by_step():
    assert t5ckpt.TensorBoardMetrics('run').by_step('train/accuracy', [1]) == {}


# ---- signatures ----


class T5X:
    """The public functions and methods with a counterpart."""

    class Checkpointer:
        def __init__(
            self,
            train_state,
            partitioner,
            checkpoints_dir,
            dataset_iterator=None,
            *,
            keep=None,
            save_dtype=np.float32,
            restore_dtype=None,
            keep_dataset_checkpoints=None,
        ): ...
        def all_steps(self): ...
        def all_dataset_checkpoint_steps(self): ...
        def latest_step(self): ...
        def save(self, train_state, state_transformation_fns=(), *, concurrent_gb=128): ...
        def restore(
            self,
            step=None,
            path=None,
            state_transformation_fns=(),
            fallback_state=None,
            lazy_parameters=False,
        ): ...
        def restore_from_tf_checkpoint(self, path_or_dir, strict=True, translator=None): ...
        def convert_from_tf_checkpoint(
            self, path_or_dir, *, state_transformation_fns=(), concurrent_gb=16, translator=None
        ): ...

    class SaveBestCheckpointer:
        def __init__(
            self,
            train_state,
            partitioner,
            checkpoints_dir,
            dataset_iterator=None,
            *,
            keep=None,
            save_dtype=np.float32,
            restore_dtype=None,
            metric_name_to_monitor='train/accuracy',
            metric_mode='max',
            keep_checkpoints_without_metrics=True,
            force_keep_period=None,
            keep_dataset_checkpoints=None,
        ): ...

    class LazyArray:
        def __init__(self, shape, dtype, get_fn): ...
        def astype(self, dtype): ...
        def get(self): ...
        async def get_async(self): ...

    class LazyThreadPoolArray(LazyArray):
        def __init__(self, shape, dtype, get_fn): ...

    class LazyAwaitableArray(LazyArray):
        @classmethod
        def from_tensor_store_spec(cls, ts_spec, get_fn, dtype=None): ...
        @classmethod
        def from_array(cls, array, get_fn, dtype=None): ...
        @classmethod
        def from_tensor_store_spec_or_array(cls, maybe_ts_spec, get_fn, dtype=None): ...

    class CheckpointTranslator:
        def add(self, pattern): ...
        def apply(self, flatdict, **opts): ...

    class ParameterInfo:
        """_ParameterInfo; _OrbaxParamInfo has name and mesh_axes."""

        def __init__(self, name, shape, ts_spec, local_chunk_info, axes=None): ...

    class SaveStateTransformationFn:
        def __call__(self, state_dict, parameter_infos): ...

    class RestoreStateTransformationFn:
        def __call__(self, state_dict, target_state_dict, *, is_resuming=False): ...

    def find_checkpoint(path, step=None): ...
    def load_t5x_checkpoint(
        path, step=None, state_transformation_fns=(), remap=True, restore_dtype=None, lazy_parameters=False
    ): ...
    def all_steps(checkpoints_dir): ...
    def all_dataset_checkpoint_steps(checkpoints_dir): ...
    def latest_step(checkpoints_dir): ...
    def get_checkpoint_dir(checkpoints_dir, step, step_format_fixed_length=None): ...
    def is_pinned_checkpoint(ckpt_dir): ...
    def pin_checkpoint(ckpt_dir, txt='1'): ...
    def unpin_checkpoint(ckpt_dir): ...
    def apply_assignment_map(
        ckpt_optimizer_state, optimizer_state, assignment_map, require_all_rules_match=True, *, is_resuming=False
    ): ...
    def intersect_state(state_dict, intersect_state_dict): ...


#: What a default is in T5X and not here, with the row that says so.
DEFAULTS = {'save_dtype': 'Nothing is cast silently'}
#: What a protocol of ours does not ask for, with the row that says so.
LEFT_OUT = {('RestoreStateTransformationFn.__call__', 'is_resuming'): 'Required arguments of T5X are optional'}


def functions(owner, prefix=''):
    for name, value in vars(owner).items():
        if inspect.isclass(value):
            yield from functions(value, f'{prefix}{name}.')
        elif callable(value) or isinstance(value, classmethod):
            yield f'{prefix}{name}', getattr(owner, name)


THEIRS = {name: value for name, value in functions(T5X) if not name.startswith('__')}


def ours_of(name):
    value = t5ckpt
    for part in name.split('.'):
        value = getattr(value, part)
    return value


def parameters_of(name):
    """Ours; what SaveBestCheckpointer passes on is Checkpointer's."""
    found = dict(inspect.signature(ours_of(name)).parameters)
    if name == 'SaveBestCheckpointer.__init__':
        del found['others']
        base = inspect.signature(t5ckpt.Checkpointer.__init__).parameters
        found |= {key: value for key, value in base.items() if key not in found}
    return found


@pytest.mark.parametrize('name', THEIRS)
def test_signatures_are_t5xs(name):
    """Each parameter has T5X's name, place, kind and default; what is new is optional and comes after."""
    theirs, ours = inspect.signature(THEIRS[name]).parameters, parameters_of(name)
    places = [key for key, value in theirs.items() if value.kind is value.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(places)] == places
    left_out = {key for key in theirs if (name, key) in LEFT_OUT}
    assert all(f'`{key}`' in ROWS[LEFT_OUT[name, key]] for key in left_out)
    assert left_out.isdisjoint(ours)
    for key, value in theirs.items():
        if key in left_out:
            continue
        assert ours[key].kind == value.kind or value.kind is value.KEYWORD_ONLY, key
        if value.default is not value.empty and ours[key].default != value.default:
            assert DEFAULTS[key] in ROWS
    for key, value in ours.items():
        variable = value.kind in (value.VAR_KEYWORD, value.VAR_POSITIONAL)
        assert key in theirs or value.default is not value.empty or variable, key


def test_every_public_name_of_t5x_is_here_or_on_the_page():
    absent = set(re.findall(r'`([A-Za-z_0-9]+)`', PAGE.partition('## What has no counterpart')[2])) | {
        'populate_metrics_for_steps'
    }
    assert not {name for name in absent if hasattr(t5ckpt, name)}
    have = {name.partition('.')[0] for name in THEIRS}
    assert have <= set(t5ckpt.__all__)
    assert have | absent == PUBLIC


#: The public functions and classes of the five modules.
PUBLIC = {
    # Of checkpoints.py:
    *(
        'Checkpointer',
        'CheckpointerConstructor',
        'CheckpointManagerConstructor',
        'DatasetArgs',
        'DatasetCheckpointHandler',
    ),
    *(
        'OrbaxCheckpointManagerInterface',
        'RestoreStateTransformationFn',
        'SaveBestCheckpointer',
        'SaveStateTransformationFn',
    ),
    *('fake_param_info', 'find_checkpoint', 'get_local_data', 'load_t5x_checkpoint', 'populate_metrics_for_steps'),
    *('register_ts_spec_for_serialization', 'ParameterInfo'),
    # Of checkpoints_utils.py:
    *('all_dataset_checkpoint_steps', 'all_steps', 'get_checkpoint_dir', 'get_checkpoint_prefix', 'latest_step'),
    'get_step_from_checkpoint_dir',
    # Of checkpoint_utils.py:
    *('CheckpointTypes', 'detect_checkpoint_type', 'get_restore_parameters', 'is_pinned_checkpoint', 'pin_checkpoint'),
    *('pinned_checkpoint_filepath', 'remove_checkpoint_dir', 'remove_dataset_checkpoint', 'unpin_checkpoint'),
    # Of checkpoint_importer.py:
    *('CheckpointTranslator', 'LazyArray', 'LazyAwaitableArray', 'LazyThreadPoolArray', 'load_tf_ckpt', 't5_importer'),
    'restore_from_t5_checkpoint',
    # Of state_utils.py:
    *(
        'apply_assignment_map',
        'flatten_state_dict',
        'get_name_tree',
        'intersect_state',
        'merge_state',
        'tensorstore_leaf',
    ),
}


# ---- what T5X's callers reach for ----


@pytest.mark.parametrize('name', ['uint16', 'bfloat16', 'float32', 'int8'])
def test_lazy_arrays_of_specs(name):
    wanted = 'bfloat16' if name == 'uint16' else name
    spec = {'driver': 'zarr', 'dtype': name, 'kvstore': 'memory://', 'metadata': {'shape': [2, 3]}}

    async def read():
        return np.ones((2, 3), np.float32)

    make = t5ckpt.LazyAwaitableArray
    for lazy in (
        make.from_tensor_store_spec(ts.Spec(spec), read),
        make.from_tensor_store_spec_or_array(ts.Spec(spec), read),
        make.from_tensor_store_spec_or_array(spec, read),
    ):
        assert (lazy.shape, lazy.dtype.name, lazy.get().dtype.name) == ((2, 3), wanted, wanted)
    array = np.ones((2, 3), np.float16)
    assert make.from_tensor_store_spec(ts.Spec(spec), read, dtype='float64').dtype == np.float64
    assert make.from_array(array, read).dtype == np.float16
    assert make.from_tensor_store_spec_or_array(array, read, 'int32').dtype == np.int32


def test_directories_with_fixed_lengths():
    assert t5ckpt.get_checkpoint_dir('run', 7) == 'run/checkpoint_7'
    assert t5ckpt.get_checkpoint_dir('run', 7, 4) == 'run/checkpoint_0007'


def test_use_gda_is_ignored(tmp_path):
    for make in (t5ckpt.Checkpointer, t5ckpt.SaveBestCheckpointer):
        for value in (True, False):
            with pytest.warns(t5ckpt.errors.NoEffectWarning, match=f'use_gda={value} has no effect'):
                make({'w': np.ones(2)}, None, tmp_path, use_gda=value)
