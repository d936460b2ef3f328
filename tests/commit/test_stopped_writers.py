"""A writer that is stopped for longer than its lease, between its last look at the lease and its commit."""

import json
import os
import signal
import subprocess
import time
import uuid

import numpy as np
import pytest
from support import forked

import t5ckpt
from t5ckpt.catalog.listing import catalog_of
from t5ckpt.commit.completion import complete_step
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.lease_owner import COLLECT, EXPIRED, process_facts
from t5ckpt.commit.step_lease import AlreadyCommittedError, acquire_lease
from t5ckpt.commit.strategy import open_transaction
from t5ckpt.format.manifest import split_facts
from t5ckpt.storage import open_storage
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


class Elsewhere(FaultyStorage):
    """The storage as a process of another machine sees it, which is stopped before it writes a file of the step."""

    def __init__(self, inner, stops_at, stop):
        super().__init__(inner)
        self._stops_at = stops_at
        self._stop = stop

    def _seen(self, key, data):
        if key.startswith('checkpoint_1/') and key.endswith(self._stops_at):
            self._stop()
        is_lease = b'"digests"' not in data
        return data.replace(process_facts()['place'].encode(), b'elsewhere') if is_lease else data

    def write(self, key, data):
        super().write(key, self._seen(key, data))

    def replace(self, key, data, version):
        return super().replace(key, self._seen(key, data), version)

    def try_lock(self, key):
        return super().try_lock(f'elsewhere/{key}')


def stopped(stops_at, stop, value=1.0):
    """A save that is stopped before it writes a file, by a process that acts then."""
    run, clock = open_storage(f'memory://{uuid.uuid4().hex}/run'), FakeClock()

    def act():
        clock.advance(4000)
        stop(run, clock)

    return run, clock, save(Elsewhere(run, stops_at, act), value, clock)


def is_whole(run, value):
    assert t5ckpt.all_steps(run.url()) == [1]
    assert t5ckpt.load_t5x_checkpoint(run.url())['w']['0'] == value
    assert t5ckpt.verify(run.url(), full=True).ok
    return True


@pytest.mark.parametrize('value', [1.0, 2.0])
@pytest.mark.parametrize('stops_at', ['/checkpoint', '.json', 'integrity.0.json'])
def test_in_place_the_first_manifest_counts(stops_at, value):
    """Another process has saved the step meanwhile. Its checkpoint stays; also where both have the same manifest."""
    run, clock, late = stopped(stops_at, lambda run, clock: save(run, value, clock))
    assert late is None
    assert is_whole(run, value)
    save(run, 3.0, clock)
    assert is_whole(run, value)


@pytest.mark.parametrize('stops_at', ['/checkpoint', '.json', 'integrity.0.json'])
def test_in_place_after_garbage_collection(stops_at):
    """Nobody else has saved the step, but the files of the stopped writer are gone: it is not told that it has saved."""
    run, clock, late = stopped(stops_at, collect)
    assert late is None
    assert t5ckpt.all_steps(run.url()) == []
    save(run, 2.0, clock)
    assert is_whole(run, 2.0)


def test_in_place_garbage_collection_between_the_last_look_and_the_manifest():
    """The writer has looked at its lease after it went on; a lease that has expired may be taken over right after that."""
    run, clock = open_storage(f'memory://{uuid.uuid4().hex}/run'), FakeClock()
    looked = Elsewhere(run, '/checkpoint', lambda: collect(run, clock))
    assert save(Elsewhere(looked, '.json', lambda: clock.advance(4000)), 1.0, clock) is None
    assert t5ckpt.all_steps(run.url()) == []
    assert list(run.walk('checkpoint_1')) == []
    save(run, 2.0, clock)
    assert is_whole(run, 2.0)


def test_in_place_another_writer_that_has_stepped_back():
    """It has taken the step over, and is gone before the manifest arrives: the files are there, so the step is saved."""

    def begin_and_step_back(run, clock):
        open_transaction(run, 1, clock).rollback()

    run, _, late = stopped('/checkpoint', begin_and_step_back)
    assert late.step == 1
    assert is_whole(run, 1.0)


def test_in_place_garbage_collection_that_is_stopped_as_well():
    """It has listed the files before the manifest arrives, and removes them after its own lease has expired."""

    def collect_slowly(run, clock):
        third = Elsewhere(Elsewhere(run, ' ', None), ' ', None)
        acquire_lease(third, 1, clock, COLLECT, stale_after=3600)
        clock.advance(700)

    run, _, late = stopped('/checkpoint', collect_slowly)
    assert late is None
    assert t5ckpt.all_steps(run.url()) == []


def test_in_place_garbage_collection_and_another_writer():
    """Another writer has the lease, and the files of the stopped one are gone all the same."""
    found = []

    def collect_and_begin(run, clock):
        assert collect(run, clock)[0] == (['checkpoint_1'])
        found.append(open_transaction(run, 1, clock))

    run, clock, late = stopped('/checkpoint', collect_and_begin)
    assert late is None
    found[0].rollback()
    assert t5ckpt.all_steps(run.url()) == []
    save(run, 2.0, clock)
    assert is_whole(run, 2.0)


def test_in_place_two_writers_at_once():
    """The other has taken the step over and not committed: the first manifest counts, and has all of its files."""
    found = []

    def begin(run, clock):
        found.append(open_transaction(run, 1, clock))

    run, _, late = stopped('/checkpoint', begin)
    assert late.step == 1
    assert is_whole(run, 1.0)
    with pytest.raises(AlreadyCommittedError):
        commit_as(found[0], {'w': [2.0]})
    found[0].rollback()
    assert is_whole(run, 1.0)


def test_in_place_a_manifest_that_its_writer_removes_again():
    """Garbage collection has its files. Another writer that meets the manifest goes on, so not both give the step up."""
    run, clock, found = open_storage(f'memory://{uuid.uuid4().hex}/run'), FakeClock(), []
    state = {'w': np.ones(8, np.float32)}

    class Removing(Elsewhere):
        def delete_unchanged(self, key, version):
            commit_as(found[0], {'w': [2.0]})
            return super().delete_unchanged(key, version)

    def collect_and_begin():
        clock.advance(4000)
        assert collect(run, clock)[0] == ['checkpoint_1']
        found.append(open_transaction(run, 1, clock))

    storage = Removing(run, '/checkpoint', collect_and_begin)
    with t5ckpt.Checkpointer(state, checkpoints_dir=storage, clock=clock, inline_bytes=0) as ck:
        assert ck.save(state, step=1) is None
    assert t5ckpt.all_steps(run.url()) == [1]
    assert t5ckpt.load_t5x_checkpoint(run.url())['w']['0'] == 2.0


def commit_as(work, state):
    """Commits the manifest of another save of the state."""
    source = open_storage(f'memory://{uuid.uuid4().hex}/run')
    with t5ckpt.Checkpointer(state, checkpoints_dir=source) as ck:
        ck.save(state, step=1)
    work.commit(*split_facts(source.read('checkpoint_1/checkpoint')), [])


class StoppedAtListing(Elsewhere):
    """A process of another machine that is stopped before it lists the files of the step."""

    def __init__(self, inner, stop):
        super().__init__(inner, ' ', stop)

    def walk(self, key):
        if key.startswith('checkpoint_1'):
            self._stop()
        return super().walk(key)


def test_in_place_a_collector_that_is_stopped_removes_nothing_of_a_later_save(caplog):
    run, clock = open_storage(f'memory://{uuid.uuid4().hex}/run'), FakeClock()
    run.write(catalog_of(run).write_lease_key(1, '0' * 16), json.dumps(EXPIRED.record()).encode())
    run.write('checkpoint_1/t5ckpt-0123456789abcdef/w/0', b'left by a dead writer')
    stops = []

    def stop():
        if not stops:
            stops.append(1)
            clock.advance(4000)
            assert save(run, 2.0, clock) is not None

    assert collect(StoppedAtListing(run, stop), clock)[0] == []
    assert stops
    assert 'could not collect' in caplog.text
    assert is_whole(run, 2.0)


def test_in_place_a_manifest_that_arrives_while_the_files_are_listed():
    """It is that of a writer that goes on after its lease has expired. Its checkpoint stays."""
    run, source = (open_storage(f'memory://{uuid.uuid4().hex}/run') for _ in range(2))
    save(source, 1.0)
    run.write('checkpoint_1/t5ckpt-0123456789abcdef/w/0', b'left by a dead writer')

    def arrive():
        if list(run.walk('.t5ckpt/busy')) and not run.is_file('checkpoint_1/checkpoint'):
            for key, _ in source.walk('checkpoint_1'):
                run.write(key, source.read(key))

    assert save(StoppedAtListing(run, arrive), 2.0) is None
    assert is_whole(run, 1.0)


def test_in_place_an_overwrite_that_is_stopped_removes_nothing_of_a_later_one():
    """It has written its manifest, and the later one its first chunk."""
    run, clock = open_storage(f'memory://{uuid.uuid4().hex}/run'), FakeClock()
    save(run, 1.0, clock)
    later = []

    def stop():
        if not later:
            clock.advance(4000)
            later.append(f'checkpoint_1/t5ckpt-{acquire_lease(run, 1, clock).nonce}/w/0')
            run.write(later[0], b'chunk')

    elsewhere = StoppedAtListing(run, stop)
    complete_step(elsewhere, 1, acquire_lease(elsewhere, 1, clock))
    assert run.read(later[0]) == b'chunk'
