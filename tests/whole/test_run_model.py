"""The life of a run, in any order of operations, against a dictionary of its steps.

Hypothesis chooses the operations: saves, asynchronous saves, overwrites, restores, pins, deletions, ``prune``, copies, reopened
checkpointers, lazy readers, and damage. After each of them the run has exactly the steps of the dictionary, and each step
has the values that were saved last. A failure prints the shortest list of operations that still fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import tempfile
import uuid

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import t5ckpt
from t5ckpt import Checkpointer
from t5ckpt.cli.app import run as run_command
from t5ckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StepKeptError,
)
from t5ckpt.storage import open_storage

# Without a .zarray, which the manifest replaces, or with another chunk.
WHOLE, READABLE, LOST = 'whole', 'readable', 'lost'
STEPS = st.integers(0, 12)
SEEDS = st.integers(0, 5)
_ORDER = itertools.count()


def state_of(seed: int) -> dict:
    """Two arrays of several chunks, one of which is the same for two seeds, an inline one, and a Python number."""
    return {
        'params': {
            'w': np.random.default_rng(seed).standard_normal((48, 64), dtype=np.float32),
            'same': np.random.default_rng(seed // 2).standard_normal((48, 64), dtype=np.float32),
        },
        'bias': np.full(3, seed, np.float32),
        'seed': seed,
    }


def assert_is(tree, seed: int) -> None:
    expected = state_of(seed)
    for name in ('w', 'same'):
        np.testing.assert_array_equal(np.asarray(tree['params'][name]), expected['params'][name])
    np.testing.assert_array_equal(np.asarray(tree['bias']), expected['bias'])
    assert int(tree['seed']) == seed


@dataclasses.dataclass
class Saved:
    """What the dictionary has of a step; ``order`` tells a step from one that was saved under its number before."""

    seed: int
    metric: float
    pinned: bool = False
    condition: str = WHOLE
    order: int = dataclasses.field(default_factory=lambda: next(_ORDER))


class RunMachine(RuleBasedStateMachine):
    """One run, and the dictionary of what it should have. A subclass says where it is."""

    lazy_leaves = Bundle('lazy_leaves')
    renames = True

    def __init__(self):
        super().__init__()
        self.steps: dict[int, Saved] = {}
        self.copies: dict[int, int] = {}
        self.pending = None
        self.cleanup = contextlib.ExitStack()
        self.url, self.copies_url = self.new_url(), self.new_url()
        self.ck = None

    def new_url(self) -> str:
        raise NotImplementedError

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            if self.ck is not None:
                self.ck.close()
            self.cleanup.close()

    # --- what changes the run ----------------------------------------------------------------------------------------

    @initialize(keep=st.sampled_from([None, 1, 2, 3]))
    def begin(self, keep):
        self.keep = keep
        self.reopen_with(keep)

    @rule(keep=st.sampled_from([None, 1, 2, 3]))
    def reopen(self, keep):
        self.settle()
        self.ck.close()
        self.reopen_with(keep)

    def reopen_with(self, keep):
        self.keep = keep
        self.ck = Checkpointer(
            state_of(0),
            checkpoints_dir=self.url,
            keep=keep,
            options=t5ckpt.CheckpointerOptions(chunk_bytes=4096, inline_bytes=1024, verify='full'),
        )

    @rule(step=STEPS, seed=SEEDS, metric=st.sampled_from([0.25, 0.5, 1.0]))
    def save(self, step, seed, metric):
        self.settle()
        done = self.ck.save(state_of(seed), step=step, metrics={'loss': metric})
        assert (done is None) == (step in self.steps)
        if done is not None:
            self.note_saved(step, seed, metric)

    @rule(step=STEPS, seed=SEEDS, metric=st.sampled_from([0.25, 0.5, 1.0]))
    def save_async(self, step, seed, metric):
        self.settle()
        state = state_of(seed)
        self.pending = self.ck.save_async(state, step=step, metrics={'loss': metric}), step, seed, metric
        state['params']['w'][:] = np.nan  # the caller may overwrite it
        state['bias'][:] = np.nan

    @precondition(lambda self: self.pending is not None and self.keep is None and self.some(WHOLE))
    @rule(data=st.data())
    def restore_beside_the_save(self, data):
        step = self.some_step(data, WHOLE)
        assert_is(self.ck.restore(step), self.steps[step].seed)

    def settle(self):
        if self.pending is not None:
            (pending, step, seed, metric), self.pending = self.pending, None
            done = pending.result()
            assert (done is None) == (step in self.steps)
            if done is not None:
                self.note_saved(step, seed, metric)

    def note_saved(self, step, seed, metric):
        self.steps[step] = Saved(seed, metric)
        if self.keep is not None:
            unpinned = sorted(step for step, saved in self.steps.items() if not saved.pinned)
            kept = {*unpinned[-self.keep :], max(self.steps), step}
            for other in unpinned:
                if other not in kept:
                    del self.steps[other]

    @precondition(lambda self: self.pending is None and self.steps)
    @rule(data=st.data(), seed=SEEDS)
    def overwrite(self, data, seed):
        step = self.some_step(data)
        if self.steps[step].pinned:
            with pytest.raises(StepKeptError):
                self.ck.save(state_of(seed), step=step, overwrite=True)
        else:
            self.ck.save(state_of(seed), step=step, metrics={'loss': 2.0}, overwrite=True)
            self.note_saved(step, seed, 2.0)

    @precondition(lambda self: self.pending is None and self.steps)
    @rule(data=st.data())
    def delete(self, data):
        step = self.some_step(data)
        if self.steps[step].pinned:
            with pytest.raises(StepKeptError):
                self.ck.delete(step)
        else:
            self.ck.delete(step)
            del self.steps[step]

    @rule(step=STEPS)
    def delete_what_is_not_there(self, step):
        self.settle()
        if step not in self.steps:
            with pytest.raises(CheckpointNotFoundError):
                self.ck.delete(step)

    @precondition(lambda self: self.pending is None and self.steps)
    @rule(data=st.data())
    def pin_or_unpin(self, data):
        step = self.some_step(data)
        path = f'{self.url}/checkpoint_{step}'
        (t5ckpt.unpin_checkpoint if self.steps[step].pinned else t5ckpt.pin_checkpoint)(path)
        self.steps[step].pinned = not self.steps[step].pinned
        assert t5ckpt.is_pinned_checkpoint(path) == self.steps[step].pinned

    @precondition(lambda self: self.pending is None and self.steps)
    @rule(keep=st.integers(1, 3))
    def prune(self, keep):
        with pytest.raises(SystemExit) as ended:
            run_command(['prune', self.url, '--keep', str(keep), '--yes', '--json'])
        assert ended.value.code == 0
        unpinned = sorted(step for step, saved in self.steps.items() if not saved.pinned)
        for step in unpinned:
            if step not in {*unpinned[-keep:], max(self.steps)}:
                del self.steps[step]

    @precondition(lambda self: self.pending is None and self.steps)
    @rule(data=st.data())
    def copy(self, data):
        step = self.some_step(data)
        saved = self.steps[step]
        if step in self.copies:
            with pytest.raises(CheckpointExistsError):
                t5ckpt.copy_checkpoint(f'{self.url}/checkpoint_{step}', self.copies_url)
        elif saved.condition == LOST:
            with pytest.raises(CorruptCheckpointError):
                t5ckpt.copy_checkpoint(f'{self.url}/checkpoint_{step}', self.copies_url)
        else:
            t5ckpt.copy_checkpoint(f'{self.url}/checkpoint_{step}', self.copies_url)
            self.copies[step] = saved.seed

    # --- damage ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.pending is None and self.some(WHOLE))
    @rule(data=st.data(), lose_values=st.booleans())
    def damage(self, data, lose_values):
        step = self.some_step(data, WHOLE)
        storage = open_storage(self.url)
        keys = sorted(key for key, _ in storage.walk(f'checkpoint_{step}'))
        arrays = [key for key in keys if key.endswith('/.zarray')]
        key = data.draw(st.sampled_from(arrays))
        if lose_values:
            chunks = [each for each in keys if each.startswith(key.removesuffix('.zarray')) and each != key]
            chunk = data.draw(st.sampled_from(chunks))
            flipped = bytearray(storage.read(chunk))
            flipped[len(flipped) // 2] ^= 4
            storage.write(chunk, bytes(flipped))
        else:
            storage.delete_file(key)
        self.steps[step].condition = LOST if lose_values else READABLE

    @precondition(lambda self: self.pending is None and self.some(READABLE, LOST))
    @rule(data=st.data())
    def copy_what_is_intact(self, data):
        step = self.some_step(data, READABLE, LOST)
        saved, path = self.steps[step], f'{self.url}/checkpoint_{step}'
        if saved.condition == LOST:
            with pytest.raises(CorruptCheckpointError):
                t5ckpt.copy_checkpoint(path, self.new_url())
            lost = {damage.leaf for damage in t5ckpt.verify(path, full=True).damages}
            rest = self.new_url()
            t5ckpt.copy_checkpoint(path, rest, t5ckpt.ConvertOptions(leave=sorted(lost)))
            expected = state_of(saved.seed)
            left = {
                'params/w': expected['params']['w'],
                'params/same': expected['params']['same'],
                'bias': expected['bias'],
            }
            for name in left.keys() - lost:
                np.testing.assert_array_equal(t5ckpt.open_checkpoint(rest)[name][...], left[name])
        elif step in self.copies:
            with pytest.raises(CheckpointExistsError):
                t5ckpt.copy_checkpoint(path, self.copies_url)
        else:
            t5ckpt.copy_checkpoint(path, self.copies_url)
            self.copies[step] = saved.seed

    # --- what reads the run ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.pending is None and self.steps)
    @rule(data=st.data())
    def restore(self, data):
        step = self.some_step(data)
        saved = self.steps[step]
        if saved.condition == LOST:
            with pytest.raises(CorruptCheckpointError):
                self.ck.restore(step)
            return
        # Chunks whose .zarray is lost are read where the manifest is enough to decode them.
        with contextlib.suppress(*(() if saved.condition == WHOLE else (CorruptCheckpointError,))):
            assert_is(self.ck.restore(step), saved.seed)

    @precondition(lambda self: self.pending is None and self.some(WHOLE))
    @rule()
    def restore_or_init(self):
        restored = t5ckpt.restore_or_init(self.ck, lambda: state_of(99))
        newest = self.ck.restored_step
        assert newest >= max(step for step, saved in self.steps.items() if saved.condition == WHOLE)
        assert_is(restored, self.steps[newest].seed)
        if self.renames:
            for step in [step for step, saved in self.steps.items() if step > newest and not saved.pinned]:
                del self.steps[step]

    @precondition(lambda self: self.pending is None and self.some(WHOLE))
    @rule(target=lazy_leaves, data=st.data())
    def open_lazily(self, data):
        step = self.some_step(data, WHOLE)
        return step, self.steps[step], t5ckpt.open_checkpoint(self.url, step)['params/w']

    @rule(opened=lazy_leaves)
    def read_lazily(self, opened):
        """A leaf has the values of the step that was opened, or says that the step is gone."""
        self.settle()
        step, saved, leaf = opened
        now = self.steps.get(step)
        is_there = now is not None and now.order == saved.order
        if is_there and now.condition != WHOLE:
            return
        gone = () if is_there else (CheckpointNotFoundError,)
        with contextlib.suppress(*gone):
            np.testing.assert_array_equal(leaf[...], state_of(saved.seed)['params']['w'])

    @precondition(lambda self: self.pending is None and self.steps)
    @rule(data=st.data())
    def verify(self, data):
        step = self.some_step(data)
        assert t5ckpt.verify(self.url, step, full=True).ok == (self.steps[step].condition == WHOLE)

    # --- what holds after each of them -------------------------------------------------------------------------------

    @invariant()
    def has_the_steps(self):
        if self.ck is None or self.pending is not None:
            return
        steps = sorted(self.steps)
        assert self.ck.all_steps() == steps
        assert t5ckpt.all_steps(self.url) == steps
        assert self.ck.latest_step() == max(steps, default=None)
        assert t5ckpt.all_steps(self.copies_url) == sorted(self.copies)
        if steps:
            best = min(steps, key=lambda step: (self.steps[step].metric, -step))
            assert self.ck.best_step('loss', 'min') == best
            newest = self.steps[steps[-1]]
            if newest.condition == WHOLE:
                assert_is(t5ckpt.load_t5x_checkpoint(self.url, steps[-1]), newest.seed)
        for step, seed in self.copies.items():
            assert_is(t5ckpt.load_t5x_checkpoint(self.copies_url, step), seed)

    def some(self, *conditions):
        return sorted(step for step, saved in self.steps.items() if not conditions or saved.condition in conditions)

    def some_step(self, data, *conditions):
        return data.draw(st.sampled_from(self.some(*conditions)))


class OnDisk(RunMachine):
    def new_url(self):
        return str(pathlib.Path(self.cleanup.enter_context(tempfile.TemporaryDirectory())) / 'run')


class InMemory(RunMachine):
    renames = False

    def new_url(self):
        return f'memory://{uuid.uuid4().hex}/run'


@pytest.mark.slow
@pytest.mark.parametrize('machine', [OnDisk, InMemory])
def test_a_run_has_what_its_dictionary_has(machine):
    settings = hypothesis.settings(max_examples=15, stateful_step_count=25)
    run_state_machine_as_test(machine, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize('machine', [OnDisk, InMemory])
def test_a_run_has_what_its_dictionary_has_in_long_runs(machine):
    settings = hypothesis.settings(max_examples=60, stateful_step_count=60)
    run_state_machine_as_test(machine, settings=settings)


@pytest.mark.slow
def test_a_run_in_a_bucket_has_what_its_dictionary_has(bucket):
    class InBucket(RunMachine):
        renames = False

        def new_url(self):
            return bucket.url()

    run_state_machine_as_test(InBucket, settings=hypothesis.settings(max_examples=5, stateful_step_count=30))
