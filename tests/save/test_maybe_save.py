"""The loop's view: maybe_save, preemption by a real signal, retention in the background, bookkeeping after failures."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from support import forked
from support.facts import put_facts
from support.options import with_options

import t5ckpt
from t5ckpt import (
    Checkpointer,
    KeepBest,
    KeepEvery,
    KeepLatest,
    PreemptionNotice,
    SaveAt,
    SaveEvery,
    SaveEverySeconds,
    SaveFirst,
    SaveOnImprovement,
    SaveOnPreemption,
)
from t5ckpt.commit.retention import Retention
from t5ckpt.errors import NoSpaceError, SaveFailedError
from t5ckpt.storage.file import FileStorage
from t5ckpt.testing import FakeClock


class FullDisk(FileStorage):
    """A directory on a disk that is full when the test says so, and that keeps some names from being renamed."""

    full = False
    stuck = ''

    def write(self, key, data):
        if self.full:
            raise NoSpaceError(errno.ENOSPC, 'injected: no space')
        super().write(key, data)

    def publish(self, source, target):
        if source == self.stuck:
            raise NoSpaceError(errno.ENOSPC, 'injected: no space')
        super().publish(source, target)


def state(value=0.0):
    return {'params': {'w': np.full((64, 64), value, np.float32)}}


def test_saves_when_the_policy_says(tmp_path):
    with Checkpointer(state(), checkpoints_dir=tmp_path, save_policy=SaveFirst() | SaveEvery(4)) as ck:
        saved = [step for step in range(1, 10) if ck.maybe_save(step, state(step)) is not None]
    assert saved == [1, 4, 8] == t5ckpt.all_steps(tmp_path)
    assert t5ckpt.load_t5x_checkpoint(tmp_path, 4)['params']['w'][0, 0] == 4
    # The next run has a first checkpoint, and does not save again what is there.
    with Checkpointer(state(), checkpoints_dir=tmp_path, save_policy=SaveFirst() | SaveEvery(4)) as ck:
        assert [step for step in range(8, 13) if ck.maybe_save(step, state()) is not None] == [12]


def test_the_state_is_not_looked_at_when_nothing_is_due(tmp_path):
    with Checkpointer(state(), checkpoints_dir=tmp_path, save_policy=SaveEvery(10)) as ck:
        assert ck.maybe_save(3, object()) is None
        assert ck.maybe_save(4, object(), metrics={'loss': object()}) is None


def test_no_policy_is_an_error(tmp_path):
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck, pytest.raises(ValueError, match='save_policy='):
        ck.maybe_save(1, state())


def test_time_counts_from_the_last_save(tmp_path):
    clock = FakeClock()
    with Checkpointer(
        state(),
        checkpoints_dir=tmp_path,
        save_policy=SaveEverySeconds(60),
        options=t5ckpt.CheckpointerOptions(clock=clock),
    ) as ck:
        saved = []
        for step in range(1, 30):
            clock.advance(13)
            if ck.maybe_save(step, state()) is not None:
                saved.append(step)
    # 60 s after the first call, then every fifth step.
    assert saved == [6, 11, 16, 21, 26]


def test_a_clock_that_is_set_back_does_not_stop_the_saves(tmp_path):
    clock = FakeClock()
    with Checkpointer(
        state(),
        checkpoints_dir=tmp_path,
        save_policy=SaveEverySeconds(60),
        options=t5ckpt.CheckpointerOptions(clock=clock),
    ) as ck:
        saved = []
        for step in range(1, 9):
            clock.advance(-9000 if step == 4 else 31)
            if ck.maybe_save(step, state()) is not None:
                saved.append(step)
    assert saved == [3, 6, 8]


def test_improvement_counts_from_what_is_saved_also_after_a_restart(tmp_path):
    def run(first, values):
        with Checkpointer(state(), checkpoints_dir=tmp_path, save_policy=SaveOnImprovement('loss', 'min')) as ck:
            calls = enumerate(values, first)
            return [step for step, loss in calls if ck.maybe_save(step, state(), metrics={'loss': loss}) is not None]

    assert run(1, [5.0, 6.0, np.float32(4.0), float('nan'), 4.0]) == [1, 3]
    assert run(6, [4.5, 4.0, 3.0]) == [8]
    assert t5ckpt.open_run(tmp_path).metrics(3) == {'loss': 4.0}


def test_a_save_that_reports_the_failure_of_another_is_due_again(tmp_path):
    """Otherwise one full disk costs two intervals."""
    run, failed = tmp_path / 'run', []
    run.write_text('a file in the place of the directory')
    with Checkpointer(state(), checkpoints_dir=run, save_policy=SaveEvery(10)) as ck:
        for step in range(1, 31):
            try:
                pending = ck.maybe_save(step, state())
            except t5ckpt.errors.SaveFailedError:
                failed.append(step)
                run.unlink()
            else:
                if pending is not None:
                    pending.wait()
        assert failed == [20]
        assert ck.all_steps() == [21, 30]


def test_an_infinity_is_no_improvement(tmp_path):
    with Checkpointer(state(), checkpoints_dir=tmp_path, save_policy=SaveOnImprovement('loss', 'min')) as ck:
        for step, loss in enumerate([float('inf'), float('-inf'), 5.0, float('-inf'), 4.0]):
            ck.maybe_save(step, state(), metrics={'loss': loss})
        ck.wait_until_finished()
        assert ck.all_steps() == [2, 4]


def test_metrics_that_are_no_numbers_are_refused(tmp_path):
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        with pytest.raises(ValueError, match="'loss' is 'low'"):
            ck.save(state(), step=1, metrics={'loss': 'low'})
        assert ck.all_steps() == []


def test_a_failed_save_counts_for_nothing(tmp_path):
    """The disk is full once. The run says so, the bookkeeping is that of before, and the next save is made."""
    storage = FullDisk(str(tmp_path))
    with Checkpointer(state(), checkpoints_dir=storage, save_policy=SaveEvery(2)) as ck:
        ck.maybe_save(2, state()).result()
        storage.full = True
        failing = ck.maybe_save(4, state())
        failing.wait()
        assert failing.failed()
        storage.full = False
        assert ck.latest_step() == 2
        assert ck.maybe_save(5, state()) is None
        with pytest.raises(SaveFailedError, match='step 4'):
            ck.maybe_save(6, state())
        assert ck.maybe_save(8, state()).result().step == 8
        assert ck.all_steps() == [2, 8]


def test_time_policies_try_again_after_a_failure(tmp_path):
    clock = FakeClock()
    storage = FullDisk(str(tmp_path))
    with Checkpointer(
        state(),
        checkpoints_dir=storage,
        save_policy=SaveEverySeconds(60),
        options=t5ckpt.CheckpointerOptions(clock=clock),
    ) as ck:
        ck.maybe_save(1, state())
        clock.advance(61)
        storage.full = True
        ck.maybe_save(2, state()).wait()
        storage.full = False
        clock.advance(1)
        with pytest.raises(SaveFailedError):
            ck.maybe_save(3, state())
        assert ck.maybe_save(4, state()).result().step == 4


def test_a_loop_that_was_rolled_back_is_told_of_the_steps_that_it_does_not_replace(tmp_path, caplog):
    with t5ckpt.Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        ck.save(state(), step=10)
        ck.save(state(), step=20)
    caplog.clear()
    with t5ckpt.Checkpointer(state(), checkpoints_dir=tmp_path, save_policy=SaveEvery(10)) as ck:
        ck.restore(step=10)
        for step in range(11, 21):
            ck.maybe_save(step, state())
    assert 'Skipping save checkpoint for step 20' in caplog.text
    # The loop begins with step 20, which is no news.
    caplog.clear()
    with t5ckpt.Checkpointer(state(), checkpoints_dir=tmp_path, save_policy=SaveEvery(10)) as ck:
        ck.restore()
        assert ck.maybe_save(20, state()) is None
    assert 'Skipping' not in caplog.text


def test_a_preemption_notice_is_entered_once():
    notice, before = PreemptionNotice((signal.SIGUSR1,)), signal.getsignal(signal.SIGUSR1)
    with notice:
        with pytest.raises(RuntimeError, match='is already entered'), notice:
            pass
        os.kill(os.getpid(), signal.SIGUSR1)
        assert notice()
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.slow
def test_sigterm_saves_one_step_and_stops(tmp_path):
    """A real process, a real signal, in the middle of a loop; and the handler that was there before is called, too."""
    code = textwrap.dedent(
        """
        import os, signal, sys, numpy as np
        from t5ckpt import Checkpointer, PreemptionNotice, SaveEvery, SaveOnPreemption

        signal.signal(signal.SIGTERM, lambda *_: print('heard before', flush=True))
        policy = SaveEvery(1_000_000) | SaveOnPreemption()
        state = {'w': np.zeros((64, 64), np.float32)}
        with PreemptionNotice() as notice, Checkpointer(
            state, checkpoints_dir=sys.argv[1], save_policy=policy, preempted=notice
        ) as ck:
            for step in range(1, 100_000_000):
                ck.maybe_save(step, state)
                if step == 1000:
                    print('running', flush=True)
                if ck.should_stop:
                    break
        print('stopped at', step, flush=True)
        assert signal.getsignal(signal.SIGTERM)(0, None) is None
        """
    )
    with subprocess.Popen(
        [sys.executable, '-c', code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stdout.readline() == 'running\n'
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == 'heard before\n'
        stopped = int(process.stdout.readline().removeprefix('stopped at '))
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert t5ckpt.all_steps(tmp_path) == [stopped]


def test_sigterm_ends_a_forked_worker():
    """The pools of multiprocessing end their workers with it, and wait."""
    code = textwrap.dedent(
        """
        import multiprocessing, signal, time
        from t5ckpt import PreemptionNotice

        def work(ready):
            ready.set()
            # Python calls a handler after the sleep if the signal arrives just before it.
            for _ in range(600):
                time.sleep(0.1)

        context = multiprocessing.get_context('fork')
        heard = context.Event()
        for before in signal.SIG_DFL, lambda *_: heard.set():
            signal.signal(signal.SIGTERM, before)
            with PreemptionNotice() as notice:
                ready = context.Event()
                worker = context.Process(target=work, args=[ready])
                worker.start()
                ready.wait()
                worker.terminate()
                worker.join(30) if before is signal.SIG_DFL else heard.wait(30)
                print(worker.exitcode, notice(), heard.is_set(), flush=True)
                worker.kill()
        """
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [f'{-signal.SIGTERM} False False', 'None False True']


def test_sigterm_ends_a_forked_worker_that_has_not_begun():
    code = textwrap.dedent(
        """
        import multiprocessing, os, signal, time
        from t5ckpt import PreemptionNotice

        os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
        with PreemptionNotice() as notice:
            worker = multiprocessing.get_context('fork').Process(target=time.sleep, args=[60])
            worker.start()
            worker.join(30)
            print(worker.exitcode, notice(), signal.pthread_sigmask(signal.SIG_BLOCK, []))
            worker.kill()
        """
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f'{-signal.SIGTERM} False set()\n'


def test_preemption_saves_once_and_goes_on_asking_to_stop(tmp_path):
    told = []
    options = {'save_policy': SaveOnPreemption(), 'preempted': lambda: bool(told)}
    with Checkpointer(state(), checkpoints_dir=tmp_path, **with_options(**options)) as ck:
        assert ck.maybe_save(1, state()) is None
        assert not ck.should_stop
        told.append(1)
        assert ck.maybe_save(2, state()).result().step == 2
        assert ck.should_stop
        assert ck.maybe_save(3, state()) is None
        assert ck.should_stop


@pytest.mark.parametrize('cure', ['', 'policy', 'by hand'])
def test_a_preemption_that_no_policy_saves_is_told(tmp_path, caplog, cure):
    policy = SaveEvery(100) | SaveOnPreemption() if cure == 'policy' else SaveEvery(100)
    told = []
    options = {'save_policy': policy, 'preempted': lambda: bool(told)}
    with Checkpointer(state(), checkpoints_dir=tmp_path, **with_options(**options)) as ck:
        ck.maybe_save(100, state())
        told.append(1)
        ck.maybe_save(150, state())
        assert ck.should_stop
        if cure == 'by hand':
            ck.save(state(), step=150)
    assert t5ckpt.all_steps(tmp_path) == ([100, 150] if cure else [100])
    warnings = [record.message for record in caplog.records if record.levelname == 'WARNING']
    assert (
        warnings == [] if cure else 'step 150 was not saved' in warnings[0] and 'last saved step is 100' in warnings[0]
    )


def test_a_notice_belongs_in_the_main_thread():
    errors = []

    def enter():
        try:
            with PreemptionNotice():
                pass
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert 'main thread' in errors[0]


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_best_by_metrics_given_to_save(tmp_path):
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: float('nan'), 5: 3.0, 6: 2.0}
    with Checkpointer(state(), checkpoints_dir=tmp_path, keep_policy=KeepBest(2, 'loss', 'min')) as ck:
        for step, loss in losses.items():
            ck.save(state(), step=step, metrics={'loss': loss})
    assert t5ckpt.all_steps(tmp_path) == [2, 5, 6]
    assert sorted(os.listdir(tmp_path)) == ['checkpoint_2', 'checkpoint_5', 'checkpoint_6']


def test_nothing_is_read_of_damaged_facts(tmp_path):
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        for step, text in enumerate(
            ('{', '{"metrics": 3, "created_unix": "now"}', f'{{"metrics": {{"loss": 1{"0" * 400}}}}}')
        ):
            ck.save(state(), step=step, metrics={'loss': 1})
            put_facts(tmp_path / f'checkpoint_{step}', text.encode())
    with Checkpointer(state(), checkpoints_dir=tmp_path, keep_policy=KeepBest(1, 'loss', 'min')) as ck:
        ck.save(state(), step=9, metrics={'loss': 1})
        # No metric is known of them, so they stay.
        assert ck.all_steps() == [0, 1, 2, 9]


def test_one_failed_deletion_does_not_stop_the_others(tmp_path, caplog):
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        for step in range(4):
            ck.save(state(), step=step)
    storage = FullDisk(str(tmp_path))
    storage.stuck = 'checkpoint_1'
    retention = Retention(storage, KeepLatest(1), FakeClock())
    assert retention.carry_out() == [0, 2]
    assert t5ckpt.all_steps(tmp_path) == [1, 3]
    assert 'could not delete step 1' in caplog.text


def test_the_next_save_completes_a_killed_deletion(tmp_path):
    """SIGKILL while directories are being removed: no listing shows them, and the next save clears up."""
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        for step in range(6):
            ck.save(state(), step=step)
    code = textwrap.dedent(
        """
        import os, signal, sys
        from t5ckpt import KeepLatest
        from t5ckpt.commit import retention
        from t5ckpt.storage.file import FileStorage

        class Killed(FileStorage):
            def delete_tree(self, key):
                if key.startswith('checkpoint_2.'):
                    os.unlink(self.local_path(key) + '/checkpoint')
                    os.kill(os.getpid(), signal.SIGKILL)
                super().delete_tree(key)

        retention.Retention(Killed(sys.argv[1]), KeepLatest(2), lambda: 1e9).carry_out()
        """
    )
    assert forked.run(code, tmp_path).returncode == -signal.SIGKILL
    left = [name for name in os.listdir(tmp_path) if '.deleted-' in name]
    assert left
    assert t5ckpt.all_steps(tmp_path) == [4, 5]
    with Checkpointer(state(), checkpoints_dir=tmp_path) as ck:
        ck.save(state(), step=6)
    assert sorted(os.listdir(tmp_path)) == ['checkpoint_4', 'checkpoint_5', 'checkpoint_6']


def test_close_waits_for_the_deletions(tmp_path):
    with Checkpointer(state(), checkpoints_dir=tmp_path, keep_policy=KeepLatest(1) | KeepEvery(3)) as ck:
        for step in range(8):
            ck.save(state(), step=step)
    assert sorted(os.listdir(tmp_path)) == ['checkpoint_0', 'checkpoint_3', 'checkpoint_6', 'checkpoint_7']


def test_given_steps_and_periods_are_policies(tmp_path):
    """T5X's checkpoint_steps and period."""
    with Checkpointer(state(), checkpoints_dir=tmp_path, save_policy=SaveAt({1, 7}) | SaveEvery(5)) as ck:
        for step in range(11):
            ck.maybe_save(step, state())
    assert t5ckpt.all_steps(tmp_path) == [0, 1, 5, 7, 10]
