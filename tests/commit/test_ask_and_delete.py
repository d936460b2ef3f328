"""Asking a checkpointer, deleting and replacing steps, metadata, callbacks, and a checkpointer that only reads."""

import contextlib
import math
import os
import shutil
import subprocess
import sys
import threading
import time
import types
import uuid

import jax
import numpy as np
import pytest
from support.cli import t5ckpt_cli
from support.damage import with_fields
from support.options import with_options

import t5ckpt
from t5ckpt import (
    Checkpointer,
    KeepBest,
    KeepLatest,
    SaveBestCheckpointer,
    SaveEvery,
    SaveEverySeconds,
    SaveOnImprovement,
    SaveWhenIdle,
)
from t5ckpt.cli.app import run
from t5ckpt.commit.deletion import announced, delete_step, find_step, hide
from t5ckpt.commit.holds import hold
from t5ckpt.commit.markers import HIDE, Marker
from t5ckpt.commit.removal import rename_aside
from t5ckpt.errors import (
    CheckpointNotFoundError,
    NoSpaceError,
    NotDurableError,
    ReadOnlyError,
    SaveFailedError,
    StepKeptError,
    StorageError,
    UnsupportedFormatError,
)
from t5ckpt.format.manifest import file_with_facts, split_facts
from t5ckpt.storage import open_storage
from t5ckpt.testing import FakeClock, FaultyStorage


def state(value=0.0):
    return {'params': {'w': np.full((64, 64), value, np.float32)}}


def value_of(run, step):
    return t5ckpt.load_t5x_checkpoint(run, step)['params']['w'][0, 0]


class Slow(FaultyStorage):
    """Holds a save back until the test lets it go on, or fails it."""

    def __init__(self, inner):
        super().__init__(inner)
        self.go = threading.Event()
        self.go.set()
        self.fails = False

    def before_operation(self, name, key):
        super().before_operation(name, key)
        if name == 'write' and 'integrity' in key:
            assert self.go.wait(30)
            if self.fails:
                raise NoSpaceError(28, 'injected: no space left')


class Acting(FaultyStorage):
    """Does something once before an operation; may be one that cannot exchange two names."""

    def __init__(self, inner, fail_at=None, *, exchanges=True, **options):
        super().__init__(inner, fail_at, **options)
        self.exchanges = exchanges
        self.acts = {}

    def before_operation(self, name, key):
        super().before_operation(name, key)
        for wanted in list(self.acts):
            operation, _, part = wanted.partition(' ')
            if operation == name and part in key:
                self.acts.pop(wanted)()

    def exchange(self, source, target):
        if self.exchanges:
            return super().exchange(source, target)
        self.before_operation('exchange', target)
        return False


@pytest.fixture
def slow(tmp_path):
    return Slow(open_storage(tmp_path / 'run'))


# --- asking ----------------------------------------------------------------------------------------------------------


def test_best_step_and_metrics(tmp_path):
    policy = KeepLatest(9) | KeepBest(1, 'loss', 'min')
    with Checkpointer(state(), checkpoints_dir=tmp_path, keep_policy=policy) as ck:
        assert ck.best_step() is None
        for step, loss in enumerate([3.0, 1.0, math.nan, 1.0, 2.0]):
            ck.save(state(), step=step, metrics={'loss': loss, 'acc': -loss})
        assert ck.best_step() == ck.best_step('loss') == 3
        assert ck.best_step('acc', 'max') == 3
        assert ck.best_step('acc', 'min') == 0
        with pytest.raises(ValueError, match="no step has the metric 'lss'; there are: acc, loss"):
            ck.best_step('lss', 'min')
        with pytest.raises(
            ValueError, match=r"the metric 'accc'; there are: acc, loss\. Did you mean 'acc'\? Pass one"
        ):
            ck.best_step('accc')
        with pytest.raises(ValueError, match="mode must be one of 'max', 'min', got 'loss'"):
            ck.best_step('min', 'loss')
        assert ck.metrics(1) == {'loss': 1.0, 'acc': -1.0}
        assert ck.metrics() == {'loss': 2.0, 'acc': -2.0}
        with pytest.raises(CheckpointNotFoundError, match='step 7 does not exist, complete steps are: 0, 1, 2, 3, 4'):
            ck.metrics(7)
        with pytest.raises(
            ValueError,
            match=r"do not say which steps are best .*loss \(min\).* Pass the mode: best_step\('acc', 'min'\)",
        ):
            ck.best_step('acc')
    with Checkpointer(state(), checkpoints_dir=tmp_path, save_policy=SaveOnImprovement('acc', 'max')) as ck:
        assert ck.best_step() == 3
    with SaveBestCheckpointer(state(), None, tmp_path, metric_name_to_monitor='loss', metric_mode='max') as ck:
        assert ck.best_step() == 0
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck, pytest.raises(ValueError, match='they compare: none'):
        ck.best_step()
    with Checkpointer(state(), checkpoints_dir=tmp_path / 'bare') as ck:
        ck.save(state(), step=1)
        assert ck.best_step('loss', 'min') is None, 'no step has any metric'


@pytest.mark.parametrize('read_only', [True, False])
def test_a_reader_waits_for_the_metric_of_its_source(tmp_path, read_only):
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        ck.save(state(), step=1, metrics={'loss': 1.0})
    options = {'keep_policy': KeepBest(1, 'eval/acc'), 'metric_source': t5ckpt.TensorBoardMetrics(tmp_path)}
    with Checkpointer(state(), checkpoints_dir=tmp_path, read_only=read_only, **with_options(**options)) as ck:
        if read_only:
            assert ck.best_step() is None
        else:
            with pytest.raises(ValueError, match="no step has the metric 'eval/acc'; there are: loss"):
                ck.best_step()
        # A name that no policy compares is not awaited.
        with pytest.raises(ValueError, match="no step has the metric 'los'"):
            ck.best_step('los', 'min')


def test_should_save_changes_nothing(tmp_path):
    clock = FakeClock()
    policy = (SaveEvery(4) | SaveEverySeconds(60)) & SaveOnImprovement('loss', 'min')
    answers, saved = [], []
    with Checkpointer(
        state(), checkpoints_dir=tmp_path, save_policy=policy, options=t5ckpt.CheckpointerOptions(clock=clock)
    ) as ck:
        for step in range(30):
            clock.advance(13)
            metrics = {'loss': 100.0 - step}
            asked = {ck.should_save(step, metrics=metrics) for _ in range(3)}
            assert not ck.should_save(step, metrics={'loss': 101.0}) or step == 0
            pending = ck.maybe_save(step, state(), metrics=metrics)
            saved += [step] if pending is not None else []
            answers += [step] if asked == {True} else []
            assert asked in ({True}, {False})
            ck.wait_until_finished()
            assert not ck.should_save(step, metrics=metrics)
    assert answers == saved != []


@pytest.mark.parametrize('method', ['save', 'save_async'])
def test_a_loop_may_ask_should_save_and_then_save(tmp_path, method):
    clock = FakeClock()
    policy = SaveEverySeconds(60) & SaveOnImprovement('loss', 'min')
    with Checkpointer(
        state(), checkpoints_dir=tmp_path, save_policy=policy, options=t5ckpt.CheckpointerOptions(clock=clock)
    ) as ck:
        for step in range(30):
            clock.advance(13)
            # Not better at every fifth step
            metrics = {'loss': 1000.0 if step % 5 == 0 else 100.0 - step}
            if ck.should_save(step, metrics=metrics):
                getattr(ck, method)(state(), step=step, metrics=metrics)
    assert t5ckpt.all_steps(tmp_path) == [5, 11, 16, 21, 26]


def test_every_save_restarts_the_interval_of_maybe_save(tmp_path):
    clock = FakeClock()
    with Checkpointer(
        state(),
        checkpoints_dir=tmp_path,
        save_policy=SaveEverySeconds(60),
        options=t5ckpt.CheckpointerOptions(clock=clock),
    ) as ck:
        for step in range(12):
            ck.maybe_save(step, state())
            if step == 4:
                ck.save(state(), step=step)
            clock.advance(13)
    assert t5ckpt.all_steps(tmp_path) == [4, 9]


def test_should_save_needs_a_policy_and_a_step(tmp_path):
    with (
        Checkpointer(state(), checkpoints_dir=tmp_path) as ck,
        pytest.raises(ValueError, match='should_save: pass save_policy='),
    ):
        ck.should_save(1)
    with Checkpointer(state(), checkpoints_dir=tmp_path, save_policy=SaveEvery(1)) as ck:
        with pytest.raises(ValueError, match='step must be an integer'):
            ck.should_save('1')
        assert not os.listdir(tmp_path)


def test_reached_preemption(tmp_path):
    told = threading.Event()
    with Checkpointer(state(), checkpoints_dir=tmp_path, preempted=told.is_set) as ck:
        assert [ck.reached_preemption(step) for step in range(3)] == [False] * 3
        told.set()
        assert ck.reached_preemption(3)
        assert ck.should_stop
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck, pytest.raises(ValueError, match='pass preempted='):
        ck.reached_preemption(1)


# --- policies --------------------------------------------------------------------------------------------------------


def test_save_when_idle(slow):
    with Checkpointer(state(), checkpoints_dir=slow, save_policy=SaveWhenIdle(min_step=1)) as ck:
        slow.go.clear()
        pending = [ck.maybe_save(step, state()) for step in range(4)]
        assert [save is not None for save in pending] == [False, True, False, False]
        slow.go.set()
        pending[1].result()
        assert ck.maybe_save(4, state()) is not None
        # Saves that were not begun by the policy count, too.
        ck.wait_until_finished()
        slow.go.clear()
        ck.save_async(state(), step=5)
        assert ck.maybe_save(6, state()) is None
        slow.go.set()


@pytest.mark.parametrize('policy', [SaveEvery(2, min_step=3), SaveEvery(2, 3) | SaveEverySeconds(10**6, 3)])
def test_min_step(tmp_path, policy):
    with Checkpointer(state(), checkpoints_dir=tmp_path, save_policy=policy) as ck:
        assert [step for step in range(8) if ck.maybe_save(step, state()) is not None] == [4, 6]


# --- deleting --------------------------------------------------------------------------------------------------------


def test_delete(tmp_path):
    with Checkpointer(state(), checkpoints_dir=tmp_path, save_policy=SaveWhenIdle()) as ck:
        for step in range(4):
            ck.save(state(step), step=step)
        ck.delete(np.int64(1))
        assert ck.all_steps() == [0, 2, 3]
        assert sorted(os.listdir(tmp_path)) == ['checkpoint_0', 'checkpoint_2', 'checkpoint_3']
        with pytest.raises(
            CheckpointNotFoundError, match=r'step 1 does not exist, complete steps are: 0, 2, 3\. Pass one'
        ):
            ck.delete(1)
        with pytest.raises(ValueError, match='step must be an integer'):
            ck.delete('2')
        t5ckpt.pin_checkpoint(tmp_path / 'checkpoint_2')
        with pytest.raises(StepKeptError, match='is pinned, so it was not deleted'):
            ck.delete(2)
        # What was deleted may be saved again, and by the policy.
        assert ck.maybe_save(4, state()).result().step == 4
        ck.delete(4)
        assert ck.maybe_save(4, state(5)).result().step == 4
        assert value_of(tmp_path, 4) == 5


@pytest.mark.slow
@pytest.mark.parametrize('what', ['manifest', 'facts'])
def test_a_step_of_a_newer_program_is_not_removed(bucket, tmp_path, what, caplog):
    """Neither on a disk nor in a bucket, by whichever way; retention says so once."""
    for url in (str(tmp_path / 'run'), bucket.url()):
        caplog.clear()
        clock = FakeClock()
        storage = open_storage(url)
        with Checkpointer(state(), checkpoints_dir=url, keep=2, options=t5ckpt.CheckpointerOptions(clock=clock)) as ck:
            ck.save(state(1.0), step=1)
        if what == 'manifest':
            data = storage.read('checkpoint_1/checkpoint')
            storage.write('checkpoint_1/checkpoint', data.replace(b'\xa7version\x03', b'\xa7version\x09', 1))
        else:
            manifest, facts = split_facts(storage.read('checkpoint_1/checkpoint'))
            storage.write('checkpoint_1/checkpoint', file_with_facts(manifest, with_fields(facts, format=9)))
        before = {key: storage.read(key) for key, _ in storage.walk('checkpoint_1')}
        caplog.set_level('INFO', 't5ckpt')
        with Checkpointer(state(), checkpoints_dir=url, keep=1, options=t5ckpt.CheckpointerOptions(clock=clock)) as ck:
            ck.save(state(2.0), step=2)
            ck.save(state(3.0), step=3)
            with pytest.raises(UnsupportedFormatError, match=f'{what} of version 9.* Update t5ckpt'):
                ck.delete(1)
        assert [record.message for record in caplog.records if 'version 9' in record.message] == [
            record.message for record in caplog.records if 'step 1 is kept' in record.message
        ]
        assert sum('step 1 is kept' in record.message for record in caplog.records) == 1
        for verb in (['rm', url, '1', '--yes'], ['prune', url, '--keep', '1', '--yes']):
            with pytest.raises(SystemExit):
                run(verb)
        assert {key: storage.read(key) for key, _ in storage.walk('checkpoint_1')} == before
        assert not storage.commits_by_rename or storage.names('', 'busy_') == []
        # A marker remains only of what was removed.
        assert {name.partition('.')[0] for name in storage.names('.t5ckpt/busy', '')} <= {'2'}
    with pytest.raises(UnsupportedFormatError, match=r'version'):
        Checkpointer(state(), checkpoints_dir=str(tmp_path / 'run')).save(state(4.0), step=1, overwrite=True)
    assert (tmp_path / 'run/checkpoint_1/checkpoint').exists()


@pytest.mark.parametrize('manifest', [b'', bytes(3), b'\x82\xa7version\x03'])
def test_a_step_whose_manifest_is_damaged_can_be_deleted(manifest, tmp_path):
    """Its bytes may be zeros after a power cut on the disk of another program."""
    with t5ckpt.Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        ck.save(state(), step=1)
        (tmp_path / 'checkpoint_1/checkpoint').write_bytes(manifest)
        ck.delete(1)
    assert not list(tmp_path.iterdir())


def test_delete_spares_what_a_reader_holds(tmp_path):
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        ck.save(state(), step=1)
        steps = t5ckpt.checkpoints_iterator(tmp_path, timeout=0, hold_seconds=60)
        assert next(steps) == 1
        with pytest.raises(StepKeptError, match='held by a reader'):
            ck.delete(1)
        steps.close()
        ck.delete(1)
        assert ck.all_steps() == []


def test_delete_waits_for_a_running_save(slow, tmp_path):
    with Checkpointer(state(), checkpoints_dir=slow) as ck:
        ck.save(state(), step=1)
        slow.go.clear()
        pending = ck.save_async(state(), step=2)
        threading.Timer(0.2, slow.go.set).start()
        ck.delete(2)
        assert pending.done()
        assert ck.all_steps() == [1]


@pytest.mark.slow
def test_delete_in_a_bucket(bucket):
    url = bucket.url()
    with Checkpointer(state(), checkpoints_dir=url) as ck:
        for step in (1, 2):
            ck.save(state(), step=step)
        ck.delete(2)
        assert ck.all_steps() == t5ckpt.all_steps(url) == [1]
        assert open_storage(url).kind('checkpoint_2') is None


# --- replacing -------------------------------------------------------------------------------------------------------


def test_overwrite(tmp_path):
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        ck.save(state(1), step=1)
        assert ck.save(state(2), step=1) is None
        assert ck.save(state(3), step=1, overwrite=True).step == 1
        assert value_of(tmp_path, 1) == 3
        assert ck.save_async(state(4), step=1, overwrite=True).result().step == 1
        assert value_of(tmp_path, 1) == 4
        # Where nothing is there it is a save.
        assert ck.save(state(5), step=2, overwrite=True).step == 2
        assert sorted(os.listdir(tmp_path)) == ['checkpoint_1', 'checkpoint_2']
    assert t5ckpt.verify(tmp_path / 'checkpoint_1').ok


def test_an_overwrite_that_fails_leaves_the_old_one(slow, tmp_path):
    run = tmp_path / 'run'
    with Checkpointer(state(), checkpoints_dir=slow) as ck:
        ck.save(state(1), step=1)
        slow.fails = True
        with pytest.raises(NoSpaceError):
            ck.save(state(2), step=1, overwrite=True)
        assert value_of(run, 1) == 1
        assert os.listdir(run) == ['checkpoint_1']


def test_what_is_pinned_or_not_ours_is_not_overwritten(tmp_path):
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        ck.save(state(1), step=1)
        t5ckpt.pin_checkpoint(tmp_path / 'checkpoint_1')
        with pytest.raises(StepKeptError, match='is pinned'):
            ck.save(state(2), step=1, overwrite=True)
        assert value_of(tmp_path, 1) == 1


@pytest.mark.slow
@pytest.mark.parametrize('exchanges', [True, False])
@pytest.mark.parametrize(
    ('keeps', 'when'),
    [('pin', 'before'), ('pin', 'meanwhile'), ('reader', 'before'), ('reader', 'meanwhile')],
)
def test_what_is_kept_while_it_is_replaced(tmp_path, keeps, when, exchanges):
    """A pin and a hold that come at any time before the commit hold; nothing is left over."""
    run = tmp_path / 'run'
    steps = t5ckpt.checkpoints_iterator(run, timeout=0, hold_seconds=60)

    def keep():
        if keeps == 'pin':
            # As T5X does, which looks for no deleter.
            (run / 'checkpoint_1' / 'PINNED').write_text('1')
        else:
            assert next(steps) == 1

    storage = Acting(open_storage(run), exchanges=exchanges)
    with Checkpointer(state(), checkpoints_dir=storage) as ck:
        ck.save(state(1), step=1)
        storage.acts = {'before': {}, 'meanwhile': {'sync_tree': keep}}[when]
        if when == 'before':
            keep()
        with pytest.raises(StepKeptError, match='was not replaced'):
            ck.save(state(2), step=1, overwrite=True)
        assert value_of(run, 1) == 1
        assert [name for name in os.listdir(run) if not name.startswith('held_')] == ['checkpoint_1']
        t5ckpt.unpin_checkpoint(run / 'checkpoint_1')
        steps.close()
        assert ck.save(state(2), step=1, overwrite=True).step == 1
        assert value_of(run, 1) == 2
        assert sorted(os.listdir(run)) == ['checkpoint_1']


@pytest.mark.parametrize('when', ['names checkpoint_1', 'read checkpoint_1/checkpoint'])
def test_an_overwrite_whose_step_another_process_deletes_as_it_begins(when):
    """After the look whether the step is there, and before its manifest is read."""
    storage = Acting(open_storage(f'memory://{uuid.uuid4().hex}/run'))
    with Checkpointer(state(), checkpoints_dir=storage) as ck:
        ck.save(state(1), step=1)
        storage.acts = {when: lambda: delete_step(open_storage(storage.url()), 1, time.time)}
        assert ck.save(state(2), step=1, overwrite=True).step == 1
        assert storage.acts == {}
    assert value_of(storage.url(), 1) == 2


@pytest.mark.parametrize('action', ['delete', 'replace'])
def test_a_pin_that_comes_while_a_step_is_deleted_or_replaced(tmp_path, action):
    """After the last look at the pin, before the rename: it waits, and reports the deletion, or pins the new step."""
    outcomes = []

    def pin():
        try:
            t5ckpt.pin_checkpoint(tmp_path / 'checkpoint_1')
            outcomes.append('pinned')
        except CheckpointNotFoundError:
            outcomes.append('gone')

    def begin():
        thread.start()
        while not (tmp_path / 'checkpoint_1' / 'PINNED').exists():
            time.sleep(0.001)

    thread, storage = threading.Thread(target=pin), Acting(open_storage(tmp_path))
    with Checkpointer(state(), checkpoints_dir=storage) as ck:
        ck.save(state(1), step=1)
        if action == 'delete':
            storage.acts = {'publish .deleted': begin}
            ck.delete(1)
        else:
            storage.acts = {'exchange': begin}
            ck.save(state(2), step=1, overwrite=True)
        thread.join()
    assert outcomes == ['gone' if action == 'delete' else 'pinned']
    assert os.listdir(tmp_path) == ([] if action == 'delete' else ['checkpoint_1'])
    if action == 'replace':
        assert value_of(tmp_path, 1) == 2
        assert t5ckpt.is_pinned_checkpoint(tmp_path / 'checkpoint_1')


def killed_overwrite(run, step=1):
    """What an overwrite leaves that is killed before it exchanges the two; it is whole."""
    marker = Marker(open_storage(run), step, time.time, HIDE)
    shutil.copytree(run / f'checkpoint_{step}', run / marker.directory)
    marker.release()


class DyingWhenHidden(FaultyStorage):
    """A process that is killed as soon as step 1 is hidden."""

    def before_operation(self, name, key):
        if not os.path.exists(self.local_path('checkpoint_1')):
            raise StorageError(5, 'killed')


@pytest.mark.parametrize('when', ['before a deletion that is killed', 'meanwhile'])
def test_garbage_collection_does_not_undo_a_deletion(tmp_path, when):
    """It puts the directory of an overwrite that was killed in the place of the step that this has hidden."""
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        ck.save(state(1), step=1)
        if when == 'meanwhile':
            # After the listing
            storage = Acting(open_storage(tmp_path))
            storage.acts = {'try_lock checkpoint_1': lambda: killed_overwrite(tmp_path)}
            delete_step(storage, 1, time.time)
        else:
            killed_overwrite(tmp_path)
            delete_step(DyingWhenHidden(open_storage(tmp_path)), 1, time.time)
        assert ck.all_steps() == []
        ck.save(state(2), step=2)
    assert os.listdir(tmp_path) == ['checkpoint_2']


class NoExchange(DyingWhenHidden):
    """On NFS or FUSE."""

    def exchange(self, source, target):
        return False


@pytest.mark.parametrize('older', [True, False])
def test_a_start_finds_the_step_that_a_killed_overwrite_has_hidden(tmp_path, older):
    """Without exchange of names; it would continue from an older step, or begin anew."""
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        if older:
            ck.save(state(1), step=0)
        ck.save(state(1), step=1)
    with pytest.raises(StorageError):
        Checkpointer(state(), checkpoints_dir=NoExchange(open_storage(tmp_path))).save(state(2), step=1, overwrite=True)
    assert t5ckpt.all_steps(tmp_path) == ([0] if older else [])
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        t5ckpt.restore_or_init(ck, lambda: pytest.fail('the run begins anew'))
        assert ck.restored_step == 1
    assert value_of(tmp_path, 1) == 2


def test_a_deletion_leaves_the_directory_of_an_overwrite_that_is_alive(tmp_path):
    """It is to become the step."""
    storage = Acting(open_storage(tmp_path))
    late = {'try_lock checkpoint_1': lambda: delete_step(open_storage(tmp_path), 1, time.time)}
    with Checkpointer(state(), checkpoints_dir=storage) as ck:
        ck.save(state(1), step=1)
        storage.acts = {'sync_tree checkpoint_1.tmp': lambda: storage.acts.update(late)}
        assert ck.save(state(2), step=1, overwrite=True).step == 1
    assert storage.acts == {}
    assert value_of(tmp_path, 1) == 2


@pytest.mark.parametrize('keeps', ['pin', 'reader', 'newer'])
def test_a_refused_deletion_changes_nothing(tmp_path, keeps):
    """Another step of the same batch goes."""
    storage, manifest = open_storage(tmp_path), tmp_path / 'checkpoint_1' / 'checkpoint'
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck, contextlib.ExitStack() as stack:
        for step in (1, 2):
            ck.save(state(step), step=step)
        if keeps == 'pin':
            t5ckpt.pin_checkpoint(tmp_path / 'checkpoint_1')
        elif keeps == 'reader':
            assert stack.enter_context(hold(storage, 1, 60, time.time))
        else:
            manifest.write_bytes(manifest.read_bytes().replace(b'\xa7version\x03', b'\xa7version\x09', 1))
        first, second = find_step(storage, 1), find_step(storage, 2)
        with announced(storage, [1, 2], time.time) as batch:
            with pytest.raises((StepKeptError, UnsupportedFormatError)):
                hide(storage, first, time.time, batch)
            hide(storage, second, time.time, batch)()
        assert manifest.exists()
    assert [name for name in sorted(os.listdir(tmp_path)) if not name.startswith('held_')] == ['checkpoint_1']


class Contended(FaultyStorage):
    """Before a directory is set aside for the first time, another process takes that very name."""

    taken: str | None = None

    def publish(self, source, target):
        if self.taken is None and '.damaged-' in target:
            self.taken = target
            self.make_dir(target)
            self.write(f'{target}/file', b'')
        super().publish(source, target)


def test_a_name_that_another_process_takes_in_the_same_second(tmp_path):
    storage = Contended(open_storage(tmp_path))
    with Checkpointer(state(), checkpoints_dir=storage, options=t5ckpt.CheckpointerOptions(inline_bytes=0)) as ck:
        ck.save(state(1), step=0)
        ck.save(state(1), step=1)
        (chunk, *_) = (tmp_path / 'checkpoint_1' / 'params.w').glob('[0-9]*')
        # Step 0 has a link to it.
        chunk.unlink()
        t5ckpt.restore_or_init(ck, state)
    assert len([name for name in os.listdir(tmp_path) if name.startswith('checkpoint_1.damaged-')]) == 2
    assert storage.taken is not None


@pytest.mark.slow
@pytest.mark.parametrize(('exchanges', 'sticky'), [(True, False), (False, True)])
def test_a_fault_at_every_operation_of_a_replacement(tmp_path, exchanges, sticky):
    """The old step or the new one is there, whole, after the next save at the latest: also where names cannot be swapped."""
    at = reached = 0
    while reached == at:
        run = tmp_path / str(at)
        with Checkpointer(state(), checkpoints_dir=run, options=t5ckpt.CheckpointerOptions(clock=FakeClock())) as ck:
            ck.save(state(1), step=1)
        storage = Acting(open_storage(run), at, exchanges=exchanges, sticky=sticky)
        try:
            faulty = Checkpointer(
                state(), checkpoints_dir=storage, options=t5ckpt.CheckpointerOptions(clock=FakeClock())
            )
            new = faulty.save(state(2), step=1, overwrite=True) is not None
        except StorageError:
            new = None
        with Checkpointer(
            state(), checkpoints_dir=run, options=t5ckpt.CheckpointerOptions(clock=FakeClock(10**10))
        ) as ck:
            ck.save(state(3), step=2)
        assert sorted(os.listdir(run)) == ['checkpoint_1', 'checkpoint_2']
        assert value_of(run, 1) in ([1, 2] if new is None else [2])
        assert t5ckpt.verify(run / 'checkpoint_1').ok
        reached += len(storage.operations) > at
        at += 1
    assert at > 20


@pytest.mark.parametrize('exchanges', [True, False])
def test_an_overwrite_reports_a_faster_writer(tmp_path, caplog, exchanges):
    """The old step is gone when it is to be replaced, or has its other name, and another writer saves the step at this moment."""
    storage = Acting(open_storage(tmp_path), exchanges=exchanges)

    def other(action):
        with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
            action(ck)

    def before_last():
        if exchanges:
            other(lambda ck: ck.delete(1))
        storage.acts['publish checkpoint_1'] = (
            last if exchanges else lambda: storage.acts.update({'publish checkpoint_1': last})
        )

    def last():
        other(lambda ck: ck.save(state(3), step=1))

    other(lambda ck: ck.save(state(1), step=1))
    storage.acts['sync_tree checkpoint_1.tmp'] = lambda: storage.acts.update({'try_lock checkpoint_1': before_last})
    with Checkpointer(state(), checkpoints_dir=storage) as ck:
        assert ck.save(state(2), step=1, overwrite=True) is None
    assert 'this save of step 1 is dropped' in caplog.text
    assert 'checkpoint_1 was saved by another writer in the meantime' in caplog.text
    assert value_of(tmp_path, 1) == [3]
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        ck.save(state(4), step=4)
    assert sorted(os.listdir(tmp_path)) == ['checkpoint_1', 'checkpoint_4']


class NotSynced(Acting):
    """A disk that cannot synchronize the directory after a step has its name, nor take the rename back."""

    def _fail(self, target):
        if target == 'checkpoint_1':
            raise NotDurableError(5, f'{self.url(target)}: the rename is visible, but may be gone after a power cut')

    def publish(self, source, target):
        super().publish(source, target)
        self._fail(target)

    def exchange(self, source, target):
        if not super().exchange(source, target):
            return False
        self._fail(target)
        return True


@pytest.mark.parametrize('exchanges', [True, False])
@pytest.mark.parametrize('is_cut', [False, True])
@pytest.mark.parametrize('old', ['whole', 'broken'])
def test_a_step_that_may_be_gone_after_a_power_cut_is_there_after_it(tmp_path, exchanges, is_cut, old):
    """The names that it had before are the ones that a power cut brings back."""
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        ck.save(state(1), step=1)
    if old == 'broken':
        (tmp_path / 'checkpoint_1' / 'checkpoint').unlink()
    storage = NotSynced(open_storage(tmp_path), exchanges=exchanges)
    with Checkpointer(state(), checkpoints_dir=storage) as ck, pytest.raises(NotDurableError, match='is visible'):
        ck.save(state(2), step=1, overwrite=True)
    assert value_of(tmp_path, 1) == 2
    if is_cut:
        (other,) = tmp_path.glob('checkpoint_1.*')
        if exchanges:
            other.rename(tmp_path / 'other')
        (tmp_path / 'checkpoint_1').rename(other.with_name(other.name.replace('deleted', 'tmp')))
        if exchanges:
            (tmp_path / 'other').rename(tmp_path / 'checkpoint_1')
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        ck.save(state(3), step=3)
    assert sorted(os.listdir(tmp_path)) == ['checkpoint_1', 'checkpoint_3']
    # Between two names that were exchanged, the old one is there again, whole or not.
    if is_cut and exchanges:
        assert t5ckpt.all_steps(tmp_path) == ([1, 3] if old == 'whole' else [3])
    else:
        assert value_of(tmp_path, 1) == 2


def test_a_name_that_another_process_takes_and_leaves(tmp_path):
    """Between the look at the name and the rename it is taken; it is free again when the rename has failed."""
    storage = Acting(open_storage(tmp_path))

    def take(name, then):
        storage.make_dir(name)
        storage.write(f'{name}/w', b'')
        storage.acts[f'{then} {name}'] = lambda: storage.delete_tree(name)

    storage.make_dir('new')
    storage.acts['publish checkpoint_1.damaged-5'] = lambda: take('checkpoint_1.damaged-5', 'kind')
    assert rename_aside(storage, 'new', 1, 'damaged', 5) == 'checkpoint_1.damaged-6'
    storage.acts['publish checkpoint_1'] = lambda: take('checkpoint_1', 'is_file')
    with Checkpointer(state(), checkpoints_dir=storage) as ck:
        assert ck.save(state(1), step=1) is not None
    assert 'is_file checkpoint_1' not in storage.acts
    assert value_of(tmp_path, 1) == 1


# --- metadata --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('fails', [False, True])
def test_a_manifest_that_appears_while_a_save_holds_the_step_stays(bucket, fails):
    """Of a writer that took the step in the same moment, or that writes no markers: the save's failure removes nothing."""
    url = bucket.url()
    storage = Acting(open_storage(url))
    with Checkpointer(state(), checkpoints_dir=url) as ck:
        ck.save(state(1), step=1)
    files = {
        key: storage.read(f'checkpoint_1/{key}') for key in storage.names('checkpoint_1', ('checkpoint', 't5ckpt.'))
    }

    def appear():
        for key, data in files.items():
            open_storage(url).write(f'checkpoint_2/{key}', data)
        if fails:
            raise StorageError(5, 'injected')

    # After the look at the step: when files are being written, and just before the manifest.
    storage.acts = {'write integrity': appear} if fails else {'replace checkpoint_2/checkpoint': appear}
    with Checkpointer(state(), checkpoints_dir=storage) as ck, contextlib.suppress(StorageError):
        ck.save(state(2), step=2, overwrite=True)
    assert not storage.acts
    assert t5ckpt.all_steps(url) == [1, 2]


def test_custom_metadata(tmp_path):
    given = {'git': 'a1b2', 'tuned': [1, 2.5, None, True], 'nested': {'a': {}}}
    with Checkpointer(state(), checkpoints_dir=tmp_path, save_policy=SaveEvery(3)) as ck:
        ck.save(state(), step=1, custom_metadata=given)
        pending = ck.save_async(state(), step=2, custom_metadata=given)
        ck.maybe_save(3, state(), custom_metadata={'tuple': (1, 2)})
        ck.save(state(), step=4)
        given['git'] = 'changed'
        pending.result()
    expected = {'git': 'a1b2', 'tuned': [1, 2.5, None, True], 'nested': {'a': {}}}
    found = [t5ckpt.open_checkpoint(tmp_path, step).custom_metadata for step in range(1, 5)]
    assert found == [expected, expected, {'tuple': [1, 2]}, {}]
    assert t5ckpt.verify(tmp_path).ok


class ConfigDict:
    """ml_collections' class has a mapping's methods, and is not registered as one."""

    def __init__(self, **items):
        self.held = items

    def __getitem__(self, key):
        return self.held[key]

    def keys(self):
        return self.held.keys()


def test_metadata_of_any_mapping(tmp_path):
    given = ConfigDict(model=ConfigDict(width=8, names=('a', 'b')), view=types.MappingProxyType({'lr': 0.1}))
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        ck.save(state(), step=1, custom_metadata=given)
    found = t5ckpt.open_checkpoint(tmp_path).custom_metadata
    assert found == {'model': {'width': 8, 'names': ['a', 'b']}, 'view': {'lr': 0.1}}


def endless():
    loop = {}
    loop['again'] = [loop]
    return loop


@pytest.mark.parametrize(
    ('bad', 'text'),
    [
        ([1], r'custom_metadata must be a Mapping'),
        ('a', r'custom_metadata must be a Mapping'),
        ({1: 2}, r'^custom_metadata: key 1 is not a str'),
        ({'llama_config': {'id2label': {0: 'no'}}}, r'^custom_metadata: llama_config/id2label: key 0 is not a str'),
        ({'a': [{'b': ConfigDict(), 'c': {None: 1}}]}, r'^custom_metadata: a/0/c: key None is not a str'),
        ({'a': {'b': {3}}}, r'^custom_metadata: a/b: \{3\} is of type set'),
        ({'a': math.nan}, r'^custom_metadata: a: nan is of type float'),
        ({'a': np.ones(2)}, r'^custom_metadata: a: .* is of type ndarray'),
        (endless(), r'^custom_metadata is nested too deeply'),
    ],
    ids=lambda value: value if isinstance(value, str) else '',
)
def test_metadata_that_json_cannot_hold(tmp_path, bad, text):
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        with pytest.raises(ValueError, match=text):
            ck.save(state(), step=1, custom_metadata=bad)
        assert ck.all_steps() == []


# --- callbacks -------------------------------------------------------------------------------------------------------


def test_callbacks(slow, tmp_path, caplog):
    called = []

    def note(pending):
        called.append((pending.step, pending.failed(), pending.done(), t5ckpt.all_steps(tmp_path / 'run')))

    def broken(pending):
        raise RuntimeError('of the callback')

    def leaving(pending):
        raise SystemExit('of the program')

    with Checkpointer(state(), checkpoints_dir=slow) as ck:
        slow.go.clear()
        pending = ck.save_async(state(), step=1)
        for callback in (broken, leaving, note):
            pending.add_done_callback(callback)
        assert called == []
        slow.go.set()
        ck.wait_until_finished()
        pending.result()
        while len(called) < 1:
            pass
        assert called == [(1, False, True, [1])]
        assert caplog.text.count('a callback of the save of step 1 failed') == 2
        # Here it is the caller's own.
        with pytest.raises(SystemExit):
            pending.add_done_callback(leaving)
        # Of a save that has ended it is called at once, here.
        pending.add_done_callback(lambda _: called.append(threading.get_ident()))
        assert called[1] == threading.get_ident()
        slow.fails = True
        failing = ck.save_async(state(), step=2)
        failing.add_done_callback(note)
        with pytest.raises(NoSpaceError):
            failing.result()
        while len(called) < 3:
            pass
        assert called[2] == (2, True, True, [1])
        skipped = ck.save_async(state(), step=1)
        skipped.add_done_callback(note)
        assert skipped.result() is None
        while len(called) < 4:
            pass
        assert called[3][:2] == (1, False)
        with pytest.raises(ValueError, match='callback must be a function'):
            pending.add_done_callback(3)


# --- reading alone ---------------------------------------------------------------------------------------------------


def test_read_only(tmp_path):
    with Checkpointer(state(), checkpoints_dir=tmp_path / 'none', read_only=True, save_policy=SaveEvery(1)) as ck:
        for act in (
            lambda: ck.save(state(), step=1),
            lambda: ck.save_async(state(), step=1),
            lambda: ck.maybe_save(1, state()),
            lambda: ck.delete(1),
        ):
            with pytest.raises(ReadOnlyError, match='read_only=True'):
                act()
        assert ck.all_steps() == []
    assert os.listdir(tmp_path) == []
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        ck.save(state(3), step=1)
    before = sorted(os.listdir(tmp_path / 'checkpoint_1'))
    with Checkpointer(state(), checkpoints_dir=tmp_path, read_only=True) as ck:
        assert ck.restore()['params']['w'][0, 0] == 3
    assert sorted(os.listdir(tmp_path / 'checkpoint_1')) == before
    assert os.listdir(tmp_path) == ['checkpoint_1']


def test_the_error_of_a_save_is_raised_once(slow):
    """Also where a callback has looked at it."""
    ck = Checkpointer(state(), checkpoints_dir=slow)
    slow.fails = True
    pending = ck.save_async(state(), step=1)
    pending.add_done_callback(lambda done: done.failed())
    with pytest.raises(SaveFailedError):
        ck.close()


@pytest.mark.parametrize('where', ['file', 'memory'])
@pytest.mark.parametrize('reads', [0, 1, 2])
def test_a_step_that_another_process_deletes_while_a_save_looks_at_it(tmp_path, where, reads):
    """The save takes the place of the step, or is skipped as long as it finds it; it does not fail."""
    url = tmp_path / 'run' if where == 'file' else f'memory://deleted_{uuid.uuid4().hex}'
    inner = open_storage(url)
    with Checkpointer(state(1), checkpoints_dir=inner) as ck:
        ck.save(state(1), step=1)
    storage = Acting(inner)
    key = 'checkpoint_1/checkpoint'

    def after(count):
        if count:
            storage.acts[f'read {key}'] = lambda: after(count - 1)
        else:
            inner.delete_tree('checkpoint_1') if where == 'file' else inner.delete_file(key)

    storage.acts[f'read {key}'] = lambda: after(reads)
    with Checkpointer(state(2), checkpoints_dir=storage) as ck:
        saved = ck.save(state(2), step=1)
    if saved is not None:
        with Checkpointer(state(0), checkpoints_dir=inner) as ck:
            jax.tree.map(np.testing.assert_array_equal, ck.restore(1), state(2))


# --- many steps, and file systems that cannot rename a step -----------------------------------------------------------

_COUNTED = """
import os, shutil, sys
import numpy as np, t5ckpt
run, count = sys.argv[1], int(sys.argv[2])
state = {'a': np.arange(4.0)}
with t5ckpt.Checkpointer(state, checkpoints_dir=run) as checkpointer:
    checkpointer.save(state, step=0)
for step in range(1, count):
    shutil.copytree(f'{run}/checkpoint_0', f'{run}/checkpoint_{step}')
scans = []
sys.addaudithook(
    lambda event, args: scans.append(args[0]) if event in ('os.listdir', 'os.scandir') and args[0] == run else None
)
with t5ckpt.Checkpointer(state, checkpoints_dir=run, keep=3) as checkpointer:
    checkpointer.save(state, step=count)
    assert checkpointer.all_steps() == [count - 2, count - 1, count]
print(len(scans))
"""


@pytest.mark.slow
def test_the_run_is_not_listed_for_each_step_that_a_lower_keep_deletes(tmp_path):
    counts = [
        int(
            subprocess.check_output([sys.executable, '-c', _COUNTED, str(tmp_path / str(count)), str(count)], text=True)
        )
        for count in (10, 60)
    ]
    assert counts[0] == counts[1]
    assert sorted(path.name for path in (tmp_path / '60').iterdir() if path.name.startswith(('.', 'checkpoint'))) == [
        'checkpoint_58',
        'checkpoint_59',
        'checkpoint_60',
    ]


@pytest.fixture
def lower(tmp_path):
    """A run whose steps 1 and 2 are in the lower layer of an overlay file system, whose directories cannot be renamed."""
    for name in ('lower', 'upper', 'work', 'merged'):
        (tmp_path / name).mkdir()
    with t5ckpt.Checkpointer(
        _state(0), checkpoints_dir=tmp_path / 'lower' / 'run', options=t5ckpt.CheckpointerOptions(inline_bytes=0)
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.save(_state(step), step=step)
    layers = ','.join(f'{name}dir={tmp_path / name}' for name in ('lower', 'upper', 'work'))
    done = subprocess.run(
        ['mount', '-t', 'overlay', 'overlay', '-o', layers, str(tmp_path / 'merged')], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f'cannot mount an overlay file system: {done.stderr.decode()}')
    run = tmp_path / 'merged' / 'run'
    try:
        with pytest.raises(OSError, match='cross-device'):
            (run / 'checkpoint_1').rename(run / 'other')
        yield run
    finally:
        subprocess.check_call(['umount', str(tmp_path / 'merged')])


def _state(value):
    return {'a': np.full(5000, value, np.float32), 'n': value}


def _value(run, **options):
    state = t5ckpt.load_t5x_checkpoint(run, **with_options(**options))
    assert len(set(np.asarray(state['a']).tolist())) == 1
    return int(state['n'])


def test_retention_and_delete_remove_steps_of_a_lower_layer(lower, caplog):
    with t5ckpt.Checkpointer(_state(0), checkpoints_dir=lower, keep=2) as checkpointer:
        checkpointer.save(_state(3), step=3)
        assert checkpointer.all_steps() == [2, 3]
        checkpointer.delete(2)
    assert t5ckpt.all_steps(lower) == [3]
    assert sorted(path.name for path in lower.iterdir() if path.name.startswith('checkpoint_')) == ['checkpoint_3']
    assert [record.getMessage() for record in caplog.records if record.levelname in ('WARNING', 'ERROR')] == []


def test_files_of_others_stay_in_a_step_of_a_lower_layer_that_is_deleted(lower):
    (lower / 'checkpoint_1' / 'notes.txt').write_text('mine')
    with t5ckpt.Checkpointer(_state(0), checkpoints_dir=lower) as checkpointer:
        checkpointer.delete(1)
        assert checkpointer.all_steps() == [2]
    assert [path.name for path in (lower / 'checkpoint_1').iterdir()] == ['notes.txt']


def test_a_step_of_a_lower_layer_is_overwritten(lower):
    with t5ckpt.Checkpointer(_state(0), checkpoints_dir=lower) as checkpointer:
        checkpointer.save(_state(9), step=2, overwrite=True)
    assert (_value(lower), t5ckpt.all_steps(lower)) == (9, [1, 2])
    assert t5ckpt.verify(lower).ok


def test_the_run_goes_on_after_a_damaged_step_of_a_lower_layer(lower):
    chunk = lower / 'checkpoint_2' / 'a' / '0'
    chunk.write_bytes(b'\xff' * 20000)
    with t5ckpt.Checkpointer(_state(0), checkpoints_dir=lower) as checkpointer:
        assert int(t5ckpt.restore_or_init(checkpointer, lambda: _state(0))['n']) == 1
        assert checkpointer.all_steps() == [1]
        # Its files stay, as those of a step that is renamed.
        assert (lower / 'checkpoint_2' / 'checkpoint.damaged').exists()
        assert checkpointer.save(_state(22), step=2) is not None
    assert (_value(lower), t5ckpt.all_steps(lower)) == (22, [1, 2])


def test_an_overwrite_that_dies_while_it_removes_the_old_step_is_completed(tmp_path):
    with t5ckpt.Checkpointer(_state(0), checkpoints_dir=tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(_state(step), step=step)
    marker = Marker(open_storage(tmp_path), 2, time.time, HIDE)
    (tmp_path / 'checkpoint_1').rename(tmp_path / marker.directory)
    (tmp_path / marker.aside).mkdir()
    (tmp_path / 'checkpoint_2' / 'checkpoint').unlink()
    marker.release()
    with t5ckpt.Checkpointer(_state(0), checkpoints_dir=tmp_path) as checkpointer:
        checkpointer.save(_state(3), step=3)
    assert (_value(tmp_path, step=2), t5ckpt.all_steps(tmp_path)) == (1, [2, 3])


def test_rm_of_several_steps_goes_on_behind_one_that_the_storage_does_not_delete(gs):
    run_dir = gs.url()
    with t5ckpt.Checkpointer({'w': np.ones(4)}, checkpoints_dir=run_dir) as ck:
        for step in (1, 2, 3):
            ck.save({'w': np.ones(4)}, step=step)
    gs.proxy.choose = lambda kind, key: '403' if kind == 'delete' and 'checkpoint_2/' in key else None
    said = t5ckpt_cli('rm', run_dir, 1, 2, 3, '--yes', code=4)
    gs.proxy.reset()
    assert 'deleted: 1, 3' in said
    assert 'step 2 was not deleted: ' in said
    assert t5ckpt.all_steps(run_dir) == [2]
