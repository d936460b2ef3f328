"""Write leases and read leases: who excludes whom, with the other process acting at exactly one operation."""

import json
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
from support.schedules import Killed, Schedule, kills, run_schedule, schedules

import t5ckpt
from t5ckpt.catalog.listing import steps_in
from t5ckpt.catalog.locate import Located
from t5ckpt.commit.begin import begin
from t5ckpt.commit.dataset_files import remove_old_datasets
from t5ckpt.commit.deletion import delete_step, hide_checkpoint, remove_hidden, rename_damaged
from t5ckpt.commit.garbage_collection import collect, collect_leftovers
from t5ckpt.commit.lease_files import write_leases_of
from t5ckpt.commit.pins import pin_in
from t5ckpt.commit.read_lease import read_lease
from t5ckpt.commit.step_lease import BeingWrittenError, StepTakenError, acquire_lease
from t5ckpt.commit.transaction import writer_facts
from t5ckpt.errors import CheckpointNotFoundError, StepKeptError, StorageError, T5CkptError, UnsupportedFormatError
from t5ckpt.format.names import busy_key, deleting_file, index_complete, read_lease_file
from t5ckpt.integrity.verify import verify_located
from t5ckpt.storage import open_storage
from t5ckpt.testing import FakeClock, FaultyStorage

STATE = {'w': [1.0]}


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
    lease = acquire_lease(storage, 1, clock)
    assert [each.key for each in write_leases_of(storage, 1)] == [lease.key]
    assert [owner.host for owner in lease.predecessors] == ['other']
    lease.release()
    # A request of the dead owner may arrive for an hour, so garbage collection inspects the step again.
    assert [each.key for each in write_leases_of(storage, 1)] == [lease.key]
    clock.advance(3601)
    collect_leftovers(storage, clock)
    assert write_leases_of(storage, 1) == []


def test_a_deletion_that_fails_before_it_hides_leaves_no_lease(run):
    """A reader would wait for it."""

    class Failing(FaultyStorage):
        def _count(self, name, key):
            super()._count(name, key)
            if (name, key) in (('read', 'checkpoint_1/checkpoint'), ('publish', key)) and '_1' in key:
                raise StorageError(5, 'injected')

    with pytest.raises(StorageError, match='injected'):
        hide_checkpoint(Failing(run), 1, time.time)
    assert write_leases_of(run, 1) == []
    with read_lease(run, 1, 60, time.time) as is_there:
        assert is_there


def test_a_deleter_that_was_killed_is_not_waited_for(run):
    """Its lease stays; the step is as it was, and garbage collection removes the lease."""

    class Killed(FaultyStorage):
        def _count(self, name, key):
            super()._count(name, key)
            # With its lease, before anything is hidden; nothing that it does afterwards has an effect.
            if name in ('names', 'walk') and self.operations[0][0] != 'read':
                self._fail_at, self._sticky = 0, True
                raise self._error

    with pytest.raises(StorageError):
        hide_checkpoint(Killed(run), 1, time.time)
    assert len(write_leases_of(run, 1)) == 1
    began = time.monotonic()
    with read_lease(run, 1, 60, time.time) as is_there:
        assert is_there
    assert time.monotonic() - began < 2
    saved_run(run.url(), [3])
    assert run.commits_by_rename == (write_leases_of(run, 1) == [])
    collect_leftovers(run, lambda: time.time() + 7200)
    assert write_leases_of(run, 1) == []
    assert t5ckpt.all_steps(run.url()) == [1, 2, 3]
    remove_hidden(run, hide_checkpoint(run, 1, time.time), time.time)
    assert t5ckpt.all_steps(run.url()) == [2, 3]


_KILLED_DELETER = """
import sys, time
from support.faultshim import KILL, RENAME, WRITE, Shim
from t5ckpt.commit.deletion import delete_step
from t5ckpt.integrity.verify import verify_located
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
def test_a_pin_without_a_checkpoint_is_in_nobodys_way(bucket):
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
    collect_leftovers(run, lambda: time.time() + 7200)
    assert list(run.walk('checkpoint_1')) == []
    assert write_leases_of(run, 1) == []
    pin_in(run, 'checkpoint_2', '1', time.time)
    assert write_leases_of(run, 2) == []


def saves(storage):
    with pytest.raises(StepTakenError):
        begin(storage, 1, time.time, writer_facts())


def deletes_what_is_pinned(storage):
    with read_lease(storage, 1, 60, time.time):
        assert hide_checkpoint(storage, 1, time.time) is None


def strips(storage):
    for step in (1, 2):
        storage.write(f'checkpoint_{step}/train_ds-000-of-001', b'x')
    strip(storage)
    assert not storage.names('checkpoint_1', 'train_ds')


def fails_to_overwrite(storage):
    collect(storage, time.time)
    begin(storage, 1, time.time, writer_facts(), None, lambda: True).rollback()


@pytest.mark.parametrize('act', [saves, deletes_what_is_pinned, strips, fails_to_overwrite])
def test_who_takes_a_lease_over_and_finishes_nothing_leaves_a_record(act):
    """A writer of another machine died between its manifest and the marker. Only its lease shows the step to a listing."""
    run = saved_run(f'memory://{uuid.uuid4().hex}/run')
    run.delete_file('.t5ckpt/steps/1')
    plant(run, 1, beat=time.time() - 700)
    act(run)
    assert steps_in(run) == [1, 2]
    collect_leftovers(run, FakeClock(time.time() + 4000))
    assert run.is_file('.t5ckpt/steps/1')
    assert write_leases_of(run, 1) == []


# The manifest, the sidecar, the file checksums, and a metadata file and a chunk.
FILES = 5

# --- every order of two processes' operations ------------------------------------------------------------------------


def clock_of(storage):
    """The actor's clock."""
    return getattr(storage, 'clock', time.time)


def delete(storage):
    delete_step(storage, 1, clock_of(storage))
    return 'deleted'


def read(storage):
    with read_lease(storage, 1, 600, clock_of(storage)) as is_there:
        if not is_there:
            return 'gone'
        manifest = storage.read('checkpoint_1/checkpoint')
        for key in [key for key, _ in storage.walk('checkpoint_1')]:
            storage.read(key)
        assert storage.read('checkpoint_1/checkpoint') == manifest, 'another checkpoint took its place'
        return 'read'


def save(storage, *, overwrite=False):
    state = {'w': np.full(64, 2.0 if overwrite else 1.0)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=storage, inline_bytes=0, clock=clock_of(storage)) as ck:
        return 'skipped' if ck.save(state, step=1, overwrite=overwrite) is None else 'saved'


def overwrite(storage):
    return save(storage, overwrite=True)


def pin(storage):
    try:
        pin_in(storage, 'checkpoint_1', '1', clock_of(storage))
    except CheckpointNotFoundError:
        return 'gone'
    except StorageError:
        return 'undecided'
    return 'pinned'


def put_aside(storage):
    """What ``restore_or_init`` does with a damaged step."""
    rename_damaged(storage, 1, clock_of(storage))
    return 'deleted'


def strip(storage):
    remove_old_datasets(storage, [1, 2], 1, None, clock_of(storage))


def save_again(storage):
    try:
        delete(storage)
    except StepKeptError:
        return 'kept'
    return save(storage)


def _source():
    """The run of which each schedule has a copy."""
    source = open_storage('memory://t5ckpt-test-leases/run')
    if not source.is_file('checkpoint_1/checkpoint'):
        with t5ckpt.Checkpointer({'w': np.ones(64)}, checkpoints_dir=source, inline_bytes=0) as ck:
            for step in (1, 2):
                ck.save({'w': np.ones(64)}, step=step)
    return source


def copied_run(kind, directory):
    """A run with the steps 1 and 2."""
    source = _source()
    target = open_storage(directory if kind == 'file' else f'memory://{uuid.uuid4().hex}/run')
    for key, _ in source.walk(''):
        if kind == 'file' and not key.startswith('.t5ckpt'):
            (directory / key).parent.mkdir(parents=True, exist_ok=True)
            (directory / key).write_bytes(source.read(key))
        elif kind == 'memory':
            name = index_complete(target.url()) if key.startswith('.t5ckpt/complete') else key
            target.write(name, source.read(key))
    for step in (1, 2):
        for part in range(3):
            target.write(f'checkpoint_{step}/train_ds-00{part}-of-003', b'x')
    return target


def check(storage, actors, found):
    """Nothing is half there, nobody was told what is not so, and garbage collection leaves nothing behind."""
    values = [outcome.value for outcome in found]
    for actor, outcome in zip(actors, found, strict=True):
        allowed = (Killed,) if actor in (read, pin) else (Killed, CheckpointNotFoundError, StepKeptError)
        assert outcome.error is None or isinstance(outcome.error, allowed), repr(outcome.error)
    is_killed = any(isinstance(outcome.error, Killed) for outcome in found)
    is_there = 1 in steps_in(storage)
    assert not (is_there and 'deleted' in values) or 'saved' in values or is_killed
    assert is_there or 'deleted' in values or is_killed
    assert 'pinned' not in values or (is_there and storage.is_file('checkpoint_1/PINNED'))
    for name in storage.names('', 'held_') if storage.commits_by_rename else ():
        age(storage, name, 8000)
    collect_leftovers(storage, FakeClock(time.time() + 8000))
    was_there, is_there = is_there, 1 in steps_in(storage)
    # The new checkpoint of an overwriter that was killed was whole, and now has the place of the one that was deleted.
    assert was_there is is_there or (is_there and is_killed and overwrite in actors)
    left = {key for key, _ in storage.walk('')}
    of_step = {key for key in left if key.startswith('checkpoint_1/')} - {'checkpoint_1/PINNED'}
    of_step = {key for key in of_step if 'train_ds' not in key and 'DATASET_REMOVED' not in key}
    assert len(of_step) == (FILES if is_there else 0), of_step
    assert (
        not is_there or verify_located(Located(storage, 'checkpoint_1', 'checkpoint', 1), full=True, progress=None).ok
    )
    assert not [key for key in left if any(word in key for word in ('busy', 'deleting_', 'held_'))]
    assert storage.commits_by_rename or ('.t5ckpt/steps/1' in left) is is_there
    # A pin that was killed is in nobody's way.
    assert is_there or save(storage) == 'saved'
    assert is_there or not storage.is_file('checkpoint_1/PINNED')


@pytest.mark.slow
@pytest.mark.parametrize(
    ('kind', 'actors'),
    [
        *(('memory', (delete, other)) for other in (delete, read, save, pin)),
        ('memory', (save_again, pin)),
        ('memory', (strip, read)),
        ('memory', (strip, delete)),
        *(('file', (delete, other)) for other in (read, save, overwrite)),
        *(('file', (other, read)) for other in (overwrite, put_aside, strip)),
    ],
    ids=lambda value: value if isinstance(value, str) else '-'.join(actor.__name__ for actor in value),
)
def test_two_processes_in_every_order_with_one_switch(kind, actors, tmp_path, caplog):
    """Also where one of them is killed at an operation, and some orders with two switches."""
    caplog.set_level('ERROR', 't5ckpt')
    _source()
    serial = [run_schedule(copied_run(kind, tmp_path / str(first)), actors, Schedule(first)) for first in (0, 1)]
    counts = [max(len(found[actor].operations) for found in serial) for actor in (0, 1)]
    stride = 1 if kind == 'memory' else 3
    orders = [
        *schedules(counts, 1),
        *kills(counts),
        *kills(counts, after_other=True),
        *schedules(counts, 2, stride=97),
        *(Schedule(first, (1, count, 1)) for first in (0, 1) for count in range(counts[1 - first])),
    ][::stride]
    for index, order in enumerate(orders):
        storage = copied_run(kind, tmp_path / f'run{index}')
        found = run_schedule(storage, actors, order)
        try:
            check(storage, actors, found)
        except AssertionError as error:
            raise AssertionError(f'{order}: {[outcome.value or outcome.error for outcome in found]}') from error


@pytest.mark.parametrize('kind', ['memory', 'file'])
def test_a_pin_that_meets_a_deleter_that_stalls_and_is_killed(kind, tmp_path):
    """The deleter stands still for longer than the pin waits, does one more operation and is killed."""
    _source()
    serial = run_schedule(copied_run(kind, tmp_path / 'serial'), (delete, pin), Schedule(0))
    values = set()
    for index, order in enumerate(kills((len(serial[0].operations), 0), after_other=True, stalls=True)):
        storage = copied_run(kind, tmp_path / f'run{index}')
        found = run_schedule(storage, (delete, pin), order)
        values.add(found[1].value)
        assert found[1].value != 'pinned' or 1 in steps_in(storage), order
        assert (found[1].value == 'pinned') is storage.is_file('checkpoint_1/PINNED'), order
    assert values == {'pinned', 'undecided', 'gone'}


@pytest.mark.slow
@pytest.mark.parametrize(
    ('kind', 'ahead', 'actors'),
    [
        *(('file', seconds, (delete, read)) for seconds in (7200, -7200)),
        *(('file', seconds, (overwrite, read)) for seconds in (7200, -7200)),
        ('file', 7200, (delete, save)),
        *(('memory', seconds, (delete, read)) for seconds in (500, -500)),
        ('memory', 500, (delete, save)),
    ],
    ids=lambda value: str(value) if not isinstance(value, tuple) else '-'.join(actor.__name__ for actor in value),
)
def test_two_machines_whose_clocks_differ(kind, ahead, actors, tmp_path):
    """On file systems by any time, on object stores by less than ten minutes."""
    _source()
    machines = (ahead, 0.0)
    serial = [
        run_schedule(copied_run(kind, tmp_path / str(first)), actors, Schedule(first), machines) for first in (0, 1)
    ]
    counts = [max(len(found[actor].operations) for found in serial) for actor in (0, 1)]
    for index, order in enumerate(schedules(counts, 1)):
        storage = copied_run(kind, tmp_path / f'run{index}')
        found = run_schedule(storage, actors, order, machines)
        try:
            check(storage, actors, found)
        except AssertionError as error:
            raise AssertionError(f'{order}: {[outcome.value or outcome.error for outcome in found]}') from error


def test_on_an_object_store_clocks_may_not_differ_by_more_than_ten_minutes(tmp_path):
    """TensorStore passes on no time of the server. docs/storage.md says so."""
    _source()
    found = run_schedule(copied_run('memory', tmp_path), (delete, read), Schedule(1, (4,)), (7200, 0.0))
    assert found[0].value == 'deleted'
    assert isinstance(found[1].error, CheckpointNotFoundError)


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
    collect_leftovers(run, FakeClock(1_700_000_000.0))
    for key in (busy_key(1, 'other'), held):
        assert f'{run.url(key)} expires at 2100-01-01 00:' in caplog.text
    assert 'now is 2023-11-14 22:13:20 UTC' in caplog.text
    assert 'If the owner has ended, remove the file' in caplog.text
    caplog.clear()
    for key in (busy_key(1, 'other'), held):
        run.delete_file(key)
    with read_lease(run, 2, 60, time.time):
        plant(run, 1)
        collect_leftovers(run, time.time)
    assert caplog.text == ''


_DELETER = """
import sys, time
from t5ckpt.commit.deletion import hide_checkpoint, remove_hidden
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.integrity.verify import verify_located
from t5ckpt.storage import open_storage
storage, steps = open_storage(sys.argv[1]), range(int(sys.argv[2]))
print('ready', flush=True)
sys.stdin.readline()
for step in steps:
    try:
        hidden = hide_checkpoint(storage, step, time.time)
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
    assert keys == expected | {f'.t5ckpt/steps/{step}' for step in left} | {index_complete(storage.url())}
