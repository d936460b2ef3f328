"""How uploads end: overwrites, close, damage of the local disk, deletions, steps that the training went back behind."""

import errno
import logging
import os
import threading
import time

import numpy as np
import pytest
from support.options import with_options
from support.tiers import tier_of

import t5ckpt
from t5ckpt.errors import CheckpointNotFoundError, ClosedError, NotPersistedError, StorageError
from t5ckpt.storage import open_storage
from t5ckpt.testing import FaultyStorage

SMALL = {'chunk_bytes': 2**14, 'inline_bytes': 64}


class Bucket(FaultyStorage):
    """A bucket in memory that answers no request while it is away, waits before each write, and can lose all of its keys."""

    def __init__(self, name):
        super().__init__(open_storage(f'memory://upload-ends/{name}'))
        self.is_away = self.is_gone = False
        self.seconds = 0.0

    def before_operation(self, name, key):
        super().before_operation(name, key)
        if self.is_away:
            raise StorageError(errno.EIO, 'injected: the bucket is away')
        if name in ('write', 'replace'):
            time.sleep(self.seconds)
            if self.is_gone:
                raise CheckpointNotFoundError('injected: 404 NoSuchBucket')


class BadDisk(FaultyStorage):
    """A disk that cannot list the files of one directory or, if it ``heals``, cannot once."""

    bad, heals = '', False

    def before_operation(self, name, key):
        super().before_operation(name, key)
        if name == 'walk' and key == self.bad:
            self.bad = '' if self.heals else key
            raise StorageError(errno.EIO, 'injected: input/output error')


@pytest.fixture
def remote(request):
    return Bucket(request.node.name.replace('[', '-').replace(']', ''))


@pytest.fixture
def local(tmp_path):
    return tmp_path / 'local'


def state(value, step=None):
    return {'w': np.full((64, 96), value, np.float32), 'step': np.int32(value if step is None else step)}


def checkpointer(run, local, **options):
    return t5ckpt.Checkpointer(state(0), None, run, local=tier_of(local), **with_options(**SMALL, **options))


def value(run, step):
    return t5ckpt.load_t5x_checkpoint(run, step)['w'][0, 0]


def waiting(local):
    return sorted(int(name) for name in os.listdir(local / '.t5ckpt/to_persist'))


def await_write(remote, key):
    """Waits until a file is being written to the bucket."""
    deadline = time.monotonic() + 30
    while not any(name == 'write' and each.startswith(key) for name, each in remote.operations):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def await_end(local):
    """Waits until no step waits."""
    deadline = time.monotonic() + 30
    while waiting(local):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def damage(file):
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.unlink()
    file.write_bytes(data)


# --- overwrites ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('away', [False, True])
def test_an_overwrite_that_the_policy_does_not_take_is_uploaded(remote, local, away):
    with checkpointer(remote, t5ckpt.LocalTier(local, persist=t5ckpt.SaveEvery(100), keep=1)) as ck:
        ck.save(state(1, 100))
        ck.wait_until_persisted(100)
        remote.is_away = away
        ck.save(state(2, 100), overwrite=True)
        remote.is_away = False
        ck.wait_until_persisted(100)
        ck.save(state(3, 150))
        assert t5ckpt.all_steps(local) == [150]
        assert ck.restore(100)['w'][0, 0] == 2
    assert t5ckpt.all_steps(remote) == [100]


def test_an_overwrite_during_its_first_upload_is_uploaded(remote, local):
    remote.seconds = 0.3
    with checkpointer(remote, t5ckpt.LocalTier(local, persist=t5ckpt.SaveEvery(100))) as ck:
        ck.save(state(1, 100))
        await_write(remote, 'checkpoint_100/t5ckpt-')
        ck.save(state(2, 100), overwrite=True)
        remote.seconds = 0.0
        ck.wait_until_persisted(100)
    assert value(remote, 100) == 2


class SlowPolicy(t5ckpt.KeepPolicy):
    """Keeps all, and takes its time for the first decision."""

    def __init__(self):
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def choose(self, infos):
        self.is_asked.set()
        self.may_answer.wait(30)
        return t5ckpt.KeepAll().choose(infos)


def test_an_overwrite_during_retention_after_an_upload_is_uploaded(remote, local):
    policy = SlowPolicy()
    with checkpointer(remote, local, keep_policy=policy) as ck:
        ck.save(state(1, 100))
        assert policy.is_asked.wait(30)
        ck.save(state(2, 100), overwrite=True)
        policy.may_answer.set()
        ck.wait_until_persisted(100)
    assert value(remote, 100) == 2


def test_an_overwrite_replaces_the_step_of_the_bucket_in_one_write(remote, local):
    with checkpointer(remote, local) as ck:
        ck.save(state(1, 100))
        ck.wait_until_persisted()
        before = len(remote.operations)
        ck.save(state(2, 100), overwrite=True)
        ck.wait_until_persisted()
    operations = [(name, key) for name, key in remote.operations[before:] if key == 'checkpoint_100/checkpoint']
    assert [name for name, _ in operations if name in ('replace', 'write', 'delete_file', 'delete_unchanged')] == [
        'replace'
    ]
    assert value(remote, 100) == 2
    assert t5ckpt.verify(remote, full=True).ok


def test_a_damaged_local_manifest_is_not_replaced_by_that_of_the_bucket(remote, local):
    """They name other files."""
    with checkpointer(remote, local) as ck:
        ck.save(state(1, 100))
        ck.wait_until_persisted()
    manifest = local / 'checkpoint_100' / 'checkpoint'
    data = manifest.read_bytes()
    manifest.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    with checkpointer(remote, local) as ck:
        assert ck.restore()['w'][0, 0] == 1
    for file in local.rglob('checkpoint'):
        assert b't5ckpt-' not in file.read_bytes()


def test_an_overwrite_is_not_dropped_for_a_newer_step(remote, local):
    with checkpointer(remote, t5ckpt.LocalTier(local, keep=1)) as ck:
        ck.save(state(1, 100))
        ck.wait_until_persisted()
        remote.is_away = True
        ck.save(state(2, 200))
        ck.save(state(9, 100), overwrite=True)
        ck.save(state(3, 300))
        assert waiting(local) == [100, 300]
        remote.is_away = False
        ck.wait_until_persisted()
        assert t5ckpt.all_steps(remote) == [100, 300]
        assert value(remote, 100) == 9
        assert t5ckpt.all_steps(local) == [300]


def test_overwrites_of_new_steps_do_not_fill_the_disk(remote, local):
    """A loop that always passes overwrite=True replaces nothing in the bucket, so newer steps replace older ones that wait."""
    with checkpointer(remote, t5ckpt.LocalTier(local, keep=1)) as ck:
        ck.save(state(1), overwrite=True)
        ck.wait_until_persisted()
        ck.save(state(2), overwrite=True)
        ck.wait_until_persisted()
        remote.is_away = True
        for step in (3, 4, 5, 6):
            ck.save(state(step), overwrite=True)
        assert len(waiting(local)) <= 2
        assert waiting(local)[-1] == 6
        remote.is_away = False


def test_a_wait_compares_the_saves(remote, local):
    with checkpointer(remote, local) as ck:
        ck.save(state(1))
        ck.wait_until_persisted(1)
        # Another program replaces the bucket's step.
        t5ckpt.Checkpointer(state(0), None, remote).save(state(5, 1), overwrite=True)
        with pytest.raises(NotPersistedError, match=r'is of another save than in .*\. Save it with overwrite=True\.'):
            ck.wait_until_persisted(1)
        ck.save(state(7, 1), overwrite=True)
        ck.wait_until_persisted(1)


# --- close ---------------------------------------------------------------------------------------------------------------


def test_after_close_nothing_waits_and_nothing_is_deleted(remote, local):
    ck = checkpointer(remote, local)
    ck.save(state(1))
    ck.wait_until_persisted()
    remote.is_away = True
    ck.save(state(2))
    ck.close()
    remote.is_away = False
    with checkpointer(remote, local) as new:
        for call in (ck.wait_until_persisted, lambda: ck.delete(2)):
            with pytest.raises(ClosedError, match='is closed'):
                call()
        assert ck.all_steps() == [1, 2]
        assert ck.restore()['step'] == 2
        new.wait_until_persisted(2)


def test_close_ends_a_wait_of_another_thread(remote, local):
    ck = checkpointer(remote, local)
    ck.save(state(1))
    ck.wait_until_persisted()
    remote.is_away = True
    ck.save(state(2))
    errors = []

    def wait():
        for _ in range(100):
            try:
                ck.wait_until_persisted(2)
            except ClosedError:
                return
            except NotPersistedError as error:
                errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    ck.close()
    thread.join(30)
    assert not thread.is_alive()
    assert all('step 2 is not in' in text for text in errors)


def test_a_closed_checkpointer_leaves_the_records_of_the_next_one(remote, local):
    old = checkpointer(remote, local)
    old.save(state(1))
    old.close()
    with checkpointer(remote, local) as new:
        remote.is_away = True
        new.save(state(2))
        # The record of a step that is being committed.
        record = local / '.t5ckpt/to_persist/7'
        record.write_bytes(b'')
        assert old.all_steps() == [1, 2]
        assert record.exists()
        record.unlink()
        remote.is_away = False


# --- failures of the disk and of the bucket ------------------------------------------------------------------------------


def test_a_wait_for_all_raises_if_a_step_could_not_be_uploaded(remote, local):
    with checkpointer(remote, local) as ck:
        ck.save(state(1))
        ck.wait_until_persisted()
        remote.is_away = True
        ck.save(state(2))
        damage(local / 'checkpoint_2/w/0.0')
        remote.is_away = False
        await_end(local)
        with pytest.raises(NotPersistedError, match=r'step 2 was not uploaded .*damaged'):
            ck.wait_until_persisted()
        ck.wait_until_persisted()
        ck.save(state(3))
        ck.wait_until_persisted()
    assert t5ckpt.all_steps(remote) == [1, 3]


def test_a_bad_disk_drops_the_step_and_the_next_save_links_nothing(remote, local):
    """A frozen array is linked from step to step. If its file may be damaged, the process still has its values."""
    disk = BadDisk(open_storage(local))
    frozen = np.arange(64 * 96, dtype=np.float32).reshape(64, 96)

    def tree(step):
        return state(step) | {'frozen': frozen}

    with t5ckpt.Checkpointer(
        tree(0), None, remote, local=t5ckpt.LocalTier(disk), **with_options(**SMALL | {'chunk_bytes': 2**16})
    ) as ck:
        ck.save(tree(1))
        ck.wait_until_persisted()
        inode = os.stat(local / 'checkpoint_1/frozen/0.0').st_ino
        disk.bad = 'checkpoint_2'
        ck.save(tree(2))
        # The first attempt that fails is repeated, and a wait that has begun before raises its error.
        await_end(local)
        with pytest.raises(NotPersistedError, match=r'step 2 was not uploaded .*cannot be read: .*input/output error'):
            ck.wait_until_persisted(2)
        assert os.stat(local / 'checkpoint_2/frozen/0.0').st_ino == inode
        ck.save(tree(3))
        ck.wait_until_persisted(3)
        assert os.stat(local / 'checkpoint_3/frozen/0.0').st_ino != inode
    assert t5ckpt.all_steps(remote) == [1, 3]


def test_a_disk_that_fails_for_a_moment_drops_no_step(remote, local):
    disk = BadDisk(open_storage(local))
    with t5ckpt.Checkpointer(state(0), None, remote, local=t5ckpt.LocalTier(disk), **with_options(**SMALL)) as ck:
        ck.save(state(1))
        ck.wait_until_persisted()
        disk.bad, disk.heals = 'checkpoint_2', True
        ck.save(state(2))
        ck.wait_until_persisted(2)
        assert disk.bad == ''
    assert t5ckpt.all_steps(remote) == [1, 2]


def test_a_bucket_that_answers_404_is_tried_again(remote, local):
    with checkpointer(remote, local) as ck:
        ck.save(state(1))
        ck.wait_until_persisted()
        remote.is_gone = True
        before = len(remote.operations)
        ck.save(state(2))
        with pytest.raises(NotPersistedError, match='404'):
            ck.wait_until_persisted(2)
        assert len(remote.operations) - before < 100
        assert waiting(local) == [2]
        remote.is_gone = False
        ck.wait_until_persisted(2)


def test_the_error_of_a_step_that_the_keep_policy_deleted(remote, local):
    with checkpointer(remote, local, keep=1) as ck:
        for step in (1, 2):
            ck.save(state(step))
            ck.wait_until_persisted()
        with pytest.raises(NotPersistedError, match='persist did not take it, or it was deleted since'):
            ck.wait_until_persisted(1)


# --- deletions, and going back -------------------------------------------------------------------------------------------


def test_a_step_that_is_deleted_during_its_upload_leaves_no_files(remote, local):
    def tree(step):
        return {'w': np.random.default_rng(step).standard_normal((512, 96)).astype(np.float32), 'step': np.int32(step)}

    remote.seconds = 0.2
    with t5ckpt.Checkpointer(tree(0), None, remote, local=t5ckpt.LocalTier(local), **with_options(**SMALL)) as ck:
        ck.save(tree(1))
        await_write(remote, 'checkpoint_1/t5ckpt-')
        ck.delete(1)
        assert not [key for key, _ in remote.walk('') if key.startswith('checkpoint_1')]
        assert waiting(local) == []


def test_a_failed_deletion_of_a_step_that_waits_drops_no_later_step(remote, local):
    """The step waits behind a later one, since it replaces one of the run."""
    with checkpointer(remote, local) as ck:
        ck.save(state(1, 100))
        ck.wait_until_persisted()
        remote.is_away = True
        ck.save(state(2, 100), overwrite=True)
        ck.save(state(3, 200))
        with pytest.raises(StorageError, match='injected'):
            ck.delete(100)
        assert waiting(local) == [100, 200]
        remote.is_away = False
        ck.wait_until_persisted()
    assert (t5ckpt.all_steps(remote), value(remote, 100), value(remote, 200)) == ([100, 200], 2, 3)


def test_wait_ends_with_an_attempt_that_fails_as_the_one_before_it(remote, local, caplog):
    """The error is the same object."""
    error = StorageError(errno.EMFILE, 'injected: too many open files')

    class Failing(FaultyStorage):
        def before_operation(self, name, key):
            if name == 'write':
                raise error

    with checkpointer(Failing(remote), local) as ck:
        ck.save(state(1))
        while 'failed, and is repeated' not in caplog.text:
            time.sleep(0.01)
        with pytest.raises(NotPersistedError, match=r'yet: .*injected.* The upload is repeated'):
            ck.wait_until_persisted()


def test_after_a_restore_of_an_older_step_the_new_saves_are_uploaded(remote, local, caplog):
    caplog.set_level(logging.INFO)
    with checkpointer(remote, local) as ck:
        ck.save(state(1, 100))
        ck.wait_until_persisted()
        remote.is_away = True
        ck.save(state(2, 200))
        ck.close()
    with checkpointer(remote, local) as ck:
        assert ck.restore(step=100)['step'] == 100
        ck.save(state(5, 150))
        remote.is_away = False
        ck.wait_until_persisted()
        assert 'step 150 was saved later' in caplog.text
    assert t5ckpt.all_steps(remote) == [100, 150]


@pytest.mark.parametrize('away', [False, True])
def test_a_reader_says_that_it_uploads_nothing(remote, local, away):
    """The step waits since an earlier start."""
    remote.is_away = True
    with t5ckpt.Checkpointer(state(1), None, remote, local=t5ckpt.LocalTier(local), **with_options(**SMALL)) as ck:
        ck.save(state(1))
    remote.is_away = away
    with t5ckpt.Checkpointer(
        state(1), None, remote, local=t5ckpt.LocalTier(local), read_only=True, **with_options(**SMALL)
    ) as reader:
        for words in ((), (1,)):
            with pytest.raises(
                NotPersistedError,
                match=r'step 1 .*waits for its upload.* neither .* read_only=True nor a forked process uploads',
            ):
                reader.wait_until_persisted(*words)
        if not away:
            with pytest.raises(NotPersistedError, match='there is no such step'):
                reader.wait_until_persisted(2)
    remote.is_away = False
    with t5ckpt.Checkpointer(state(1), None, remote, local=t5ckpt.LocalTier(local), **with_options(**SMALL)) as ck:
        ck.wait_until_persisted(1)
    # The trainer died before it removed the record.
    (local / '.t5ckpt/to_persist/1').touch()
    with t5ckpt.Checkpointer(
        state(1), None, remote, local=t5ckpt.LocalTier(local), read_only=True, **with_options(**SMALL)
    ) as reader:
        reader.wait_until_persisted(1)


@pytest.mark.parametrize(
    'policy', [t5ckpt.SaveEvery(1), t5ckpt.SaveOnImprovement('loss', 'min')], ids=['every', 'best']
)
def test_a_training_begins_while_the_bucket_is_away(remote, local, caplog, policy):
    """The local directory has no step yet, so the steps of the run are unknown."""
    with t5ckpt.Checkpointer(
        state(0), None, remote, local=t5ckpt.LocalTier(local), save_policy=policy, **with_options(**SMALL)
    ) as ck:
        assert int(t5ckpt.restore_or_init(ck, lambda: state(0))['step']) == 0
        remote.is_away = True
        assert ck.should_save(1, metrics={'loss': 0.5})
        for step in (1, 2, 3):
            assert ck.maybe_save(step, state(step), metrics={'loss': 1 / step}).result().step == step
        assert [record.levelname for record in caplog.records if 'the steps of the run' in record.message] == [
            'WARNING'
        ]
        remote.is_away = False
        ck.wait_until_persisted(3)


def test_saves_do_not_wait_for_a_bucket_that_is_away(remote, local):
    """The start asks it, and then only uploads do, of which the policy takes none."""
    policy = t5ckpt.SaveAt([99])
    with checkpointer(remote, t5ckpt.LocalTier(local, persist=policy)) as ck:
        ck.save(state(1))
    remote.is_away = True
    with checkpointer(remote, t5ckpt.LocalTier(local, persist=policy)) as ck:
        assert ck.restore()['step'] == 1
        before = len(remote.operations)
        for step in (2, 3):
            ck.save(state(step))
        assert len(remote.operations) == before
    remote.is_away = False


def test_a_restart_asks_a_bucket_that_is_away_once(remote, local, caplog):
    """Each request takes the client's whole time for retries."""
    policy = t5ckpt.SaveEvery(100)
    with checkpointer(remote, t5ckpt.LocalTier(local, persist=policy)) as ck:
        ck.save(state(1))
    remote.is_away, before = True, len(remote.operations)
    with checkpointer(
        remote, t5ckpt.LocalTier(local, persist=policy), save_policy=t5ckpt.SaveEvery(1) | t5ckpt.SaveOnImprovement('x')
    ) as ck:
        assert t5ckpt.restore_or_init(ck, lambda: state(0))['step'] == 1
        assert ck.all_steps() == [1]
        ck.maybe_save(2, state(2), metrics={'x': 1.0})
        assert len(remote.operations) == before + 1
    assert [
        record.message.partition(': only ')[0] for record in caplog.records if 'only the steps of' in record.message
    ] == ['t5ckpt']
    remote.is_away = False


def test_a_training_without_a_local_directory_does_not_begin_while_the_bucket_is_away(remote):
    with t5ckpt.Checkpointer(state(0), None, remote, save_policy=t5ckpt.SaveEvery(1), **with_options(**SMALL)) as ck:
        remote.is_away = True
        with pytest.raises(StorageError, match='the bucket is away'):
            ck.maybe_save(1, state(1))
        remote.is_away = False
        assert ck.maybe_save(1, state(1)).result().step == 1


def test_the_last_step_is_uploaded(run_dir, local):
    policy = t5ckpt.SaveEvery(10) | t5ckpt.SaveLast(23)
    with checkpointer(run_dir, t5ckpt.LocalTier(local, persist=policy)) as ck:
        for step in (5, 10, 15, 20, 23):
            ck.save(state(step))
            ck.wait_until_persisted()
    assert t5ckpt.all_steps(run_dir) == [10, 20, 23]
