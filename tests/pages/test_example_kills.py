"""The examples are killed and started again: the losses and the checkpoints keep every bit."""

import contextlib
import json
import os
import pathlib
import random
import signal
import time
from collections.abc import Iterator

import pytest
from support.nursery import ROOT, Nursery, Process

import t5ckpt

STEPS, SAVE_EVERY, EVAL_EVERY = 64, 3, 6
KILLS = 6
MOST_STEPS = 5  # before a kill, and then at most MOST_SECONDS
MOST_SECONDS = 0.1


class Trainers(Nursery):
    """Makes trainers of an example and hears how they end."""

    def __init__(self, cache: pathlib.Path, example: str, **options: int) -> None:
        self._options = [
            word for name, value in options.items() for word in (f'--{name.replace("_", "-")}', str(value))
        ]
        env = {
            'PYTHONPATH': os.pathsep.join([str(ROOT), str(ROOT / 'examples')]),
            'XLA_FLAGS': '--xla_force_host_platform_device_count=4',
            'JAX_COMPILATION_CACHE_DIR': str(cache),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
            'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
        }
        super().__init__(example, env)

    def train(self, run: pathlib.Path) -> Process:
        """Starts a trainer."""
        return self.start([str(run), *self._options])


@pytest.fixture
def nursery(tmp_path: pathlib.Path) -> Iterator[Trainers]:
    """Trainers that share a compilation cache."""
    made = Trainers(tmp_path / 'cache', 'train_t5', steps=STEPS, save_every=SAVE_EVERY, eval_every=EVAL_EVERY)
    yield made
    made.close()


def losses(run: pathlib.Path) -> list[tuple[int, str]]:
    """(step, loss to the bit) in the order written, over all lives."""
    path = run / 'losses.jsonl'
    lines = path.read_text().splitlines() if path.exists() else []
    return [(record['step'], record['loss']) for record in map(json.loads, lines)]


def wait_for_steps(run: pathlib.Path, before: int, count: int) -> None:
    """Waits until this life has logged so many steps."""
    deadline = time.monotonic() + 300
    path = run / 'losses.jsonl'
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().count('\n') - before >= count:
            return
        time.sleep(0.002)
    raise AssertionError('the trainer makes no progress')


@pytest.mark.slow
@pytest.mark.multiprocess
def test_kills_do_not_change_a_bit(nursery, tmp_path):
    assert nursery.train(tmp_path / 'whole').wait() == 0, nursery.log()
    whole = losses(tmp_path / 'whole')
    assert [step for step, _ in whole] == list(range(STEPS))

    run = tmp_path / 'killed'
    chance = random.Random(20)
    startup = 0.0
    for life in range(KILLS):
        before = len(losses(run))
        trainer, started = nursery.train(run), time.monotonic()
        # Every fourth dies while it starts: it restores, loads what was compiled, and has not trained yet.
        if life % 4 == 3:
            time.sleep(chance.uniform(0, startup))
        else:
            wait_for_steps(run, before, 1)
            startup = time.monotonic() - started
            wait_for_steps(run, before, chance.randint(1, MOST_STEPS))
            time.sleep(chance.uniform(0, MOST_SECONDS))
        trainer.kill()
        assert trainer.wait() == -signal.SIGKILL, nursery.log()
    assert nursery.train(run).wait() == 0, nursery.log()

    curve = losses(run)
    assert dict(curve) == dict(whole)
    assert set(curve) == set(whole), 'a step that was trained again has another loss'
    assert len(curve) > len(whole), 'no step was trained twice'
    # The latest three and the best, each whole; and of what was half written or half deleted nothing is left.
    steps = t5ckpt.all_steps(run)
    assert steps[-1] == STEPS
    assert len(steps) in (3, 4)
    assert [step for step in steps if not t5ckpt.verify(run, step, full=True).ok] == []
    assert sorted(path.name for path in run.glob('checkpoint_*')) == sorted(f'checkpoint_{step}' for step in steps)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_an_nnx_trainer_that_was_killed_ends_with_the_same_bits(tmp_path):
    """Parameters, optimizer, RNG streams and the position of Grain's iterator: all of them decide the next loss."""
    with contextlib.closing(Trainers(tmp_path / 'cache', 'train_nnx', steps=12, save_every=4)) as nursery:
        whole, run = tmp_path / 'whole', tmp_path / 'killed'
        assert nursery.train(whole).wait() == 0, nursery.log()
        trainer = nursery.train(run)
        wait_for_steps(run, 0, 6)
        trainer.kill()
        assert trainer.wait() == -signal.SIGKILL, nursery.log()
        assert nursery.train(run).wait() == 0, nursery.log()
    curve = losses(run)
    assert [step for step, _ in curve] != list(range(12)), 'no step was trained twice'
    assert set(curve) == set(losses(whole))
    ours, theirs = (
        {name: leaf[...].tobytes() for name, leaf in t5ckpt.open_checkpoint(path).items()} for path in (run, whole)
    )
    assert ours == theirs
    for path in (whole / 'checkpoint_12').glob('train_ds-*'):
        assert path.read_bytes() == (run / 'checkpoint_12' / path.name).read_bytes()
    assert t5ckpt.open_checkpoint(run)['params/blocks/0/dropout/rngs/count/value'].item() == 2 * 12
    kernel = whole / 'checkpoint_12' / 'params.blocks.0.up.kernel.value'
    assert len([path for path in kernel.iterdir() if path.name != '.zarray']) == 2, 'the mesh splits the kernel in two'
