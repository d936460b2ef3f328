"""The example survives being killed: twenty times at random moments, and what it computes does not change by a bit."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

import t5ckpt

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS, SAVE_EVERY, EVAL_EVERY = 160, 3, 6
KILLS = 20
MOST_STEPS = 5  # that a trainer gets to before it is killed, and what it does in MOST_SECONDS besides
MOST_SECONDS = 0.1


class Nursery:
    """Makes trainers and hears how they end."""

    def __init__(self, cache: pathlib.Path) -> None:
        env = {
            **os.environ,
            'PYTHONPATH': os.pathsep.join([str(ROOT), str(ROOT / 'examples')]),
            'XLA_FLAGS': '--xla_force_host_platform_device_count=4',
            'JAX_COMPILATION_CACHE_DIR': str(cache),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
            'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
        }
        self._log = (cache.parent / 'trainers.log').open('w+')
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / 'tests' / 'support' / 'nursery.py')],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def start(self, run: pathlib.Path) -> int:
        """A trainer's pid."""
        options = {'steps': STEPS, 'save-every': SAVE_EVERY, 'eval-every': EVAL_EVERY}
        words = [str(run), *(word for name, value in options.items() for word in (f'--{name}', str(value)))]
        self._process.stdin.write(json.dumps(words) + '\n')
        self._process.stdin.flush()
        return int(self._answer())

    def ended(self) -> int:
        """Waits for it: its exit code, or minus the signal's number."""
        return os.waitstatus_to_exitcode(int(self._answer()))

    def _answer(self) -> str:
        # The trainers print, too.
        for line in self._process.stdout:
            if line.strip().isdigit():
                return line
        raise AssertionError(self.log())

    def log(self) -> str:
        """What the trainers complained of."""
        self._log.seek(0)
        return self._log.read()

    def close(self) -> None:
        """Ends the mother of all trainers."""
        with self._process, self._log:
            self._process.kill()


@pytest.fixture
def nursery(tmp_path: pathlib.Path) -> Iterator[Nursery]:
    """Trainers that share a compilation cache."""
    made = Nursery(tmp_path / 'cache')
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
def test_twenty_kills_do_not_change_a_bit(nursery, tmp_path):
    nursery.start(tmp_path / 'whole')
    assert nursery.ended() == 0, nursery.log()
    whole = losses(tmp_path / 'whole')
    assert [step for step, _ in whole] == list(range(STEPS))

    run = tmp_path / 'killed'
    chance = random.Random(20)
    startup = 0.0
    for life in range(KILLS):
        before = len(losses(run))
        pid, started = nursery.start(run), time.monotonic()
        # Every fourth dies while it starts: it restores, loads what was compiled, and has not trained yet.
        if life % 4 == 3:
            time.sleep(chance.uniform(0, startup))
        else:
            wait_for_steps(run, before, 1)
            startup = time.monotonic() - started
            wait_for_steps(run, before, chance.randint(1, MOST_STEPS))
            time.sleep(chance.uniform(0, MOST_SECONDS))
        os.kill(pid, signal.SIGKILL)
        assert nursery.ended() == -signal.SIGKILL, nursery.log()
    nursery.start(run)
    assert nursery.ended() == 0, nursery.log()

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
