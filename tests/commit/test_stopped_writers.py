"""A writer that is stopped for longer than its horizon, between its last look at the clock and its commit."""

import os
import signal
import subprocess
import time

import pytest
from support import forked

import t5ckpt
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.storage import open_storage

_STOPPED = """
import os, signal, sys, time
import t5ckpt
from t5ckpt.storage import open_storage
from t5ckpt.storage.base import Lock
from t5ckpt.testing import FaultyStorage

class NoLock(Lock):
    def is_current(self): return True
    def close(self): pass

class Stopping(FaultyStorage):
    # What another machine sees of the locks of this one, where locks are those of a node.
    def try_lock(self, key):
        return NoLock()

    def publish(self, source, target):
        if target == 'checkpoint_1':
            print(source, flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            # Another thread may take the signal, and this one go on for a moment.
            time.sleep(1)
        super().publish(source, target)

with t5ckpt.Checkpointer({'w': [1.0]}, checkpoints_dir=Stopping(open_storage(sys.argv[1]))) as ck:
    ck.save({'w': [1.0]}, step=1)
"""


def save(place, value, clock=time.time):
    state = {'w': [value]}
    with t5ckpt.Checkpointer(state, checkpoints_dir=place, clock=clock) as ck:
        return ck.save(state, step=1)


@pytest.mark.multiprocess
@pytest.mark.parametrize('is_saved', [False, True])
def test_where_directories_are_renamed_it_comes_too_late(is_saved, tmp_path):
    """Garbage collection gives its directory another name first, so its own rename fails."""
    run = tmp_path / 'run'
    with forked.start(_STOPPED, run, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        try:
            directory = writer.stdout.readline().strip()
            assert directory, writer.stderr.read()
            assert collect(open_storage(run), time.time)[0] == []
            os.utime(run / directory / 'checkpoint', (time.time() - 3700,) * 2)
            assert collect(open_storage(run), time.time)[0] == [directory]
            if is_saved:
                save(run, 2.0)
            writer.send_signal(signal.SIGCONT)
            assert 'CheckpointNotFoundError' in writer.communicate()[1]
        finally:
            # A process that is stopped would be waited for.
            writer.kill()
    assert sorted(path.name for path in run.iterdir()) == (['checkpoint_1'] if is_saved else [])
    if is_saved:
        assert t5ckpt.verify(run, full=True).ok
        assert t5ckpt.load_t5x_checkpoint(run)['w']['0'] == 2.0
