"""Write leases and read leases: who excludes whom, with the other process acting at exactly one operation."""

import itertools
import json
import math
import os
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
from t5ckpt.commit.dataset_files import remove_old_datasets
from t5ckpt.commit.deletion import delete_step, remove_hidden
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.lease_files import write_leases_of
from t5ckpt.commit.lease_owner import REPLACE, SAVE
from t5ckpt.commit.pins import pin_in
from t5ckpt.commit.read_lease import read_lease
from t5ckpt.commit.retention import Retention
from t5ckpt.commit.step_lease import BeingWrittenError, StepTakenError, acquire_lease
from t5ckpt.commit.strategy import open_transaction, strategy_of
from t5ckpt.commit.transaction import TransactionOptions
from t5ckpt.errors import AccessDeniedError, StepKeptError, StorageError, T5CkptError, UnsupportedFormatError
from t5ckpt.format.names import TRAIN_DS_PREFIX, busy_key, deleting_file, read_lease_file
from t5ckpt.policies import KeepLatest
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


def plant(storage, step, **facts):
    """The write lease of a process of another machine."""
    owner = {'nonce': '0', 'host': 'other', 'place': 'elsewhere', 'pid': 1, 'born': '1', 'beat': time.time()}
    storage.write(busy_key(step, 'other'), json.dumps(owner | facts).encode())


def test_a_lease_of_another_process_is_neither_overwritten_nor_removed():
    """Not by who finds it, and not by an owner that was taken over and then releases its own."""
    storage = open_storage(f'memory://{uuid.uuid4().hex}/run')
    clock = FakeClock()
    lease = acquire_lease(storage, 1, clock)
    storage.delete_file(lease.key)
    plant(storage, 1, beat=clock())
    assert not lease.is_ours()
    lease.release()
    assert [each.nonce for each in write_leases_of(storage, 1)] == ['other']
    with pytest.raises(BeingWrittenError, match='process 1 on other'):
        acquire_lease(storage, 1, clock, 'mend')
    assert [each.nonce for each in write_leases_of(storage, 1)] == ['other']
    clock.advance(601)
    lease = acquire_lease(storage, 1, clock, REPLACE)
    assert [each.key for each in write_leases_of(storage, 1)] == [lease.key]
    assert [owner.host for owner in lease.predecessors] == ['other']
    lease.release()
    # A request of the dead owner may arrive for an hour, so garbage collection inspects the step again.
    assert [each.key for each in write_leases_of(storage, 1)] == [lease.key]
    clock.advance(3601)
    collect(storage, clock)
    assert write_leases_of(storage, 1) == []


def test_a_late_file_of_a_pin_is_collected_after_a_deletion_of_an_hour():
    """The pin is killed and its file arrives after the deleter has listed the files, which needs an hour to remove them."""
    run, clock = saved_run(f'memory://{uuid.uuid4().hex}/run'), FakeClock()

    class Dying(FaultyStorage):
        def write(self, key, data):
            if key.endswith('PINNED'):
                raise Killed
            super().write(key, data)

    with pytest.raises(Killed):
        pin_in(Dying(run), 'checkpoint_1', '1', clock)
    hidden = strategy_of(run).hide(run, 1, clock)
    run.write('checkpoint_1/PINNED', b'1')
    clock.advance(4000)
    remove_hidden(run, hidden, clock)
    assert [key for key, _ in run.walk('checkpoint_1')] == ['checkpoint_1/PINNED']
    clock.advance(3601)
    collect(run, clock)
    assert list(run.walk('checkpoint_1')) == []
    assert write_leases_of(run, 1) == []


@pytest.mark.parametrize('compares', [True, False])
@pytest.mark.parametrize('is_removed', [False, True])
def test_a_heartbeat_that_takes_longer_than_the_lease(compares, is_removed):
    """A record that is there shows that no process has taken the step over, where the store compares versions."""
    storage, clock = open_storage(f'memory://{uuid.uuid4().hex}/run'), FakeClock()

    class Late(FaultyStorage):
        compares_versions = compares

        def before_operation(self, name, key):
            super().before_operation(name, key)
            if name in ('write', 'replace') and lease is not None:
                clock.advance(700)
                if is_removed:
                    storage.delete_file(key)

    lease = None
    lease = acquire_lease(Late(storage), 1, clock)
    lease.update(REPLACE)
    assert lease.is_ours() is (compares and not is_removed)
    assert lease.last_beat == -math.inf or is_removed
    lease.update(SAVE)
    assert lease.is_ours() is (compares and not is_removed)
    assert len(write_leases_of(storage, 1)) == (not (compares and is_removed))
    lease.close()


def test_a_heartbeat_whose_reply_was_lost_does_not_lose_the_lease():
    storage, clock = open_storage(f'memory://{uuid.uuid4().hex}/run'), FakeClock()

    class Lost(FaultyStorage):
        is_lost = False

        def replace(self, key, data, version):
            written = super().replace(key, data, version)
            if self.is_lost:
                self.is_lost = False
                raise StorageError(5, 'injected: the reply was lost')
            return written

    lossy = Lost(storage)
    lease = acquire_lease(lossy, 1, clock)
    lossy.is_lost = True
    with pytest.raises(StorageError, match='the reply was lost'):
        lease.update(REPLACE)
    lease.update(SAVE)
    assert lease.is_ours()
    lease.release()
    assert write_leases_of(storage, 1) == []


def test_a_clock_that_runs_fast_does_not_shorten_a_wait():
    """The other owner needs half a second, in which this clock runs for eight minutes."""
    storage, start = open_storage(f'memory://{uuid.uuid4().hex}/run'), time.monotonic()

    def clock():
        return 1e9 + 1000 * (time.monotonic() - start)

    plant(storage, 1, beat=clock(), action='delete')
    timer = threading.Timer(0.5, storage.delete_file, [busy_key(1, 'other')])
    timer.start()
    acquire_lease(storage, 1, clock).release()
    timer.join()


def test_not_both_of_two_processes_give_a_step_up():
    """At its last attempt each finds the record of the other. The one that removes its own later goes on."""
    storage, until = open_storage(f'memory://{uuid.uuid4().hex}/run'), time.monotonic() + 5

    class Last(FaultyStorage):
        def delete_file(self, key):
            super().delete_file(key)
            if time.monotonic() > until:
                storage.delete_file(busy_key(1, 'other'))

    plant(storage, 1)
    acquire_lease(Last(storage), 1, time.time).release()


def test_a_deletion_that_fails_before_it_hides_leaves_no_lease(run):
    """A reader would wait for it."""

    class Failing(FaultyStorage):
        def before_operation(self, name, key):
            super().before_operation(name, key)
            if (name, key) in (('read', 'checkpoint_1/checkpoint'), ('publish', key)) and '_1' in key:
                raise StorageError(5, 'injected')

    with pytest.raises(StorageError, match='injected'):
        strategy_of(Failing(run)).hide(Failing(run), 1, time.time)
    assert write_leases_of(run, 1) == []
    with read_lease(run, 1, 60, time.time) as is_there:
        assert is_there


def test_a_deleter_that_was_killed_is_not_waited_for(run):
    """Its lease stays; the step is as it was, and garbage collection removes the lease."""

    class Killed(FaultyStorage):
        def before_operation(self, name, key):
            super().before_operation(name, key)
            # With its lease, before anything is hidden; nothing that it does afterwards has an effect.
            if name in ('names', 'walk') and self.operations[0][0] != 'read':
                self._fail_at, self._sticky = 0, True
                raise self._error

    with pytest.raises(StorageError):
        strategy_of(Killed(run)).hide(Killed(run), 1, time.time)
    assert len(write_leases_of(run, 1)) == 1
    began = time.monotonic()
    with read_lease(run, 1, 60, time.time) as is_there:
        assert is_there
    assert time.monotonic() - began < 2
    saved_run(run.url(), [3])
    assert run.commits_by_rename == (write_leases_of(run, 1) == [])
    collect(run, lambda: time.time() + 7200)
    assert write_leases_of(run, 1) == []
    assert t5ckpt.all_steps(run.url()) == [1, 2, 3]
    remove_hidden(run, strategy_of(run).hide(run, 1, time.time), time.time)
    assert t5ckpt.all_steps(run.url()) == [2, 3]


def test_a_retention_that_fails_half_way_keeps_no_lease():
    """Step 1 is hidden by then. Its lease would be renewed until the process ends, and its files would stay."""

    class Failing(FaultyStorage):
        def names(self, key, beginning):
            if beginning == TRAIN_DS_PREFIX:
                raise StorageError(5, 'injected')
            return super().names(key, beginning)

    run = saved_run(f'memory://{uuid.uuid4().hex}/run')
    retention = Retention(Failing(run), KeepLatest(1), time.time, 1)
    with pytest.raises(StorageError, match='injected'):
        retention.carry_out()
    retention.wait()
    assert write_leases_of(run, 1) == []
    assert list(run.walk('checkpoint_1')) == []


def test_where_nothing_may_be_deleted_each_save_leaves_few_records():
    """By a role that may only add objects. The records of all saves were replaced by new ones, which stayed as well."""

    class AddOnly(FaultyStorage):
        def _refuse(self, *_):
            raise AccessDeniedError(13, 'injected')

        delete_file = delete_files = delete_tree = delete_unchanged = _refuse

    inner, clock, counts = open_storage(f'memory://{uuid.uuid4().hex}/run'), FakeClock(), []
    with t5ckpt.Checkpointer(STATE, checkpoints_dir=AddOnly(inner), keep=2, clock=clock) as ck:
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
from t5ckpt.integrity.verify import verify_located
from t5ckpt.policies import KeepLatest
from t5ckpt.storage import open_storage
place, kind = sys.argv[1], {'write': WRITE, 'rename': RENAME}[sys.argv[2]]
# The first change that a deletion makes is its lease.
Shim().arm(place, 0, KILL, classes=kind)
delete_step(open_storage(place), 2, time.time)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize('call', ['write', 'rename'])
def test_the_partial_lease_of_a_deleter_that_was_killed_is_collected(call, tmp_path):
    """It is empty, or whole and not renamed yet. The step is there, and the next save removes the file."""
    run = saved_run(tmp_path / 'run', (1, 2, 3))
    killed = subprocess.run(
        [sys.executable, '-c', _KILLED_DELETER, tmp_path / 'run', call],
        env={**os.environ, 'LD_PRELOAD': str(faultshim.build(tmp_path)), 'PYTHONPATH': os.pathsep.join(sys.path)},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    (partial,) = (tmp_path / 'run').glob('deleting_2.*.__partial')
    assert (partial.stat().st_size > 0) is (call == 'rename')
    assert t5ckpt.all_steps(tmp_path / 'run') == [1, 2, 3]
    saved_run(run.url(), [4])
    assert {path.name for path in (tmp_path / 'run').iterdir()} == {f'checkpoint_{step}' for step in range(1, 5)}


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


def test_the_file_of_a_pin_that_was_killed_is_collected():
    """The step was deleted before the file was written. On a file system its directory is gone then."""
    run = saved_run(f'memory://{uuid.uuid4().hex}/run')

    class Dying(FaultyStorage):
        def write(self, key, data):
            if key.endswith('PINNED'):
                delete_step(run, 1, time.time)
                super().write(key, data)
                raise Killed
            super().write(key, data)

    with pytest.raises(Killed):
        pin_in(Dying(run), 'checkpoint_1', '1', time.time)
    assert [key for key, _ in run.walk('checkpoint_1')] == ['checkpoint_1/PINNED']
    collect(run, lambda: time.time() + 7200)
    assert list(run.walk('checkpoint_1')) == []
    assert write_leases_of(run, 1) == []
    pin_in(run, 'checkpoint_2', '1', time.time)
    assert write_leases_of(run, 2) == []


def saves(storage):
    with pytest.raises(StepTakenError):
        open_transaction(storage, 1, time.time)


def deletes_what_is_pinned(storage):
    with read_lease(storage, 1, 60, time.time):
        assert strategy_of(storage).hide(storage, 1, time.time) is None


def strips(storage):
    for step in (1, 2):
        storage.write(f'checkpoint_{step}/train_ds-000-of-001', b'x')
    remove_old_datasets(storage, [1, 2], 1, None, time.time)
    assert not storage.names('checkpoint_1', 'train_ds')


def fails_to_overwrite(storage):
    collect(storage, time.time)
    open_transaction(storage, 1, time.time, TransactionOptions(may_replace=lambda: True)).rollback()


@pytest.mark.parametrize('act', [saves, deletes_what_is_pinned, strips, fails_to_overwrite])
def test_who_takes_a_lease_over_and_finishes_nothing_leaves_a_record(act):
    """A writer of another machine died after its manifest. Its requests may still arrive, and are collected an hour later."""
    run = saved_run(f'memory://{uuid.uuid4().hex}/run')
    plant(run, 1, beat=time.time() - 700)
    act(run)
    assert write_leases_of(run, 1)
    collect(run, FakeClock(time.time() + 4000))
    assert steps_in(run) == [1, 2]
    assert write_leases_of(run, 1) == []


def test_on_an_object_store_clocks_may_not_differ_by_more_than_ten_minutes():
    """TensorStore passes on no time of the server. docs/storage.md says so."""
    run = saved_run(f'memory://{uuid.uuid4().hex}/run')
    with read_lease(run, 1, 60, time.time) as is_there:
        assert is_there
        with pytest.raises(StepKeptError):
            delete_step(run, 1, FakeClock(time.time() + 500))
        delete_step(run, 1, FakeClock(time.time() + 7200))
        assert steps_in(run) == [2]


@pytest.mark.parametrize('ahead', [-(10**8), 10**8])
def test_on_a_file_system_no_clock_of_a_host_counts(ahead, tmp_path):
    """The age of a lease is that of its file, by the clock of the file server."""
    run, clock = saved_run(tmp_path / 'run'), FakeClock(time.time() + ahead)
    key = deleting_file(1, 'other')
    owner = {
        'nonce': 'a',
        'host': 'other',
        'place': 'elsewhere',
        'pid': 1,
        'born': '1',
        'beat': clock(),
        'action': 'delete',
    }
    run.write(key, json.dumps(owner).encode())
    with pytest.raises(BeingWrittenError, match='process 1 on other'):
        acquire_lease(run, 1, time.time, 'mend')
    age(run, key, 590)
    with pytest.raises(BeingWrittenError):
        acquire_lease(run, 1, FakeClock(time.time() + 10**6), 'mend')
    age(run, key, 610)
    acquire_lease(run, 1, time.time, 'mend').release()
    assert write_leases_of(run, 1) == []
    with read_lease(run, 1, 60, clock) as is_there:
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
    for name in ('held_0.0.0123456789abcdefs0', 'held_0.0.fedcba9876543210s0.__partial'):
        run.write(name, b'')
        age(run, name, 1)
    saved_run(run.url(), [3])
    assert {path.name for path in (tmp_path / 'run').iterdir()} == {f'checkpoint_{step}' for step in (1, 2, 3)}


def test_leases_of_a_clock_years_ahead_are_named(caplog):
    run = saved_run(f'memory://{uuid.uuid4().hex}/run')
    plant(run, 1, beat=4102444800.0)
    held = f'.t5ckpt/{read_lease_file(2, 4102444800, 60, "0" * 16)}'
    run.write(held, b'')
    collect(run, FakeClock(1_700_000_000.0))
    for key in (busy_key(1, 'other'), held):
        assert f'{run.url(key)} expires at 2100-01-01 00:' in caplog.text
    assert 'now is 2023-11-14 22:13:20 UTC' in caplog.text
    assert 'If the owner has ended, remove the file' in caplog.text
    caplog.clear()
    for key in (busy_key(1, 'other'), held):
        run.delete_file(key)
    with read_lease(run, 2, 60, time.time):
        plant(run, 1)
        collect(run, time.time)
    assert caplog.text == ''


class _LockedOnce(FaultyStorage):
    """Another process has the lock of a directory, and releases it after the first attempt to get it."""

    other = None

    def try_lock(self, key):
        found = super().try_lock(key)
        if self.other is not None:
            assert found is None
            self.other.close()
            self.other = None
        return found


def test_a_hidden_step_that_is_locked_for_a_moment_is_removed(tmp_path):
    """A rival that wants to hide the same step may have opened its directory before the rename."""
    state = {'w': np.ones(64)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, inline_bytes=0) as ck:
        ck.save(state, step=1)
    storage = _LockedOnce(open_storage(tmp_path))
    hidden = strategy_of(storage).hide(storage, 1, time.time)
    storage.other = open_storage(tmp_path).try_lock(hidden.directory)
    remove_hidden(storage, hidden, time.time)
    assert not (tmp_path / hidden.directory).exists()


_DELETER = """
import sys, time
from t5ckpt.commit.deletion import remove_hidden
from t5ckpt.commit.strategy import strategy_of
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.integrity.verify import verify_located
from t5ckpt.policies import KeepLatest
from t5ckpt.storage import open_storage
storage, steps = open_storage(sys.argv[1]), range(int(sys.argv[2]))
print('ready', flush=True)
sys.stdin.readline()
for step in steps:
    try:
        hidden = strategy_of(storage).hide(storage, step, time.time)
    except CheckpointNotFoundError:
        continue
    if hidden is not None:
        remove_hidden(storage, hidden, time.time)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_deleters_and_readers_in_processes_of_their_own(bucket):
    """A lease that was obtained means that every file can be read until its release; what nobody leased is gone."""
    place, count = bucket.url(), 12
    with t5ckpt.Checkpointer({'w': np.ones(64)}, checkpoints_dir=place, inline_bytes=0) as ck:
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
                with read_lease(storage, step, 60, time.time) as is_there:
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
    keys = {key for key, _ in storage.walk('')}
    expected = {key for step in left for key in names[step]}
    assert keys == expected
