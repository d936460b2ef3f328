"""Compares two versions of t5ckpt: the same saves and restores, in processes that alternate.

    git archive COMMIT | tar x -C OLD
    python benchmarks/paired.py OLD .                      all cases, about ten minutes on two cores
    python benchmarks/paired.py OLD . --cases small s1     some of them
    python benchmarks/paired.py OLD OLD                    the noise of the machine

OLD and NEW are source trees. Each turn is a process that imports t5ckpt from one of them and runs one case several times. The
turns go old, new, new, old, ... The table has the medians of seconds and of processor seconds of the process, and the ratio of
new to old. The last column has the smallest and the largest ratio of a pair of turns. If 1 is in this range, the difference is
noise. On a busy machine, the processor seconds are more reliable.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

_HERE = pathlib.Path(__file__).parent
_SMALL_LEAVES, _SMALL_TURNS = 3_000, 10
_LARGE_TURNS = 5
_LOSS_TURNS = 2
_BUCKET_BYTES, _BUCKET_RATE, _BUCKET_TURNS = 2**28, 1e8, 3
_CASES = {'s1': 4, 'async': 4, 'loss': 1, 'small': 1, 'small-keep': 1, 'bucket': 1}
"""The cases, with the number of CPU devices of each."""
_COUNTS = ('GET requests', 'MB received')

Samples = collections.defaultdict[str, list[list[float]]]


class Turn:
    """One process: measures one case."""

    def __init__(self, root: pathlib.Path):
        """Takes an empty directory."""
        self._root = root
        self._samples: Samples = collections.defaultdict(list)

    def measure(self, case: str) -> Samples:
        """Seconds and processor seconds by metric."""
        own = {'s1': self._s1, 'async': self._async, 'loss': self._loss, 'bucket': self._bucket}
        own.get(case, functools.partial(self._small, case))()
        return self._samples

    def _timed(self, metric: str, act: Callable[[], Any]) -> Any:
        import probe

        probe.settle(self._root)
        wall, cpu = time.perf_counter(), time.process_time()
        result = act()
        self._samples[metric].append([time.perf_counter() - wall, time.process_time() - cpu])
        return result

    def _checkpointer(self, template: Any, **options: Any) -> Any:
        import t5ckpt

        return t5ckpt.Checkpointer(template, checkpoints_dir=os.fspath(self._root), **options)

    def _large(self) -> tuple[Any, list[Any]]:
        """A checkpointer for S1, and two states that it saves by turns, so that no chunk is linked."""
        import cases
        import jax

        leaves, mesh = cases.transformer(cases.FULL), cases.mesh_of(_CASES['s1'])
        states = [cases.nest(cases.materialize(leaves, mesh, dict.fromkeys(leaves, seed))) for seed in (1, 2)]
        return self._checkpointer(cases.nest(cases.abstract(leaves, mesh))), jax.block_until_ready(states)

    def _s1(self) -> None:
        import jax
        import probe

        checkpointer, states = self._large()
        checkpointer.save(states[0], step=0)
        for step in range(1, _LARGE_TURNS + 1):
            self._timed('save', functools.partial(checkpointer.save, states[step % 2], step=step))
            shutil.rmtree(self._root / f'checkpoint_{step - 1}')
        restore = lambda: jax.block_until_ready(checkpointer.restore())  # noqa: E731 - called in a loop
        restore()
        for _ in range(_LARGE_TURNS):
            self._timed('restore, warm', restore)
        for _ in range(_LARGE_TURNS):
            probe.empty_page_cache()
            probe.cool_cache(self._root)
            self._timed('restore, cold', restore)
        checkpointer.close()

    def _async(self) -> None:
        checkpointer, states = self._large()
        checkpointer.save_async(states[0], step=0).result()
        for step in range(1, _LARGE_TURNS + 1):
            pending = self._timed('call', functools.partial(checkpointer.save_async, states[step % 2], step=step))
            pending.result()
            shutil.rmtree(self._root / f'checkpoint_{step - 1}')
        checkpointer.close()

    def _loss(self) -> None:
        """The time that ``loop.measure`` calls lost."""
        import cases
        import jax
        import loop
        import peers

        leaves, mesh = cases.transformer(cases.FULL), cases.mesh_of(1)
        training, abstract = loop.Training(leaves, mesh), cases.nest(cases.abstract(leaves, mesh))
        peer = peers.T5ckpt(self._root, abstract, abstract)
        for step in range(_LOSS_TURNS + 1):
            values = cases.nest(cases.materialize(leaves, mesh, dict.fromkeys(leaves, step)))
            found = loop.measure(training, peer, jax.block_until_ready(values), step)
            if step:
                self._samples['training time'].append([found['lost'], float('nan')])
            shutil.rmtree(self._root / f'checkpoint_{step}')
        peer.close()

    def _bucket(self) -> None:
        """Restores from a bucket that lets 100 MB/s pass."""
        sys.path.insert(0, os.fspath(_HERE.parent / 'tests'))
        import light_store

        import t5ckpt

        rng = np.random.default_rng(0)
        state = {f'leaf_{index}': rng.standard_normal(_BUCKET_BYTES // 32, np.float32) for index in range(8)}
        with light_store.light_store(self._root) as address:
            checkpointer = t5ckpt.Checkpointer(state, checkpoints_dir='gs://bucket/run')
            checkpointer.save(state, step=1)
            light_store.counts(address, _BUCKET_RATE)
            for _ in range(_BUCKET_TURNS):
                self._timed('restore', checkpointer.restore)
                counted = light_store.counts(address, _BUCKET_RATE)
                for metric, value in zip(_COUNTS, (counted['GET'], counted['received'] / 1e6), strict=True):
                    self._samples[metric].append([value, float('nan')])
            checkpointer.close()

    def _small(self, case: str) -> None:
        leaves = {f'leaf_{index}': np.full(256, index, np.float32) for index in range(_SMALL_LEAVES)}
        checkpointer = self._checkpointer(leaves, **({'keep': 1} if case == 'small-keep' else {}))
        for step in range(_SMALL_TURNS + 2):
            state = {name: values + step for name, values in leaves.items()}
            save = functools.partial(checkpointer.save, state, step=step)
            _ = save() if step < 2 else self._timed('save', save)
        checkpointer.restore()
        for _ in range(_SMALL_TURNS):
            self._timed('restore', checkpointer.restore)
        checkpointer.close()


def _run(case: str, tree: pathlib.Path, scratch: pathlib.Path) -> dict[str, list[list[float]]]:
    """The samples of one turn, in a process of its own that imports t5ckpt from ``tree``."""
    flag = f'--xla_force_host_platform_device_count={_CASES[case]}'
    compiled = os.fspath(scratch / 'compiled')
    environment = os.environ | {
        'PYTHONPATH': os.fspath(tree),
        'XLA_FLAGS': flag,
        'JAX_COMPILATION_CACHE_DIR': compiled,
    }
    with tempfile.TemporaryDirectory(dir=scratch) as root:
        command = [sys.executable, __file__, '--turn', case, root]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    if not pathlib.Path(answer['imported']).is_relative_to(tree):
        raise SystemExit(f't5ckpt was imported from {answer["imported"]}, not from {tree}')
    return answer['samples']


def _median(samples: list[list[float]], which: int) -> float:
    return statistics.median(sample[which] for sample in samples)


def _print_case(case: str, rounds: list[tuple[dict[str, list[list[float]]], dict[str, list[list[float]]]]]) -> None:
    """Two lines for each metric: seconds and processor seconds."""
    for metric in rounds[0][0]:
        old, new = ([sample for pair in rounds for sample in pair[side][metric]] for side in (0, 1))
        for which, unit in enumerate(('' if metric in _COUNTS else 's', 'CPU s')):
            before, after = _median(old, which), _median(new, which)
            if np.isnan(before):
                continue
            ratios = [_median(pair[1][metric], which) / _median(pair[0][metric], which) for pair in rounds]
            print(
                f'{case:10} {metric:14} {unit:5} {before:8.4f} {after:8.4f} {after / before:6.3f}   '
                f'{min(ratios):.2f} - {max(ratios):.2f}',
                flush=True,
            )


def main() -> None:
    """Runs the turns and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('old', type=pathlib.Path)
    parser.add_argument('new', type=pathlib.Path)
    parser.add_argument('--cases', nargs='+', choices=_CASES, default=list(_CASES))
    parser.add_argument('--rounds', type=int, default=3, help='pairs of turns of each case')
    parser.add_argument('--scratch', type=pathlib.Path, default=_HERE, help='a directory on the disk to measure')
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('terminated'))  # so that the scratch directory is removed
    trees = arguments.old.resolve(), arguments.new.resolve()
    print(f'load before: {os.getloadavg()[0]:.2f}')
    print('case       metric         unit       old      new  ratio   of single pairs')
    with tempfile.TemporaryDirectory(prefix='.scratch-', dir=arguments.scratch) as name:
        for case in arguments.cases:
            rounds = []
            for index in range(arguments.rounds):
                order = (0, 1) if index % 2 == 0 else (1, 0)
                found = {side: _run(case, trees[side], pathlib.Path(name)) for side in order}
                rounds.append((found[0], found[1]))
            _print_case(case, rounds)
    print(f'load after: {os.getloadavg()[0]:.2f}')


def _turn(case: str, root: str) -> None:
    import t5ckpt

    samples = Turn(pathlib.Path(root)).measure(case)
    print(json.dumps({'imported': os.fspath(pathlib.Path(t5ckpt.__file__).resolve()), 'samples': samples}))


if __name__ == '__main__':
    _turn(*sys.argv[2:]) if sys.argv[1:2] == ['--turn'] else main()
