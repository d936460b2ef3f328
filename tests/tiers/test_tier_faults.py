"""Two tiers while the bucket is slow or away, the program is interrupted or killed, and the disk fails."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from support import forked
from support.options import with_options
from support.tiers import tier_of
from tensorboardX import SummaryWriter

import t5ckpt
from t5ckpt.errors import AccessDeniedError, NoSpaceError, NotPersistedError, StorageError
from t5ckpt.storage import open_storage
from t5ckpt.testing import FaultyStorage

AWAY = {'retry_seconds': 1.0}
SMALL = {'chunk_bytes': 2**12, 'inline_bytes': 64}


def state(step):
    rng = np.random.default_rng(step)
    return {'w': rng.standard_normal((64, 64), dtype=np.float32), 'step': np.int32(step)}


def same(found, step):
    for name, values in state(step).items():
        assert np.array_equal(found[name], values), (step, name)


@pytest.fixture
def local(tmp_path):
    return tmp_path / 'local'


def checkpointer(run, local, **options):
    return t5ckpt.Checkpointer(state(0), None, run, local=tier_of(local), **with_options(**{**SMALL, **options}))


def program(run, local, lines):
    """The program of a trainer; it has `ck` and `state(step)`."""
    text = f"""
import numpy as np, sys, t5ckpt
def state(step):
    rng = np.random.default_rng(step)
    return {{'w': rng.standard_normal((64, 64), dtype=np.float32), 'step': np.int32(step)}}
ck = t5ckpt.Checkpointer(
    state(0), None, {str(run)!r}, local=t5ckpt.LocalTier({str(local)!r}), storage_options={{'retry_seconds': 1.0}},
    options=t5ckpt.CheckpointerOptions(chunk_bytes={2**12}, inline_bytes=64))
"""
    return text + textwrap.dedent(lines)


class Held:
    """Requests of an upload that wait from the one that a test chooses on, until it releases them."""

    def __init__(self, bucket, is_held):
        self.reached, self.released = threading.Event(), threading.Event()
        self._is_held = is_held
        bucket.proxy.choose = self._choose

    def _choose(self, kind, key):
        if self._is_held(kind, key):
            self.reached.set()
            self.released.wait(60)


@pytest.mark.slow
def test_saves_go_on_while_an_upload_is_slow(bucket, local):
    run = bucket.url()
    held = Held(bucket, lambda kind, key: 'checkpoint_1' in key and kind == 'write')
    with checkpointer(run, t5ckpt.LocalTier(local, keep=1)) as ck:
        ck.save(state(1))
        assert held.reached.wait(60)
        for step in (2, 3, 4):
            ck.save(state(step))
        assert t5ckpt.all_steps(local) == [1, 4], 'what is being uploaded, and the newest'
        same(ck.restore(), 4)
        held.released.set()
        ck.wait_until_persisted(4)
        with pytest.raises(NotPersistedError, match='was saved later'):
            ck.wait_until_persisted(3)
    assert t5ckpt.all_steps(run)[-1] == 4
    assert t5ckpt.all_steps(local) == [4]


@pytest.mark.slow
@pytest.mark.parametrize('stage', ['/w/', 'integrity', '/checkpoint'])
def test_a_killed_upload_to_a_bucket_is_finished_by_the_next_start(bucket, local, stage):
    run = bucket.url()
    with checkpointer(run, local) as ck:
        ck.save(state(1))
    held = Held(bucket, lambda kind, key: 'checkpoint_2' in key and stage in key and kind == 'write')
    trainer = forked.start(program(run, local, 'ck.save(state(2))\nck.close()'))
    try:
        assert held.reached.wait(120), stage
    finally:
        trainer.kill()
        trainer.wait()
        held.released.set()
    bucket.proxy.reset()
    with checkpointer(run, local) as ck:
        same(ck.restore(), 2)
        ck.wait_until_persisted()
        assert ck.all_steps() == [1, 2]
        ck.save(state(3))
    assert t5ckpt.all_steps(run) == [1, 2, 3]
    for step in (1, 2, 3):
        assert t5ckpt.verify(run, step, full=True).ok
    assert os.listdir(local / '.t5ckpt/to_persist') == []


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_of_close(gs, local):
    run = gs.url()
    held = Held(gs, lambda kind, key: 'checkpoint_1' in key and kind == 'write')
    # A shell that starts the tests in the background ignores SIGINT, and its children inherit that.
    lines = """
    import signal
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ck.save(state(1))
    print('saved', flush=True)
    try:
        ck.close()
    except KeyboardInterrupt:
        print('interrupted', flush=True)
    """
    command = [sys.executable, '-c', program(run, local, lines)]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout.readline() == 'saved\n'
        assert held.reached.wait(60)
        # The program is in close() by then, and then has handled the signal.
        time.sleep(2)
        trainer.send_signal(signal.SIGINT)
        time.sleep(2)
        # The thread ends after the files that are on their way.
        held.released.set()
        out, errors = trainer.communicate(timeout=120)
    finally:
        trainer.kill()
        trainer.wait()
        held.released.set()
    assert out == 'interrupted\n', errors
    assert 'The next start with this local directory uploads it' in errors
    gs.proxy.reset()
    with checkpointer(run, local) as ck:
        same(ck.restore(), 1)
        ck.wait_until_persisted()
    assert t5ckpt.all_steps(run) == [1]


@pytest.mark.slow
def test_a_program_that_forgets_close_ends_while_the_bucket_is_away(gs, local):
    run = gs.url()
    gs.proxy.choose = lambda kind, key: '503'
    command = [sys.executable, '-c', program(run, local, 'ck.save(state(1))')]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert os.listdir(local / '.t5ckpt/to_persist') == ['1']
    gs.proxy.reset()
    with checkpointer(run, local) as ck:
        same(ck.restore(), 1)
        ck.wait_until_persisted(1)
    assert t5ckpt.all_steps(run) == [1]


def test_a_damaged_local_file_comes_from_the_bucket(bucket, local, caplog):
    caplog.set_level(logging.INFO, 't5ckpt')
    run = bucket.url()
    with checkpointer(run, local, reuse_unchanged=False) as ck:
        ck.save(state(1))
    file = next((local / 'checkpoint_1/w').glob('0.*'))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with checkpointer(run, local) as ck:
        same(ck.restore(), 1)
    (reason,) = [text for text in caplog.messages if 'local step 1 was not restored' in text]
    assert 'a part of w is on no disk' in reason
    assert [each.name for each in local.glob('checkpoint_*')] == ['checkpoint_1'], 'retention deletes it'


class Worn(FaultyStorage):
    """A disk whose writes fail from a moment on."""

    error: StorageError | None = None

    def before_operation(self, name, key):
        super().before_operation(name, key)
        if self.error is not None and name in ('write', 'replace', 'make_dir'):
            raise self.error


@pytest.mark.parametrize(
    'error', [NoSpaceError(28, 'full'), AccessDeniedError(30, 'read-only'), StorageError(5, 'bad')]
)
def test_a_damaged_step_on_a_disk_that_cannot_be_written_is_read_from_the_run(run_dir, local, error):
    with checkpointer(run_dir, local, reuse_unchanged=False) as ck:
        for step in (1, 2):
            ck.save(state(step))
            ck.wait_until_persisted()
    file = next((local / 'checkpoint_2/w').glob('[0-9]*'))
    file.write_bytes(file.read_bytes()[:-1] + b'?')
    disk = Worn(open_storage(local))
    with checkpointer(run_dir, disk) as ck:
        disk.error = error
        same(t5ckpt.restore_or_init(ck, lambda: state(0)), 2)
        disk.error = None


def test_uploads_at_an_interval(run_dir, local):
    now = [1000.0]
    policy = t5ckpt.SaveEverySeconds(10)
    with checkpointer(run_dir, t5ckpt.LocalTier(local, persist=policy, keep=9), clock=lambda: now[0]) as ck:
        for step, seconds in [(1, 5.0), (2, 6.0), (3, 0.0), (4, 10.0)]:
            now[0] += seconds
            ck.save(state(step))
            ck.wait_until_persisted()
    assert t5ckpt.all_steps(run_dir) == [2, 4]


def test_the_best_steps_stay_in_the_run(run_dir, local):
    options = {'keep': 2, 'metric_name_to_monitor': 'eval/accuracy', 'local': t5ckpt.LocalTier(local), **SMALL}
    with (
        t5ckpt.SaveBestCheckpointer(state(0), None, run_dir, **with_options(**options)) as ck,
        SummaryWriter(str(run_dir / 'eval')) as events,
    ):
        for step, accuracy in [(1, 0.1), (2, 0.9), (3, 0.5), (4, 0.2), (5, 0.3)]:
            events.add_scalar('accuracy', accuracy, step)
            events.flush()
            ck.save(state(step))
            ck.wait_until_persisted()
        assert t5ckpt.all_steps(local) == [4, 5]
        assert t5ckpt.all_steps(run_dir) == [2, 3, 5], 'the two best, and the latest'
        assert ck.best_step('eval/accuracy') == 2
        same(ck.restore(2), 2)
