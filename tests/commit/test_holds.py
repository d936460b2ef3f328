"""Markers and holds: who excludes whom, with the other process acting at exactly one operation."""

import errno
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import uuid

import numpy as np
import pytest
from support import faultshim

import t5ckpt
from t5ckpt.catalog.listing import steps_in
from t5ckpt.commit.deletion import delete_step
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.holds import hold
from t5ckpt.commit.markers import Marker
from t5ckpt.commit.retention import Retention
from t5ckpt.commit.writers import writer_facts
from t5ckpt.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    NoSpaceError,
    StepKeptError,
    StorageError,
    T5CkptError,
    UnsupportedFormatError,
)
from t5ckpt.format.names import busy_key, to_persist_file
from t5ckpt.policies import KeepBest, KeepLatest
from t5ckpt.storage import open_storage
from t5ckpt.testing import FakeClock, FaultyStorage

STATE = {'w': [1.0]}


class Killed(BaseException):
    """The process is dead."""


def saved_run(place, steps=(1, 2)):
    with t5ckpt.Checkpointer(STATE, checkpoints_dir=place) as ck:
        for step in steps:
            ck.save(STATE, step=step)
    return open_storage(place)


def age(storage, key, seconds):
    """So long ago the file was written, by the file server's clock."""
    os.utime(storage.local_path(key), (time.time() - seconds,) * 2)


@pytest.fixture(params=['file', 'memory'])
def run(request, tmp_path):
    return saved_run(tmp_path / 'run' if request.param == 'file' else f'memory://{uuid.uuid4().hex}/run')


def test_where_nothing_may_be_deleted_each_save_leaves_few_records():
    """By a role that may only add objects. The records of all saves were replaced by new ones, which stayed as well."""

    class AddOnly(FaultyStorage):
        def _refuse(self, *_):
            raise AccessDeniedError(13, 'injected')

        delete_file = delete_files = delete_tree = delete_unchanged = _refuse

    inner, clock, counts = open_storage(f'memory://{uuid.uuid4().hex}/run'), FakeClock(), []
    with t5ckpt.Checkpointer(
        STATE, checkpoints_dir=AddOnly(inner), keep=2, options=t5ckpt.CheckpointerOptions(clock=clock)
    ) as ck:
        for step in range(1, 9):
            clock.advance(4000)
            assert ck.save(STATE, step=step) is not None
            counts.append(len([*inner.walk('.t5ckpt/busy')]))
    assert t5ckpt.all_steps(inner.url()) == [*range(1, 9)]
    assert max(after - before for before, after in itertools.pairwise(counts)) <= 3


_KILLED_DELETER = """
import sys, time
from support.faultshim import KILL, RENAME, WRITE, Shim
from t5ckpt.commit.deletion import delete_step
from t5ckpt.policies import KeepLatest
from t5ckpt.storage import open_storage
place, kind = sys.argv[1], {'write': WRITE, 'rename': RENAME}[sys.argv[2]]
# The first change that a deletion makes is its marker.
Shim().arm(place, 0, KILL, classes=kind)
delete_step(open_storage(place), 2, time.time)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize('call', ['write', 'rename'])
def test_the_partial_marker_of_a_deleter_that_was_killed_is_collected(call, tmp_path):
    """It is empty, or whole and not renamed yet. The step is there; a save removes the file after an hour."""
    run = saved_run(tmp_path / 'run', (1, 2, 3))
    killed = subprocess.run(
        [sys.executable, '-c', _KILLED_DELETER, tmp_path / 'run', call],
        env={**os.environ, 'LD_PRELOAD': str(faultshim.build(tmp_path)), 'PYTHONPATH': os.pathsep.join(sys.path)},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    (partial,) = (tmp_path / 'run').glob('busy_2.*.__partial')
    assert (partial.stat().st_size > 0) is (call == 'rename')
    assert t5ckpt.all_steps(tmp_path / 'run') == [1, 2, 3]
    age(run, partial.name, 3590)
    saved_run(run.url(), [4])
    assert partial.exists()
    age(run, partial.name, 3610)
    saved_run(run.url(), [5])
    assert {path.name for path in (tmp_path / 'run').iterdir()} == {f'checkpoint_{step}' for step in range(1, 6)}


@pytest.mark.multiprocess
def test_a_pin_without_a_checkpoint_blocks_no_save(bucket):
    """A pin that is killed leaves it, where the step was deleted meanwhile; that of a broken checkpoint keeps the files."""
    place = bucket.url()
    bucket.put(f'{place}/checkpoint_1/PINNED', b'1')
    bucket.put(f'{place}/checkpoint_2/PINNED', b'1')
    bucket.put(f'{place}/checkpoint_2/checkpoint', b'\x82 broken')
    with t5ckpt.Checkpointer(STATE, checkpoints_dir=place) as ck:
        assert ck.save(STATE, step=1).step == 1
        assert bucket.raw(f'{place}/checkpoint_1/PINNED') is None
        with pytest.raises(UnsupportedFormatError, match='is broken, but pinned'):
            ck.save(STATE, step=2)
    assert t5ckpt.all_steps(place) == [1]


def test_on_an_object_store_clocks_may_not_differ_by_more_than_ten_minutes():
    """TensorStore passes on no time of the server. docs/storage.md says so."""
    run = saved_run(f'memory://{uuid.uuid4().hex}/run')
    with hold(run, 1, 60, time.time) as is_there:
        assert is_there
        with pytest.raises(StepKeptError):
            delete_step(run, 1, FakeClock(time.time() + 500))
        delete_step(run, 1, FakeClock(time.time() + 7200))
        assert steps_in(run) == [2]


@pytest.mark.slow
@pytest.mark.parametrize('fits', [True, False])
@pytest.mark.parametrize('ahead', [-(10**8), 10**8])
def test_on_a_file_system_no_clock_of_a_host_counts(ahead, fits, tmp_path):
    """The age of a hold is that of its file, by the clock of the file server; so is that of a marker, empty on a full disk."""
    run, clock = saved_run(tmp_path / 'run'), FakeClock(time.time() + ahead)
    key = busy_key(1, int(clock()) + 7200, '0' * 16, in_bucket=False)
    owner = {'host': 'other', 'place': 'elsewhere', 'pid': 1, 'born': '1'}
    record = {'action': 'hide', 'directories': [], 'seconds': 3600, 'owner': owner}
    run.write(key, json.dumps(record).encode() if fits else b'')
    for seconds, is_waited_for in ((0, True), (7190, True), (7210, False)):
        age(run, key, seconds)
        with hold(run, 1, 60, clock) as is_there:
            assert is_there is not is_waited_for
    for seconds, is_collected in ((7190, False), (7210, True)):
        age(run, key, seconds)
        collect(run, clock)
        assert run.is_file(key) is not is_collected
    with hold(run, 1, 60, clock) as is_there:
        assert is_there
        with pytest.raises(StepKeptError):
            delete_step(run, 1, time.time)
        (name,) = (path.name for path in (tmp_path / 'run').glob('held_1*'))
        age(run, name, 59)
        with pytest.raises(StepKeptError):
            delete_step(run, 1, FakeClock(time.time() + 10**6))
        age(run, name, 63)
        delete_step(run, 1, FakeClock(time.time() - 10**6))
    assert t5ckpt.all_steps(tmp_path / 'run') == [2]
    assert {path.name for path in (tmp_path / 'run').iterdir()} == {'checkpoint_2'}


def test_what_a_crash_leaves_of_the_time_file_is_collected(tmp_path):
    run = saved_run(tmp_path / 'run')
    for name in ('held_0123456789abcdef.__partial', 'held_fedcba9876543210.__partial.__partial'):
        run.write(name, b'')
        age(run, name, 3610)
    saved_run(run.url(), [3])
    assert {path.name for path in (tmp_path / 'run').iterdir()} == {f'checkpoint_{step}' for step in (1, 2, 3)}


_DELETER = """
import sys, time
from t5ckpt.catalog.layouts import ListedStep
from t5ckpt.commit.deletion import hide
from t5ckpt.errors import CheckpointNotFoundError, StepKeptError
from t5ckpt.policies import KeepLatest
from t5ckpt.storage import open_storage
storage, steps = open_storage(sys.argv[1]), range(int(sys.argv[2]))
print('ready', flush=True)
sys.stdin.readline()
for step in steps:
    try:
        remove = hide(storage, ListedStep(step, f'checkpoint_{step}'), time.time)
    except (CheckpointNotFoundError, StepKeptError):
        continue
    remove()
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_deleters_and_readers_in_processes_of_their_own(bucket):
    """A hold that was obtained means that every file can be read until its end; what nobody held is gone."""
    place, count = bucket.url(), 12
    with t5ckpt.Checkpointer(
        {'w': np.ones(64)}, checkpoints_dir=place, options=t5ckpt.CheckpointerOptions(inline_bytes=0)
    ) as ck:
        for step in range(count):
            ck.save({'w': np.ones(64)}, step=step)
    words = [sys.executable, '-c', _DELETER, place, str(count)]
    deleters = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in deleters:
        assert process.stdout.readline() == 'ready\n'
    begin_all, failures, held = threading.Barrier(4), [], set()
    names = [[key for key, _ in open_storage(place).walk(f'checkpoint_{step}')] for step in range(count)]

    def reader(offset):
        storage = open_storage(place)
        begin_all.wait()
        for step in range(offset, count, 2):
            try:
                with hold(storage, step, 60, time.time) as is_there:
                    if is_there:
                        held.add(step)
                        for _ in range(3):
                            for key in names[step]:
                                storage.read(key)
            except (T5CkptError, OSError) as error:
                failures.append((step, error))

    readers = [threading.Thread(target=reader, args=(index % 2,)) for index in range(3)]
    for thread in readers:
        thread.start()
    for process in deleters:
        process.stdin.write('go\n')
        process.stdin.flush()
    begin_all.wait()
    for thread in readers:
        thread.join()
    assert [process.wait(120) for process in deleters] == [0, 0]
    for process in deleters:
        process.stdin.close()
        process.stdout.close()
    storage = open_storage(place)
    left = steps_in(storage)
    assert failures == []
    assert set(left) <= held
    # The markers of the deleters stay for two horizons.
    keys = {key for key, _ in storage.walk('') if '/busy/' not in key}
    assert keys == {key for step in left for key in names[step]}


def test_a_step_that_waits_for_its_upload_since_its_deletion_was_decided_stays(tmp_path):
    """Another process overwrites the step in a local directory: its record comes before the commit."""
    storage = saved_run(tmp_path / 'run')

    class Overwritten(FaultyStorage):
        def before_operation(self, name, key):
            super().before_operation(name, key)
            if key == 'checkpoint_1' and name == 'try_lock':
                storage.make_dir('.t5ckpt/to_persist')
                storage.write(to_persist_file(1), b'overwrite')

    with pytest.raises(StepKeptError, match='waits'):
        delete_step(Overwritten(storage), 1, FakeClock(1e9))
    assert steps_in(storage) == [1, 2]


def test_the_second_of_two_deleters_is_told_at_once_that_the_step_is_gone(tmp_path):
    storage = saved_run(tmp_path / 'run')

    class Second(FaultyStorage):
        def try_lock(self, key):
            """The first deleter renames the directory before this lock."""
            lock = super().try_lock(key)
            if storage.kind(key) is not None:
                storage.publish(key, f'{key}.deleted-1000')
            return lock

    began = time.monotonic()
    with pytest.raises(CheckpointNotFoundError):
        delete_step(Second(storage), 1, time.time)
    assert time.monotonic() - began < 4


def test_what_could_not_be_removed_keeps_its_marker(tmp_path, caplog):
    class Stubborn(FaultyStorage):
        def delete_tree(self, key):
            raise StorageError(5, 'injected')

    storage = open_storage(tmp_path)
    marker = Marker(storage, 1, time.time)
    storage.make_dir(f'{marker.directory}/w')
    storage.write(f'{marker.directory}/w/0', b'')
    marker.release()
    for _ in range(2):
        collect(Stubborn(storage), time.time)
        assert [path.name for path in tmp_path.glob('checkpoint_*')] == [marker.aside]
    assert 'could not collect' in caplog.text
    collect(storage, time.time)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize('error', [StorageError(5, 'injected'), AccessDeniedError(13, 'injected')])
def test_a_save_is_complete_where_retention_cannot_write_its_marker(run, error, caplog):
    """The step goes at the next time."""

    class Refusing(FaultyStorage):
        def replace(self, key, data, version):
            if key.startswith(('busy_1.', '.t5ckpt/busy/1.')):
                raise error
            return super().replace(key, data, version)

    with t5ckpt.Checkpointer(STATE, checkpoints_dir=Refusing(run), keep=2) as ck:
        assert ck.save(STATE, step=3).step == 3
    assert 'injected' in caplog.text
    assert steps_in(run) == [1, 2, 3]
    Retention(run, KeepLatest(2), time.time).carry_out()
    assert steps_in(run) == [2, 3]


@pytest.mark.parametrize('error', [StorageError(5, 'injected'), AccessDeniedError(13, 'injected')])
def test_a_step_whose_manifest_cannot_be_read_for_a_moment_is_not_deleted(run, error):
    """Whichever read of it fails: it is the best one, and the next save decides."""

    class Failing(FaultyStorage):
        reads, fails_at = 0, 0

        def before_operation(self, name, key):
            super().before_operation(name, key)
            if name in ('read', 'heads') and 'checkpoint_1/checkpoint' in key:
                self.reads += 1
                if self.reads == self.fails_at:
                    raise error

    policy = KeepBest(1, 'loss', 'min', keep_without_metric=False)
    with t5ckpt.Checkpointer(STATE, checkpoints_dir=run) as ck:
        for step, loss in ((1, 0.1), (2, 0.5)):
            ck.save(STATE, step=step, metrics={'loss': loss}, overwrite=True)
    storage, step = Failing(run), 2
    while storage.reads >= storage.fails_at:
        storage.reads, storage.fails_at, step = 0, storage.fails_at + 1, step + 1
        with t5ckpt.Checkpointer(STATE, checkpoints_dir=storage, keep_policy=policy) as ck:
            ck.save(STATE, step=step, metrics={'loss': 0.7})
        assert 1 in steps_in(run), storage.fails_at
    assert storage.fails_at > 1
    assert steps_in(run) == [1, step]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_process_that_its_parent_does_not_wait_for_has_ended(tmp_path):
    """As in a container whose first process waits for nobody."""
    run = saved_run(tmp_path / 'run')
    code = 'import sys, time; from t5ckpt.commit.markers import *; from t5ckpt.storage import open_storage; '
    code += 'Marker(open_storage(sys.argv[1]), 1, time.time, HIDE); print("there", flush=True); time.sleep(600)'
    with subprocess.Popen([sys.executable, '-c', code, run.url()], stdout=subprocess.PIPE) as deleter:
        assert deleter.stdout.readline()
        try:
            with hold(run, 1, 60, time.time) as is_there:
                assert not is_there
        finally:
            deleter.kill()
        # Its parent, this process, waits for it at the end of the block.
        while ') Z ' not in pathlib.Path(f'/proc/{deleter.pid}/stat').read_text(encoding='utf-8'):
            time.sleep(0.01)
        with hold(run, 1, 60, time.time) as is_there:
            assert is_there
        saved_run(run.url(), [3])
        assert not list((tmp_path / 'run').glob('busy_*'))


def test_nothing_expires_where_the_time_cannot_be_read(tmp_path):
    """On a disk without room for the file that shows it, the clock of this host may be years ahead."""

    class Full(FaultyStorage):
        def server_time(self, key):
            raise NoSpaceError(errno.ENOSPC, 'injected')

    run = saved_run(tmp_path / 'run')
    key = busy_key(1, 7200, '0' * 16, in_bucket=False)
    record = {'action': 'hide', 'directories': [], 'unix': 0, 'seconds': 3600, 'owner': {'place': 'elsewhere'}}
    run.write(key, json.dumps(record).encode())
    with hold(run, 2, 60, time.time) as is_there:
        assert is_there
        collect(Full(run), FakeClock(time.time() + 10**8))
        assert run.is_file(key)
        with pytest.raises(StepKeptError):
            delete_step(Full(run), 2, FakeClock(time.time() + 10**8))


@pytest.mark.parametrize('seconds', ['NaN', '1e300', '1e400', '1' + '0' * 400, '[' * 100_000, '"x"'])
@pytest.mark.parametrize('pid', ['-1', '1' + '0' * 30, '[]'])
def test_hostile_markers_stop_no_save(seconds, pid, tmp_path):
    run = saved_run(tmp_path / 'run')
    place = json.dumps(writer_facts()['place'])
    text = '{"action": "hide", "directories": [], "unix": 1, "seconds": %s, "owner": {"place": %s, "pid": %s}}'
    key = busy_key(1, 7200, '0' * 16, in_bucket=False)
    run.write(key, (text % (seconds, place, pid)).encode())
    saved_run(run.url(), [3])
    assert t5ckpt.all_steps(run.url()) == [1, 2, 3]
    age(run, key, 7300)
    t5ckpt.pin_checkpoint(run.url('checkpoint_1'))


@pytest.mark.slow
def test_a_step_that_a_dead_deleter_has_announced_keeps_no_iterator_from_its_end(run):
    """Of another machine, so that nobody knows that it is dead. The iterator leaves the step out, and ends at its time-out."""
    record = {
        'action': 'hide',
        'directories': [],
        'unix': time.time(),
        'seconds': 3600,
        'owner': {'place': 'elsewhere'},
    }
    key = busy_key(2, int(time.time()) + 7200, 'abc', in_bucket=not run.commits_by_rename)
    run.write(key, json.dumps(record).encode())
    assert list(t5ckpt.checkpoints_iterator(run, timeout=1, poll_seconds=0.1, hold_seconds=60)) == [1]


def test_a_hold_that_cannot_be_removed_ends_no_evaluation(run, caplog):
    class Refusing(FaultyStorage):
        def delete_file(self, key):
            if 'held_' in key:
                raise StorageError(5, 'injected')
            super().delete_file(key)

    latest = max(t5ckpt.all_steps(run.url()))
    assert list(t5ckpt.checkpoints_iterator(Refusing(run), timeout=0, hold_seconds=60))[-1] == latest
    assert 'kept from deletion for up to 60 s' in caplog.text
