"""Requests that arrive late: the client gave one up and sent it again, and the first arrives after newer ones.

The arrays of each save have a directory of their own, and the write of the manifest and its deletion have a condition, so a late
request of an earlier save of the step changes nothing. What stays is pinned here, too, see docs/storage.md: a server may refuse
the condition of a deletion.
"""

import re

import numpy as np
import pytest
from support.options import with_options

import t5ckpt
from t5ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError
from t5ckpt.storage import open_storage
from t5ckpt.testing import FakeClock

OPTIONS = {'retry_seconds': 5.0}
STEP = 5
# Longer than two of the horizons of commit/markers.py.
AFTER_TWO_HORIZONS = 7300


def state(seed):
    values = np.random.default_rng(seed).standard_normal((64, 96), dtype=np.float32)
    return {'w': values, 'seed': np.int32(seed)}


def checkpointer(url, clock, **options):
    options = {'inline_bytes': 64, 'storage_options': OPTIONS, 'clock': clock} | options
    return t5ckpt.Checkpointer(state(0), checkpoints_dir=url, **with_options(**options))


def delay(bucket, kind, ending, *before):
    """Has the first request of a kind for a key with this ending arrive when it is released; ``before`` it, other faults."""
    faults = ['late', *reversed(before)]

    def choose(asked, key):
        return faults.pop() if asked == kind and key.endswith(ending) and faults else None

    bucket.proxy.choose = choose


def release(bucket):
    assert len(bucket.proxy.held) == 1, 'the request was made'
    bucket.proxy.release()


def loaded(url, **options):
    return t5ckpt.load_t5x_checkpoint(url, STEP, **with_options(mmap=False, **options))


def is_of(found, seed):
    return all(np.array_equal(found[name], value) for name, value in state(seed).items())


def saved_twice(bucket, kind, ending, *before, **options):
    """Saves the step, deletes it and saves it again; a request of the first part is held back until all is over."""
    url, clock = bucket.url(), FakeClock()
    with checkpointer(url, clock, **options) as ck:
        delay(bucket, kind, ending, *before)
        ck.save(state(1), step=STEP)
        ck.delete(STEP)
        ck.save(state(2), step=STEP)
        assert is_of(loaded(url), 2)
        release(bucket)
    return url, clock


def is_whole(url, seed=2):
    """The step has the values of one save, in full, and a later save of it goes through."""
    assert t5ckpt.all_steps(url) == [STEP]
    assert t5ckpt.verify(url, STEP, full=True).ok
    return is_of(loaded(url, verify='full'), seed)


def keys(url):
    return {key for key, _ in open_storage(url).walk('checkpoint_5')}


@pytest.mark.slow
@pytest.mark.parametrize('ending', ['w/0.0', 'w/.zarray', '.json', 'integrity.0.json', 'checkpoint_5/checkpoint'])
@pytest.mark.parametrize('kind', ['write', 'delete'])
def test_a_late_request_of_an_earlier_save(bucket, kind, ending):
    """What it leaves is in no one's way, and is removed two horizons after its step was deleted."""
    url, clock = saved_twice(bucket, kind, ending)
    assert is_whole(url)
    with checkpointer(url, clock) as ck:
        ck.delete(STEP)
        clock.advance(AFTER_TWO_HORIZONS)
        ck.save(state(3), step=STEP)
        assert len({key.split('/')[1] for key in keys(url) if '/t5ckpt-' in key}) == 1
    assert is_whole(url, 3)


@pytest.mark.slow
@pytest.mark.parametrize('answer', ['501', '400'])
def test_a_late_deletion_of_the_manifest_without_a_condition_hides_the_step(s3, answer):
    """On a server that refuses the condition. Nothing else is lost, and the next save of the step writes it anew."""
    url, clock = saved_twice(s3, 'delete', 'checkpoint_5/checkpoint', answer)
    assert t5ckpt.all_steps(url) == []
    with pytest.raises(CheckpointNotFoundError):
        loaded(url)
    assert any(key.endswith('w/0.0') for key in keys(url))
    with checkpointer(url, clock) as ck:
        ck.save(state(3), step=STEP)
    assert is_whole(url, 3)


def test_a_manifest_that_arrives_after_the_deletion_of_its_step(bucket):
    """It names files that are gone. The step cannot be read, and a save of the step replaces it."""
    url, clock = bucket.url(), FakeClock()
    with checkpointer(url, clock) as ck:
        delay(bucket, 'write', 'checkpoint_5/checkpoint')
        ck.save(state(1), step=STEP)
        ck.delete(STEP)
        release(bucket)
        with pytest.raises(CorruptCheckpointError, match='missing'):
            loaded(url)
        assert ck.save(state(2), step=STEP) is not None
    assert is_whole(url)


def test_a_late_position_of_a_data_iterator(bucket):
    """A restore reads the one of the save. T5X's copy is the late one, as a verification says."""

    class Position:
        def __init__(self, value):
            self.value = value

        def save(self, filename):
            with open(f'{filename}.index', 'w', encoding='utf-8') as file:
                file.write(self.value)

        def load(self, filename):
            with open(f'{filename}.index', encoding='utf-8') as file:
                self.value = file.read()

    position = Position('1')
    url, clock = bucket.url(), FakeClock()
    with checkpointer(url, clock, dataset_iterator=position) as ck:
        delay(bucket, 'write', 'checkpoint_5/train_ds-000-of-001.index')
        ck.save(state(1), step=STEP)
        ck.delete(STEP)
        position.value = '2'
        ck.save(state(2), step=STEP)
        assert any(re.fullmatch(r'checkpoint_5/train_ds-000-of-001.*', key) for key in keys(url))
        release(bucket)
        assert is_of(ck.restore(STEP), 2)
    assert position.value == '2'
    report = t5ckpt.verify(url, STEP, full=True)
    assert report.ok
    assert 'T5X reads the position in the data from train_ds-000-of-001.index, which is not' in report.notes[0]


def fail(bucket, kind, ending, *after):
    """Has all requests of a kind, for a key with this ending, fail; the first one arrives when it is released.

    Those of the kinds ``after`` it fail, too.
    """

    def choose(asked, key):
        if not key.endswith(ending) or asked not in (kind, *(after if bucket.proxy.held else ())):
            return None
        return 'dropped' if bucket.proxy.held else 'late'

    bucket.proxy.choose = choose


def heal(bucket):
    bucket.proxy.choose = lambda kind, key: None


@pytest.mark.slow
@pytest.mark.parametrize('ending', ['w/0.0', 'w/.zarray', 'integrity.0.json', '.json', 'checkpoint_5/checkpoint'])
def test_a_late_write_of_a_save_that_failed(bucket, ending):
    """What it leaves is removed two horizons later. A late manifest finds its files, so the step is whole."""
    url, clock = bucket.url(), FakeClock()
    with checkpointer(url, clock, storage_options={'retry_seconds': 1.0}) as ck:
        fail(bucket, 'write', ending)
        with pytest.raises(StorageError):
            ck.save(state(1), step=STEP)
        heal(bucket)
        # The same process goes on, and collects the leftovers of the dead.
        ck.save(state(2), step=6)
        release(bucket)
        assert keys(url)
        clock.advance(AFTER_TWO_HORIZONS)
        ck.save(state(3), step=7)
    if ending == 'checkpoint_5/checkpoint':
        assert t5ckpt.all_steps(url) == [STEP, 6, 7]
        assert t5ckpt.verify(url, STEP, full=True).ok
        assert is_of(loaded(url), 1)
    else:
        assert t5ckpt.all_steps(url) == [6, 7]
        assert not keys(url)
    assert not markers(url)


def markers(url):
    return [key for key, _ in open_storage(url).walk('.t5ckpt') if '/busy/' in key]


@pytest.mark.slow
@pytest.mark.parametrize('after', [(), ('read', 'head')])
def test_a_late_deletion_of_a_step_that_could_not_be_deleted(bucket, after):
    """The step is deleted then, with all of its files. The error says so."""
    url, clock = bucket.url(), FakeClock()
    with checkpointer(url, clock, storage_options={'retry_seconds': 1.0}) as ck:
        ck.save(state(1), step=STEP)
        fail(bucket, 'delete', 'checkpoint_5/checkpoint', *after)
        with pytest.raises(StorageError, match='may disappear'):
            ck.delete(STEP)
        heal(bucket)
        assert t5ckpt.all_steps(url) == [STEP]
        release(bucket)
        clock.advance(AFTER_TWO_HORIZONS)
        ck.save(state(2), step=6)
    assert t5ckpt.all_steps(url) == [6]
    assert not keys(url)
    assert not markers(url)


def test_a_late_write_of_a_marker_damages_nothing(bucket):
    """That of a save that has ended comes back; garbage collection takes it when it is due."""
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
    clock.advance(AFTER_TWO_HORIZONS)
    with checkpointer(url, clock) as ck:
        ck.save(state(6), step=6)
    assert t5ckpt.all_steps(url) == [STEP, 6]
    assert is_of(loaded(url), 1)
    assert not markers(url)


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
