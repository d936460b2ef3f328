"""A writer that is stopped for longer than its horizon, between its last look at the clock and its commit."""

import errno
import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest
from support import forked

import t5ckpt
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.transaction import Transaction
from t5ckpt.errors import StorageError
from t5ckpt.format.manifest import encode_manifest
from t5ckpt.storage import open_storage
from t5ckpt.storage.base import Lock
from t5ckpt.testing import FakeClock, FaultyStorage

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
    with t5ckpt.Checkpointer(state, checkpoints_dir=place, options=t5ckpt.CheckpointerOptions(clock=clock)) as ck:
        return ck.save(state, step=1)


def move_to_another_machine(run):
    """Changes the only marker, so that another machine wrote it three hours ago."""
    (marker,) = run.glob('busy_*')
    record = json.loads(marker.read_bytes())
    record['owner']['place'] = 'another'
    marker.write_text(json.dumps(record))
    os.utime(marker, (time.time() - 3 * 3600,) * 2)


@pytest.mark.multiprocess
@pytest.mark.parametrize('is_saved', [False, True])
def test_where_directories_are_renamed_it_comes_too_late(is_saved, tmp_path):
    """Garbage collection gives its directory another name first, so its own rename fails."""
    run = tmp_path / 'run'
    with forked.start(_STOPPED, run, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        try:
            directory = writer.stdout.readline().strip()
            assert directory, writer.stderr.read()
            collect(open_storage(run), time.time)
            assert (run / directory).exists()
            move_to_another_machine(run)
            collect(open_storage(run), time.time)
            assert not (run / directory).exists()
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


class NoLock(Lock):
    """A lock of another machine, or of a file system without locks."""

    is_held = False

    def is_current(self):
        return True

    def close(self):
        pass


class WithoutLocks(FaultyStorage):
    def try_lock(self, key):
        return NoLock()


def test_what_is_written_after_the_directory_was_collected_is_not_published(tmp_path):
    """By the processes of a job that waits for its slowest one: their writes create the directory again."""
    run, clock = open_storage(tmp_path), FakeClock(time.time())
    with Transaction(run, 1, clock) as work:
        clock.advance(3 * 3600)
        move_to_another_machine(tmp_path)
        collect(WithoutLocks(run), time.time)
        assert not (tmp_path / work.directory).exists()
        # As TensorStore does.
        run.make_dir(f'{work.directory}/w')
        run.write(f'{work.directory}/w/1', b'after')
        with pytest.raises(StorageError, match='took 10800 s, and at most 3600 s are allowed'):
            work.commit(encode_manifest({'w': np.ones(1)}), None, ['w'])
    assert [path.name for path in tmp_path.iterdir()] == []


def test_without_locks_one_of_two_writers_has_a_step_that_was_broken(tmp_path):
    """The second one exchanged the names once more, and removed the step of the first one."""

    class Late(WithoutLocks):
        def before_operation(self, name, key):
            super().before_operation(name, key)
            if name == 'exchange' and not others:
                others.append(None)
                others.append(save(tmp_path, 2.0))

    others = []
    (tmp_path / 'checkpoint_1').mkdir()
    assert save(Late(open_storage(tmp_path)), 1.0) is None
    assert others[1] is not None
    assert t5ckpt.load_t5x_checkpoint(tmp_path)['w']['0'] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ['checkpoint_1']


def test_without_locks_a_save_of_this_process_is_not_collected(tmp_path):
    run = WithoutLocks(open_storage(tmp_path))
    copied = []

    def progress(done, total):
        if not copied:
            copied.append(t5ckpt.copy_checkpoint(f'{tmp_path}-source', tmp_path))
            collect(run, time.time)

    save(f'{tmp_path}-source', 1.0)
    with t5ckpt.Checkpointer({'w': np.ones(4000)}, checkpoints_dir=run, progress=progress) as ck:
        assert ck.save({'w': np.ones(4000)}, step=5) is not None
    assert t5ckpt.all_steps(tmp_path) == [1, 5]


@pytest.mark.parametrize(
    'contents', [b'', b'{}', b'[]', b'{"action": "hide", "directories": [], "seconds": NaN, "owner": {}}']
)
def test_a_marker_that_cannot_be_understood_stops_no_save(tmp_path, contents):
    (tmp_path / 'busy_1.5.0123456789abcdef').write_bytes(contents)
    save(tmp_path, 1.0)
    assert t5ckpt.all_steps(tmp_path) == [1]


def test_a_broken_step_that_cannot_be_looked_at_after_it_was_replaced_is_back(tmp_path):
    """The save failed, and its step was there."""

    class Failing(FaultyStorage):
        has_exchanged = False

        def exchange(self, source, target):
            self.has_exchanged = True
            return super().exchange(source, target)

        def version(self, key):
            if self.has_exchanged:
                raise StorageError(errno.EIO, f'{key}: injected')
            return super().version(key)

    (tmp_path / 'checkpoint_1').mkdir()
    (tmp_path / 'checkpoint_1' / 'checkpoint').write_bytes(bytes(40))
    ck = t5ckpt.Checkpointer({'w': [1.0]}, checkpoints_dir=Failing(open_storage(tmp_path)))
    with ck, pytest.raises(StorageError, match='injected'):
        ck.save({'w': [1.0]}, step=1)
    assert t5ckpt.all_steps(tmp_path) == []
    assert (tmp_path / 'checkpoint_1' / 'checkpoint').read_bytes() == bytes(40)
    with t5ckpt.Checkpointer({'w': [1.0]}, checkpoints_dir=tmp_path) as ck:
        assert ck.save({'w': [1.0]}, step=1) is not None
