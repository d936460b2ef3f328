"""docs/t5x-differences.md is complete: each section is tested, and what the signatures of T5X's say is on it.

The signatures below are T5X's, of t5x/checkpoints.py, checkpoints_utils.py, checkpoint_utils.py, checkpoint_importer.py and
state_utils.py; bodies and annotations are left out.
"""

# ruff: noqa: N805 - functions stand in a class, as they do in a module

import inspect
import pathlib
import re
import runpy

import numpy as np
import pytest

import t5ckpt

PAGE = (pathlib.Path(__file__).resolve().parents[2] / 'docs' / 't5x-differences.md').read_text(encoding='utf-8')
HEAD, *SECTIONS = re.split(r'^## ', PAGE, flags=re.MULTILINE)
BY_HEADING = {section.partition('\n')[0]: section for section in SECTIONS}


def code_of(text: str) -> str:
    return '\n'.join(re.findall(r'^```python\n(.*?)^```$', text, re.DOTALL | re.MULTILINE))


# ---- each section ----


@pytest.mark.parametrize('heading', BY_HEADING)
def test_each_difference_is_asserted_by_its_own_code(heading, tmp_path, monkeypatch):
    """With the head of the page alone: no section needs another. The page as a whole is run by test_readme.py."""
    code = code_of(BY_HEADING[heading])
    assert 'assert' in code or 'pytest.raises' in code or heading == 'Large arrays cannot hang a save'
    monkeypatch.chdir(tmp_path)
    imports = {line for line in code_of(PAGE).splitlines() if re.match(r'(import|from) ', line)}
    program = '\n'.join([*sorted(imports), code_of(HEAD), code])
    pathlib.Path('section.py').write_text(program, encoding='utf-8')
    runpy.run_path('section.py')


def test_the_table_has_a_row_for_each_section():
    assert re.findall(r'^\| \[(.*?)\]\(#', HEAD, re.MULTILINE) == list(BY_HEADING)


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


#: What a default is in T5X and not here, with the section that says so.
DEFAULTS = {'save_dtype': 'Nothing is cast silently'}
#: What a protocol of ours does not ask for, with the section that says so.
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
    assert all(f'`{key}`' in BY_HEADING[LEFT_OUT[name, key]] for key in left_out)
    assert left_out.isdisjoint(ours)
    for key, value in theirs.items():
        if key in left_out:
            continue
        assert ours[key].kind == value.kind or value.kind is value.KEYWORD_ONLY, key
        if value.default is not value.empty and ours[key].default != value.default:
            assert DEFAULTS[key] in BY_HEADING
    for key, value in ours.items():
        variable = value.kind in (value.VAR_KEYWORD, value.VAR_POSITIONAL)
        assert key in theirs or value.default is not value.empty or variable, key


def test_every_public_name_of_t5x_is_here_or_on_the_page():
    absent = set(re.findall(r'`([A-Za-z_0-9]+)`', BY_HEADING['What has no counterpart'])) | {
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
    import tensorstore as ts

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
            with pytest.warns(t5ckpt.errors.ObsoleteArgumentWarning, match=f'use_gda={value} has no effect'):
                make({'w': np.ones(2)}, None, tmp_path, use_gda=value)
    assert issubclass(t5ckpt.errors.ObsoleteArgumentWarning, (DeprecationWarning, t5ckpt.errors.T5CkptWarning))
