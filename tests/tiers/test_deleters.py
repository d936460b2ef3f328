"""A step that waits for its upload is safe from everything that deletes steps, unless it is forced."""

import json
import logging
import os
import shutil
import time

import numpy as np
import pytest
from support import forked
from support.cli import t5ckpt_cli

import t5ckpt
from t5ckpt.commit.retention import Retention
from t5ckpt.errors import StepKeptError
from t5ckpt.policies import KeepAll
from t5ckpt.storage import open_storage

WAITS = 'waits for its upload'


def state(step):
    return {'w': np.full((32, 64), step, np.float32), 'step': np.int32(step)}


@pytest.fixture
def waiting(tmp_path):
    """A local directory whose steps 2 and 3 wait for their uploads, as after a crash; the run is `tmp_path / 'run'`."""
    local = tmp_path / 'local'
    with t5ckpt.Checkpointer(
        state(0),
        None,
        tmp_path / 'run',
        local=t5ckpt.LocalTier(local, keep=9),
        options=t5ckpt.CheckpointerOptions(inline_bytes=64),
    ) as ck:
        for step in (1, 2, 3, 4):
            ck.save(state(step))
        ck.wait_until_persisted()
    for step in (2, 3):
        (local / f'.t5ckpt/to_persist/{step}').write_bytes(b'')
    return local


def test_rm_refuses_it_and_deletes_nothing(waiting):
    said = t5ckpt_cli('rm', waiting, 1, 2, '--yes', code=1)
    assert WAITS in said
    assert 'pass --force' in said
    assert t5ckpt.all_steps(waiting) == [1, 2, 3, 4]
    assert WAITS in t5ckpt_cli('rm', waiting, 2, '--json', '--yes', '--pinned', code=1)


def test_rm_with_force_deletes_it_and_forgets_the_upload(waiting, tmp_path, caplog):
    t5ckpt_cli('rm', waiting, 2, '--yes', '--force')
    assert t5ckpt.all_steps(waiting) == [1, 3, 4]
    assert os.listdir(waiting / '.t5ckpt/to_persist') == ['3']
    with t5ckpt.Checkpointer(state(0), None, tmp_path / 'run', local=t5ckpt.LocalTier(waiting)) as ck:
        ck.wait_until_persisted()
    assert not [each for each in caplog.records if 'is not uploaded' in each.getMessage()]


def test_force_does_not_unpin(waiting):
    t5ckpt.pin_checkpoint(waiting / 'checkpoint_2')
    assert 'pinned' in t5ckpt_cli('rm', waiting, 2, '--yes', '--force', code=1)
    assert t5ckpt.all_steps(waiting) == [1, 2, 3, 4]


def test_prune_keeps_it(waiting):
    assert t5ckpt_cli('prune', waiting, '--keep', 1, '--yes').count(WAITS) == 2
    assert t5ckpt.all_steps(waiting) == [2, 3, 4]
    plan = {each['step']: each for each in json.loads(t5ckpt_cli('prune', waiting, '--keep', 1, '--json'))['plan']}
    assert plan[2] == {'step': 2, 'keep': True, 'reason': WAITS, 'overruled': True, 'was_deleted': False}


def test_a_step_that_begins_to_wait_after_the_plan_is_kept(waiting):
    run = t5ckpt.Checkpointer(state(0), None, waiting, keep=1)
    (waiting / '.t5ckpt/to_persist/1').write_bytes(b'')
    run.save(state(5))
    run.close()
    assert t5ckpt.all_steps(waiting) == [1, 2, 3, 5]


def test_another_trainer_on_the_directory_keeps_it(waiting, caplog):
    caplog.set_level(logging.INFO, 't5ckpt')
    with t5ckpt.Checkpointer(state(0), None, waiting, keep=1) as other:
        other.save(state(5))
        with pytest.raises(StepKeptError, match=f'{WAITS}, so it was not deleted.*t5ckpt rm --force'):
            other.delete(2)
    assert t5ckpt.all_steps(waiting) == [2, 3, 5]
    assert [
        each for each in caplog.records if f'step 2 is kept regardless of the keep policy: {WAITS}' in each.getMessage()
    ]


def test_the_iterator_state_of_it_stays(waiting):
    for step in (1, 2, 3, 4):
        (waiting / f'checkpoint_{step}/train_ds-00000-of-00001.position').write_text('1', encoding='ascii')
    Retention(open_storage(waiting), KeepAll(), time.time, 1).carry_out()
    kept = [step for step in (1, 2, 3, 4) if list((waiting / f'checkpoint_{step}').glob('train_ds*'))]
    assert kept == [2, 3, 4]


def test_ls_says_so(waiting):
    listed = json.loads(t5ckpt_cli('ls', waiting, '--json'))
    rows = {each['step']: each for each in listed if each['tier'] == 'local'}
    assert [step for step, row in rows.items() if WAITS in row['kept']] == [2, 3]


def test_a_checkpointer_of_both_tiers_deletes_it_from_both(waiting, tmp_path):
    # Not there if step 3 was saved before its upload began.
    shutil.rmtree(tmp_path / 'run/checkpoint_2', ignore_errors=True)
    with t5ckpt.Checkpointer(state(0), None, tmp_path / 'run', local=t5ckpt.LocalTier(waiting, keep=9)) as ck:
        ck.delete(2)
        assert 2 not in ck.all_steps()
    assert t5ckpt.all_steps(waiting) == [1, 3, 4]
    assert os.listdir(waiting / '.t5ckpt/to_persist') == []


def test_a_run_without_tiers_looks_for_no_uploads_in_a_bucket(bucket):
    run = bucket.url()
    with t5ckpt.Checkpointer(state(0), None, run, keep=1) as ck:
        ck.save(state(1))
        ck.save(state(2))
    assert not [each.key for each in bucket.proxy.clear() if 'to_persist' in each.key]


def test_a_waiting_step_of_a_program_that_was_killed_is_kept(tmp_path):
    (tmp_path / 'file').write_text('not a directory', encoding='ascii')
    program = f"""
import os, numpy as np, t5ckpt
tier = t5ckpt.LocalTier({str(tmp_path / 'local')!r})
ck = t5ckpt.Checkpointer({{'step': np.int32(0)}}, None, {str(tmp_path / 'file/run')!r}, local=tier)
ck.save({{'step': np.int32(1)}})
ck.save({{'step': np.int32(2)}})
os.kill(os.getpid(), 9)
"""
    forked.run(program)
    assert 2 in t5ckpt.all_steps(tmp_path / 'local')
    t5ckpt_cli('rm', tmp_path / 'local', 2, '--yes', code=1)
