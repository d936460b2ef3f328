"""Retention decides by the facts that are stored, and decides nothing about a step whose facts it cannot read."""

import uuid

import pytest

import t5ckpt
from t5ckpt.catalog.listing import steps_in
from t5ckpt.commit.retention import recorded_policy
from t5ckpt.errors import StorageError
from t5ckpt.format.manifest import file_with_facts, split_facts
from t5ckpt.policies import KeepBest, KeepLatest
from t5ckpt.storage import open_storage
from t5ckpt.testing import FaultyStorage

STATE = {'w': [1.0]}
BEST = KeepBest(1, 'loss', 'min', keep_without_metric=False)


@pytest.fixture(params=['file', 'memory'])
def run(request, tmp_path):
    return open_storage(tmp_path / 'run' if request.param == 'file' else f'memory://{uuid.uuid4().hex}/run')


def save(run, losses, policy=None):
    with t5ckpt.Checkpointer(STATE, checkpoints_dir=run, keep_policy=policy) as ck:
        for step, loss in losses.items():
            ck.save(STATE, step=step, metrics={'loss': loss})


def test_the_facts_of_a_step_that_another_program_has_saved_again_count(run):
    with t5ckpt.Checkpointer(STATE, checkpoints_dir=run, keep_policy=BEST) as ck:
        ck.save(STATE, step=1, metrics={'loss': 0.1})
        ck.save(STATE, step=2, metrics={'loss': 0.5})
        with t5ckpt.Checkpointer(STATE, checkpoints_dir=run) as other:
            other.delete(1)
            other.save(STATE, step=1, metrics={'loss': 9.0})
        assert ck.metrics(1) == {'loss': 9.0}
        ck.save(STATE, step=3, metrics={'loss': 0.3})
        assert ck.best_step() == 3
        ck.save(STATE, step=4, metrics={'loss': 0.4})
    assert steps_in(run) == [3, 4]


def spoiled(manifest):
    return file_with_facts(split_facts(manifest)[0], b'{' * 40)


@pytest.mark.parametrize('spoil', [spoiled, lambda manifest: manifest[:150]], ids=['facts', 'cut off'])
@pytest.mark.parametrize('policy', [BEST, KeepLatest(1)])
def test_a_step_with_damaged_facts_is_kept_and_named_once(run, spoil, policy, caplog):
    save(run, {1: 0.1, 2: 0.5})
    key = 'checkpoint_1/checkpoint'
    run.write(key, spoil(run.read(key)))
    save(run, {3: 0.3, 4: 0.2}, policy)
    assert steps_in(run) == ([1, 4] if policy == KeepLatest(1) else [1, 3, 4])
    lines = [line for line in caplog.text.splitlines() if 'step 1 is kept regardless of the keep policy' in line]
    assert len(lines) == 1
    assert 'checkpoint_1/checkpoint' in lines[0]


@pytest.mark.parametrize(('policy', 'left'), [(BEST, [2, 3, 5]), (KeepLatest(2), [3, 4, 5])])
def test_a_step_that_is_cut_off_after_its_facts_is_none_of_the_best_or_latest(policy, left, tmp_path):
    """It would count in the place of an intact one, which would be deleted."""
    run = open_storage(tmp_path)
    save(run, {1: 0.9, 2: 0.5, 3: 0.1})
    key = 'checkpoint_3/checkpoint'
    run.write(key, run.read(key)[:-20])
    save(run, {4: 0.7, 5: 0.6}, policy)
    assert steps_in(run) == left


def test_the_manifest_of_a_step_without_facts_is_read_once(tmp_path):
    """As T5X writes it. Each save read all of them, which took half a second for 40 steps of 3,000 leaves."""
    run = FaultyStorage(open_storage(tmp_path))
    save(run, {1: 0.9})
    key = 'checkpoint_1/checkpoint'
    run.write(key, split_facts(run.read(key))[0])
    counts = []
    with t5ckpt.Checkpointer(STATE, checkpoints_dir=run, keep_policy=KeepLatest(9)) as ck:
        for step in (2, 3, 4):
            run.operations.clear()
            ck.save(STATE, step=step)
            counts.append(run.operations.count(('read', key)))
    assert counts[0] > counts[1] == counts[2]


def test_the_steps_of_a_policy_that_cannot_be_read_are_named(run, caplog):
    save(run, {1: 0.1}, KeepLatest(1))
    assert recorded_policy(run) == KeepLatest(1)
    key = 'checkpoint_1/checkpoint'
    run.write(key, spoiled(run.read(key)))
    assert recorded_policy(run) is None
    assert key in caplog.text


class Failing(FaultyStorage):
    """No file of step 1 can be read."""

    def before_operation(self, name, key):
        super().before_operation(name, key)
        if name in ('read', 'heads') and 'checkpoint_1/' in key:
            raise StorageError(5, 'injected')


def test_a_step_that_cannot_be_read_is_kept(run, caplog):
    save(run, {1: 0.1, 2: 0.5})
    save(Failing(run), {3: 0.3, 4: 0.4}, BEST)
    # The other one is decided about on a disk. An object store that fails is no reason to decide about any step.
    assert steps_in(run) == ([1, 3, 4] if run.commits_by_rename else [1, 2, 3, 4])
    assert 'injected' in caplog.text
