"""A value of another kind that Python would take for something else is refused before a file is written.

Text is true, True is 1, and 1.5 may be rounded: where that would replace a file, follow a link or name another step, the call is
an error. Elsewhere Python's own TypeError says enough.
"""

import inspect

import flax.serialization
import numpy as np
import pytest

import t5ckpt

STATE = {'params': {'w': np.arange(6, dtype=np.float32).reshape(2, 3)}, 'opt_state': {'m': np.ones(2)}}

# What a call needs in addition to the wrong argument: '/...' is a path in the test's directory, the class a checkpointer there.
FUNCTIONS = {
    'all_dataset_checkpoint_steps': ['/run'],
    'all_steps': ['/run'],
    'checkpoints_iterator': ['/run'],
    'convert_checkpoint': ['flax', '/flax', '/new'],
    'copy_checkpoint': ['/run', '/new'],
    'diff': ['/run', '/run'],
    'find_checkpoint': ['/run'],
    'get_checkpoint_dir': ['/run', 1],
    'is_pinned_checkpoint': ['/run/checkpoint_1'],
    'latest_step': ['/run'],
    'load_t5x_checkpoint': ['/run'],
    'open_checkpoint': ['/run'],
    'open_run': ['/run'],
    'pin_checkpoint': ['/run/checkpoint_1'],
    'unpin_checkpoint': ['/run/checkpoint_1'],
    'verify': ['/run'],
}
# Of every public function that has the parameter.
WRONG = {
    'overwrite': ['no', 5],
    'force': ['no', 5],
    'follow_links': ['no', 5],
    'step': ['1', 1.5, True],
    'after': ['1', 1.5, True],
    'workers': ['1', 1.5, True],
}
COUNTS = [
    (t5ckpt.KeepLatest, {}),
    (t5ckpt.KeepEvery, {}),
    (t5ckpt.SaveEvery, {}),
    (t5ckpt.SaveLast, {}),
    (t5ckpt.KeepBest, {'metric': 'acc'}),
]
CALLS = [
    ('Checkpointer', 'delete', 'step'),
    ('Checkpointer', 'metrics', 'step'),
    ('Checkpointer', 'restore', 'step'),
    ('Checkpointer', 'restore', 'donate'),
    ('Checkpointer', 'save', 'overwrite'),
    ('Checkpointer', 'should_save', 'step'),
    ('CheckpointView', 'report', 'force'),
    ('Run', 'report', 'force'),
    ('Run', 'metrics', 'step'),
]
METHODS = {'save': [STATE], 'report': ['/page.html']}


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp('kinds')
    with t5ckpt.Checkpointer(STATE, checkpoints_dir=place / 'run') as checkpointer:
        for step in (1, 2):
            checkpointer.save(STATE, step=step, metrics={'acc': 1.0})
    (place / 'flax').mkdir()
    (place / 'flax/checkpoint_1').write_bytes(flax.serialization.to_bytes(STATE))
    return place


def files(place):
    return {path: path.stat().st_mtime_ns for path in sorted(place.rglob('*')) if path.is_file()}


def refuses(place, call, given, name, value):
    given = {key: place / each[1:] if isinstance(each, str) and each[0] == '/' else each for key, each in given.items()}
    before = files(place)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any class
        call(**{**given, name: value})
    assert files(place) == before
    return str(caught.value)


def functions():
    for name, given in FUNCTIONS.items():
        parameters = inspect.signature(getattr(t5ckpt, name)).parameters
        for parameter in parameters.keys() & WRONG.keys():
            yield name, dict(zip(parameters, given, strict=False)), parameter


def test_the_table_has_every_public_function():
    public = {name for name in t5ckpt.__all__ if inspect.isfunction(getattr(t5ckpt, name))}
    assert public == set(FUNCTIONS) | {'apply_assignment_map', 'intersect_state', 'restore_or_init'}


@pytest.mark.parametrize(('name', 'given', 'parameter'), sorted(functions(), key=lambda each: (each[0], each[2])))
def test_functions(place, name, given, parameter):
    for value in WRONG[parameter]:
        refuses(place, getattr(t5ckpt, name), given, parameter, value)


@pytest.mark.parametrize(('owner', 'name', 'parameter'), CALLS)
def test_methods(place, owner, name, parameter):
    makers = {
        'Checkpointer': lambda: t5ckpt.Checkpointer(
            STATE, checkpoints_dir=place / 'run', save_policy=t5ckpt.SaveEvery(1)
        ),
        'CheckpointView': lambda: t5ckpt.open_checkpoint(place / 'run'),
        'Run': lambda: t5ckpt.open_run(place / 'run'),
    }
    method = getattr(makers[owner](), name)
    parameters = inspect.signature(method).parameters
    given = dict(zip(parameters, METHODS.get(name, []), strict=False)) | ({'step': 7} if name == 'save' else {})
    for value in WRONG.get(parameter, ['no', 5]):
        assert parameter in refuses(place, method, given, parameter, value)


@pytest.mark.parametrize(('policy', 'given'), COUNTS)
def test_a_count_is_no_flag(policy, given):
    first = next(iter(inspect.signature(policy).parameters))
    for value in (True, '3'):
        with pytest.raises(ValueError, match=first):
            policy(**{first: value}, **given)


def test_text_is_no_list():
    with pytest.raises(ValueError, match='rename must be a list'):
        t5ckpt.WarmStart('/run', rename='params/.*')
    with pytest.raises(ValueError, match='steps'):
        t5ckpt.KeepSteps('100')
