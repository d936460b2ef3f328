"""Every storage operation of a save fails once: nothing that was there is lost, nothing unfinished shows."""

import errno
import json
import os
import socket
import subprocess
import time
import uuid

import numpy as np
import pytest
from support import forked
from support.options import with_options

import t5ckpt
from t5ckpt import errors
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.markers import announcement_directory
from t5ckpt.commit.transaction import Transaction
from t5ckpt.core.keys import join
from t5ckpt.format.names import hold_file
from t5ckpt.storage import open_storage
from t5ckpt.testing import FakeClock, FaultyStorage, mixed_state


def place_of(kind, tmp_path):
    return f'memory://{uuid.uuid4().hex}/run' if kind == 'memory' else str(tmp_path / 'run')


def open_faulty(place, kind, *arguments, **options):
    direct = {'direct_bytes': 1} if kind == 'direct' else None
    return FaultyStorage(open_storage(place, direct), *arguments, **options)


def save(storage, step, clock, **options):
    state = mixed_state()
    with t5ckpt.Checkpointer(
        state, checkpoints_dir=storage, **with_options(clock=clock, inline_bytes=64, **options)
    ) as ck:
        return ck.save(mixed_state(step), step=step)


def check(place, steps):
    assert t5ckpt.all_steps(place) == steps
    for step in steps:
        loaded = t5ckpt.load_t5x_checkpoint(place, step)
        assert np.array_equal(loaded['params']['w'], mixed_state(step)['params']['w'])
        assert np.array_equal(loaded['list']['2'], np.arange(9000))


def operations(kind, tmp_path, options):
    """How many operations the second save of a run takes."""
    place = place_of(kind, tmp_path / 'count')
    save(place, 1, FakeClock(), **options)
    faulty = open_faulty(place, kind)
    save(faulty, 2, FakeClock(), **options)
    assert any(name == 'write_chunk' for name, _ in faulty.operations)
    return len(faulty.operations)


ENCODED = {'reuse_unchanged': False, 'compression': 'zstd', 'keep': 1}


@pytest.mark.parametrize('sticky', [False, True])
@pytest.mark.parametrize(
    ('kind', 'options'),
    [
        ('file', {}),
        # Storages differ in how a chunk is written and a step published, options in what a save does around that.
        *[
            pytest.param(kind, options, marks=pytest.mark.slow)
            for kind, options in [
                ('file', {'keep': 1}),
                ('file', ENCODED),
                ('direct', ENCODED),
                ('memory', {}),
                ('memory', {'keep': 1}),
            ]
        ],
    ],
)
def test_a_fault_at_every_operation(tmp_path, kind, options, sticky):
    count = operations(kind, tmp_path, options)
    assert count > 15
    raised = 0
    for fail_at in range(count):
        place = place_of(kind, tmp_path / str(fail_at))
        clock = FakeClock()
        save(place, 1, clock)
        faulty = open_faulty(place, kind, fail_at, sticky=sticky)
        try:
            done = save(faulty, 2, clock, **options)
        except errors.T5CkptError as error:
            raised += 'injected' in str(error)
            assert t5ckpt.all_steps(place) == [1]
        else:
            assert done is not None
            # Retention may have failed, which is logged, but the save has not.
            assert 2 in t5ckpt.all_steps(place)
        check(place, t5ckpt.all_steps(place))
        save(place, 3, clock, keep=1)
        check(place, [3])
        # Longer than two of the horizons of commit/markers.py.
        clock.advance(7300)
        save(place, 4, clock)
        left = {entry.name for entry in open_storage(place).entries()}
        assert left - {'.t5ckpt'} == {'checkpoint_3', 'checkpoint_4'}
        assert not list(open_storage(place).walk('.t5ckpt/busy'))
    assert raised > 10


def test_another_error_comes_through(tmp_path):
    faulty = FaultyStorage(open_storage(tmp_path), 5, error=errors.AccessDeniedError(errno.EACCES, 'injected: no'))
    with pytest.raises(errors.AccessDeniedError, match='injected: no'):
        save(faulty, 1, FakeClock())


# --- what the dead leave --------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
import numpy as np
import t5ckpt
from t5ckpt.storage import open_storage
from t5ckpt.testing import FaultyStorage

class Last(FaultyStorage):
    def publish(self, source, target):
        os.kill(os.getpid(), signal.SIGKILL)

ck = t5ckpt.Checkpointer({'w': np.ones(3)}, checkpoints_dir=Last(open_storage(sys.argv[1])))
ck.save({'w': np.ones(3)}, step=1)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_what_a_save_that_is_killed_in_its_commit_leaves_goes_at_once(tmp_path):
    forked.run(KILLED, tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    collect(open_storage(tmp_path), time.time)
    assert os.listdir(tmp_path) == []


LIVE = """
import sys, time
from t5ckpt.commit.transaction import Transaction
from t5ckpt.storage import open_storage
work = Transaction(open_storage(sys.argv[1]), 1, time.time)
print(work.directory, flush=True)
time.sleep(60)
"""


@pytest.mark.multiprocess
def test_a_live_save_is_left_alone(tmp_path):
    storage = open_storage(tmp_path)
    with forked.start(LIVE, tmp_path, stdout=subprocess.PIPE) as writer:
        try:
            directory = writer.stdout.readline().strip()
            (marker,) = tmp_path.glob('busy_*')
            # Whatever the time: the process is there.
            age(storage, marker.name, 10**6)
            for clock in (time.time, lambda: time.time() + 10**6):
                collect(storage, clock)
                assert storage.kind(directory) == 'dir'
        finally:
            writer.kill()
    collect(storage, time.time)
    assert os.listdir(tmp_path) == []


def unfinished(storage, clock, **owner):
    """What the writer of another machine with this one's name has written so far; returns its marker and its directory."""
    work = Transaction(storage, 1, clock)
    work.keeps_files = True
    with work:
        pass
    (marker,) = storage.names('', 'busy_')
    record = json.loads(storage.read(marker))
    assert {'host', 'place', 'pid', 'born'} <= record['owner'].keys()
    assert record['owner']['host'] == socket.gethostname()
    record['owner'] |= owner
    storage.write(marker, json.dumps(record).encode())
    return marker, work.directory


def age(storage, key, seconds):
    """So long ago the file was written, by the file server's clock."""
    os.utime(storage.local_path(key), (time.time() - seconds,) * 2)


@pytest.mark.parametrize('pid', [None, 1, 2**22])
def test_host_names_are_not_compared(tmp_path, pid):
    """By the file server's clock: two horizons after the writer has signed."""
    storage, clock = open_storage(tmp_path), FakeClock()
    marker, directory = unfinished(storage, clock, place='other-boot/pid:[1]', pid=pid or os.getpid())
    clock.advance(10_000)
    for seconds, is_there in ((0, True), (7100, True), (7300, False)):
        age(storage, marker, seconds)
        collect(storage, clock)
        assert (tmp_path / directory).exists() is is_there


def test_a_process_with_the_number_of_a_dead_one_is_another(tmp_path):
    storage, clock = open_storage(tmp_path), FakeClock()
    unfinished(storage, clock, pid=os.getppid(), born='1')
    collect(storage, clock)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize('kind', ['file', 'memory', 'gs', 's3'])
def test_an_expired_hold_is_collected(tmp_path, kind, request):
    """An evaluator that was killed leaves one; the margin of object stores is for clocks that differ."""
    places = {'file': lambda: tmp_path, 'memory': lambda: f'memory://{tmp_path.name}/run'}
    place = places[kind]() if kind in places else request.getfixturevalue(kind).url()
    storage, clock = open_storage(place), FakeClock()
    storage.make_dir('')
    others = {'held_1.x', 'held_', 'held_2.1.UP'}
    file = hold_file(1, int(clock()) + 60, 60, '0' * 16)
    for name in (*others, file):
        storage.write(join(announcement_directory(storage), name), b'')
    state = {'x': np.arange(8.0)}

    def holds():
        return [name for name in storage.names(announcement_directory(storage), 'held_') if name == file]

    with t5ckpt.Checkpointer(
        state, checkpoints_dir=place, keep=1, options=t5ckpt.CheckpointerOptions(clock=clock)
    ) as ck:
        ck.save(state, step=1)
        clock.advance(600)
        if kind == 'file':
            age(storage, file, 50)
        ck.save(state, step=2)
        assert len(holds()) == 1
        clock.advance(62)
        if kind == 'file':
            age(storage, file, 70)
        ck.save(state, step=3)
    assert holds() == []
    assert others <= set(storage.names(announcement_directory(storage), 'held_'))
