"""prune, pin and unpin from a shell; holds; the evaluator's iterator; weights alone."""

import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from click.testing import CliRunner
from support import forked
from support.cli import t5ckpt_cli
from support.facts import put_facts

import t5ckpt
from t5ckpt import Checkpointer, KeepBest, KeepLatest, checkpoints_iterator
from t5ckpt.catalog.locate import refuse_other_contents
from t5ckpt.catalog.pin_file import pin_reason
from t5ckpt.cli.app import app
from t5ckpt.commit.deletion import find_step, hide
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.holds import hold
from t5ckpt.commit.markers import announcement_directory
from t5ckpt.commit.retention import Retention, remove_positions
from t5ckpt.errors import CheckpointNotFoundError, StepKeptError
from t5ckpt.storage import open_storage
from t5ckpt.storage.file import FileStorage
from t5ckpt.testing import FakeClock, FaultyStorage


def save(directory, steps, metrics=None):
    state = {'params': {'w': np.ones(8, np.float32)}}
    with Checkpointer(state, checkpoints_dir=directory) as ck:
        for step in steps:
            ck.save(state, step=step, metrics=None if metrics is None else {'loss': metrics[step]})


def test_a_step_that_was_saved_during_the_question_changes_nothing_of_what_was_confirmed(tmp_path):
    save(tmp_path, [1, 2, 3])
    ours, theirs = os.openpty()
    words = 'prune', tmp_path, '--keep', '1'
    with forked.start(None, *words, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as prune:
        asked = ''
        while 'Delete 2 of 3 steps?' not in asked:
            character = prune.stderr.read(1)
            assert character, asked
            asked += character
        # By the same rule, step 3 would now go as well.
        save(tmp_path, [4])
        os.write(ours, b'y\n')
        prune.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert prune.returncode == 0
    assert t5ckpt.all_steps(tmp_path) == [3, 4]


def test_prune_says_what_it_would_do_and_does_that(tmp_path):
    save(tmp_path, range(5), {0: 5.0, 1: 1.0, 2: 4.0, 3: 3.0, 4: 2.0})
    t5ckpt_cli('pin', f'{tmp_path}@0', f'{tmp_path}@2', '--why', 'in the paper')
    assert (tmp_path / 'checkpoint_2' / 'PINNED').read_text() == 'in the paper'
    assert json.loads(t5ckpt_cli('unpin', tmp_path / 'checkpoint_2', '--json'))['not_pinned'] == []
    assert 'was not pinned' in t5ckpt_cli('unpin', f'{tmp_path}@2', code=1)
    words = ('prune', tmp_path, '--keep', 1, '--best', 'loss', '--mode', 'min')
    text = t5ckpt_cli(*words, '--dry-run')
    plan = json.loads(t5ckpt_cli(*words, '--dry-run', '--json'))['plan']
    assert [entry['step'] for entry in plan if not entry['keep']] == [2, 3]
    for entry in plan:
        assert entry['reason'] in text
    assert t5ckpt.all_steps(tmp_path) == [0, 1, 2, 3, 4]
    assert 'pass --yes' in t5ckpt_cli(*words, code=2)
    assert t5ckpt.all_steps(tmp_path) == [0, 1, 2, 3, 4]
    assert json.loads(t5ckpt_cli(*words, '--yes', '--json'))['deleted'] == [2, 3]
    assert sorted(os.listdir(tmp_path)) == ['checkpoint_0', 'checkpoint_1', 'checkpoint_4']
    assert json.loads(t5ckpt_cli(*words, '--json'))['deleted'] == [], 'nothing to do is nothing to ask'


def test_the_last_line_says_what_was_deleted(tmp_path):
    save(tmp_path, range(5))
    words = ('prune', tmp_path, '--keep', 3)
    assert t5ckpt_cli(*words, '--dry-run').splitlines()[-1] == '2 of 5 steps would be deleted'
    assert t5ckpt_cli(*words, '--yes').splitlines()[-1] == 'deleted: 0, 1'
    assert t5ckpt_cli(*words).splitlines()[-1] == 'nothing was deleted'
    assert t5ckpt_cli('rm', tmp_path, 2, 3, '--yes').splitlines()[-1] == 'deleted: 2, 3'
    assert t5ckpt_cli('rm', tmp_path, 4, '--dry-run').splitlines()[-1] == '1 of 1 step would be deleted'


def test_why_a_step_is_pinned_stays_and_is_shown(tmp_path):
    def run(*words):
        done = CliRunner().invoke(app, [*map(str, words)])
        assert done.exit_code == 0, done.output
        return ' '.join(done.output.split())

    save(tmp_path, range(3))
    step = tmp_path / 'checkpoint_1'
    run('pin', f'{tmp_path}@1', '--why', 'in the paper')
    assert run('pin', f'{tmp_path}@1').endswith('checkpoint_1: in the paper')
    t5ckpt.pin_checkpoint(step)
    assert (step / 'PINNED').read_text() == 'in the paper'
    assert 'complete pinned: in the paper' in run('ls', tmp_path)
    assert '1 keep pinned: in the paper' in run('prune', tmp_path, '--keep', 1, '--dry-run')
    assert json.loads(run('ls', tmp_path, '--json'))[1]['kept'] == 'pinned: in the paper'
    run('pin', step, '--why', 'the baseline')
    assert 'pinned: the baseline' in run('ls', tmp_path)
    run('pin', f'{tmp_path}@2')
    assert json.loads(run('ls', tmp_path, '--json'))[2]['kept'] == 'pinned, latest'
    assert run('pin', f'{tmp_path}@2').endswith('checkpoint_2')


def test_a_pin_that_may_not_be_read_is_a_pin(tmp_path):
    save(tmp_path, range(2))
    t5ckpt.pin_checkpoint(tmp_path / 'checkpoint_0', 'in the paper')
    assert pin_reason(FaultyStorage(open_storage(tmp_path), 0), 'checkpoint_0') == 'pinned'
    assert pin_reason(open_storage(tmp_path), 'checkpoint_0') == 'pinned: in the paper'


def test_a_run_without_a_policy_says_so(tmp_path):
    """Such as one of converted steps."""
    save(tmp_path / 'a', range(2))
    for step in (0, 1):
        t5ckpt.copy_checkpoint(tmp_path / 'a' / f'checkpoint_{step}', tmp_path / 'b')
    for step in (0, 1):
        put_facts(tmp_path / 'b' / f'checkpoint_{step}', None)
    told = json.loads(CliRunner().invoke(app, ['ls', str(tmp_path / 'b'), '--json']).stdout)
    assert [each['kept'] for each in told] == ['no keep policy is recorded', 'latest']


def test_prune_needs_an_option_of_what_to_keep(tmp_path):
    assert 'Pass --keep, --best, ' in t5ckpt_cli('prune', tmp_path, code=2)
    for hours in ('0', 'inf', 'nan'):
        assert 'must be a finite number above 0' in pruned(tmp_path, '--every-hours', hours, code=2)
    assert 'no such file or directory' in t5ckpt_cli('prune', tmp_path / 'none', '--keep', 1, code=3)


def pruned(*words, code=0):
    """What prune says, in this process."""
    done = CliRunner().invoke(app, ['prune', *map(str, words)])
    assert done.exit_code == code, done.output
    return done.output


def test_a_metric_that_no_step_has_deletes_nothing(tmp_path):
    save(tmp_path, range(3), {0: 5.0, 1: 1.0, 2: 4.0})
    for words in (['--yes'], ['--dry-run'], ['--mode', 'min', '--json', '--yes']):
        done = pruned(tmp_path, '--keep', 1, '--best', 'los', *words, code=2)
        assert "no step has the metric 'los'; there are: loss" in done
    assert t5ckpt.all_steps(tmp_path) == [0, 1, 2]
    save(tmp_path / 'bare', range(3))
    words = ('--keep', 1, '--best', 'loss', '--yes')
    assert 'no step has a value for loss' in pruned(tmp_path / 'bare', *words, '--mode', 'min', code=2)
    assert 'Pass the mode' in pruned(tmp_path / 'bare', *words, code=2)
    assert t5ckpt.all_steps(tmp_path / 'bare') == [0, 1, 2]


def test_the_mode_of_the_best_comes_from_the_policy_that_the_run_was_saved_under(tmp_path):
    state = {'params': {'w': np.ones(8, np.float32)}}
    policy = KeepLatest(9) | KeepBest(2, 'loss', 'min')
    with Checkpointer(state, checkpoints_dir=tmp_path, keep_policy=policy) as ck:
        for step, loss in enumerate([5.0, 1.0, 4.0, 3.0]):
            ck.save(state, step=step, metrics={'loss': loss, 'accuracy': step})
    words = (tmp_path, '--keep', 1, '--best', 'loss', '--dry-run')
    assert '--best loss: the lowest value is best' in pruned(*words)
    found = json.loads(pruned(*words, '--json'))
    assert [entry['step'] for entry in found['plan'] if entry['keep']] == [1, 3]
    # What is asked for counts.
    assert '--best loss: the highest value is best' in pruned(*words, '--mode', 'max')
    for metric in ('accuracy', 'accurac'):
        said = pruned(tmp_path, '--keep', 1, '--best', metric, '--yes', code=2)
        assert ('--mode min' in said) == (metric == 'accuracy')
    assert t5ckpt.all_steps(tmp_path) == [0, 1, 2, 3]
    told = pruned(tmp_path, '--keep', 1, '--best', 'loss', '--yes')
    assert 'the lowest value is best' in told
    assert t5ckpt.all_steps(tmp_path) == [1, 3]


def found_best(*words, code=0):
    done = CliRunner().invoke(app, ['best', *map(str, words)])
    assert done.exit_code == code, done.output
    return done.output


def test_best_prints_the_step_that_best_step_returns(tmp_path):
    state = {'params': {'w': np.ones(8, np.float32)}}
    policy = KeepLatest(9) | KeepBest(2, 'loss', 'min')
    with Checkpointer(state, checkpoints_dir=tmp_path, keep_policy=policy) as ck:
        for step, loss in enumerate([5.0, 1.0, 1.0, float('nan'), 3.0]):
            ck.save(state, step=step, metrics={'loss': loss, 'accuracy': -step})
        for words in ([], ['loss'], ['loss', 'max'], ['accuracy', 'max']):
            options = [*words[:1], *(['--mode', words[1]] if words[1:] else [])]
            assert found_best(tmp_path, *options).splitlines()[0] == f'{ck.best_step(*words)}'
    shown = CliRunner().invoke(app, ['best', str(tmp_path)])
    assert shown.stdout == '2\n', 'standard output is for a shell'
    assert shown.stderr == 'loss: min is best by the keep policy of the run. --mode chooses another.\n'
    assert not CliRunner().invoke(app, ['best', str(tmp_path), 'loss', '--mode', 'min']).stderr
    assert json.loads(found_best(tmp_path, '--json')) == {'step': 2, 'metric': 'loss', 'mode': 'min', 'value': 1.0}
    assert 'run@best:accuracy:min, or accuracy with --mode min.' in ' '.join(
        found_best(tmp_path, 'accuracy', code=2).split()
    )
    assert "no step has the metric 'los'; there are: accuracy, loss" in found_best(tmp_path, 'los', code=2)
    for named, text in (
        ('best:los', "no step has the metric 'los'; there are: accuracy, loss"),
        ('best:accuracy', 'run@best:accuracy:min'),
    ):
        shown = CliRunner().invoke(app, ['show', f'{tmp_path}@{named}'])
        assert shown.exit_code == 2
        assert text in shown.output
    assert 'there are: accuracy, loss' in found_best(tmp_path, 'los', '--mode', 'max', code=2)
    save(tmp_path / 'bare', range(2))
    assert 'no step has a value for loss' in found_best(tmp_path / 'bare', 'loss', '--mode', 'max', code=1)
    assert 'metrics they compare: none; metrics of the steps: none' in found_best(tmp_path / 'bare', code=2)


# --- holds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', ['file', 'memory'])
def test_a_held_step_is_not_deleted(tmp_path, kind):
    place = str(tmp_path) if kind == 'file' else 'memory://t5ckpt-holds/run'
    storage, clock = open_storage(place), FakeClock()
    save(storage, range(4))
    retention = Retention(storage, KeepLatest(1), clock)
    with hold(storage, 1, 60, clock) as is_there:
        assert is_there
        assert {d.step: d.reason for d in retention.plan()}[1] == 'held by a reader'
        assert retention.carry_out() == [0, 2]
        # Also for who has made a plan before.
        with pytest.raises(StepKeptError, match='held by a reader'):
            hide(storage, find_step(storage, 1), clock)
        clock.advance(662)
        for held in tmp_path.glob('held_1*'):
            # By the clock of the file server.
            os.utime(held, (time.time() - 62,) * 2)
        assert [decision.step for decision in retention.plan() if not decision.keep] == [1], 'a hold ends by itself'
        clock.advance(-62)
    assert retention.carry_out() == [1]
    assert t5ckpt.all_steps(place) == [3]
    with hold(storage, 1, 60, clock) as is_there:
        assert not is_there
    assert not storage.names(announcement_directory(storage), 'held_')


@pytest.mark.parametrize('kind', ['file', 'memory'])
def test_the_next_step_of_another_process_is_skipped(tmp_path, kind):
    """Above its own latest step a process does not look before it saves; it finds what is there."""
    place = tmp_path if kind == 'file' else f'memory://{tmp_path.name}/run'
    state = {'params': {'w': np.zeros(8, np.float32)}}
    with Checkpointer(state, checkpoints_dir=place, keep=2) as ck:
        ck.save(state, step=0)
        save(place, [1])
        assert ck.save(state, step=1) is None
        assert ck.save(state, step=2) is not None
    assert t5ckpt.all_steps(place) == [1, 2]
    assert t5ckpt.load_t5x_checkpoint(place, 1)['params']['w'].sum() == 8
    if kind == 'memory':
        # That of the step that was deleted.
        assert [name.partition('.')[0] for name in open_storage(place).names('.t5ckpt/busy', '')] == ['0']


# --- two deleters ---------------------------------------------------------------------------------------------------


def many_steps(place, count):
    """A run of so many steps, copied from one."""
    save(place, [0])
    storage = open_storage(place)
    files = [(key, storage.read(key)) for key, _ in storage.walk('checkpoint_0')]
    # A manifest goes last.
    files.sort(key=lambda file: file[0].endswith('/checkpoint'))
    for step in range(1, count):
        for key, data in files:
            name = key.replace('checkpoint_0/', f'checkpoint_{step}/', 1)
            storage.make_dir(name.rpartition('/')[0])
            storage.write(name, data)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['file', 'gs', 's3'])
def test_what_another_deleter_has_deleted_is_deleted(tmp_path, kind, request, caplog):
    place, count = (tmp_path / 'run', 60) if kind == 'file' else (request.getfixturevalue(kind).url(), 12)
    many_steps(place, count)
    start = threading.Barrier(3)

    def trainer():
        retention = Retention(open_storage(place), KeepLatest(1), time.time)
        start.wait()
        retention.carry_out()

    threads = [threading.Thread(target=trainer) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert t5ckpt.all_steps(place) == [count - 1]
    assert [record.getMessage() for record in caplog.records if record.levelname == 'WARNING'] == []
    left = {key.partition('/')[0] for key, _ in open_storage(place).walk('')} - {'.t5ckpt'}
    assert left == {f'checkpoint_{count - 1}'}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_prunes_at_once_both_succeed(tmp_path):
    many_steps(tmp_path / 'run', 150)
    words = 'prune', tmp_path / 'run', '--keep', '1', '--yes'
    running = [forked.start(None, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]
    for process in running:
        output, complaints = process.communicate(timeout=60)
        # Each waits for the locks of the others.
        complaints = [line for line in complaints.splitlines() if 'still working' not in line]
        assert (process.returncode, complaints) == (0, []), output
    assert [path.name for path in (tmp_path / 'run').iterdir()] == ['checkpoint_149']


# --- the evaluator ----------------------------------------------------------------------------------------------------


def test_steps_as_they_come(tmp_path):
    save(tmp_path, [1, 2])
    (tmp_path / 'checkpoint_9.tmp-1700000000').mkdir()
    (tmp_path / 'checkpoint_8').mkdir()
    assert list(checkpoints_iterator(tmp_path, every=True, timeout=0)) == [1, 2]
    assert list(checkpoints_iterator(tmp_path, timeout=0)) == [2]
    assert list(checkpoints_iterator(tmp_path, after=2, timeout=0.1, poll_seconds=0.01)) == []
    assert list(checkpoints_iterator(tmp_path / 'none', timeout=0)) == []


@pytest.mark.parametrize('every', [False, True])
def test_the_iterator_goes_back_with_the_training(tmp_path, every):
    """Of a run that was rolled back, or that began anew with the same numbers, the new steps are evaluated, and no step twice."""
    state = {'w': np.ones(3, np.float32)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, keep=None) as ck:
        for step in (50, 100, 200):
            ck.save(state, step=step)
        steps = checkpoints_iterator(tmp_path, after=50, timeout=0, poll_seconds=0, every=every)
        assert [next(steps) for _ in range(1 + every)] == [100, 200][-1 - every :]
        ck.delete(200)
        ck.save(state, step=150)
        assert next(steps) == 150
        for step in (50, 100, 150):
            ck.delete(step)
        assert list(steps) == []
        ck.save(state, step=150)
        assert list(checkpoints_iterator(tmp_path, timeout=0)) == [150]


def test_the_iterator_yields_a_step_that_is_saved_anew(tmp_path):
    state = {'w': np.ones(3, np.float32)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as ck:
        ck.save(state, step=100)
        steps = checkpoints_iterator(tmp_path, timeout=60, poll_seconds=0.05)
        assert next(steps) == 100
        ck.delete(100)
        later = threading.Timer(1.0, ck.save, (state,), {'step': 100})
        later.start()
        assert next(steps) == 100
        later.join()


def test_what_the_iterator_refuses(tmp_path):
    with pytest.raises(ValueError, match='hold_seconds'):
        checkpoints_iterator(tmp_path, hold_seconds=0)


@pytest.mark.parametrize('at', range(4))
def test_a_first_step_that_is_committed_while_an_evaluator_starts(tmp_path, at):
    (tmp_path / 'checkpoint_9.tmp-7').mkdir()
    listings = []

    class Run(FileStorage):
        def entries(self, directory=''):
            listings.append(directory)
            if len(listings) == at + 1:
                save(tmp_path, [1])
            return super().entries(directory)

    refuse_other_contents(Run(str(tmp_path)))
    assert len(listings) > at


@pytest.mark.slow
def test_an_evaluator_holds_what_it_reads_against_a_trainer_that_deletes(tmp_path):
    """A real trainer in another process deletes as fast as it can; every step that is given can be read to its end."""
    code = (
        'import numpy as np, sys, t5ckpt\n'
        'state = {"params": {"w": np.ones((64, 4096), np.float32)}}\n'
        'options = t5ckpt.CheckpointerOptions(inline_bytes=64)\n'
        'with t5ckpt.Checkpointer(state, checkpoints_dir=sys.argv[1], keep=1, options=options) as ck:\n'
        '    for step in range(60):\n'
        '        ck.save({"params": {"w": np.full((64, 4096), step, np.float32)}}, step=step)\n'
    )
    read = []
    with subprocess.Popen([sys.executable, '-c', code, str(tmp_path)]) as trainer:
        for step in checkpoints_iterator(tmp_path, timeout=60, poll_seconds=0.001, hold_seconds=60):
            time.sleep(0.02)
            loaded = t5ckpt.load_t5x_checkpoint(tmp_path, step)
            assert (loaded['params']['w'] == step).all()
            read.append(step)
            if step == 59:
                break
    assert trainer.returncode == 0
    assert len(read) >= 3
    assert read == sorted(set(read))
    assert not [name for name in os.listdir(tmp_path) if name.startswith('held_')]


def test_it_waits_for_the_next(tmp_path):
    save(tmp_path, [1])
    timer = threading.Timer(0.3, save, (tmp_path, [2]))
    timer.start()
    assert list(checkpoints_iterator(tmp_path, timeout=3, poll_seconds=0.02, hold_seconds=5)) == [1, 2]
    timer.join()


def test_iterator_files_of_a_step_that_is_deleted_meanwhile(tmp_path):
    """Nothing is written into what another process removes."""
    storage = open_storage(f'memory://{tmp_path.name}/run')
    save(storage.url(), [0, 1])
    for step in (0, 1):
        storage.write(f'checkpoint_{step}/train_ds-000-of-001', b'x')
    storage.delete_file('checkpoint_0/checkpoint')
    before = set(storage.walk('checkpoint_0'))
    with pytest.raises(CheckpointNotFoundError):
        remove_positions(storage, 0, time.time)
    assert set(storage.walk('checkpoint_0')) == before
    collect(storage, lambda: time.time() + 8000)
    assert storage.names('.t5ckpt/busy', '') == []
