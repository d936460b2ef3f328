"""Coming back: damaged checkpoints, warm starts, strictness, memory."""

import dataclasses
import functools
import inspect
import os
import re
import shutil
import time
import warnings

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from support.facts import put_facts
from support.options import with_options

import t5ckpt
from t5ckpt import MODEL, OPTIMIZER, Checkpointer, SaveEvery, WarmStart, restore_or_init
from t5ckpt.commit.holds import hold
from t5ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DtypeMismatch,
    MissingLeaves,
    TemplateMismatchWarning,
    TreeMismatchError,
    UnexpectedLeaves,
)
from t5ckpt.storage import open_storage


def params(value, dtype=jnp.float32):
    return {
        'dense': {'kernel': jnp.full((64, 128), value, dtype)},
        'head': {'kernel': jnp.full((128, 8), value, dtype)},
    }


def train_state(value=0.0, step=0):
    state = TrainState.create(apply_fn=lambda: None, params=params(value), tx=optax.adam(1e-3))
    return state.replace(step=jnp.int32(step))


def must_not_run():
    raise AssertionError('init_fn was called')


def run_with(directory, steps):
    with Checkpointer(
        train_state(), checkpoints_dir=directory, options=t5ckpt.CheckpointerOptions(inline_bytes=64)
    ) as ck:
        for step in steps:
            ck.save(train_state(step, step))


def value_of(state):
    return float(state.params['dense']['kernel'][3, 4])


def test_a_new_run_is_initialised(tmp_path):
    with Checkpointer(train_state(), checkpoints_dir=tmp_path / 'run') as ck:
        assert value_of(restore_or_init(ck, lambda: train_state(7))) == 7
        assert ck.restored_step is None


def test_the_latest_is_restored_also_step_0(tmp_path):
    run_with(tmp_path, [0])
    with Checkpointer(train_state(9), checkpoints_dir=tmp_path) as ck:
        assert value_of(restore_or_init(ck, must_not_run)) == 0
        assert ck.restored_step == 0
    run_with(tmp_path, [4, 12])
    with Checkpointer(train_state(9), checkpoints_dir=tmp_path) as ck:
        restored = restore_or_init(ck, must_not_run)
        assert (value_of(restored), int(restored.step), ck.restored_step) == (12, 12, 12)


def lose_a_chunk(directory):
    os.unlink(next((directory / 'params.dense.kernel').glob('[0-9]*')))


def truncate_the_manifest(directory):
    path = directory / 'checkpoint'
    path.write_bytes(path.read_bytes()[:-40])


def break_the_facts(directory):
    put_facts(directory, b'{' * 40)


def lose_an_array(directory):
    shutil.rmtree(directory / 'params.dense.kernel')


@pytest.mark.parametrize('damage', [lose_a_chunk, lose_an_array, break_the_facts, truncate_the_manifest])
def test_a_damaged_one_is_reported_put_aside_and_the_older_used(tmp_path, caplog, damage):
    run_with(tmp_path, [1, 2, 3])
    damage(tmp_path / 'checkpoint_2')
    damage(tmp_path / 'checkpoint_3')
    with Checkpointer(train_state(), checkpoints_dir=tmp_path, save_policy=SaveEvery(1)) as ck:
        state = restore_or_init(ck, must_not_run)
        assert (value_of(state), ck.restored_step, ck.latest_step()) == (1, 1, 1)
        assert 'step 3 cannot be restored' in caplog.text
        assert 'step 2 cannot be restored' in caplog.text
        # The run can save those steps again, and nothing was thrown away.
        assert [step for step in (1, 2, 3) if ck.maybe_save(step, train_state(step, step)) is not None] == [2, 3]
    assert t5ckpt.all_steps(tmp_path) == [1, 2, 3]
    aside = [name for name in os.listdir(tmp_path) if '.damaged-' in name]
    assert sorted(name.split('.')[0] for name in aside) == ['checkpoint_2', 'checkpoint_3']
    with Checkpointer(train_state(), checkpoints_dir=tmp_path) as ck:
        assert value_of(restore_or_init(ck, must_not_run)) == 3


def test_never_silently_from_scratch(tmp_path):
    run_with(tmp_path, [1, 2])
    lose_a_chunk(tmp_path / 'checkpoint_1')
    lose_a_chunk(tmp_path / 'checkpoint_2')
    with Checkpointer(train_state(), checkpoints_dir=tmp_path) as ck:
        with pytest.raises(CorruptCheckpointError, match=r'none of the steps \[1, 2\]'):
            restore_or_init(ck, must_not_run, initial_checkpoint=tmp_path)
        assert ck.all_steps() == [1, 2], 'nothing was put aside'


def test_without_fallback_the_damage_is_raised(tmp_path):
    run_with(tmp_path, [1, 2])
    lose_a_chunk(tmp_path / 'checkpoint_2')
    with Checkpointer(train_state(), checkpoints_dir=tmp_path) as ck:
        with pytest.raises(CorruptCheckpointError, match='kernel'):
            restore_or_init(ck, must_not_run, fallback=None)
        assert ck.all_steps() == [1, 2]
        with pytest.raises(ValueError, match='fallback'):
            restore_or_init(ck, must_not_run, fallback='newer')


def test_another_model_is_not_damage(tmp_path):
    run_with(tmp_path, [1, 2])
    other = train_state()
    other = other.replace(params={**other.params, 'new': jnp.zeros(3)})
    with Checkpointer(other, checkpoints_dir=tmp_path) as ck, pytest.raises(MissingLeaves, match='params/new'):
        restore_or_init(ck, must_not_run)


def test_the_cures_for_leaves_that_appear_during_a_run_restore_them(tmp_path):
    fresh = {'params': jnp.zeros(4), 'replay': {}}
    grown = {'params': jnp.ones(4), 'replay': {'chunk_0': np.arange(3.0), 'chunk_1': np.arange(2.0)}}
    cure = r'a replay buffer that grows; t5ckpt.load_t5x_checkpoint\(directory, checkpointer.restored_step\) reads it'
    with Checkpointer(fresh, checkpoints_dir=tmp_path) as ck:
        with pytest.warns(TemplateMismatchWarning, match=r'with \.\.\. for a subtree that gets new leaves'):
            ck.save(grown, 1)
        with pytest.raises(UnexpectedLeaves, match=cure):
            restore_or_init(ck, must_not_run)
    with Checkpointer({**fresh, 'replay': ...}, checkpoints_dir=tmp_path) as ck:
        with warnings.catch_warnings(action='error'):
            ck.save(grown, 2)
        restored = restore_or_init(ck, must_not_run)
        restored['replay'] = t5ckpt.load_t5x_checkpoint(tmp_path, ck.restored_step)['replay']
    jax.tree.map(np.testing.assert_array_equal, restored, grown)


def test_a_pinned_one_is_not_put_aside(tmp_path, caplog):
    run_with(tmp_path, [1, 2])
    lose_a_chunk(tmp_path / 'checkpoint_2')
    t5ckpt.pin_checkpoint(tmp_path / 'checkpoint_2')
    with Checkpointer(train_state(), checkpoints_dir=tmp_path) as ck:
        assert value_of(restore_or_init(ck, must_not_run)) == 1
        assert ck.all_steps() == [1, 2]
    assert 'cannot be saved there again' in caplog.text


def test_one_that_is_held_is_not_put_aside(tmp_path, caplog):
    run_with(tmp_path, [1, 2])
    lose_a_chunk(tmp_path / 'checkpoint_2')
    with Checkpointer(train_state(), checkpoints_dir=tmp_path) as ck:
        with hold(open_storage(tmp_path), 2, 60, time.time):
            assert value_of(restore_or_init(ck, must_not_run)) == 1
            assert ck.all_steps() == [1, 2]
        assert 'cannot be saved there again' in caplog.text
        assert 'is held by a reader, so it was not renamed' in caplog.text
        assert value_of(restore_or_init(ck, must_not_run)) == 1
        assert ck.all_steps() == [1]
    assert not [name for name in os.listdir(tmp_path) if name.startswith('busy_')]


# --- another run's ----------------------------------------------------------------------------------------------------


def test_an_initial_checkpoint_counts_only_for_a_run_without(tmp_path):
    run_with(tmp_path / 'pretrained', [5, 6])
    with Checkpointer(train_state(), checkpoints_dir=tmp_path / 'run') as ck:
        state = restore_or_init(ck, must_not_run, initial_checkpoint=tmp_path / 'pretrained')
        assert (value_of(state), int(state.step), ck.restored_step) == (6, 6, None)
        ck.save(train_state(1, 1))
        assert value_of(restore_or_init(ck, must_not_run, initial_checkpoint=tmp_path / 'none')) == 1
    with (
        Checkpointer(train_state(), checkpoints_dir=tmp_path / 'fresh') as ck,
        pytest.raises(CheckpointNotFoundError, match='none'),
    ):
        restore_or_init(ck, must_not_run, initial_checkpoint=tmp_path / 'none')


def test_the_model_alone(tmp_path):
    run_with(tmp_path / 'pretrained', [5, 6])
    with Checkpointer(train_state(), checkpoints_dir=tmp_path / 'run') as ck:
        warm = WarmStart(tmp_path / 'pretrained', step=5, take=MODEL)
        state = restore_or_init(ck, lambda: train_state(0, 0), initial_checkpoint=warm)
    assert (value_of(state), int(state.step)) == (5, 0)
    assert float(state.opt_state[0].mu['dense']['kernel'].sum()) == 0


def test_all_but_the_optimizer(tmp_path):
    run_with(tmp_path / 'pretrained', [5])
    with Checkpointer(train_state(), checkpoints_dir=tmp_path / 'run') as ck:
        warm = WarmStart(tmp_path / 'pretrained', leave=OPTIMIZER)
        fresh = train_state(0, 0)
        fresh = fresh.replace(opt_state=jax.tree.map(lambda leaf: leaf + 3, fresh.opt_state))
        state = restore_or_init(ck, lambda: fresh, initial_checkpoint=warm)
    assert (value_of(state), int(state.step), int(state.opt_state[0].count)) == (5, 5, 3)


def test_the_optimizer_of_a_dict_may_be_called_opt(tmp_path, caplog):
    saved = {'params': {'enc/cnn0': np.ones(2), 'opt/mu': np.ones(2)}, 'opt': {'mu': np.ones(2)}, 'step': 3}
    with Checkpointer(saved, checkpoints_dir=tmp_path / 'old') as ck:
        ck.save(saved)
    fresh = jax.tree.map(np.zeros_like, saved)
    with Checkpointer(fresh, checkpoints_dir=tmp_path / 'new') as ck:
        state = restore_or_init(ck, lambda: fresh, initial_checkpoint=WarmStart(tmp_path / 'old', leave=OPTIMIZER))
    assert (state['opt']['mu'][0], state['params']['enc/cnn0'][0]) == (0, 1)


def test_all_but_the_optimizers_of_several_models(tmp_path):
    old, new = (
        {'actor': train_state(value, step), 'critic': train_state(value, step)} for value, step in ((5, 5), (0, 0))
    )
    with Checkpointer(old, checkpoints_dir=tmp_path / 'old') as ck:
        ck.save(jax.tree.map(lambda leaf: leaf + 1, old), step=5)
    state = start_from(tmp_path / 'run', WarmStart(tmp_path / 'old', leave=OPTIMIZER), new)
    for model in state.values():
        assert (value_of(model), int(model.step), int(model.opt_state[0].count)) == (6, 6, 0)


def test_an_optimizer_that_is_not_found_is_not_restored_unnoticed(tmp_path):
    old = {'params': params(5.0), 'optimizer': {'mu': jnp.ones(3)}}
    with Checkpointer(old, checkpoints_dir=tmp_path / 'old') as ck:
        ck.save(old, step=1)
    with pytest.raises(ValueError, match=r'leave=.* matches no leaf'):
        start_from(tmp_path / 'run', WarmStart(tmp_path / 'old', leave=OPTIMIZER), old)


def test_a_part_by_pattern_under_other_names_and_only_missing_leaves_are_new(tmp_path):
    old = {'params': {'old': {'kernel': jnp.full((64, 128), 5.0)}, 'extra': jnp.ones(3)}}
    with Checkpointer(old, checkpoints_dir=tmp_path / 'pretrained') as ck:
        ck.save(old, step=1)
    model = {'params': params(0.0), 'step': 0}
    warm = WarmStart(
        tmp_path / 'pretrained',
        take=r'params/.*',
        rename=[(r'params/dense/(.*)', r'params/old/\1')],
        missing='init',
        strict='contains',
    )
    with Checkpointer(model, checkpoints_dir=tmp_path / 'run') as ck:
        state = restore_or_init(ck, lambda: {'params': params(1.0), 'step': 4}, initial_checkpoint=warm)
    assert float(state['params']['dense']['kernel'][0, 0]) == 5
    assert float(state['params']['head']['kernel'][0, 0]) == 1
    assert state['step'] == 4
    assert set(state['params']) == {'dense', 'head'}


def test_a_rename_that_leads_to_nothing(tmp_path):
    """The leaf is missing, as one without a rule is, so ``missing`` says what comes of it."""
    old = {'params': {'dense': {'kernel': jnp.full((64, 128), 5.0)}}}
    with Checkpointer(old, checkpoints_dir=tmp_path / 'old') as ck:
        ck.save(old, step=1)
    model = {'params': params(0.0)}
    rename = [(r'params/head/(.*)', r'params/top/\1')]
    with Checkpointer(model, checkpoints_dir=tmp_path / 'run') as ck:
        with pytest.raises(TreeMismatchError, match=r'params/head/kernel: .* takes it from params/top/kernel'):
            restore_or_init(ck, must_not_run, initial_checkpoint=WarmStart(tmp_path / 'old', rename=rename))
        warm = WarmStart(tmp_path / 'old', rename=rename, missing='init')
        state = restore_or_init(ck, lambda: {'params': params(1.0)}, initial_checkpoint=warm)
    assert [float(state['params'][name]['kernel'][0, 0]) for name in ('dense', 'head')] == [5, 1]


@pytest.mark.parametrize('layout', ['t5x', 'flax'])
def test_a_rename_of_a_whole_state_needs_no_source_for_what_is_empty(layout, tmp_path):
    """optax's EmptyState, and a field that is None, are no leaves: a rule that matches them has nothing to take."""
    old = {'actor': train_state(5.0, 3), 'target': {'params': params(2.0), 'opt_state': None}}
    for name, state in old.items():
        if layout == 't5x':
            with Checkpointer(state, checkpoints_dir=tmp_path / name) as ck:
                ck.save(state, step=3)
        else:
            (tmp_path / name).write_bytes(flax.serialization.to_bytes(state))
    model = {'actor': train_state(), 'target': {'params': params(0.0), 'opt_state': None}}
    state = model
    for name in old:
        words = {'take': f'{name}/.*', 'rename': [(f'{name}/(.*)', r'\1')]}
        with Checkpointer(model, checkpoints_dir=tmp_path / 'run') as ck:
            started = restore_or_init(ck, lambda: model, initial_checkpoint=WarmStart(tmp_path / name, **words))
        state = state | {name: started[name]}
    with Checkpointer(model) as ck:
        rename = functools.partial(t5ckpt.apply_assignment_map, assignment_map=[('actor/(.*)', r'\1')])
        again = Checkpointer({'actor': model['actor']}).restore(
            path=str(tmp_path / 'actor'), state_transformation_fns=[rename]
        )
    for restored, saved in ((state, old), (again['actor'], old['actor'])):
        assert jax.tree.all(jax.tree.map(np.array_equal, jax.tree.leaves(restored), jax.tree.leaves(saved)))
    assert state['target']['opt_state'] is None


@pytest.mark.parametrize(
    'options',
    [
        {'take': r'params/head/.*', 'rename': [(r'params/head/(.*)', r'params/top/\1')], 'missing': 'init'},
        {'take': r'ema/.*'},
        {'take': r'params/dense/.*', 'leave': r'params/.*'},
    ],
)
def test_a_source_that_gives_nothing_is_an_error(tmp_path, options):
    """The run would start from new weights, and only the log would say so."""
    old = {'params': {'dense': {'kernel': jnp.full((64, 128), 5.0)}}, 'ema': {'kernel': jnp.ones(3)}}
    with Checkpointer(old, checkpoints_dir=tmp_path / 'old') as ck:
        ck.save(old, step=1)
    with pytest.raises(ValueError, match=r'provides no leaf of the template\. Correct take='):
        start_from(tmp_path / 'run', WarmStart(tmp_path / 'old', **options), {'params': params(0.0)})


def test_what_is_missing_or_too_much_is_named(tmp_path):
    old = {'params': {'dens': {'kernel': jnp.full((64, 128), 5.0)}, 'head': {'kernel': jnp.zeros((128, 8))}}}
    with Checkpointer(old, checkpoints_dir=tmp_path / 'pretrained') as ck:
        ck.save(old, step=1)
    with Checkpointer({'params': params(0.0)}, checkpoints_dir=tmp_path / 'run') as ck:
        with pytest.raises(TreeMismatchError, match='Near: params/dens/kernel') as raised:
            restore_or_init(ck, must_not_run, initial_checkpoint=tmp_path / 'pretrained')
        assert {problem.kind for problem in raised.value.problems} == {'missing', 'unexpected'}
    with pytest.raises(ValueError, match="'error', 'init'"):
        WarmStart('x', missing='ignore')


@pytest.mark.parametrize(
    ('field', 'pattern', 'hint'),
    [
        ('take', 'prams/.*', 'the whole name of a leaf'),
        ('take', 'params', "Did you mean 'params/.*'"),
        ('leave', 'optt/.*', 'the whole name of a leaf'),
        ('take', re.compile('params'), "Did you mean 'params/.*'"),
    ],
)
def test_a_pattern_that_names_nothing_is_an_error(tmp_path, field, pattern, hint):
    """The run would start from other weights than was meant, and say so only in the log."""
    run_with(tmp_path / 'pretrained', [5])
    warm = WarmStart(tmp_path / 'pretrained', **{field: pattern})
    with (
        Checkpointer(train_state(), checkpoints_dir=tmp_path / 'run') as ck,
        pytest.raises(ValueError, match='matches no leaf') as raised,
    ):
        restore_or_init(ck, must_not_run, initial_checkpoint=warm)
    assert f'{field}={getattr(pattern, "pattern", pattern)!r} matches no leaf' in str(raised.value)
    assert hint in str(raised.value)


def test_averaged_weights_instead_of_the_trained(tmp_path):
    old = {'params': params(1.0), 'ema': params(2.0)}
    with Checkpointer(old, checkpoints_dir=tmp_path / 'pretrained') as ck:
        ck.save(old, step=1)
    warm = WarmStart(tmp_path / 'pretrained', take=MODEL, rename=[(r'params/(.*)', r'ema/\1')])
    with Checkpointer({'params': params(0.0)}, checkpoints_dir=tmp_path / 'run') as ck:
        state = restore_or_init(ck, must_not_run, initial_checkpoint=warm)
    assert float(state['params']['dense']['kernel'][0, 0]) == 2


class Position:
    """A data iterator with T5X's two methods."""

    def __init__(self, at=0):
        self.at = at

    def save(self, filename):
        with open(filename, 'w') as file:
            file.write(str(self.at))

    def load(self, filename):
        with open(filename) as file:
            self.at = int(file.read())


@pytest.mark.parametrize(
    ('options', 'at'),
    [
        (None, 17),
        ({}, 17),
        ({'missing': 'init', 'leave': OPTIMIZER}, 17),
        ({'restore_iterator': False}, 0),
        ({'take': MODEL}, 0),
        ({'take': MODEL, 'restore_iterator': True}, 17),
    ],
)
def test_the_position_in_the_data_belongs_to_all_of_a_checkpoint(tmp_path, caplog, options, at):
    caplog.set_level('INFO', 't5ckpt')
    old = tmp_path / 'pretrained'
    with Checkpointer(train_state(), None, old, Position(17)) as ck:
        ck.save(train_state(1, 1))
    iterator = Position()
    with Checkpointer(train_state(), None, tmp_path / 'run', iterator) as ck:
        source = old if options is None else WarmStart(old, **options)
        restore_or_init(ck, train_state, initial_checkpoint=source)
        assert iterator.at == at
        iterator.at = 3
        ck.save(train_state(2, 2))
        iterator.at = 0
        restore_or_init(ck, must_not_run)
        assert iterator.at == 3
    said = f'the data continues at the position in {old}' if at else 'the data starts at its beginning (WarmStart('
    assert said in caplog.text


def test_a_warm_start_means_the_directory_in_which_it_was_made(tmp_path, monkeypatch):
    for name, value in (('a', 1), ('b', 2)):
        run_with(tmp_path / name / 'run', [value])
    monkeypatch.chdir(tmp_path / 'a')
    warm = WarmStart('run')
    monkeypatch.chdir(tmp_path / 'b')
    assert value_of(start_from(tmp_path / 'new', warm)) == 1
    with pytest.raises(ValueError, match='path is empty'):
        WarmStart('')
    with Checkpointer(train_state(), checkpoints_dir='run') as ck, pytest.raises(ValueError, match='path is empty'):
        ck.restore(path='')


# --- loops -------------------------------------------------------------------------------------------------------------


def test_the_restored_step_is_known_after_each_way_to_restore(tmp_path):
    run_with(tmp_path / 'run', [1, 2])
    run_with(tmp_path / 'other', [7])
    with Checkpointer(train_state(), checkpoints_dir=tmp_path / 'run') as ck:
        for call, step in (
            (ck.restore, 2),
            (lambda: ck.restore(1), 1),
            (lambda: ck.restore(path=tmp_path / 'other'), None),
            (lambda: restore_or_init(ck, must_not_run), 2),
        ):
            call()
            assert ck.restored_step == step


def test_going_back_to_an_older_step_says_what_a_restart_takes(tmp_path, caplog):
    run_with(tmp_path, [10, 20, 30])
    with Checkpointer(train_state(), checkpoints_dir=tmp_path) as ck:
        ck.restore(10)
        caplog.clear()
        ck.save(train_state(5, 15))
        ck.save_async(train_state(5, 25)).result()
        (told,) = [record.getMessage() for record in caplog.records if 'later steps' in record.getMessage()]
        assert f'step 15 is to be saved, but {tmp_path} has later steps: 20, 30. A restart takes step 30' in told
        # The cures
        ck.save(train_state(5, 20), overwrite=True)
        ck.delete(30)
    with Checkpointer(train_state(), checkpoints_dir=tmp_path) as ck:
        assert value_of(restore_or_init(ck, must_not_run)) == 5
        assert ck.restored_step == 25
        caplog.clear()
        ck.save(train_state(6, 30))
    assert 'later steps' not in caplog.text


# --- how alike they must be, and what memory it takes -----------------------------------------------------------------


@pytest.mark.parametrize(
    ('held', 'strict', 'error'),
    [
        ({'w': jnp.ones(4)}, 'exact', None),
        ({'w': jnp.ones(4, jnp.bfloat16)}, 'exact', DtypeMismatch),
        ({'w': jnp.ones(4, jnp.bfloat16)}, 'up_to_dtype', None),
        ({'w': jnp.ones(4), 'more': jnp.ones(2)}, 'up_to_dtype', UnexpectedLeaves),
        ({'w': jnp.ones(4), 'more': jnp.ones(2)}, 'contains', None),
        ({'w': jnp.ones(4, jnp.bfloat16), 'more': jnp.ones(2)}, 'contains', None),
        ({'more': jnp.ones(2)}, 'contains', MissingLeaves),
        ({'w': jnp.ones(5)}, 'contains', t5ckpt.errors.ShapeMismatch),
    ],
)
def test_strictness(tmp_path, held, strict, error):
    with Checkpointer({'params': held}, checkpoints_dir=tmp_path) as ck:
        ck.save({'params': held}, step=1)
    with Checkpointer({'params': {'w': jnp.zeros(4)}}, checkpoints_dir=tmp_path) as ck:
        if error is None:
            restored = ck.restore(strict=strict)
            assert set(restored['params']) == {'w'}
            assert np.array_equal(restored['params']['w'], np.ones(4))
        else:
            with pytest.raises(error, match='params/'):
                ck.restore(strict=strict)


def test_exact_is_meant_after_the_cast(tmp_path):
    state = {'params': {'w': jnp.ones(4)}}
    with Checkpointer(state, checkpoints_dir=tmp_path) as ck:
        ck.save(state, step=1)
    model = {'params': {'w': jnp.zeros(4, jnp.bfloat16)}}
    with Checkpointer(model, checkpoints_dir=tmp_path, restore_dtype='bfloat16') as ck:
        assert ck.restore(strict='exact')['params']['w'].dtype == jnp.bfloat16
    with Checkpointer(model, checkpoints_dir=tmp_path) as ck:
        with pytest.raises(DtypeMismatch, match=r"params/w: checkpoint float32, template bfloat16. strict='exact'"):
            ck.restore(strict='exact')
        with pytest.raises(ValueError, match='strict must be one of'):
            ck.restore(strict='loose')


def test_donated_buffers_are_freed_before_reading_but_not_when_it_does_not_fit(tmp_path):
    run_with(tmp_path, [3])
    other = {'something': jnp.ones(8)}
    with Checkpointer(other, checkpoints_dir=tmp_path) as ck, pytest.raises(TreeMismatchError):
        ck.restore(donate=True)
    assert not other['something'].is_deleted()

    template = train_state(9)
    freed_at_first_byte = []

    def progress(_done, _total):
        freed_at_first_byte.append(template.params['dense']['kernel'].is_deleted())

    with Checkpointer(template, checkpoints_dir=tmp_path, progress=progress) as ck:
        state = ck.restore(donate=True)
        assert freed_at_first_byte
        assert all(freed_at_first_byte)
        assert value_of(state) == 3
        # The template still says what to restore to.
        assert value_of(ck.restore(donate=True)) == 3


def test_a_donated_template_may_be_the_fallback(tmp_path):
    held = {'params': {'w': jnp.ones(4)}}
    with Checkpointer(held, checkpoints_dir=tmp_path) as ck:
        ck.save(held, step=1)
    model = {'params': {'w': jnp.zeros(4), 'new': jnp.full(4, 7.0)}}
    with Checkpointer(model, checkpoints_dir=tmp_path) as ck:
        state = ck.restore(fallback_state=model, donate=True)
    assert np.array_equal(state['params']['new'], np.full(4, 7.0))
    assert np.array_equal(state['params']['w'], np.ones(4))
    assert model['params']['w'].is_deleted()


# --- another run ------------------------------------------------------------------------------------------------------


def start_from(directory, source, model=None, value=9, **options):
    with Checkpointer(
        train_state() if model is None else model, checkpoints_dir=directory, **with_options(**options)
    ) as ck:
        return restore_or_init(ck, lambda: train_state(value) if model is None else model, initial_checkpoint=source)


@pytest.mark.parametrize('missing', ['error', 'init'])
def test_an_empty_container_is_not_a_leaf_that_a_source_lacks(tmp_path, caplog, missing):
    """Adam's state has an EmptyState of optax."""
    run_with(tmp_path / 'old', [1])
    caplog.set_level('INFO', 't5ckpt')
    with Checkpointer(train_state(), checkpoints_dir=tmp_path / 'new') as ck:
        state = restore_or_init(ck, must_not_run, initial_checkpoint=WarmStart(tmp_path / 'old', missing=missing))
    assert value_of(state) == 1
    count = len(jax.tree.leaves(state))
    assert f'{tmp_path}/old: {count} of {count} leaves' in caplog.text
    assert 'lacks' not in caplog.text


def test_none_is_not_a_leaf_that_a_source_lacks(tmp_path, caplog):
    state = {'w': np.ones(3, np.float32), 'bias': None, 'step': np.int32(1)}
    with Checkpointer(state, checkpoints_dir=tmp_path / 'old') as ck:
        ck.save(state)
    caplog.set_level('INFO', 't5ckpt')
    with Checkpointer(state, checkpoints_dir=tmp_path / 'new') as ck:
        started = restore_or_init(ck, must_not_run, initial_checkpoint=tmp_path / 'old')
    assert started['bias'] is None
    assert '2 of 2 leaves' in caplog.text


def test_a_source_of_another_size(tmp_path):
    run_with(tmp_path / 'one', [1])
    model = {'params': {'dense': {'kernel': jnp.zeros((80, 128))}}}
    state = start_from(
        tmp_path / 'new',
        WarmStart(tmp_path / 'one', take=MODEL, strict='contains', resize=re.compile('params/.*')),
        model,
    )
    assert float(state['params']['dense']['kernel'].sum()) == 64 * 128


# --- errors and log lines that fit what was called ---------------------------------------------------------------------


OTHERS = {
    'missing': {'params': {**params(0.0), 'new': jnp.zeros(3)}, 'n': 0},
    'unexpected': {'params': {'dense': params(0.0)['dense']}, 'n': 0},
    'renamed': {'params': {'dense': params(0.0)['dense'], 'heads': params(0.0)['head']}, 'n': 0},
    'shape': {'params': {**params(0.0), 'dense': {'kernel': jnp.zeros((80, 128))}}, 'n': 0},
    'dtype': {'params': params(0.0), 'n': 0.5},
}


@pytest.mark.parametrize('kind', OTHERS)
@pytest.mark.parametrize('how', ['own', 'path', 'warm'])
def test_every_option_that_an_error_names_is_one_of_the_called_function(tmp_path, kind, how):
    held = {'params': params(1.0), 'n': 7}
    with Checkpointer(held, checkpoints_dir=tmp_path / 'old') as ck:
        ck.save(held, step=1)
    sources = {
        'own': None,
        'path': tmp_path / 'old',
        'warm': WarmStart(tmp_path / 'old'),
    }
    directory = tmp_path / ('old' if how == 'own' else 'new')
    with Checkpointer(OTHERS[kind], checkpoints_dir=directory) as ck, pytest.raises(TreeMismatchError) as raised:
        restore_or_init(ck, lambda: OTHERS[kind], initial_checkpoint=sources[how])
    text = str(raised.value)
    named = set(re.findall(r'\b([a-z_]+)=', text))
    known = set(inspect.signature(restore_or_init).parameters) | {each.name for each in dataclasses.fields(WarmStart)}
    assert named
    assert named <= known, text
    assert 'state_transformation_fn' not in text
    assert 'fallback_state' not in text


@pytest.mark.parametrize(
    ('kind', 'options'),
    [
        ('missing', {'missing': 'init'}),
        ('unexpected', {'strict': 'contains'}),
        ('renamed', {'rename': [('(.*)/heads/(.*)', r'\1/head/\2')]}),
        ('shape', {'resize': '.*/dense/kernel'}),
        ('shape', {'leave': '.*/dense/kernel'}),
        ('dtype', {'leave': 'n'}),
    ],
)
def test_the_cures_that_they_name_work(tmp_path, kind, options):
    held = {'params': params(1.0), 'n': 7}
    with Checkpointer(held, checkpoints_dir=tmp_path / 'old') as ck:
        ck.save(held, step=1)
    state = start_from(tmp_path / 'new', WarmStart(tmp_path / 'old', **options), OTHERS[kind])
    assert jax.tree.structure(state) == jax.tree.structure(OTHERS[kind])


def test_of_leaves_that_are_left_nothing_is_said(tmp_path, caplog):
    old = {'model': {'dense': params(5.0)['dense']}}
    with Checkpointer(old, checkpoints_dir=tmp_path / 'old') as ck:
        ck.save(old, step=1)
    caplog.set_level('WARNING', 't5ckpt')
    caplog.clear()
    model = {'params': params(0.0), 'extra': jnp.zeros(3)}
    for leave in ('params/head/.*|extra', re.compile('params/head/.*|extra')):
        warm = WarmStart(tmp_path / 'old', leave=leave, rename=[('params/(.*)', r'model/\1')])
        state = start_from(tmp_path / 'new', warm, model)
        assert float(state['params']['dense']['kernel'][0, 0]) == 5
    assert caplog.messages == []


@pytest.mark.parametrize('init_fn', [None, lambda: None])
def test_a_new_run_without_a_state_is_an_error(tmp_path, init_fn):
    with (
        Checkpointer(train_state(), checkpoints_dir=tmp_path / 'run') as ck,
        pytest.raises(ValueError, match=r'init_fn (is|returned) None, but a new state is needed'),
    ):
        restore_or_init(ck, init_fn)


def test_a_new_state_that_is_not_of_the_template_is_named(tmp_path):
    """Leaves of it that the template lacks were dropped, and the others were called missing in the checkpoint."""
    with Checkpointer({'dense': jnp.ones(3)}, checkpoints_dir=tmp_path / 'old') as ck:
        ck.save({'dense': jnp.ones(3)}, step=1)
    template = {'dense': jnp.ones(3), 'head': jnp.ones(4), 'new': jnp.ones(2)}
    fresh = {'dense': jnp.ones(3), 'head': jnp.ones(5), 'other': jnp.ones(1)}
    with (
        Checkpointer(template, checkpoints_dir=tmp_path / 'run') as ck,
        pytest.raises(ValueError, match='not one of the checkpointer') as caught,
    ):
        restore_or_init(ck, lambda: fresh, initial_checkpoint=WarmStart(tmp_path / 'old', missing='init'))
    for problem in (
        'new: in the template, not in the new state',
        'other: in the new state, not in the template',
        'head: shape (5,) in the new state, (4,) in the template',
    ):
        assert problem in str(caught.value)


def test_a_replacement_without_its_group_names_the_rule(tmp_path):
    run_with(tmp_path / 'old', [1])
    warm = WarmStart(tmp_path / 'old', rename=[('params/.*', r'model/\1')])
    with (
        Checkpointer(train_state(), checkpoints_dir=tmp_path / 'new') as ck,
        pytest.raises(ValueError, match='does not fit the pattern'),
    ):
        restore_or_init(ck, train_state, initial_checkpoint=warm)
