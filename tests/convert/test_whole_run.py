"""Conversions of all steps of a run: from Orbax and Flax, back to Orbax, resumed, and what stands in the way."""

import json
import time

import flax.serialization
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from support import forked
from support.bits import assert_same
from support.cli import t5ckpt_cli

import t5ckpt
from t5ckpt import ConvertOptions, convert_run, errors

LOSSES = {10: 0.5, 20: 0.25, 30: 0.3}


def tree(step):
    return {
        'params': {'w': np.full((400, 500), step, np.float32)},
        'opt_state': {'mu': np.ones(3)},
        'step': np.array(step),
    }


def of(reports, outcome='converted'):
    """The steps with this outcome."""
    return [report.step for report in reports if report.outcome == outcome]


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
    done = convert_run('orbax', run, tmp_path / 'new')
    assert done[0].path == str(tmp_path / 'new/checkpoint_10')
    assert of(done) == [10, 20, 30]
    assert of(done, 'there') == of(done, 'gone') == []
    assert t5ckpt.all_steps(tmp_path / 'new') == [10, 20, 30]
    for step, loss in LOSSES.items():
        view = check(tmp_path / 'new', step)
        assert view.metrics == {'loss': loss}
        assert view.custom_metadata == {'project': 'x', 'at': step}
    created = [each.created for each in t5ckpt.open_run(run).summaries()]
    assert [each.created for each in t5ckpt.open_run(tmp_path / 'new').summaries()] == created
    assert t5ckpt.open_run(tmp_path / 'new').best_step('loss', 'min') == 20
    assert t5ckpt.verify(tmp_path / 'new', 20, full=True).ok


def test_a_second_call_skips_what_is_there(run, tmp_path):
    assert of(convert_run('orbax', run, tmp_path / 'new', steps=[20])) == [20]
    seen = []
    options = ConvertOptions(progress=lambda done, total: seen.append((done, total)))
    done = convert_run('orbax', run, tmp_path / 'new', options)
    assert (of(done, 'there'), of(done)) == ([20], [10, 30])
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == 2 * tree(0)['params']['w'].nbytes
    assert of(convert_run('orbax', run, tmp_path / 'new')) == []
    anew = convert_run(
        'orbax', run, tmp_path / 'new', ConvertOptions(overwrite=True, save_dtype='bfloat16'), steps=[10]
    )
    assert of(anew) == [10]
    assert str(t5ckpt.open_checkpoint(tmp_path / 'new', 10)['params/w'].dtype) == 'bfloat16'


def test_a_step_of_another_origin_is_not_taken_for_converted(run, tmp_path):
    with t5ckpt.Checkpointer(tree(20), checkpoints_dir=tmp_path / 'new') as ck:
        ck.save(tree(20), step=20)
    with pytest.raises(errors.CheckpointExistsError, match=r'checkpoint_20 exists and was not converted from .*run/20'):
        convert_run('orbax', run, tmp_path / 'new')
    assert t5ckpt.all_steps(tmp_path / 'new') == [20]
    # In its own directory, where the steps of Orbax have the same numbers.
    with pytest.raises(errors.CheckpointExistsError, match='exists and was not converted'):
        convert_run('orbax', run, run)


def test_a_step_that_orbax_saved_again_is_converted_again_on_request(run, tmp_path):
    convert_run('orbax', run, tmp_path / 'new')
    with ocp.CheckpointManager(run) as manager:
        manager.delete(30)
        manager.save(30, args=ocp.args.StandardSave(tree(31)))
    with pytest.raises(errors.CheckpointExistsError, match='as it is now'):
        convert_run('orbax', run, tmp_path / 'new')
    convert_run('orbax', run, tmp_path / 'new', ConvertOptions(overwrite=True))
    assert t5ckpt.open_checkpoint(tmp_path / 'new', 30)['params/w'][0, 0] == 31


def test_a_damaged_step_ends_it_and_the_steps_before_stay(run, tmp_path):
    (metadata,) = run.glob('20/default/_METADATA')
    text = metadata.read_text()
    metadata.write_text('{')
    with pytest.raises(errors.CorruptCheckpointError, match='run/20/default/_METADATA'):
        convert_run('orbax', run, tmp_path / 'new')
    assert t5ckpt.all_steps(tmp_path / 'new') == [10]
    metadata.write_text(text)
    assert of(convert_run('orbax', run, tmp_path / 'new'), 'there') == [10]
    assert t5ckpt.all_steps(tmp_path / 'new') == [10, 20, 30]


def test_steps_that_a_trainer_deletes_meanwhile_are_named(run, tmp_path):
    def delete(done, total):
        if (run / '20').exists():
            (run / '20').rename(tmp_path / 'gone')

    done = convert_run('orbax', run, tmp_path / 'new', ConvertOptions(progress=delete))
    assert (of(done, 'gone'), of(done)) == ([20], [10, 30])


@pytest.mark.slow
def test_a_conversion_that_was_killed_resumes(tmp_path):
    """SIGKILL in the middle of several steps; the steps are then equal to those of a conversion in one go."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics['loss'])
    with ocp.CheckpointManager(tmp_path / 'run', options=options) as manager:
        for step in range(12):
            manager.save(step, args=ocp.args.StandardSave(tree(step)), metrics={'loss': 1.0 / (step + 1)})
    words = 'convert', 'orbax', tmp_path / 'run', tmp_path / 'new', '--all'
    for count in (1, 4, 8):
        with forked.start(None, *words) as child:
            while child.poll() is None and not any((tmp_path / 'new').glob(f'checkpoint_{count}*')):
                time.sleep(0.001)
            child.kill()
        found = t5ckpt.all_steps(tmp_path / 'new')
        assert found == list(range(len(found))), 'in order, and nothing that was there is lost'
        for step in found:
            check(tmp_path / 'new', step)
    found = t5ckpt.all_steps(tmp_path / 'new')
    assert 0 < len(found) < 12, 'it was killed in the middle'
    done = convert_run('orbax', tmp_path / 'run', tmp_path / 'new')
    assert (of(done, 'there'), of(done)) == (found, [*range(len(found), 12)])
    for step in range(12):
        assert check(tmp_path / 'new', step).metrics == {'loss': 1.0 / (step + 1)}
        assert t5ckpt.verify(tmp_path / 'new', step, full=True).ok
    assert not [path for path in (tmp_path / 'new').iterdir() if '.tmp-' in path.name]


def test_a_named_tuple_without_fields_is_equal_to_that_of_orbax(tmp_path):
    """Orbax stores None in its place, so `t5ckpt diff` would never answer that the steps of both are equal."""
    state = {'w': np.ones(3, np.float32), 'opt_state': (optax.EmptyState(),)}
    with ocp.CheckpointManager(tmp_path / 'orbax') as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path / 'ours') as checkpointer:
        checkpointer.save(state, step=1)
    assert t5ckpt.open_checkpoint(tmp_path / 'orbax')['opt_state/0'] is None
    assert not t5ckpt.diff(tmp_path / 'orbax', tmp_path / 'ours')


def test_wrong_arguments(run, tmp_path):
    with pytest.raises(
        errors.CheckpointNotFoundError, match=r'has no step 7 in the layout of orbax; there are: 10.*30'
    ):
        convert_run('orbax', run, tmp_path / 'new', steps=[7, 10])
    with pytest.raises(
        errors.CheckpointNotFoundError, match=r'flax; there are: none\. In other layouts \(orbax\) the run has 3 steps'
    ):
        convert_run('flax', run, tmp_path / 'new')
    with pytest.raises(errors.CheckpointNotFoundError):
        convert_run('orbax', tmp_path / 'nothing', tmp_path / 'new')
    with pytest.raises(errors.CheckpointNotFoundError, match='not a run'):
        convert_run('orbax', run / '10', tmp_path / 'new')
    with pytest.raises(ValueError, match='format of a run'):
        convert_run('tf', run, tmp_path / 'new')
    with pytest.raises(ValueError, match='steps='):
        convert_run('orbax', run, tmp_path / 'new', ConvertOptions(step=3))
    assert not (tmp_path / 'new').exists()


def test_files_of_flax(tmp_path):
    (tmp_path / 'run').mkdir()
    for step in (1, 2):
        (tmp_path / f'run/checkpoint_{step}').write_bytes(flax.serialization.to_bytes(tree(step)))
    done = convert_run('flax', tmp_path / 'run', tmp_path / 'new', ConvertOptions(leave=t5ckpt.OPTIMIZER))
    assert [each.dropped for each in done] == [('opt_state/mu',)] * 2
    for step in (1, 2):
        check(tmp_path / 'new', step)


def test_back_to_a_run_that_orbax_manages(run, tmp_path, caplog):
    convert_run('orbax', run, tmp_path / 'new')
    done = convert_run('to-orbax', tmp_path / 'new', tmp_path / 'back')
    assert [each.path for each in done] == [str(tmp_path / f'back/{step}') for step in LOSSES]
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics['loss'], best_mode='min')
    with ocp.CheckpointManager(tmp_path / 'back', options=options) as manager:
        assert manager.all_steps() == [10, 20, 30]
        assert manager.best_step() == 20
        assert manager.metrics(30) == {'loss': 0.3}
        assert manager.metadata(30).custom_metadata == {'project': 'x', 'at': 30}
        restored = manager.restore(30, args=ocp.args.StandardRestore(tree(0)))
        assert_same(restored['params']['w'], tree(30)['params']['w'])
    again = convert_run('to-orbax', tmp_path / 'new', tmp_path / 'back')
    assert (of(again, 'there'), of(again)) == ([10, 20, 30], [])
    assert t5ckpt.open_run(tmp_path / 'back').best_step('loss', 'min') == 20
    convert_run('to-orbax', tmp_path / 'new', tmp_path / 'back', ConvertOptions(overwrite=True), steps=[10])
    t5ckpt.convert_checkpoint('to-orbax', tmp_path / 'new', tmp_path / 'one')
    assert 'TypeHandlerRegistry' not in caplog.text, 'a warning of Orbax that no user can follow'
    assert set(t5ckpt.open_checkpoint(tmp_path / 'one')) == {'params/w', 'opt_state/mu', 'step'}


@pytest.mark.slow
def test_the_verb(run, tmp_path):
    new = tmp_path / 'new'
    would = json.loads(t5ckpt_cli('convert', 'orbax', run, new, '--all', '--dry-run', '--json'))
    assert [(each['step'], each['outcome']) for each in would['steps']] == [
        (step, 'converted') for step in (10, 20, 30)
    ]
    assert (would['dry_run'], new.exists()) == (True, False)
    assert 'checkpoint_20 written' in t5ckpt_cli('convert', 'orbax', run, new, '--step', '10', '--step', '20')
    said = t5ckpt_cli('convert', 'orbax', run, new, '--all')
    assert 'already there: step 10\nalready there: step 20' in said
    assert 'checkpoint_30 written' in said
    t5ckpt_cli('convert', 'orbax', f'{run}@best:loss:min', tmp_path / 'best')
    assert t5ckpt.all_steps(tmp_path / 'best') == [20]
    t5ckpt_cli('convert', 'orbax', run, tmp_path / 'one', '--step', '10', '--as-step', '7')
    assert t5ckpt.open_checkpoint(tmp_path / 'one', 7).metrics == {'loss': 0.5}
    t5ckpt_cli('convert', 'to-orbax', new, tmp_path / 'back', '--all')
    t5ckpt_cli('convert', 'to-orbax', new, tmp_path / 'single', '--step', '10')
    assert int(t5ckpt.open_checkpoint(tmp_path / 'single')['step'][()]) == 10
    for words in (
        ('tf', run, new, '--all'),
        ('orbax', run, new, '--all', '--step', '10'),
        ('orbax', run, new, '--all', '--as-step', '10'),
        ('orbax', f'{run}@10', new, '--all', '--step', '10'),
    ):
        t5ckpt_cli('convert', *words, code=2)
    with t5ckpt.Checkpointer(tree(0), checkpoints_dir=tmp_path / 'mine') as ck:
        ck.save(tree(10))
    assert '--force' in t5ckpt_cli('convert', 'orbax', run, tmp_path / 'mine', '--all', code=1)


def test_steps_that_were_converted_with_other_options_are_no_answer(run, tmp_path):
    """What was asked for is not there: a call with other options must not call it converted."""
    new, back = tmp_path / 'new', tmp_path / 'back'
    convert_run('orbax', run, new, steps=[10, 20])
    others = [
        (ConvertOptions(save_dtype='bfloat16'), 'save_dtype'),
        (ConvertOptions(leave=t5ckpt.OPTIMIZER), 'leave'),
        (ConvertOptions(compression='zstd'), 'compression'),
    ]
    for options, name in others:
        with pytest.raises(errors.CheckpointExistsError, match=f'checkpoint_10 .*with other options.*{name}'):
            convert_run('orbax', run, new, options)
    assert t5ckpt.all_steps(new) == [10, 20]
    assert of(convert_run('orbax', run, new, ConvertOptions(concurrent_gb=0.1)), 'there') == [10, 20]
    convert_run('to-orbax', new, back, steps=[10])
    with pytest.raises(errors.CheckpointExistsError, match=r'back/10 .*with other options.*save_dtype'):
        convert_run('to-orbax', new, back, ConvertOptions(save_dtype='bfloat16'))
    assert t5ckpt.all_steps(back) == [10]


def test_steps_of_orbax_that_were_not_converted_from_this_run(run, tmp_path):
    """Two runs of one model have the same steps, names and shapes."""
    new, other, back = tmp_path / 'new', tmp_path / 'other', tmp_path / 'back'
    convert_run('orbax', run, new)
    with t5ckpt.Checkpointer(tree(0), checkpoints_dir=other) as ck:
        ck.save(tree(10))
        ck.save(tree(20))
    convert_run('to-orbax', other, back)
    with pytest.raises(errors.CheckpointExistsError, match=r'back/10 exists and was not converted from .*new'):
        convert_run('to-orbax', new, back)
    with pytest.raises(errors.CheckpointExistsError, match=r'run/10 exists and was not converted from .*new'):
        convert_run('to-orbax', new, run)
    assert t5ckpt.all_steps(back) == [10, 20]
    convert_run('to-orbax', new, back, ConvertOptions(overwrite=True))
    assert of(convert_run('to-orbax', new, back), 'there') == [10, 20, 30]


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


def test_items_that_are_not_converted_are_named_once(items, tmp_path, caplog):
    done = convert_run('orbax', items, tmp_path / 'new')
    assert [each.left_out for each in done] == [('config', 'ema')] * 2
    told = [record.message for record in caplog.records if 'config, ema' in record.message]
    assert len(told) == 1
    assert f'{items}/1/ema' in told[0]
    assert 'left out: config, ema' in t5ckpt_cli('convert', 'orbax', items, tmp_path / 'said', '--all')
    shown = json.loads(t5ckpt_cli('convert', 'orbax', items, tmp_path / 'one', '--json'))
    assert shown['left_out'] == ['config', 'ema']
    ema = t5ckpt.convert_checkpoint('orbax', items / '1/ema', tmp_path / 'ema')
    assert (ema.left_out, ema.step) == ((), 1)
    (item,) = (each for each in (tmp_path / 'items/2').iterdir() if each.name == 'ema')
    for child in sorted(item.rglob('*'), reverse=True):
        child.rmdir() if child.is_dir() else child.unlink()
    item.rmdir()
    caplog.clear()
    t5ckpt.convert_checkpoint('orbax', items / '2', tmp_path / 'json')
    assert 'config' in caplog.text


def test_an_item_of_a_later_step_is_named_without_those_of_earlier_steps(items, tmp_path, caplog):
    with ocp.CheckpointManager(items) as manager:
        state, extra = ocp.args.StandardSave(tree(3)), ocp.args.JsonSave({'a': 1})
        manager.save(3, args=ocp.args.Composite(state=state, ema=state, extra=extra))
    convert_run('orbax', items, tmp_path / 'new')
    told = [record.message for record in caplog.records if 'not converted' in record.message]
    assert [message.partition(': items of Orbax that are not converted: ')[2][:11] for message in told] == [
        'config, ema',
        'extra.',
    ]


def test_leaves_that_orbax_cannot_store_are_named(tmp_path):
    with t5ckpt.Checkpointer(tree(0), checkpoints_dir=tmp_path / 'run') as ck:
        ck.save(tree(3), metrics={'loss': 1.0}, custom_metadata={'a': 1})
    (tmp_path / 'run/checkpoint_3/train_ds-000-of-001').write_bytes(b'position')
    t5ckpt.pin_checkpoint(tmp_path / 'run/checkpoint_3')
    (one,) = convert_run('to-orbax', tmp_path / 'run', tmp_path / 'orbax')
    assert one.left_out == ('PINNED', 'train_ds-000-of-001')
    bare = t5ckpt.convert_checkpoint('to-orbax', tmp_path / 'run', tmp_path / 'bare')
    assert bare.left_out == ('PINNED', 'custom_metadata', 'metrics', 'train_ds-000-of-001')
    assert 'left out: PINNED, custom_metadata' in t5ckpt_cli('convert', 'to-orbax', tmp_path / 'run', tmp_path / 'said')
