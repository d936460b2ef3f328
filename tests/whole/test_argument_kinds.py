"""Every public function refuses an argument of another kind with an error that names the parameter and the value.

The annotations say which kinds a parameter takes. A str where a flag, a number, a policy or options are wanted is an error of
t5ckpt, before a file is read or written, and not an AttributeError or a call that means something else.
"""

import inspect
import re

import flax.serialization
import numpy as np
import pytest

import t5ckpt
from t5ckpt.errors import T5CkptError

STATE = {'params': {'w': np.arange(6, dtype=np.float32).reshape(2, 3)}, 'opt_state': {'m': np.ones(2)}}

# What a call needs in addition to the wrong argument: '/...' is a path in the test's directory, the class a checkpointer there.
FUNCTIONS = {
    'all_dataset_checkpoint_steps': ['/run'],
    'all_steps': ['/run'],
    'apply_assignment_map': [STATE, STATE, []],
    'checkpoints_iterator': ['/run'],
    'convert_checkpoint': ['flax', '/flax', '/new'],
    'convert_run': ['flax', '/flax', '/new'],
    'copy_checkpoint': ['/run', '/new'],
    'diff': ['/run', '/run'],
    'export_hf': ['/run', '/out'],
    'export_safetensors': ['/run', '/out.safetensors'],
    'export_weights': [STATE, '/new'],
    'find_checkpoint': ['/run'],
    'get_checkpoint_dir': ['/run', 1],
    'import_hf': ['/hf', '/new'],
    'import_safetensors': ['/a.safetensors', '/new'],
    'intersect_state': [STATE, STATE],
    'is_pinned_checkpoint': ['/run/checkpoint_1'],
    'latest_step': ['/run'],
    'load_t5x_checkpoint': ['/run'],
    'open_checkpoint': ['/run'],
    'open_run': ['/run'],
    'pin_checkpoint': ['/run/checkpoint_1'],
    'restore_or_init': [t5ckpt.Checkpointer, dict],
    'rewrite_checkpoint': ['/run', '/new'],
    'unpin_checkpoint': ['/run/checkpoint_1'],
    'verify': ['/run'],
}
CLASSES = {
    'Changes': [],
    'Checkpointer': [STATE, None, '/run'],
    'ConvertOptions': [],
    'ExportOptions': [],
    'ImportOptions': [],
    'KeepAny': [(t5ckpt.KeepAll(),)],
    'KeepBest': [1, 'acc'],
    'KeepEvery': [1],
    'KeepEveryHours': [1],
    'KeepLatest': [1],
    'KeepSteps': [[1]],
    'LocalTier': ['/ssd'],
    'PreemptionNotice': [],
    'ProgressReporter': [],
    'SaveAll': [(t5ckpt.SaveFirst(),)],
    'SaveAny': [(t5ckpt.SaveFirst(),)],
    'SaveAt': [[1]],
    'SaveEvery': [1],
    'SaveEverySeconds': [1],
    'SaveLast': [1],
    'SaveOnImprovement': ['acc'],
    'SaveWhenIdle': [],
    'TensorBoardMetrics': ['/run'],
    'WarmStart': ['/run'],
    'YoungDaly': [1],
}
METHODS = {
    ('Checkpointer', 'delete'): [1],
    ('Checkpointer', 'metrics'): [],
    ('Checkpointer', 'best_step'): ['acc', 'max'],
    ('Checkpointer', 'maybe_save'): [3, STATE],
    ('Checkpointer', 'restore'): [],
    ('Checkpointer', 'save'): [STATE],
    ('Checkpointer', 'save_async'): [STATE],
    ('Checkpointer', 'should_save'): [3],
    ('CheckpointView', 'heatmap'): ['params/w'],
    ('CheckpointView', 'report'): ['/page.html'],
    ('CheckpointView', 'select'): ['params'],
    ('CheckpointView', 'stats'): [],
    ('Run', 'best_step'): ['acc', 'max'],
    ('Run', 'metrics'): [1],
    ('Run', 'report'): ['/page.html'],
    ('Run', 'series'): ['params/w', np.mean],
}
# Parameters that take more than their annotation says, or that T5X's signature has and t5ckpt does not use.
FREE = {
    'sources',  # a collection of paths, of which each is located
    'stream',  # anything with write and flush
    'processes',  # of a job; internal
    'partitioner',  # a protocol of T5X
    'use_gda',  # of T5X, without an effect
    'default',  # returned as it is
    'train_state',  # any pytree
    'key',  # of a Mapping
    'concurrent_gb',  # T5X's, of save
}
# A step and transformations may be given in either order.
EITHER_ORDER = {'save', 'save_async', 'maybe_save'}

# (start of the annotation, values of another kind)
WRONG = [
    (r'bool\b', ['no', 5]),
    (r'int\b', ['x', 1.5]),
    (r'float\b', ['x', [1]]),
    (r'(\w+Options|Changes|KeepPolicy|SavePolicy|LocalTier)\b', ['bfloat16', 5, {'a': 1}]),
    (r'(Callable|Progress|Clock)\b', [5, 'x']),
    (r'Mapping\b', [5, 'x']),
    (r'(Sequence|Collection|tuple|Patterns)\b', [5]),
    (r'(str|os\.PathLike|re\.Pattern)\b', [5, ['a', 5]]),
]


def wrong_values(function):
    """(parameter, value) of each parameter whose annotation says what it takes."""
    for name, parameter in inspect.signature(function).parameters.items():
        values = next((values for start, values in WRONG if re.match(start, str(parameter.annotation))), [])
        if name not in FREE:
            yield from ((name, value) for value in values)


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp('kinds')
    with t5ckpt.Checkpointer(STATE, checkpoints_dir=place / 'run') as checkpointer:
        for step in (1, 2):
            checkpointer.save(STATE, step=step, metrics={'acc': 1.0})
    t5ckpt.export_safetensors(place / 'run', place / 'a.safetensors')
    (place / 'flax').mkdir()
    (place / 'flax/checkpoint_1').write_bytes(flax.serialization.to_bytes(STATE))
    (place / 'hf').mkdir()
    return place


def files(place):
    return {path: path.stat().st_mtime_ns for path in sorted(place.rglob('*')) if path.is_file()}


def faults(place, function, given, call):
    """The wrong arguments that have no error, or one that does not name parameter and value."""
    given = [place / value[1:] if isinstance(value, str) and value.startswith('/') else value for value in given]
    if t5ckpt.Checkpointer in given:
        given = [t5ckpt.Checkpointer(STATE, checkpoints_dir=place / 'run'), *given[1:]]
    names = [name for name in inspect.signature(function).parameters if name != 'self']
    before = files(place)
    for name, value in wrong_values(function):
        arguments = {**dict(zip(names, given, strict=False)), name: value}
        try:
            call(**arguments)
        except (ValueError, T5CkptError) as error:
            # A constructor's path is called a path.
            said = str(error).replace('A path is', f'{name}:')
            wrong = {repr(value), repr(value[-1]) if isinstance(value, list) else repr(value)}
            if name not in said or not any(text in str(error) for text in wrong):
                yield f'{name}={value!r}: {type(error).__name__}: {error}'
        except Exception as error:  # noqa: BLE001 - the fault that is looked for
            yield f'{name}={value!r}: {type(error).__name__}: {error}'
        else:
            yield f'{name}={value!r}: no error'
    assert files(place) == before


def test_the_table_has_every_public_function():
    public = {name for name in t5ckpt.__all__ if inspect.isfunction(getattr(t5ckpt, name))}
    assert public == set(FUNCTIONS)


@pytest.mark.parametrize('name', sorted({**FUNCTIONS, **CLASSES}))
def test_functions_and_options(place, name):
    function = getattr(t5ckpt, name)
    assert list(faults(place, function, {**FUNCTIONS, **CLASSES}[name], function)) == []


@pytest.mark.parametrize(('owner', 'name'), sorted(METHODS))
def test_methods(place, owner, name):
    makers = {
        'Checkpointer': lambda: t5ckpt.Checkpointer(
            STATE, checkpoints_dir=place / 'run', save_policy=t5ckpt.SaveEvery(1), read_only=False
        ),
        'CheckpointView': lambda: t5ckpt.open_checkpoint(place / 'run'),
        'Run': lambda: t5ckpt.open_run(place / 'run'),
    }
    function = getattr(getattr(t5ckpt, owner), name)

    def call(**given):
        if name in ('save', 'save_async'):
            given = {'step': 7, **given}
        return getattr(makers[owner](), name)(**given)

    found = list(faults(place, function, METHODS[owner, name], call))
    if name in EITHER_ORDER:
        found = [text for text in found if not text.startswith(('state_transformation_fns=5', 'step='))]
    assert found == []
