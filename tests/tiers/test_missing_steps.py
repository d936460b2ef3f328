"""The error for a step that no tier has lists the steps of both."""

import numpy as np
import pytest
from support.facts import put_facts

import t5ckpt
from t5ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError


def state(step):
    return {'w': np.full((32, 64), step, np.float32), 'step': np.int32(step)}


@pytest.fixture
def ck(run_dir, tmp_path):
    """Steps 31 and 35 are in the local directory, step 20 is in the bucket."""
    policy = t5ckpt.SaveAt({20})
    with t5ckpt.Checkpointer(
        state(0), checkpoints_dir=run_dir, local=t5ckpt.LocalTier(tmp_path / 'local', persist=policy)
    ) as ck:
        for step in (20, 31, 35):
            ck.save(state(step), metrics={'loss': step})
            ck.wait_until_persisted()
        yield ck


@pytest.mark.parametrize('call', ['restore', 'metrics', 'delete'])
def test_both_tiers_are_listed(ck, run_dir, tmp_path, call):
    assert ck.all_steps() == [20, 31, 35]
    with pytest.raises(CheckpointNotFoundError) as raised:
        getattr(ck, call)(77)
    text = (
        f'{tmp_path / "local"} and {run_dir}: step 77 does not exist, complete steps are: 20, 31, 35. Pass one of them'
    )
    assert text in str(raised.value)
    assert ck.all_steps() == [20, 31, 35]


def test_no_tier_has_a_step(run_dir, tmp_path):
    with t5ckpt.Checkpointer(state(0), checkpoints_dir=run_dir, local=t5ckpt.LocalTier(tmp_path / 'local')) as ck:
        for call in (ck.restore, ck.metrics, ck.delete):
            with pytest.raises(CheckpointNotFoundError, match='step 7 does not exist, complete steps are: none'):
                call(7)
        with pytest.raises(CheckpointNotFoundError, match='run: there is no such file or directory'):
            ck.metrics()


def test_one_tier_names_the_run(run_dir):
    with t5ckpt.Checkpointer(state(0), checkpoints_dir=run_dir) as ck:
        ck.save(state(1))
        for call in (ck.restore, ck.delete):
            with pytest.raises(
                CheckpointNotFoundError, match=r'checkpoint_7: step 7 does not exist, .* are: 1\. Pass one'
            ):
                call(7)


def test_steps_of_both_tiers_that_cannot_be_restored(ck, run_dir, tmp_path):
    ck.close()
    for step_dir in [*run_dir.glob('checkpoint_*'), *tmp_path.glob('local/checkpoint_*')]:
        put_facts(step_dir, b'{' * 40)
    with t5ckpt.Checkpointer(state(0), checkpoints_dir=run_dir, local=t5ckpt.LocalTier(tmp_path / 'local')) as again:
        text = rf'^{run_dir} and {tmp_path / "local"}: none of the steps \[20, 31, 35\] can be restored'
        with pytest.raises(CorruptCheckpointError, match=text):
            t5ckpt.restore_or_init(again, lambda: state(0))
