"""Requests that arrive late: the client gave one up and sent it again, and the first arrives after newer ones.

Only a condition excludes that, and only the write of the manifest in an overwrite has one: S3 has no conditional deletion. These
tests pin what a late request can do, see docs/storage.md. A manifest or a sidecar of an earlier save contradicts the recorded
checksums, and a missing chunk is an error. A chunk of an earlier save is found where checksums are compared, which a restore
from a bucket does with verify='full'. In each case the next save of the step mends it.
"""

import numpy as np
import pytest

import t5ckpt
from t5ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from t5ckpt.storage import open_storage
from t5ckpt.testing import FakeClock

OPTIONS = {'retry_seconds': 5.0}
STEP = 5


def state(seed):
    values = np.random.default_rng(seed).standard_normal((64, 96), dtype=np.float32)
    return {'w': values, 'seed': np.int32(seed)}


def checkpointer(url, clock, **options):
    options = {'inline_bytes': 64, 'storage_options': OPTIONS, 'clock': clock} | options
    return t5ckpt.Checkpointer(state(0), checkpoints_dir=url, **options)


def delay(bucket, kind, ending):
    """Has the first request of a kind, for a key with this ending, arrive only when it is released."""
    waiting = [True]

    def choose(asked, key):
        if asked == kind and key.endswith(ending) and waiting:
            waiting.clear()
            return 'late'
        return None

    bucket.proxy.choose = choose


def release(bucket):
    assert len(bucket.proxy.held) == 1, 'the request was made'
    bucket.proxy.release()


def loaded(url, **options):
    return t5ckpt.load_t5x_checkpoint(url, STEP, mmap=False, **options)


def is_of(found, seed):
    return all(np.array_equal(found[name], value) for name, value in state(seed).items())


def saved_twice(bucket, kind, ending, **options):
    """Saves the step, deletes it and saves it again; a request of the first part is held back until all is over."""
    url, clock = bucket.url(), FakeClock()
    with checkpointer(url, clock, **options) as ck:
        delay(bucket, kind, ending)
        ck.save(state(1), step=STEP)
        ck.delete(STEP)
        ck.save(state(2), step=STEP)
        assert is_of(loaded(url), 2)
        release(bucket)
    return url, clock


def mended(url, clock):
    with checkpointer(url, clock) as ck:
        ck.delete(STEP)
        ck.save(state(3), step=STEP)
    return is_of(loaded(url, verify='full'), 3)


def test_a_late_write_of_a_manifest_is_found_by_its_checksum(bucket):
    """Leaves in it would be those of another save than the arrays."""
    url, clock = saved_twice(bucket, 'write', 'checkpoint_5/checkpoint')
    with pytest.raises(CorruptCheckpointError):
        loaded(url)
    with pytest.raises(CorruptCheckpointError):
        checkpointer(url, clock).restore(STEP)
    assert not t5ckpt.verify(url, STEP).ok
    assert mended(url, clock)


def test_a_late_write_of_a_chunk_is_found_where_checksums_are_compared(bucket):
    url, clock = saved_twice(bucket, 'write', 'w/0.0')
    with pytest.raises(CorruptCheckpointError):
        loaded(url, verify='full')
    with pytest.raises(CorruptCheckpointError):
        checkpointer(url, clock, verify='full').restore(STEP)
    assert t5ckpt.verify(url, STEP).ok
    assert not t5ckpt.verify(url, STEP, full=True).ok
    # From a bucket 'auto' compares none, since each chunk would be fetched twice.
    assert np.array_equal(loaded(url)['w'], state(1)['w'])
    assert mended(url, clock)


@pytest.mark.parametrize('ending', ['/t5ckpt.json', '/integrity.0.json', 'w/.zarray'])
def test_a_late_write_of_the_same_bytes_or_of_a_record_returns_no_wrong_value(bucket, ending):
    url, _ = saved_twice(bucket, 'write', ending)
    try:
        assert is_of(loaded(url), 2)
    except CorruptCheckpointError:
        assert ending != 'w/.zarray'


def test_a_late_deletion_of_a_chunk_is_an_error_and_never_zeros(bucket):
    url, _ = saved_twice(bucket, 'delete', 'w/0.0')
    with pytest.raises(CorruptCheckpointError, match='missing'):
        loaded(url)
    assert not t5ckpt.verify(url, STEP).ok


def test_a_late_deletion_of_the_manifest_hides_the_step(bucket):
    """As a deletion does; the next save of the step writes it anew."""
    url, clock = saved_twice(bucket, 'delete', 'checkpoint_5/checkpoint')
    assert t5ckpt.all_steps(url) == []
    with pytest.raises(CheckpointNotFoundError):
        loaded(url)
    with checkpointer(url, clock) as ck:
        ck.save(state(3), step=STEP)
    assert t5ckpt.all_steps(url) == [STEP]
    assert is_of(loaded(url), 3)


def test_a_late_deletion_of_the_steps_marker(bucket):
    """On S3 the step is no longer listed, since names between known ones cannot be; by its number it is found."""
    url, _ = saved_twice(bucket, 'delete', 'steps/5')
    assert is_of(loaded(url), 2)
    assert t5ckpt.all_steps(url) == ([STEP] if bucket.scheme == 'gs' else [])
    t5ckpt.reindex_steps(url)
    assert t5ckpt.all_steps(url) == [STEP]


def test_a_late_write_of_a_lease_damages_nothing(bucket):
    """The record of a save that has ended comes back; garbage collection takes it when it has expired."""
    url, clock = bucket.url(), FakeClock()

    def choose(kind, key):
        if kind == 'write' and '/busy/5.' in key and not bucket.proxy.held:
            return 'late'
        return None

    with checkpointer(url, clock) as ck:
        bucket.proxy.choose = choose
        ck.save(state(1), step=STEP)
    bucket.proxy.choose = lambda kind, key: None
    release(bucket)
    assert is_of(loaded(url), 1)
    clock.advance(7200)
    with checkpointer(url, clock) as ck:
        ck.save(state(6), step=6)
    assert t5ckpt.all_steps(url) == [STEP, 6]
    assert is_of(loaded(url), 1)
    assert not [key for key, _ in open_storage(url).walk('.t5ckpt') if '/busy/' in key]


def test_a_late_manifest_of_an_overwrite_is_refused_by_its_condition(gs):
    """The swap writes the manifest only over the one that it has read; a late duplicate meets another."""
    url, clock = gs.url(), FakeClock()
    with checkpointer(url, clock) as ck:
        ck.save(state(1), step=STEP)
        delay(gs, 'write', 'checkpoint_5/checkpoint')
        ck.save(state(2), step=STEP, overwrite=True)
        ck.save(state(3), step=STEP, overwrite=True)
        release(gs)
    assert is_of(loaded(url), 3)
    assert t5ckpt.verify(url, STEP, full=True).ok
