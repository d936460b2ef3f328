"""Four real processes in a training loop: they save the same steps, and stop at the same one."""

import signal
import time

import jax.numpy as jnp
import pytest
import scenarios
from support import independent_reader
from support.bits import assert_same

import t5ckpt

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_all_save_the_same_steps_and_a_signal_to_one_stops_all_at_one_step(four, tmp_path):
    four.start('loop', tmp_path, each=[0.010, 0.004, 0.013, 0.001])
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob('ready-*'))) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(4)
    four.signal(2, signal.SIGTERM)
    told = time.monotonic()
    answers = four.answers()
    # Some check-in comes within about a second, and then one small save.
    assert time.monotonic() - told < 20
    saved, stopped, _ = answers[0]
    assert [answer[:2] for answer in answers] == [[saved, stopped]] * 4
    assert saved[:2] == [3, 4]
    assert 8 not in saved
    assert saved[-1] == stopped
    assert len(saved) >= 4, 'the time policy has saved, too'
    assert t5ckpt.all_steps(tmp_path) == saved


def test_a_loop_that_goes_back_sees_a_preemption_at_once(four, tmp_path):
    (seen,) = set(four.run('preempted_in_a_loop_that_went_back', tmp_path))
    assert seen is not None
    assert seen < 500


def test_processes_at_other_steps_get_an_error(four, tmp_path):
    four.start('loops_apart', tmp_path)
    answers = four.answers()
    assert 'process 0 is at step 1, process 1 at step 2' in answers[1]['error'][1]


def test_all_come_back_to_the_same_step(four, tmp_path):
    run = tmp_path / 'run'
    assert four.run('come_back', run) == [[None, 77]] * 4
    four.run('save_small', run, [1, 2, 3])
    assert four.run('come_back', run) == [[3, 3]] * 4
    assert four.run('come_back', tmp_path / 'other', str(run)) == [[None, 3]] * 4
    # A chunk that not every process reads is gone.
    chunks = sorted((run / 'checkpoint_3' / 'target.rows').glob('[0-9]*'))
    chunks[-1].unlink()
    assert four.run('come_back', run) == [[2, 2]] * 4
    assert t5ckpt.all_steps(run) == [1, 2]
    for step in (1, 2):
        min((run / f'checkpoint_{step}' / 'target.rows').glob('[0-9]*')).unlink()
    for kind, text in four.errors('come_back', run):
        assert kind in ('CorruptCheckpointError', 'RemoteError')
        assert 'none of the steps [1, 2]' in text


def test_all_save_the_weights_together(four, tmp_path):
    assert four.run('save_weights', tmp_path) == [7] * 4
    assert t5ckpt.verify(tmp_path, full=True).ok
    found = independent_reader.read(tmp_path / 'checkpoint_7')
    assert sorted(found) == ['target/everywhere', 'target/rows']
    for name, values in scenarios.expected().items():
        if name in found:
            assert_same(found[name], values.astype(jnp.bfloat16), name)


def test_a_leaf_that_the_run_lacks_is_made_by_all_processes_together(four, tmp_path):
    four.run('save_small', tmp_path / 'run', [5])
    assert four.run('come_back_wider', tmp_path / 'run', -1) == [5] * 4
    for index, (_, text) in enumerate(four.errors('come_back_wider', tmp_path / 'run', 2)):
        assert 'no state here' in text, index
