"""One of several processes on one directory, with ROLE DIRECTORY STEPS: what came of it is JSON on standard output.

Trainers make so many steps, and go on until there is a file `DIRECTORY.done`; so long goes who deletes. Readers end when
they have read so many steps.
"""

from __future__ import annotations

import collections
import itertools
import json
import pathlib
import sys
import time

import numpy as np
from crash_scenarios import Trainer, delete as delete_step, state

import t5ckpt
from t5ckpt.errors import CheckpointNotFoundError


def _is_done(root: pathlib.Path) -> bool:
    return root.with_suffix('.done').exists()


def train(root: pathlib.Path, steps: int) -> dict[str, object]:
    """Saves step after step, as often as it can, and keeps three; says which steps it saved."""
    # As two jobs that were started by mistake would: both count their own steps, and both real clocks.
    trainer = Trainer(root, keep=3, clock=time.time)
    saved, skipped = [], []
    for step in itertools.count(1):
        if step > steps and _is_done(root):
            break
        (skipped if trainer.save(step) is None else saved).append(step)
    return {'saved': saved, 'skipped': skipped}


def evaluate(root: pathlib.Path, wanted: int) -> dict[str, object]:
    """Loads the oldest and the latest step over and over; a value is right, or the step is gone."""
    counts: collections.Counter[str] = collections.Counter()
    restorer = Trainer(root).checkpointer
    while counts['read'] < wanted:
        for index in (0, -1):
            steps = t5ckpt.all_steps(root)
            if not steps:
                continue
            step = steps[index]
            try:
                loaded = t5ckpt.load_t5x_checkpoint(root, step) if index else restorer.restore(step)
            except CheckpointNotFoundError:
                counts['gone'] += 1
                continue
            assert int(loaded['step']) == step
            for key in ('params', 'frozen'):
                assert np.array_equal(loaded[key]['w'], state(step)[key]['w']), f'step {step}: {key} is wrong'
            counts['read'] += 1
    return dict(counts)


def verify(root: pathlib.Path, wanted: int) -> dict[str, object]:
    """Verifies the oldest and the latest step over and over; a step is whole, or gone."""
    counts: collections.Counter[str] = collections.Counter()
    while counts['whole'] < wanted:
        for index in (0, -1):
            steps = t5ckpt.all_steps(root)
            if not steps:
                continue
            try:
                report = t5ckpt.verify(root / f'checkpoint_{steps[index]}', full=True)
            except CheckpointNotFoundError:
                counts['gone'] += 1
                continue
            assert report.ok, f'step {steps[index]} is said to be damaged: {report}'
            counts['whole'] += 1
    return dict(counts)


def delete(root: pathlib.Path, _: int) -> dict[str, object]:
    """Deletes whatever is there but the latest step."""
    counts: collections.Counter[str] = collections.Counter()
    while not _is_done(root):
        for step in t5ckpt.all_steps(root)[:-1]:
            try:
                delete_step(root, step, time.time)
                counts['deleted'] += 1
            except CheckpointNotFoundError:
                # Retention of the trainer was faster.
                counts['gone'] += 1
    return dict(counts)


def main() -> None:
    """Waits for the word, so that all start together."""
    role, root, steps = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
    sys.stdout.write('ready\n')
    sys.stdout.flush()
    sys.stdin.readline()
    roles = {'train': train, 'evaluate': evaluate, 'verify': verify, 'delete': delete}
    answer = roles[role](root, steps)
    sys.stdout.write(json.dumps(answer) + '\n')
