"""kill -9 of any process at any point of a save, a restore or a deletion.

The job fails cleanly, every survivor in time; no half-written checkpoint is seen; the next start finds the last complete
one, restores it, and sweeps the rest.
"""

import os
import signal
import time

import pytest
from job import DEAD, HEARTBEAT_SECONDS, Job
from support import t5x_rules

import t5ckpt

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

TIMEOUT = 3.0


# Where: (process, operation of its storage, text in the key), and whether step 2 is there afterwards.
POINTS = [
    (0, 'make_dir', 'checkpoint_2', False),
    (0, 'write_chunk', 'checkpoint_2', False),
    (1, 'write_chunk', 'checkpoint_2', False),
    (1, 'write', 'integrity.1.json', False),
    (0, 'write', '/checkpoint', False),
    (0, 'publish', 'checkpoint_2', False),
    # Retention after the commit: step 1 is being deleted.
    (0, 'delete_tree', 'checkpoint_1', True),
]


def check_lost(survivor):
    """With process 0 its coordination service ends: JAX ends the survivor, which may have raised an error before."""
    if survivor != DEAD:
        kind, text = survivor['error']
        assert kind == 'CoordinationError'
        assert "lost JAX's coordination service" in text
        assert 'within' not in text


def check_after(directory, steps):
    """What a start after the crash sees, and what it makes of it."""
    assert t5ckpt.all_steps(directory) == steps
    for marker in directory.glob('busy_*'):
        # Another process of the job may still write into its directory.
        os.utime(marker, (time.time() - 2 * 3600 - 1,) * 2)
    for step in steps:
        t5x_rules.check(directory / f'checkpoint_{step}')
    job = Job(2, 4)
    try:
        job.run('restore', directory)
        job.run('save', directory, 5)
    finally:
        job.close()
    assert t5ckpt.all_steps(directory) == [*steps, 5]
    assert sorted(path.name for path in directory.iterdir()) == [f'checkpoint_{step}' for step in [*steps, 5]]


@pytest.mark.parametrize(('process', 'operation', 'key', 'committed'), POINTS)
def test_killed_in_a_save(tmp_path, process, operation, key, committed):
    options = {'process_timeout': TIMEOUT, 'keep': 1}
    job = Job(2, 4)
    try:
        job.run('save', tmp_path, 1)
        job.start('save_and_die', tmp_path, 2, process, operation, key, options)
        answers = job.answers(HEARTBEAT_SECONDS + 10 * TIMEOUT)
        assert answers[process] == DEAD
        assert job.processes[process].wait() == -signal.SIGKILL
        survivor = answers[1 - process]
        if process == 1:
            # Process 0 keeps the coordination service alive, so it can say who is missing.
            kind, text = survivor['error']
            assert kind == 'ProcessMissingError'
            assert "process 1 did not arrive at 'write'" in text
        elif not committed:
            check_lost(survivor)
    finally:
        job.close()
    check_after(tmp_path, [2] if committed else [1])


def test_process_0_is_stopped_in_a_save(tmp_path):
    """The other raises in time, although the service that could say who is missing does not answer."""
    job = Job(2, 4)
    try:
        job.start('save_and_stop', tmp_path, 'write', 'integrity.0.json')
        began = time.monotonic()
        (answer,) = job.answers(HEARTBEAT_SECONDS, processes=[1])
        assert answer['error'][0] == 'ProcessMissingError'
        assert "process 0 did not arrive at 'write'" in answer['error'][1]
        assert time.monotonic() - began < HEARTBEAT_SECONDS
    finally:
        job.close()


@pytest.mark.parametrize('process', [0, 1])
def test_killed_in_a_restore(tmp_path, process):
    job = Job(2, 4)
    try:
        job.run('save', tmp_path, 1)
        job.start('restore_and_die', tmp_path, process)
        answers = job.answers(HEARTBEAT_SECONDS + 30)
        assert answers[process] == DEAD
        survivor = answers[1 - process]
        if process == 1:
            assert survivor['error'][0] == 'ProcessMissingError'
            assert "process 1 did not arrive at 'restore'" in survivor['error'][1]
        else:
            check_lost(survivor)
    finally:
        job.close()
    check_after(tmp_path, [1])
