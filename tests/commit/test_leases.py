"""Write leases and read leases: who excludes whom, with the other process acting at exactly one operation."""

import json
import time
import uuid

import pytest

import t5ckpt
from t5ckpt.commit.deletion import hide_checkpoint, remove_hidden
from t5ckpt.commit.lease_files import write_leases_of
from t5ckpt.commit.read_lease import read_lease
from t5ckpt.commit.write_lease import BeingWrittenError, acquire_lease
from t5ckpt.errors import StorageError
from t5ckpt.format.names import busy_key
from t5ckpt.storage import open_storage
from t5ckpt.testing import FakeClock, FaultyStorage

STATE = {'w': [1.0]}


def saved_run(place, steps=(1, 2)):
    with t5ckpt.Checkpointer(STATE, checkpoints_dir=place) as ck:
        for step in steps:
            ck.save(STATE, step=step)
    return open_storage(place)


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
    assert write_leases_of(run, 1) == []
    assert t5ckpt.all_steps(run.url()) == [1, 2, 3]
    remove_hidden(run, hide_checkpoint(run, 1, time.time), time.time)
    assert t5ckpt.all_steps(run.url()) == [2, 3]
