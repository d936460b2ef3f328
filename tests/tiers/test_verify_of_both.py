"""``t5ckpt verify --tier all`` where one tier does not have the step."""

import json

import numpy as np
import pytest
from support import forked
from support.cli import t5ckpt_cli

import t5ckpt


def state(step):
    return {'w': np.full((96, 96), step, np.float32), 'step': np.int32(step)}


@pytest.fixture
def local(run_dir, tmp_path):
    """Steps 1 and 2; step 2 is not in the run."""
    tier = t5ckpt.LocalTier(tmp_path / 'local', persist=t5ckpt.SaveAt({1}))
    with t5ckpt.Checkpointer(state(0), checkpoints_dir=run_dir, local=tier) as ck:
        ck.save(state(1))
        ck.wait_until_persisted()
        ck.save(state(2))
    return tmp_path / 'local'


def test_the_tier_that_has_the_step_is_verified(local):
    done = forked.run(None, 'verify', local, '--step', 2, '--tier', 'all')
    assert done.returncode == 0
    assert str(local / 'checkpoint_2') in done.stdout
    assert 'tier persistent is not verified' in done.stderr
    found = json.loads(t5ckpt_cli('verify', local, '--step', 2, '--tier', 'all', '--json'))
    assert [(each['ok'], each['tier']) for each in found] == [(True, 'local')]


def test_a_damage_in_it_is_found(local):
    (local / 'checkpoint_2' / 'w' / '0.0').unlink()
    assert 'w/0.0' in t5ckpt_cli('verify', local, '--step', 2, '--tier', 'all', code=1)


def test_before_the_first_upload(run_dir, tmp_path):
    tier = t5ckpt.LocalTier(tmp_path / 'local', persist=t5ckpt.SaveEvery(10))
    with t5ckpt.Checkpointer(state(0), checkpoints_dir=run_dir / 'run', local=tier) as ck:
        ck.save(state(1))
    assert str(tmp_path / 'local') in t5ckpt_cli('verify', tmp_path / 'local', '--tier', 'all')


def test_a_step_of_neither_tier(local):
    assert 'step 9 does not exist' in t5ckpt_cli('verify', local, '--step', 9, '--tier', 'all', code=3)
