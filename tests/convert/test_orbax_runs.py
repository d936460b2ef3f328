"""The steps of a run of Orbax, converted one after another and back, with metrics, times and metadata."""

import json
import shutil

import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from support.bits import assert_same
from support.cli import t5ckpt_cli

import t5ckpt
from t5ckpt import convert_checkpoint, errors

LOSSES = {10: 0.5, 20: 0.25, 30: 0.3}


def tree(step):
    return {
        'params': {'w': np.full((400, 500), step, np.float32)},
        'opt_state': {'mu': np.ones(3)},
        'step': np.array(step),
    }


@pytest.fixture
def run(tmp_path):
    """A run of Orbax's CheckpointManager with metrics and metadata."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics['loss'])
    with ocp.CheckpointManager(tmp_path / 'run', options=options, metadata={'project': 'x'}) as manager:
        for step, loss in LOSSES.items():
            save = {'args': ocp.args.StandardSave(tree(step)), 'custom_metadata': {'at': step}}
            manager.save(step, metrics={'loss': loss}, **save)
    return tmp_path / 'run'


def check(path, step):
    view = t5ckpt.open_checkpoint(path, step)
    assert_same(view['params/w'][:], tree(step)['params']['w'])
    assert int(view['step'][()]) == step
    return view


def test_every_step_with_metrics_times_and_metadata(run, tmp_path):
    for step in t5ckpt.all_steps(run):
        done = convert_checkpoint('orbax', run / str(step), tmp_path / 'new')
        assert (done.step, done.path) == (step, str(tmp_path / f'new/checkpoint_{step}'))
    assert t5ckpt.all_steps(tmp_path / 'new') == [10, 20, 30]
    for step, loss in LOSSES.items():
        view = check(tmp_path / 'new', step)
        assert view.metrics == {'loss': loss}
        assert view.custom_metadata == {'project': 'x', 'at': step}
    created = [each.created for each in t5ckpt.open_run(run).summaries()]
    assert [each.created for each in t5ckpt.open_run(tmp_path / 'new').summaries()] == created
    assert t5ckpt.open_run(tmp_path / 'new').best_step('loss', 'min') == 20
    assert t5ckpt.verify(tmp_path / 'new', 20, full=True).ok
    with pytest.raises(errors.CheckpointExistsError):
        convert_checkpoint('orbax', run / '20', tmp_path / 'new')


def test_a_named_tuple_without_fields_is_equal_to_that_of_orbax(tmp_path):
    """Orbax stores None in its place, so `t5ckpt diff` would never answer that the steps of both are equal."""
    state = {'w': np.ones(3, np.float32), 'opt_state': (optax.EmptyState(),)}
    with ocp.CheckpointManager(tmp_path / 'orbax') as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'ours') as checkpointer:
        checkpointer.save(state, step=1)
    assert t5ckpt.open_checkpoint(tmp_path / 'orbax')['opt_state/0'] is None
    assert not t5ckpt.diff(tmp_path / 'orbax', tmp_path / 'ours')


def test_back_to_a_run_that_orbax_manages(run, tmp_path):
    for step in LOSSES:
        convert_checkpoint('orbax', run / str(step), tmp_path / 'new')
        done = convert_checkpoint('to-orbax', tmp_path / f'new/checkpoint_{step}', tmp_path / f'back/{step}')
        assert done.path == str(tmp_path / f'back/{step}')
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics['loss'], best_mode='min')
    with ocp.CheckpointManager(tmp_path / 'back', options=options) as manager:
        assert manager.all_steps() == [10, 20, 30]
        assert manager.best_step() == 20
        assert manager.metrics(30) == {'loss': 0.3}
        assert manager.metadata(30).custom_metadata == {'project': 'x', 'at': 30}
        restored = manager.restore(30, args=ocp.args.StandardRestore(tree(0)))
        assert_same(restored['params']['w'], tree(30)['params']['w'])
        manager.save(40, args=ocp.args.StandardSave(tree(40)), metrics={'loss': 0.1})
        manager.delete(10)
    summaries = t5ckpt.open_run(tmp_path / 'back').summaries()
    assert [each.created for each in t5ckpt.open_run(run).summaries()][1:] == [each.created for each in summaries][:2]
    assert t5ckpt.open_run(tmp_path / 'back').best_step('loss', 'min') == 40
    assert set(t5ckpt.open_checkpoint(tmp_path / 'back/20')) == {'params/w', 'opt_state/mu', 'step'}


@pytest.mark.slow
def test_the_verb(run, tmp_path):
    new = tmp_path / 'new'
    t5ckpt_cli('convert', 'orbax', f'{run}@best:loss:min', tmp_path / 'best')
    assert t5ckpt.all_steps(tmp_path / 'best') == [20]
    t5ckpt_cli('convert', 'orbax', run, new, '--step', '10', '--as-step', '7')
    assert t5ckpt.open_checkpoint(new, 7).metrics == {'loss': 0.5}
    assert '--force' in t5ckpt_cli('convert', 'orbax', run, new, '--step', '10', '--as-step', '7', code=1)
    t5ckpt_cli('convert', 'to-orbax', new, tmp_path / 'back/7', '--step', '7')
    assert int(t5ckpt.open_checkpoint(tmp_path / 'back')['step'][()]) == 10
    t5ckpt_cli('convert', 'to-orbax', new, tmp_path / 'back/8', '--as-step', '8', code=2)


@pytest.fixture
def items(tmp_path):
    """A run whose steps have several items."""
    place = tmp_path / 'items'
    with ocp.CheckpointManager(place) as manager:
        for step in (1, 2):
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(tree(step)),
                    ema=ocp.args.StandardSave({'w': np.ones(3)}),
                    config=ocp.args.JsonSave({'layers': 2}),
                ),
                metrics={'loss': 1.0},
            )
    return place


def test_items_that_are_not_converted_are_named(items, tmp_path, caplog):
    done = convert_checkpoint('orbax', items / '1', tmp_path / 'new')
    assert done.left_out == ('config', 'ema')
    (told,) = [record.message for record in caplog.records if 'config, ema' in record.message]
    assert f'{items}/1/ema' in told
    shown = json.loads(t5ckpt_cli('convert', 'orbax', items, tmp_path / 'one', '--json'))
    assert shown['left_out'] == ['config', 'ema']
    assert 'left out: config, ema' in t5ckpt_cli('convert', 'orbax', items, tmp_path / 'said')
    ema = convert_checkpoint('orbax', items / '1/ema', tmp_path / 'ema')
    assert (ema.left_out, ema.step) == ((), 1)
    shutil.rmtree(items / '2/ema')
    caplog.clear()
    convert_checkpoint('orbax', items / '2', tmp_path / 'json')
    assert 'config' in caplog.text


def test_what_a_step_of_orbax_cannot_hold_is_named(tmp_path):
    with t5ckpt.Checkpointer(tree(0), checkpoints_dir=tmp_path / 'run') as ck:
        ck.save(tree(3), metrics={'loss': 1.0}, custom_metadata={'a': 1})
    (tmp_path / 'run/checkpoint_3/train_ds-000-of-001').write_bytes(b'position')
    t5ckpt.pin_checkpoint(tmp_path / 'run/checkpoint_3')
    done = convert_checkpoint('to-orbax', tmp_path / 'run', tmp_path / 'orbax/3')
    assert done.left_out == ('PINNED', 'train_ds-000-of-001')
    assert 'left out: PINNED, train_ds' in t5ckpt_cli('convert', 'to-orbax', tmp_path / 'run', tmp_path / 'said')
