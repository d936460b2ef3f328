"""Saves to a local directory, with uploads behind: what is where, what waits, and what a restore takes."""

import contextlib
import json
import logging
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from support import forked
from support.cli import t5ckpt_cli
from support.facts import put_facts
from support.options import with_options
from support.tiers import tier_of
from support.timed_storage import TimedStorage

import t5ckpt
from t5ckpt.errors import (
    CorruptCheckpointError,
    LocalDirError,
    NoSpaceError,
    NotDurableError,
    NotPersistedError,
    StorageError,
)
from t5ckpt.format.names import parse_marker, without_generation
from t5ckpt.storage import open_storage
from t5ckpt.storage.directory_lock import DirectoryLock, lock_directory
from t5ckpt.testing import FaultyStorage
from t5ckpt.tiers.directory import LocalDirectory

AWAY = {'retry_seconds': 1.0}


def state(step):
    rng = np.random.default_rng(step)
    return {'w': rng.standard_normal((64, 96), dtype=np.float32), 'v': rng.standard_normal(500), 'step': np.int32(step)}


def same(found, step):
    for name, values in state(step).items():
        assert np.array_equal(found[name], values), (step, name)


class Position:
    """A data iterator: how many batches were taken."""

    def __init__(self, taken=0):
        self.taken = taken

    def save(self, filename):
        pathlib.Path(f'{filename}.position').write_text(str(self.taken), encoding='ascii')

    def load(self, filename):
        self.taken = int(pathlib.Path(f'{filename}.position').read_text(encoding='ascii'))


@pytest.fixture
def local(tmp_path):
    return tmp_path / 'local'


@pytest.fixture(autouse=True)
def _at_info(caplog):
    caplog.set_level(logging.INFO, 't5ckpt')


def checkpointer(run, local, *iterators, **options):
    options = {'chunk_bytes': 2**14, 'inline_bytes': 64} | options
    return t5ckpt.Checkpointer(state(0), None, run, *iterators, local=tier_of(local), **with_options(**options))


def said(caplog, text, level=logging.INFO):
    return [each.getMessage() for each in caplog.records if text in each.getMessage() and each.levelno >= level]


def steps_in(directory):
    return t5ckpt.all_steps(directory)


def chunk(local, step):
    return local / f'checkpoint_{step}' / 'w' / '0.0'


def damage(file):
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.unlink()
    file.write_bytes(data)


def fails_from_now_on(bucket):
    bucket.proxy.choose = lambda kind, key: '503'


def works_again(bucket):
    bucket.proxy.choose = lambda kind, key: None


# --- saves ---------------------------------------------------------------------------------------------------------------


def test_a_save_is_local_and_its_upload_follows(bucket, local):
    run = bucket.url()
    with checkpointer(run, local, Position(7), keep=1) as ck:
        for step in (1, 2):
            saved = ck.save(state(step), metrics={'loss': step}, custom_metadata={'git': 'a1'})
            assert saved.path == str(local / f'checkpoint_{step}')
        ck.save_async(state(3), metrics={'loss': 3}).result()
        ck.wait_until_persisted()
        assert ck.metrics(3) == {'loss': 3}
    assert steps_in(local) == [2, 3], 'LocalTier(keep=2), the default'
    assert steps_in(run) == [3], 'keep=1 is the policy of the run'
    assert t5ckpt.verify(f'{run}/checkpoint_3', full=True).ok
    assert t5ckpt.open_checkpoint(run).metrics == {'loss': 3}
    # The bytes are those of the local step, but for the names in the manifest: nothing is encoded or checked anew.
    there = {
        without_generation(key.removeprefix('checkpoint_3/')): key for key, _ in open_storage(run).walk('checkpoint_3')
    }
    for file in (local / 'checkpoint_3').rglob('*'):
        name = file.relative_to(local / 'checkpoint_3').as_posix()
        if file.is_file() and name != 'checkpoint':
            assert bucket.raw(f'{run}/{there[name]}') == file.read_bytes(), name
    position = Position()
    same(t5ckpt.Checkpointer(state(0), None, run, position).restore(), 3)
    assert position.taken == 7


def test_the_policy_chooses_what_is_uploaded(run_dir, local):
    policy = t5ckpt.SaveEvery(4)
    with checkpointer(run_dir, t5ckpt.LocalTier(local, persist=policy), save_policy=t5ckpt.SaveEvery(1)) as ck:
        for step in range(1, 7):
            ck.maybe_save(step, state(step))
        ck.wait_until_persisted()
    assert steps_in(run_dir) == [4]
    assert steps_in(local) == [5, 6]
    # The multiple between the last save of that process and the first one of this.
    with checkpointer(run_dir, t5ckpt.LocalTier(local, persist=policy)) as ck:
        ck.save(state(9))
    assert steps_in(run_dir) == [4, 9]


def test_intervals_of_time_and_bests_continue_after_a_restart(run_dir, local):
    now = [1000.0]
    policy = t5ckpt.SaveEverySeconds(60) | t5ckpt.SaveOnImprovement('loss', 'min')
    tier = t5ckpt.LocalTier(local, persist=policy)
    for step, seconds, loss in [(1, 0, 3.0), (2, 30, 5.0), (3, 40, 4.0), (4, 10, 2.0), (5, 1, 2.5)]:
        now[0] += seconds
        with checkpointer(run_dir, tier, clock=lambda: now[0]) as ck:
            ck.save(state(step), metrics={'loss': loss})
    assert steps_in(run_dir) == [1, 3, 4], 'the first, after 70 s, and the best'


def test_overwriting_replaces_the_step_in_both_tiers(bucket, local):
    run = bucket.url()
    with checkpointer(run, local) as ck:
        ck.save(state(1))
        ck.wait_until_persisted(1)
        assert ck.save(state(1)) is None
        ck.save(state(2) | {'step': np.int32(1)}, overwrite=True)
        ck.wait_until_persisted(1)
    assert np.array_equal(t5ckpt.load_t5x_checkpoint(run, 1)['w'], state(2)['w'])


def test_a_step_that_is_overwritten_during_its_upload_is_uploaded_again(gs, local):
    """Whatever is overwritten last is in the bucket, and waits for its upload until it is."""
    run = gs.url()
    reached, released = threading.Event(), threading.Event()

    def choose(kind, key):
        if kind == 'write' and key.endswith('checkpoint_1/checkpoint') and not released.is_set():
            reached.set()
            released.wait(60)

    gs.proxy.choose = choose
    with checkpointer(run, local) as ck:
        ck.save(state(1))
        assert reached.wait(60)
        ck.save(state(2) | {'step': np.int32(1)}, overwrite=True)
        released.set()
        ck.wait_until_persisted(1)
        assert np.array_equal(t5ckpt.load_t5x_checkpoint(run, 1)['w'], state(2)['w'])
    assert os.listdir(local / '.t5ckpt/to_persist') == []


class ReadOnly(FaultyStorage):
    """A disk that is remounted read-only after an error of an operation on a key."""

    def __init__(self, inner, operation, key):
        super().__init__(inner)
        self._at, self._is_broken = (operation, key), False

    def before_operation(self, name, key):
        super().before_operation(name, key)
        self._is_broken = self._is_broken or (name == self._at[0] and self._at[1] in key)
        if self._is_broken and name in ('write', 'delete_file', 'make_dir', 'publish'):
            raise StorageError(30, 'injected: read-only file system')


@pytest.mark.parametrize(('operation', 'key'), [('publish', 'checkpoint_2'), ('delete_file', 'to_persist/2')])
def test_a_disk_that_becomes_read_only_blocks_no_wait(run_dir, local, operation, key):
    """In the commit, or after the upload: the record that the step waits stays, and the next start removes it."""
    disk = ReadOnly(open_storage(local), operation, key)
    with checkpointer(run_dir, disk) as ck:
        ck.save(state(1))
        ck.wait_until_persisted(1)
        if operation == 'publish':
            with pytest.raises(StorageError, match='read-only'):
                ck.save(state(2))
        else:
            ck.save(state(2))
            ck.wait_until_persisted(2)
        ck.wait_until_persisted()
    assert os.listdir(local / '.t5ckpt/to_persist') == ['2']
    with checkpointer(run_dir, local) as ck:
        same(ck.restore(), steps_in(run_dir)[-1])
        ck.save(state(3))
    assert steps_in(run_dir) == ([1, 3] if operation == 'publish' else [1, 2, 3])
    assert os.listdir(local / '.t5ckpt/to_persist') == []


def test_a_clock_that_is_set_back_does_not_stop_the_uploads(run_dir, local):
    now = [10_000.0]
    tier = t5ckpt.LocalTier(local, persist=t5ckpt.SaveEverySeconds(60))
    for times in [(10_061, 2000, 2061), (1000, 1061)]:
        with checkpointer(run_dir, tier, clock=lambda: now[0]) as ck:
            for now[0] in times:
                ck.save(state((ck.latest_step() or 0) + 1))
                ck.wait_until_persisted()
    assert steps_in(run_dir) == [1, 3, 5]


def test_a_step_of_another_save_is_not_replaced(run_dir, local, caplog):
    t5ckpt.Checkpointer(state(0), None, run_dir).save(state(1))
    with checkpointer(run_dir, local) as ck:
        ck.save(state(2) | {'step': np.int32(1)})
        with pytest.raises(NotPersistedError, match='of another save'):
            ck.wait_until_persisted(1)
        (line,) = said(caplog, 'step 1 is not uploaded', logging.ERROR)
        cures = 'To replace it, save the step with overwrite=True, or delete it before the save'
        assert f'{run_dir}/checkpoint_1 exists, of another save. {cures} (t5ckpt rm {run_dir} 1)' in line
        same(t5ckpt.load_t5x_checkpoint(run_dir, 1), 1)
        ck.save(state(3) | {'step': np.int32(1)}, overwrite=True)
        ck.wait_until_persisted(1)
    assert np.array_equal(t5ckpt.load_t5x_checkpoint(run_dir, 1)['w'], state(3)['w'])


def test_a_step_of_another_save_that_is_deleted_before_the_save(run_dir, local):
    t5ckpt.Checkpointer(state(0), None, run_dir).save(state(1))
    with checkpointer(run_dir, local) as ck:
        ck.save(state(2))
        t5ckpt_cli('rm', run_dir, 1, '--yes')
        ck.save(state(3) | {'step': np.int32(1)})
        ck.wait_until_persisted(1)
    assert np.array_equal(t5ckpt.load_t5x_checkpoint(run_dir, 1)['w'], state(3)['w'])


def test_a_later_save_of_the_run_is_restored(run_dir, local, caplog):
    """The training went on for a while without the local directory."""
    at_one = {'step': np.int32(1)}
    with checkpointer(run_dir, local) as ck:
        ck.save(state(1))
    with t5ckpt.Checkpointer(state(0), None, run_dir) as ck:
        ck.save(state(7) | at_one, overwrite=True)
    with checkpointer(run_dir, local) as ck:
        assert np.array_equal(ck.restore()['w'], state(7)['w'])
        assert said(caplog, 'local step 1 was not restored: ', logging.WARNING)
        assert said(caplog, 'has a later save of it')
        assert np.array_equal(ck.restore(1)['w'], state(7)['w'])
        ck.save(state(8) | at_one, overwrite=True)
        assert np.array_equal(ck.restore()['w'], state(8)['w'])


def test_a_step_of_orbax_is_not_replaced(tmp_path, run_dir, local, caplog):
    (run_dir / 'checkpoint_1').mkdir(parents=True)
    (run_dir / 'checkpoint_1' / '_CHECKPOINT_METADATA').write_text('{}')
    (run_dir / 'checkpoint_1' / '_METADATA').write_text('{"tree_metadata": {}}')
    with checkpointer(run_dir, local) as ck:
        ck.save(state(1))
        with pytest.raises(NotPersistedError):
            ck.wait_until_persisted(1)
    (line,) = said(caplog, 'step 1 is not uploaded', logging.ERROR)
    assert f'{run_dir}/checkpoint_1 exists, in the layout of orbax. Remove it with the program that wrote it' in line


def test_the_newest_wins_while_the_bucket_is_away(gs, local, caplog):
    run = gs.url()
    with checkpointer(run, t5ckpt.LocalTier(local, keep=1), storage_options=AWAY) as ck:
        ck.save(state(1))
        ck.wait_until_persisted()
        fails_from_now_on(gs)
        for step in (2, 3, 4):
            ck.save(state(step))
        with pytest.raises(NotPersistedError, match='503') as caught:
            ck.wait_until_persisted(4)
        assert caught.value.__cause__ is not None
        waiting = sorted(int(name) for name in os.listdir(local / '.t5ckpt/to_persist'))
        assert waiting[-1] == 4
        assert set(waiting) <= set(steps_in(local)), 'nothing that waits is deleted'
        ck.save(state(5))
        ck.save(state(6))
        same(ck.restore(), 6)
        works_again(gs)
        ck.wait_until_persisted()
        with pytest.raises(NotPersistedError, match=r'step \d was saved later'):
            ck.wait_until_persisted(5)
        ck.save(state(7))
        ck.wait_until_persisted(7)
    assert steps_in(run) == [1, 6, 7] or steps_in(run) == [1, 2, 6, 7]
    assert steps_in(local) == [7]
    assert len(said(caplog, 'failed, and is repeated', logging.WARNING)) == 1
    assert len(said(caplog, 'work again', logging.WARNING)) == 1


def test_closing_does_not_wait_for_a_bucket_that_is_away(gs, local, caplog):
    run = gs.url()
    ck = checkpointer(run, local, storage_options=AWAY)
    ck.save(state(1))
    ck.wait_until_persisted()
    fails_from_now_on(gs)
    ck.save(state(2))
    ck.close()
    assert said(caplog, 'The next start with this local directory uploads it', logging.WARNING)
    works_again(gs)
    assert steps_in(run) == [1]
    with checkpointer(run, local, storage_options=AWAY) as ck:
        same(ck.restore(), 2)
        ck.wait_until_persisted(2)
    assert steps_in(run) == [1, 2]


def test_the_rate_is_limited(run_dir, local):
    """12 files of 2 KiB with 1 Mbit/s: one each 16 ms, except for those that wait in the four threads."""
    run = TimedStorage(open_storage(run_dir))
    with checkpointer(run, t5ckpt.LocalTier(local, upload_gbps=1e-3), chunk_bytes=2**11) as ck:
        ck.save(state(1))
        ck.wait_until_persisted()
    files = [file for file in (run_dir / 'checkpoint_1/w').iterdir() if file.name != '.zarray']
    assert len(files) == 12
    least = 8 * 2**11 / 1e6
    assert run.times[-1] - run.times[0] >= 10 * least
    for first, later in zip(run.times, run.times[5:], strict=False):
        assert later - first >= 0.9 * least, run.times


def test_a_slow_upload_has_the_time_that_its_rate_needs(gs, local):
    """Its files are not collected meanwhile, and it is not given up: 29 KB with 6.25 bytes in a second."""
    run, began, tier = open_storage(gs.url()), time.time(), t5ckpt.LocalTier(local, upload_gbps=5e-8)
    with checkpointer(run, tier, inline_bytes=64) as ck:
        ck.save(state(1))
        while not (markers := run.names('.t5ckpt/busy', '1.')):
            time.sleep(0.05)
        ck.delete(1)
    assert 2 * 4000 < parse_marker(f'.t5ckpt/busy/{markers[0]}').due - began < 2 * 5000


class Disk(FaultyStorage):
    """Fails from the operation ``fail_at`` on, until it has room again."""

    has_room = False

    def before_operation(self, name, key):
        if not self.has_room:
            super().before_operation(name, key)


def test_a_full_local_disk_fails_the_save_and_changes_nothing(run_dir, tmp_path):
    where = tmp_path / 'local'
    with checkpointer(run_dir, where) as ck:
        ck.save(state(1))
        ck.wait_until_persisted()
    disk = Disk(open_storage(where), 25, sticky=True)
    ck = checkpointer(run_dir, disk)
    with pytest.raises(NoSpaceError):
        ck.save(state(2))
    disk.has_room = True
    ck.close()
    assert steps_in(where) == steps_in(run_dir) == [1]
    assert os.listdir(where / '.t5ckpt/to_persist') == []
    with checkpointer(run_dir, where) as ck:
        ck.save(state(2))
    assert steps_in(run_dir) == [1, 2]


def test_uploads_work_again_when_one_has_succeeded(gs, local, caplog):
    """A step that is dropped after an outage does not show that the bucket is back."""
    run = gs.url()
    with checkpointer(run, local, storage_options=AWAY, reuse_unchanged=False) as ck:
        ck.save(state(1))
        ck.wait_until_persisted()
        fails_from_now_on(gs)
        ck.save(state(2))
        with pytest.raises(NotPersistedError, match='503'):
            ck.wait_until_persisted()
        damage(chunk(local, 2))
        works_again(gs)
        with pytest.raises(NotPersistedError, match='damaged'):
            ck.wait_until_persisted(2)
        assert not said(caplog, 'work again')
        ck.save(state(3))
        ck.wait_until_persisted()
        assert len(said(caplog, 'work again')) == 1
    assert steps_in(run) == [1, 3]


def test_a_damaged_local_step_is_not_uploaded(gs, local, caplog):
    run = gs.url()
    fails_from_now_on(gs)
    ck = checkpointer(run, local, storage_options=AWAY, reuse_unchanged=False)
    ck.save(state(1))
    ck.close()
    damage(chunk(local, 1))
    works_again(gs)
    # In its place, the next step is uploaded, whatever the policy says of that one.
    with checkpointer(run, t5ckpt.LocalTier(local, persist=t5ckpt.SaveAt([1]))) as ck:
        with pytest.raises(CorruptCheckpointError):
            ck.restore()
        with pytest.raises(NotPersistedError, match='damaged'):
            ck.wait_until_persisted(1)
        ck.save(state(2))
        ck.save(state(3))
    assert steps_in(run) == [2]


# --- restores ------------------------------------------------------------------------------------------------------------


def test_the_newest_step_of_either_tier_is_restored(run_dir, local, caplog):
    t5ckpt.Checkpointer(state(0), None, run_dir).save(state(5))
    with checkpointer(run_dir, t5ckpt.LocalTier(local, persist=t5ckpt.SaveAt([6]))) as ck:
        same(ck.restore(), 5)
        assert said(caplog, f'restored step 5 from {run_dir}/checkpoint_5: ')
        assert said(caplog, '; 0 bytes of arrays from')
        ck.save(state(6))
        ck.save(state(7))
        ck.save(state(8))
        assert ck.latest_step() == 8
        assert ck.all_steps() == [5, 6, 7, 8] or ck.all_steps() == [5, 7, 8]
        ck.wait_until_persisted()
        assert ck.all_steps() == [5, 6, 7, 8]
        same(ck.restore(), 8)
        same(ck.restore(6), 6)
        same(ck.restore(7), 7)
    nbytes = state(8)['w'].nbytes + state(8)['v'].nbytes
    (line,) = [line for line in caplog.messages if line.startswith('t5ckpt: restored step 8 ')]
    assert f'; {nbytes} bytes of arrays from {local}, 0 from other processes, 0 from {run_dir}' in line


def test_a_restart_reads_nothing_of_the_bucket_but_its_index(gs, local):
    run = gs.url()
    with checkpointer(run, local) as ck:
        ck.save(state(1))
    gs.proxy.clear()
    with checkpointer(run, local) as ck:
        same(ck.restore(), 1)
    assert [
        each.key for each in gs.proxy.clear() if 'checkpoint_1/' in each.key and not each.key.endswith('/checkpoint')
    ] == []


class FailsOnce(FaultyStorage):
    """A disk that fails once, at a file, when ``after`` has failed."""

    def __init__(self, inner, operation, key, after=None):
        super().__init__(inner)
        self.at, self.after, self.has_failed = (operation, key), after, False

    def before_operation(self, name, key):
        super().before_operation(name, key)
        is_upload = threading.current_thread().name == 't5ckpt-upload'
        is_due = not self.has_failed and (self.after is None or self.after.has_failed)
        if is_upload and is_due and name == self.at[0] and self.at[1] in key:
            self.has_failed = True
            raise StorageError(5, 'injected: input/output error')


def test_an_error_of_the_bucket_is_none_of_the_local_disk(run_dir, local):
    """Each fails once, with the same error: the step is uploaded by the third attempt."""
    run = FailsOnce(open_storage(run_dir), 'make_dir', '')
    disk = FailsOnce(open_storage(local), 'read', 'checkpoint_1/checkpoint', after=run)
    with checkpointer(run, disk) as ck:
        ck.save(state(1))
        while not disk.has_failed:
            with contextlib.suppress(NotPersistedError):
                ck.wait_until_persisted()
        ck.wait_until_persisted(1)
    assert steps_in(run_dir) == [1]


class FullOnce(FaultyStorage):
    """A disk that is full when a step is to be committed, once."""

    is_full = False

    def before_operation(self, name, key):
        super().before_operation(name, key)
        if self.is_full and name == 'publish':
            self.is_full = False
            raise NoSpaceError(28, 'injected: no space left')


def test_a_step_that_was_not_committed_is_followed_by_the_next_save(run_dir, local):
    disk = FullOnce(open_storage(local))
    with checkpointer(run_dir, t5ckpt.LocalTier(disk, persist=t5ckpt.SaveEvery(10))) as ck:
        ck.save(state(1))
        disk.is_full = True
        with pytest.raises(NoSpaceError):
            ck.save(state(10))
        ck.save(state(11))
        ck.save(state(12))
        ck.wait_until_persisted()
    assert steps_in(run_dir)[-1] == 11


def test_a_refused_local_step_is_never_passed_over_while_the_bucket_is_away(gs, local):
    """The bucket has step 2 whole; without an answer nobody knows that, so neither step 1 nor a new run follows."""
    run = gs.url()
    with checkpointer(run, t5ckpt.LocalTier(local, keep=2), storage_options=AWAY) as ck:
        ck.save(state(1))
        ck.save(state(2))
        ck.wait_until_persisted()
    damage(chunk(local, 2))
    fails_from_now_on(gs)
    with checkpointer(run, t5ckpt.LocalTier(local, keep=2), storage_options=AWAY) as ck:
        with pytest.raises(StorageError, match='503'):
            ck.restore()
        with pytest.raises(StorageError, match='503'):
            t5ckpt.restore_or_init(ck, lambda: state(0))
        assert steps_in(local) == [1, 2]
    works_again(gs)
    with checkpointer(run, t5ckpt.LocalTier(local, keep=2), storage_options=AWAY) as ck:
        same(t5ckpt.restore_or_init(ck, lambda: state(0)), 2)


def test_a_newer_local_step_without_its_manifest_is_named(run_dir, local, caplog):
    with checkpointer(run_dir, local) as ck:
        ck.save(state(1))
        ck.save(state(2))
        ck.wait_until_persisted(2)
    t5ckpt_cli('rm', run_dir, 2, '--yes')
    (local / 'checkpoint_2' / 'checkpoint').write_bytes(b'')
    with checkpointer(run_dir, local) as ck:
        same(ck.restore(), 1)
    assert said(caplog, 'checkpoint_2: no file "checkpoint", so step 1 is the newest complete one', logging.WARNING)


def test_a_lost_disk(run_dir, local):
    with checkpointer(run_dir, local) as ck:
        ck.save(state(1))
        ck.save(state(2))
    shutil.rmtree(local)
    with checkpointer(run_dir, local) as ck:
        same(ck.restore(), 2)
        ck.save(state(3))
    assert steps_in(local) == [3]
    assert steps_in(run_dir) == [2, 3] or steps_in(run_dir) == [1, 2, 3]


@pytest.mark.parametrize('how', ['changed', 'missing'])
def test_a_step_with_a_damaged_file_comes_from_the_run(run_dir, local, caplog, how):
    with checkpointer(run_dir, local, reuse_unchanged=False) as ck:
        ck.save(state(1))
    if how == 'changed':
        damage(chunk(local, 1))
    else:
        chunk(local, 1).unlink()
    with checkpointer(run_dir, local) as ck:
        same(ck.restore(), 1)
    assert said(caplog, 'local step 1 was not restored: a part of w is on no disk', logging.WARNING)


def test_many_local_steps_that_share_a_damaged_file(run_dir, local):
    """Unchanged arrays are links to one file. However many steps have it, the run's step is restored."""
    tier = t5ckpt.LocalTier(local, keep=9, persist=t5ckpt.SaveAt([1]))
    with checkpointer(run_dir, tier) as ck:
        for step in range(1, 10):
            ck.save(state(1) | {'step': np.int32(step)})
    with chunk(local, 9).open('r+b') as file:
        file.write(bytes(8))
    with checkpointer(run_dir, tier) as ck:
        assert ck.restore()['step'] == 1


def test_damaged_metadata_of_a_local_step_needs_no_other_copy(run_dir, local):
    with checkpointer(run_dir, local, reuse_unchanged=False) as ck:
        ck.save(state(1))
    (local / 'checkpoint_1/w/.zarray').write_text('{}')
    shutil.rmtree(run_dir / 'checkpoint_1')
    with checkpointer(run_dir, local) as ck:
        same(ck.restore(), 1)


def test_a_step_that_only_the_run_has_whole_is_read_there(run_dir, local, caplog):
    with checkpointer(run_dir, local, reuse_unchanged=False) as ck:
        ck.save(state(1))
    put_facts(local / 'checkpoint_1', b'{' * 40)
    damage(chunk(local, 1))
    chunk(local, 1).unlink()
    with checkpointer(run_dir, local) as ck:
        same(ck.restore(), 1)
        assert said(caplog, 'local step 1 was not restored: ', logging.WARNING)
        ck.save(state(2))


def test_a_damaged_step_that_only_the_disk_has_counts_as_absent(run_dir, local, caplog):
    with checkpointer(run_dir, t5ckpt.LocalTier(local, persist=t5ckpt.SaveAt([1])), reuse_unchanged=False) as ck:
        ck.save(state(1))
        ck.save(state(2))
    damage(chunk(local, 2))
    with checkpointer(run_dir, local) as ck:
        with pytest.raises(CorruptCheckpointError, match='a part of w is on no disk'):
            ck.restore(2)
        same(ck.restore(), 1)
        assert said(caplog, 'local step 2 was not restored: a part of w is on no disk', logging.WARNING)
        assert ck.restored_step == 1
        ck.save(state(2))
    assert steps_in(run_dir) == [1, 2]
    assert [name for name in os.listdir(local) if 'checkpoint_2.damaged-' in name]


@pytest.mark.parametrize('is_same_save', [True, False])
def test_a_step_that_is_damaged_in_both_tiers_is_renamed_in_both(run_dir, local, is_same_save):
    with checkpointer(run_dir, local, reuse_unchanged=False) as ck:
        for step in (1, 2):
            ck.save(state(step))
            ck.wait_until_persisted()
    if not is_same_save:
        shutil.rmtree(run_dir / 'checkpoint_2')
        with t5ckpt.Checkpointer(state(0), None, run_dir, options=t5ckpt.CheckpointerOptions(inline_bytes=64)) as ck:
            ck.save(state(2), step=2)
    for root in (run_dir, local):
        damage(chunk(root, 2))
    with checkpointer(run_dir, local) as ck:
        same(t5ckpt.restore_or_init(ck, lambda: state(0)), 1)
        ck.save(state(2))
        ck.wait_until_persisted(2)
    for root in (run_dir, local):
        assert [name for name in os.listdir(root) if 'checkpoint_2.damaged-' in name]
        assert t5ckpt.verify(root, 2, full=True).ok


def test_a_step_that_is_damaged_in_a_bucket_stays_there(gs, local, caplog):
    run = gs.url()
    with checkpointer(run, local, reuse_unchanged=False) as ck:
        for step in (1, 2):
            ck.save(state(step))
            ck.wait_until_persisted()
    (key,) = [key for key, _ in open_storage(run).walk('checkpoint_2') if '/w' in key and key.endswith('/0.0')]
    gs.put(f'{run}/{key}', b'?')
    put_facts(local / 'checkpoint_2', b'{' * 40)
    with checkpointer(run, local) as ck:
        same(t5ckpt.restore_or_init(ck, lambda: state(0)), 1)
        assert said(caplog, 'is not renamed, so that step cannot be saved there again', logging.WARNING)
        ck.save(state(2))
        with pytest.raises(NotPersistedError, match='exists, of another save'):
            ck.wait_until_persisted(2)
        assert t5ckpt.verify(local, 2, full=True).ok
        ck.save(state(2), overwrite=True)
        ck.wait_until_persisted(2)
    assert t5ckpt.verify(run, 2, full=True).ok


def test_a_wait_for_a_step_that_was_lost_before_the_start_raises(gs, local):
    run = gs.url()
    with checkpointer(run, local, storage_options=AWAY) as ck:
        ck.save(state(1))
        ck.wait_until_persisted()
        fails_from_now_on(gs)
        ck.save(state(2))
    works_again(gs)
    shutil.rmtree(local / 'checkpoint_2')
    with checkpointer(run, local, storage_options=AWAY) as ck:
        # A save that was killed before its commit leaves the same record, so a wait for all steps does not raise.
        ck.wait_until_persisted()
        with pytest.raises(NotPersistedError, match=r'step 2 is not in .*: there is no such step'):
            ck.wait_until_persisted(2)
        ck.save(state(3))
        ck.wait_until_persisted()


def test_a_bucket_that_is_away_leaves_the_local_steps(gs, local, caplog):
    run = gs.url()
    with checkpointer(run, local, storage_options=AWAY) as ck:
        ck.save(state(1))
    fails_from_now_on(gs)
    with checkpointer(run, local, storage_options=AWAY) as ck:
        assert ck.all_steps() == [1]
        same(ck.restore(), 1)
        assert ck.latest_step() == 1
    assert len(said(caplog, 'only the steps of', logging.WARNING)) == 1
    shutil.rmtree(local)
    with checkpointer(run, local, storage_options=AWAY) as ck, pytest.raises(OSError, match='503'):
        # Not a fresh start.
        t5ckpt.restore_or_init(ck, lambda: state(0))


class SlowLock(FaultyStorage):
    """A disk that takes a while for its lock."""

    def before_operation(self, name, key):
        super().before_operation(name, key)
        if name == 'try_lock':
            time.sleep(0.2)


class SlowCommit(FaultyStorage):
    """A disk that takes a while to rename."""

    def __init__(self, inner):
        super().__init__(inner)
        self.is_committing = threading.Event()

    def publish(self, source, target):
        self.is_committing.set()
        time.sleep(0.3)
        super().publish(source, target)


def test_metrics_and_deletions_know_both_tiers(run_dir, local):
    with checkpointer(run_dir, t5ckpt.LocalTier(local, persist=t5ckpt.SaveAt([1]), keep=2)) as ck:
        for step, loss in [(1, 1.0), (2, 3.0), (3, 2.0), (4, 5.0)]:
            ck.save(state(step), metrics={'loss': loss})
            ck.wait_until_persisted()
        assert ck.all_steps() == [1, 3, 4]
        assert ck.best_step('loss', 'min') == 1
        assert ck.metrics() == {'loss': 5.0}
        ck.delete(4)
        ck.delete(1)
        assert ck.all_steps() == [3]
        with pytest.raises(t5ckpt.errors.CheckpointNotFoundError):
            ck.delete(1)
        t5ckpt.pin_checkpoint(local / 'checkpoint_3')
        with pytest.raises(t5ckpt.errors.StepKeptError):
            ck.delete(3)


def test_the_last_local_step_is_deleted_without_the_runs_directory(run_dir, local):
    with checkpointer(run_dir, t5ckpt.LocalTier(local, persist=t5ckpt.SaveAt([]))) as ck:
        ck.save(state(1))
        run_dir.touch()
        ck.delete(1)
        assert steps_in(local) == []


def test_deleting_a_step_ends_its_upload(gs, local):
    run = gs.url()
    with checkpointer(run, local, storage_options=AWAY) as ck:
        ck.save(state(1))
        ck.wait_until_persisted()
        gs.proxy.choose = lambda kind, key: '503' if 'checkpoint_2' in key else None
        ck.save(state(2))
        with pytest.raises(NotPersistedError):
            ck.wait_until_persisted(2)
        gs.proxy.choose = lambda kind, key: None
        ck.delete(2)
        ck.wait_until_persisted()
        assert ck.all_steps() == [1]
    assert os.listdir(local / '.t5ckpt/to_persist') == []


# --- whose directory it is -----------------------------------------------------------------------------------------------


def test_two_checkpointers_on_one_directory(run_dir, local):
    ck = checkpointer(run_dir, local)
    ck.save(state(1))
    other = checkpointer(run_dir, local)
    with pytest.raises(LocalDirError, match='in use by another'):
        other.save(state(2))
    reader = checkpointer(run_dir, local, read_only=True)
    same(reader.restore(), 1)
    tier = f't5ckpt.LocalTier({str(local)!r})'
    program = f'import t5ckpt\nck = t5ckpt.Checkpointer({{}}, None, {str(run_dir)!r}, local={tier})\nck.latest_step()'
    assert 'LocalDirError' in forked.run(program).stderr
    ck.close()
    assert other.latest_step() == 1
    other.close()


def test_a_checkpointer_that_was_left_open_gives_the_directory_free(run_dir, local):
    for step in (1, 2, 3):
        ck = checkpointer(run_dir, local)
        ck.save(state(step))
        ck.wait_until_persisted()
    assert ck.all_steps()[-1] == 3
    ck.close()


def test_the_directory_of_another_run_is_refused(tmp_path, local):
    with checkpointer(tmp_path / 'one', local) as ck:
        ck.save(state(1))
    for action in (lambda ck: ck.restore(), lambda ck: ck.save(state(2)), lambda ck: ck.latest_step()):
        with pytest.raises(LocalDirError, match=re.escape(f'{tmp_path / "one"}, and this run is {tmp_path / "two"}')):
            action(checkpointer(tmp_path / 'two', local))
    assert not (tmp_path / 'two').exists()


def test_an_earlier_run_at_the_same_url_is_refused(bucket, local):
    run = bucket.url()
    with checkpointer(run, local) as ck:
        ck.save(state(1))
    record = json.loads((local / '.t5ckpt/tier.json').read_text())
    assert bucket.raw(f'{run}/.t5ckpt/run_id').decode() == record['id']
    bucket.put(f'{run}/.t5ckpt/run_id', b'0123456789abcdef')
    with pytest.raises(
        LocalDirError,
        match=r'another run at .* the run there has the id 0123456789abcdef: it is a new run, or another job',
    ):
        checkpointer(run, local).restore()
    with pytest.raises(LocalDirError, match='another run at'):
        t5ckpt.restore_or_init(checkpointer(run, local), lambda: state(0))
    for action in (lambda ck: ck.save(state(2)), lambda ck: ck.all_steps(), lambda ck: ck.best_step('loss', 'min')):
        with checkpointer(run, local) as ck, pytest.raises(LocalDirError, match='another run at'):
            action(ck)
    assert (steps_in(run), steps_in(local)) == ([1], [1])


def test_the_directory_of_an_earlier_run_while_the_bucket_is_away(gs, local):
    """A save alone succeeds, and learns it when it uploads."""
    run = gs.url()
    with checkpointer(run, local) as ck:
        ck.save(state(1))
    gs.put(f'{run}/.t5ckpt/run_id', b'0123456789abcdef')
    ck = checkpointer(run, local, storage_options=AWAY)
    fails_from_now_on(gs)
    ck.save(state(2))
    works_again(gs)
    with pytest.raises(LocalDirError, match='another run at'):
        ck.wait_until_persisted()
    with pytest.raises(LocalDirError, match='another run at'):
        ck.save(state(3))
    ck.close()
    assert steps_in(run) == [1]


@pytest.mark.parametrize('data', [b'', b'\xff\xfe', b'0123'])
def test_a_damaged_id_of_the_run_is_written_again(run_dir, local, data):
    with checkpointer(run_dir, local) as ck:
        ck.save(state(1))
    identity = run_dir / '.t5ckpt' / 'run_id'
    before = identity.read_bytes()
    identity.write_bytes(data)
    with checkpointer(run_dir, local) as ck:
        same(ck.restore(), 1)
        ck.save(state(2))
        ck.wait_until_persisted(2)
    assert identity.read_bytes() == before


def test_a_run_that_was_moved(run_dir, local):
    """It has the same id, at another path."""
    with checkpointer(run_dir, t5ckpt.LocalTier(local, persist=t5ckpt.SaveAt([1]))) as ck:
        ck.save(state(1))
        ck.save(state(2))
    moved = run_dir.rename(run_dir.with_name('moved'))
    with checkpointer(moved, local) as ck:
        same(ck.restore(), 2)
        ck.save(state(3))
        ck.wait_until_persisted()
    assert 3 in steps_in(moved)
    assert json.loads((local / '.t5ckpt' / 'tier.json').read_text())['run'] == str(moved)


def test_a_bucket_that_is_emptied_in_use(run_dir, local, caplog):
    with checkpointer(run_dir, local) as ck:
        ck.save(state(1))
        ck.wait_until_persisted()
        shutil.rmtree(run_dir)
        ck.save(state(2))
        ck.wait_until_persisted()
    assert len(said(caplog, 'was emptied, or is another storage than before', logging.WARNING)) == 1
    assert steps_in(run_dir) == [2]


def test_a_step_that_waits_and_whose_manifest_is_damaged(gs, local, caplog):
    """The next save is uploaded in its place."""
    tier = t5ckpt.LocalTier(local, persist=t5ckpt.SaveAt([1]))
    run = gs.url()
    fails_from_now_on(gs)
    with checkpointer(run, tier, storage_options=AWAY) as ck:
        ck.save(state(1))
    works_again(gs)
    damage(local / 'checkpoint_1' / 'checkpoint')
    with checkpointer(run, tier, storage_options=AWAY) as ck:
        with pytest.raises(
            NotPersistedError, match=r'step 1 was not uploaded .*checkpoint_1 cannot be read: .*damaged'
        ):
            ck.wait_until_persisted(1)
        ck.save(state(2))
        ck.wait_until_persisted(2)
    assert said(caplog, 'step 1 is not uploaded', logging.ERROR)


def test_checkpoints_without_a_record_are_refused(run_dir, local):
    t5ckpt.Checkpointer(state(0), None, local).save(state(1))
    with pytest.raises(LocalDirError, match=r'no \.t5ckpt/tier\.json'):
        checkpointer(run_dir, local).save(state(2))


def test_a_new_disk_joins_the_run(run_dir, tmp_path):
    for number in (1, 2, 3):
        with checkpointer(run_dir, tmp_path / f'disk{number}') as ck:
            assert ck.latest_step() == (number - 1 or None)
            ck.save(state(number))
    ids = {json.loads((tmp_path / f'disk{n}/.t5ckpt/tier.json').read_text())['id'] for n in (1, 2, 3)}
    assert len(ids) == 1


# --- options -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('place', ['run', 'run/local', '.', 'bucket'])
def test_directories_that_are_refused(tmp_path, place):
    where = 'memory://somewhere/local' if place == 'bucket' else tmp_path / place
    with pytest.raises(ValueError, match='LocalTier'):
        checkpointer(tmp_path / 'run', where)


@pytest.mark.parametrize(
    'options',
    [{'keep': 0}, {'keep': 'two'}, {'upload_gbps': 0}, {'persist': t5ckpt.KeepLatest(1)}, {'directory': None}],
)
def test_options_are_checked(local, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        t5ckpt.LocalTier(**{'directory': local} | options)


def test_a_path_in_place_of_a_local_tier_says_what_to_write(run_dir, local):
    with pytest.raises(ValueError, match=r"local=LocalTier\('/ssd/run'\), got PosixPath"):
        t5ckpt.Checkpointer(state(0), None, run_dir, local=local)


@pytest.mark.slow
def test_without_a_local_directory_there_is_nothing_of_tiers(run_dir):
    """No module, thread, file, log line or warning. tests/storage/test_object_stores.py has the requests of such a save."""
    program = f"""
import json, logging, sys, threading, t5ckpt
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger('t5ckpt').addHandler(handler)
logging.getLogger('t5ckpt').setLevel(logging.DEBUG)
with t5ckpt.Checkpointer({{'a': 1}}, None, {str(run_dir)!r}, save_policy=t5ckpt.SaveEvery(2), keep=1) as ck:
    ck.save({{'a': 1}}, step=1)
    ck.save_async({{'a': 1}}, step=2).result()
    ck.maybe_save(4, {{'a': 1}})
    ck.wait_until_finished()
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(20)  # Those of saves and of retention end.
    threads = [thread.name for thread in threading.enumerate()]
    ck.restore()
modules = [name for name in sys.modules if name.startswith('t5ckpt.tiers')]
print(json.dumps([modules, threads, lines]))
"""
    done = subprocess.run([sys.executable, '-W', 'error', '-c', program], capture_output=True, text=True, check=True)
    modules, threads, lines = json.loads(done.stdout)
    assert modules == []
    assert threads == ['MainThread']
    assert any('Saved checkpoint for step 2' in line for line in lines)
    words = ('tier', 'local director', 'upload', 'persist')
    assert not [line for line in lines if any(word in line.replace(str(run_dir), '') for word in words)]
    assert [each.name for each in run_dir.iterdir()] == ['checkpoint_4']


def test_without_a_local_directory_a_saved_step_is_persisted(run_dir):
    ck = t5ckpt.Checkpointer(state(0), None, run_dir)
    saved = ck.save_async(state(1))
    ck.wait_until_persisted(1)
    assert saved.done()


def test_a_local_directory_that_cannot_be_locked_is_refused(tmp_path):
    """Two processes would upload and delete each other's steps."""

    class Unlockable(FaultyStorage):
        def try_lock(self, key):
            return DirectoryLock(os.open(tmp_path, os.O_RDONLY), str(tmp_path), False, 'Input/output error')

    local = LocalDirectory(
        Unlockable(open_storage(tmp_path / 'local')), open_storage(tmp_path / 'run'), 2, read_only=False
    )
    for _ in range(2):
        with pytest.raises(
            LocalDirError, match=r'local cannot be locked \(Input/output error\).* Pass a directory on a disk'
        ):
            local.open(create=True)


def test_a_local_directory_that_is_removed_in_use_is_made_again(gs, local, caplog):
    """As by a cleaner of temporary files: the next save locks it again, and the next start accepts its steps."""
    run = gs.url()
    ck = checkpointer(run, local, storage_options=AWAY)
    ck.save(state(1))
    ck.wait_until_persisted()
    shutil.rmtree(local)
    fails_from_now_on(gs)
    ck.save(state(2))
    assert said(caplog, f'{local} was removed while it was in use', logging.ERROR)
    with pytest.raises(LocalDirError, match='in use by another'):
        checkpointer(run, local).save(state(3))
    ck.close()
    works_again(gs)
    with checkpointer(run, local) as ck:
        same(ck.restore(), 2)
    assert steps_in(run) == [1, 2]


@pytest.mark.parametrize('name', ['taken.json', 'tier.json', 'to_persist/7'])
def test_a_start_removes_the_files_of_writes_that_a_crash_ended(run_dir, local, name):
    with checkpointer(run_dir, local) as ck:
        ck.save(state(1))
    partial = local / '.t5ckpt' / f'{name}.0a1b2c3d.__partial'
    partial.write_bytes(b'')
    with checkpointer(run_dir, local) as ck:
        assert ck.latest_step() == 1
    assert not partial.exists()


def test_a_disk_that_cannot_be_inspected_keeps_its_lock(tmp_path):
    (tmp_path / 'a').mkdir()
    lock = lock_directory(str(tmp_path / 'a'))
    assert lock.is_current()
    (tmp_path / 'a').rename(tmp_path / 'b')
    assert not lock.is_current()
    # stat fails, and not because nothing is there.
    (tmp_path / 'a').symlink_to(tmp_path / 'a')
    assert lock.is_current()
    lock.close()
    assert not lock.is_current()


@pytest.mark.slow
@pytest.mark.parametrize('ends', ['closed', 'killed'])
def test_a_forked_process_does_not_keep_the_directory(run_dir, local, ends):
    """As a worker of a data loader, which may live longer than its parent."""
    program = f"""
import os, sys, time, signal, t5ckpt
ck = t5ckpt.Checkpointer({{'a': 1}}, None, {str(run_dir)!r}, local=t5ckpt.LocalTier({str(local)!r}))
ck.save({{'a': 1}}, step=1)
ck.wait_until_persisted()
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)
    time.sleep(600)
sys.stdin.readline()
if {ends!r} == 'killed':
    os.kill(os.getpid(), signal.SIGKILL)
ck.close()
"""
    words, pipe = [sys.executable, '-W', 'ignore', '-c', program], subprocess.PIPE
    done = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
    child = int(done.stdout.readline())
    try:
        done.stdin.close()
        done.wait()
        with t5ckpt.Checkpointer({'a': 1}, None, run_dir, local=t5ckpt.LocalTier(local)) as ck:
            ck.save({'a': 1}, step=2)
        assert steps_in(run_dir) == [1, 2]
    finally:
        os.kill(child, signal.SIGKILL)
        done.stdout.close()


@pytest.mark.parametrize('refuses', [False, True])
@pytest.mark.parametrize('operation', ['write', 'sync_tree'])
def test_a_step_whose_record_is_not_durable_does_not_wait(run_dir, local, caplog, operation, refuses):
    """The record is there, and the save fails, as when an fsync of its directory does; also if it cannot be removed then."""

    class Failing(FaultyStorage):
        fails = False

        def write(self, key, data):
            super().write(key, data)
            self._fail('write', key)

        def sync_tree(self, key, names):
            super().sync_tree(key, names)
            self._fail('sync_tree', key)

        def delete_file(self, key):
            if self.fails and refuses and 'to_persist' in key:
                raise StorageError(5, 'Input/output error')
            super().delete_file(key)

        def _fail(self, name, key):
            if self.fails and name == operation and key in ('.t5ckpt', '.t5ckpt/to_persist/3'):
                raise StorageError(5, 'Input/output error')

    disk = Failing(open_storage(local))
    with checkpointer(run_dir, disk) as ck:
        ck.save(state(2))
        ck.wait_until_persisted()
        disk.fails = True
        with pytest.raises(StorageError, match='Input/output error'):
            ck.save(state(3))
        ck.wait_until_persisted()
        assert os.listdir(local / '.t5ckpt/to_persist') == ['3'] * refuses
        assert bool(said(caplog, 'to_persist/3 could not be removed', logging.WARNING)) == refuses
        disk.fails = False
        ck.save(state(3))
        ck.wait_until_persisted(3)
    assert steps_in(run_dir) == [2, 3]
    assert os.listdir(local / '.t5ckpt/to_persist') == []


class NotSynced(FaultyStorage):
    """A disk that cannot synchronize the directory after the rename of a step, nor take the rename back."""

    def publish(self, source, target):
        super().publish(source, target)
        if target == 'checkpoint_2':
            raise NotDurableError(5, f'{self.url(target)}: Input/output error; the rename is visible')


def test_a_step_that_is_listed_although_its_save_failed_is_uploaded(run_dir, local):
    with checkpointer(run_dir, NotSynced(open_storage(local))) as ck:
        ck.save(state(1))
        ck.wait_until_persisted()
        with pytest.raises(NotDurableError, match=r'checkpoint_2: Input/output error; the rename is visible'):
            ck.save(state(2))
        assert steps_in(local) == [1, 2]
        ck.wait_until_persisted(2)
        same(ck.restore(), 2)
    assert steps_in(run_dir) == [1, 2]
