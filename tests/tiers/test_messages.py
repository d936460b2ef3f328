"""What two tiers log and raise: the numbers add up, the cures fit, and each line is said once."""

import errno
import json
import logging
import os
import re

import numpy as np
import pytest
from support.cli import t5ckpt_cli
from support.facts import put_facts
from support.options import with_options
from support.tiers import tier_of

import t5ckpt
from t5ckpt.errors import LocalDirError, NoSpaceError, NotPersistedError
from t5ckpt.storage.error_mapping import foreign_errors


def state(step):
    rng = np.random.default_rng(step)
    return {'w': rng.standard_normal((256, 256), dtype=np.float32), 'step': np.int32(step)}


class Position:
    def __init__(self):
        self.state = {'pad': b'x' * 100_000}

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


@pytest.fixture(autouse=True)
def _at_info(caplog):
    caplog.set_level(logging.INFO, 't5ckpt')


@pytest.fixture
def local(tmp_path):
    return tmp_path / 'local'


def checkpointer(run, local, **options):
    options = {'chunk_bytes': 2**16, 'compression': None} | options
    return t5ckpt.Checkpointer(state(0), checkpoints_dir=run, local=tier_of(local), **with_options(**options))


def lines(caplog, text):
    return [line for line in caplog.messages if text in line]


def restored_bytes(caplog):
    (line,) = lines(caplog, 'bytes of arrays from')
    return [
        int(found)
        for found in re.findall(r'; ([0-9]+) bytes of arrays from .*, 0 from other processes, ([0-9]+) from', line)[0]
    ]


@pytest.mark.parametrize('what', ['chunk', 'position', 'metadata'])
def test_restored_bytes_are_counted_once(run_dir, local, caplog, what):
    """Only chunks are bytes of arrays. A step of which a chunk or a position is damaged is read from the bucket."""
    with checkpointer(run_dir, local, dataset_iterator=Position()) as ck:
        ck.save(state(1))
    pattern = {'chunk': 'w/0.0', 'position': 'train_ds-*', 'metadata': 'w/.zarray'}[what]
    (damaged,) = (local / 'checkpoint_1').glob(pattern)
    damaged.write_bytes(b'\1' * damaged.stat().st_size)
    with checkpointer(run_dir, local, dataset_iterator=Position()) as ck:
        ck.restore()
    of_local, of_run = restored_bytes(caplog)
    assert (of_local, of_run) == ((256 * 256 * 4, 0) if what == 'metadata' else (0, 256 * 256 * 4))
    assert len(lines(caplog, 'local step 1 was not restored')) == (what != 'metadata')


def test_lines_of_saves(run_dir, local, caplog):
    with checkpointer(run_dir, t5ckpt.LocalTier(local, keep=1)) as ck:
        for step in (1, 2, 3):
            ck.save(state(step))
            ck.wait_until_persisted(step)
    assert lines(caplog, f'will upload step 2 to {run_dir}: every save')
    assert lines(caplog, f'deleted step 1 of {local}: older than the latest')
    assert not lines(caplog, 'is uploaded to')


def save_while_the_bucket_is_away(gs, local, steps, **options):
    """Saves and uploads step 1, and then saves others; the run."""
    run = gs.url()
    with checkpointer(run, t5ckpt.LocalTier(local, keep=1), storage_options={'retry_seconds': 1.0}) as ck:
        ck.save(state(1))
        ck.wait_until_persisted()
        gs.proxy.choose = lambda kind, key: '503'
        for step in steps:
            ck.save(state(step), **options)
        gs.proxy.choose = lambda kind, key: None
    return run


@pytest.mark.slow
def test_waiting_steps_are_logged_once(gs, local, caplog):
    """Each of them waits while the others are uploaded, or the bucket is away."""
    save_while_the_bucket_is_away(gs, local, (1, 2, 3, 4), overwrite=True)
    assert len(lines(caplog, 'waits for its upload')) == 1
    assert not lines(caplog, 'is not uploaded to')


def test_an_upload_that_a_newer_step_replaces_is_skipped(gs, local, caplog):
    run = save_while_the_bucket_is_away(gs, local, (2, 3, 4))
    assert lines(caplog, f'skipping the upload of step 3 to {run}: step 4 was saved later')
    assert not lines(caplog, 'is not uploaded to')


@pytest.mark.parametrize('number', [errno.ENOSPC, errno.EDQUOT])
def test_a_full_local_disk_names_the_keep_of_both(local, number):
    with (
        pytest.raises(NoSpaceError, match='keep= of Checkpointer and of LocalTier') as raised,
        foreign_errors(str(local), writing=True),
    ):
        raise OSError(number, os.strerror(number))
    assert 't5ckpt rm' in str(raised.value)


def test_a_file_in_the_place_of_the_directory(run_dir, local):
    local.write_text('a file')
    for action in (lambda ck: ck.all_steps(), lambda ck: ck.save(state(1)), lambda ck: ck.restore()):
        with (
            checkpointer(run_dir, local) as ck,
            pytest.raises(LocalDirError, match=r'is a file\. Pass a directory to'),
        ):
            action(ck)


def test_the_cures_of_a_refused_directory(run_dir, tmp_path, local):
    with checkpointer(tmp_path / 'other', local) as ck:
        ck.save(state(1))
    with pytest.raises(
        LocalDirError, match='Pass another directory to LocalTier, or move this one away, to start'
    ) as raised:
        checkpointer(run_dir, local).save(state(2))
    (words,) = re.findall(r'\(t5ckpt (cp .*)@STEP\)', str(raised.value))
    t5ckpt_cli(*f'{words}@1'.split(), tmp_path / 'copy')
    assert t5ckpt.all_steps(tmp_path / 'copy') == [1]
    local.rename(tmp_path / 'kept')
    with checkpointer(run_dir, local) as ck:
        ck.save(state(2))
    assert t5ckpt.all_steps(tmp_path / 'kept') == [1]
    # The directory of a run is not to be deleted.
    with pytest.raises(LocalDirError, match=r'Pass another directory to LocalTier\.$') as raised:
        checkpointer(run_dir, tmp_path / 'other').save(state(2))
    assert 'delete' not in str(raised.value)


@pytest.mark.parametrize('policy', ['recorded', 'not recorded'])
def test_ls_shows_a_pin_and_that_the_step_waits(run_dir, local, policy):
    with checkpointer(run_dir, local) as ck:
        ck.save(state(1))
        ck.save(state(2))
    for step in ('1', '2'):
        (local / '.t5ckpt' / 'to_persist' / step).touch()
    t5ckpt.pin_checkpoint(local / 'checkpoint_1', 'for a talk')
    if policy == 'not recorded':
        os.remove(local / '.t5ckpt' / 'tier.json')
        for step in (1, 2):
            put_facts(local / f'checkpoint_{step}', None)
    kept = [each['kept'] for each in json.loads(t5ckpt_cli('ls', local, '--json')) if each.get('tier') != 'persistent']
    assert kept[0] == 'pinned: for a talk; waits for its upload'
    assert 'latest' in kept[1]
    assert 'waits for its upload' in kept[1]


def test_the_repr_of_a_checkpointer_never_raises(gs, tmp_path, local):
    with checkpointer(tmp_path / 'other', local) as ck:
        ck.save(state(1))
        assert repr(ck) == f"Checkpointer('{tmp_path / 'other'}', latest_step=1)"
    refused = checkpointer(tmp_path / 'run', local)
    assert repr(refused) == f"Checkpointer('{tmp_path / 'run'}', latest_step=<LocalDirError>)"
    away = t5ckpt.Checkpointer(state(0), checkpoints_dir=gs.url(), storage_options={'retry_seconds': 1.0})
    gs.proxy.choose = lambda kind, key: '503'
    assert repr(away).endswith('latest_step=<StorageError>)')


@pytest.mark.slow
def test_several_steps_are_plural(gs, local, caplog):
    run, options = gs.url(), {'storage_options': {'retry_seconds': 1.0}}
    gs.proxy.choose = lambda kind, key: '503'
    with checkpointer(run, t5ckpt.LocalTier(local, keep=3), **options) as ck:
        for step in (1, 2):
            ck.save(state(step), overwrite=True)
            with pytest.raises(
                NotPersistedError, match=f'step{"s" * (step > 1)} .* {"is" if step == 1 else "are"} not in'
            ):
                ck.wait_until_persisted()
    assert lines(caplog, f'steps 1, 2 are in {local}, and not in {run} yet.')
    gs.proxy.choose = lambda kind, key: None
