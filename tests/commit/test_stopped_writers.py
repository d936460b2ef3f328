"""A writer that is stopped for longer than its lease, between its last look at the lease and its commit."""

import os
import signal
import subprocess
import sys
import time
import uuid

import pytest

import t5ckpt
from t5ckpt.commit.garbage_collection import collect_leftovers
from t5ckpt.commit.lease_owner import process_facts
from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.storage import open_storage
from t5ckpt.testing import FakeClock, FaultyStorage

_STOPPED = """
import os, signal, sys, time
import t5ckpt
from t5ckpt.storage import open_storage
from t5ckpt.testing import FaultyStorage

class NoLock:
    is_held = True
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
    words = [sys.executable, '-c', _STOPPED, run]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer:
        try:
            directory = writer.stdout.readline().strip()
            assert directory, writer.stderr.read()
            assert collect_leftovers(open_storage(run), time.time) == []
            os.utime(run / directory / 't5ckpt.json', (time.time() - 3700,) * 2)
            assert collect_leftovers(open_storage(run), time.time) == [directory]
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


class Elsewhere(FaultyStorage):
    """The storage as a process of another machine sees it, which is stopped before it writes a file."""

    def __init__(self, inner, stops_at, stop):
        super().__init__(inner)
        self._stops_at = f'checkpoint_1/{stops_at}'
        self._stop = stop

    def write(self, key, data):
        if key == self._stops_at:
            self._stop()
        super().write(key, data.replace(process_facts()['place'].encode(), b'elsewhere'))

    def try_lock(self, key):
        return super().try_lock(f'elsewhere/{key}')


@pytest.mark.parametrize('stops_at', ['checkpoint', 't5ckpt.json'])
def test_in_place_what_it_writes_is_seen_not_to_match(stops_at):
    """Nothing excludes it there, see docs/storage.md; a reader does not take the mixture for a checkpoint."""
    run, clock = open_storage(f'memory://{uuid.uuid4().hex}/run'), FakeClock()

    def stop():
        clock.advance(601)
        assert save(run, 2.0, clock).step == 1

    late = save(Elsewhere(run, stops_at, stop), 1.0, clock)
    # It looks at its lease between the two files.
    assert (late is None) is (stops_at == 't5ckpt.json')
    with pytest.raises(CorruptCheckpointError, match=r't5ckpt\.json'):
        t5ckpt.load_t5x_checkpoint(run.url())
    assert not t5ckpt.verify(run.url()).ok
