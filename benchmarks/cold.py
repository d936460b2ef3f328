"""Restoring from the disk, against raw reads of the same bytes: many rounds, and how long the disk was idle meanwhile.

    python benchmarks/cold.py [ROUNDS]                   40 rounds, 0.74 GB each way, six minutes and 4 GB of room
    python benchmarks/cold.py 2 --short                  tiny, which only shows that it works

A disk that others share is slower by half from one second to the next, so that a few rounds of run.py say little about a ratio of
which a twentieth matters. Each round writes S1 anew (in the background, which goes past the page cache; blocking, which goes
through it; and raw, limit.py), in an order by chance, empties all caches of the system before each read, where root allows those
of names and inodes, too, and reads the three in another order. The kernel counts the time in which a disk has something to do
(``/sys/dev/block/*/stat``, 10th field); what is left of the wall time is idle: nothing was asked for. Means with their standard
errors; ratios of means with the interval that nine of ten resamplings of the rounds fall into.
"""

from __future__ import annotations

import gc
import os
import pathlib
import random
import sys
import tempfile
import time
from typing import TYPE_CHECKING

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'

import cases
import jax
import limit
import numpy as np
import probe

import t5ckpt

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUNDS = 40
_STEPS = {'saved in the background': 1, 'saved blocking': 2}
_RAW = 'raw'
_RESAMPLINGS = 2000


def _cold(read: Callable[[], object], directory: pathlib.Path, nbytes: int) -> tuple[float, float]:
    """Seconds of a read, and those of them in which the disk had nothing to do."""
    gc.collect()
    probe.make_durable(directory)
    if '--short' not in sys.argv:
        probe.empty_page_cache()
        probe.touch_memory(2 * nbytes)
    probe.cool_cache(directory)
    busy, clock = probe.disk_busy_seconds(directory), time.perf_counter()
    restored = jax.block_until_ready(read())
    seconds = time.perf_counter() - clock
    idle = seconds - (probe.disk_busy_seconds(directory) - busy)
    # What frees a restored state is not part of restoring it.
    del restored
    return seconds, idle


def _round(state: cases.Tree, target: cases.Tree, nbytes: int) -> dict[str, tuple[float, float]]:
    with tempfile.TemporaryDirectory(dir=pathlib.Path(__file__).parent) as name:
        directory = pathlib.Path(name)
        with t5ckpt.Checkpointer(
            target,
            checkpoints_dir=directory / 'run',
            keep=None,
            options=t5ckpt.CheckpointerOptions(reuse_unchanged=False),
        ) as ck:

            def write(kind: str) -> None:
                if kind == _RAW:
                    limit.write(directory / _RAW, state)
                elif 'background' in kind:
                    ck.save_async(state, step=_STEPS[kind]).result()
                else:
                    ck.save(state, step=_STEPS[kind])

            def read(kind: str) -> object:
                return limit.read(directory / _RAW, target) if kind == _RAW else ck.restore(_STEPS[kind])

            kinds = [*_STEPS, _RAW]
            for kind in random.sample(kinds, len(kinds)):
                write(kind)
            return {
                kind: _cold(lambda kind=kind: read(kind), directory, nbytes)
                for kind in random.sample(kinds, len(kinds))
            }


def main() -> None:
    """Prints a line a kind."""
    numbers = [int(word) for word in sys.argv[1:] if not word.startswith('--')]
    rounds = numbers[0] if numbers else _ROUNDS
    leaves = cases.transformer(cases.SHORT if '--short' in sys.argv else cases.FULL)
    mesh = cases.mesh_of(4)
    target = cases.nest(cases.abstract(leaves, mesh))
    state = cases.nest(jax.block_until_ready(cases.materialize(leaves, mesh, dict.fromkeys(leaves, 1))))
    nbytes = cases.state_bytes(leaves)
    # The first one imports what is imported only now.
    _round(state, target, nbytes)
    samples = [_round(state, target, nbytes) for _ in range(rounds)]
    print(f'{rounds} rounds of {nbytes / 1e9:.2f} GB')
    columns = {kind: np.array([sample[kind] for sample in samples]) for kind in samples[0]}
    draws = np.random.default_rng(0).integers(0, rounds, (_RESAMPLINGS, rounds))
    for kind in (*_STEPS, _RAW):
        seconds, idle = columns[kind].T
        error = seconds.std(ddof=1) / np.sqrt(rounds)
        low, high = np.quantile(columns[_RAW][draws, 0].mean(1) / seconds[draws].mean(1), (0.05, 0.95))
        of_raw = columns[_RAW][:, 0].mean() / seconds.mean()
        print(
            f'{kind:24} {seconds.mean():.3f} s +- {error:.3f}, median {np.median(seconds):.3f} s, disk idle {idle.mean():.3f} s '
            f'(median {np.median(idle):.3f}); {of_raw:.2f} of raw ({low:.2f} to {high:.2f})'
        )


if __name__ == '__main__':
    main()
