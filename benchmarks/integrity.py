"""What checksums cost: a restore with and without, in turns, and the hashing of a save.

    python benchmarks/integrity.py [ROUNDS]
    python benchmarks/integrity.py 1 --short            tiny, which only shows that it works

The state is S1 of run.py (0.74 GB, four CPU devices), its files lie in the page cache. A save always has checksums, so
its share is that of hashing: the same bytes in pieces as large as the chunks, in one thread, against the save's seconds on
one core.
"""

from __future__ import annotations

import gc
import os
import pathlib
import statistics
import sys
import tempfile
import time

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'

import cases
import jax
import numpy as np
import xxhash

import t5ckpt

_LEVELS = ('quick', 'auto', 'full')


def _seconds(act: object) -> tuple[float, float]:
    """Wall and processor seconds."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Prints medians and ratios."""
    numbers = [int(word) for word in sys.argv[1:] if word != '--short']
    rounds = numbers[0] if numbers else 15
    leaves = cases.transformer(cases.SHORT if '--short' in sys.argv else cases.FULL)
    mesh = cases.mesh_of(4)
    with tempfile.TemporaryDirectory(dir=pathlib.Path(__file__).parent) as directory:
        saves: list[tuple[float, float]] = []
        for step in range(3):
            state = cases.materialize(leaves, mesh, dict.fromkeys(leaves, step))
            with t5ckpt.Checkpointer(state, checkpoints_dir=directory, keep=1) as ck:
                saves.append(_seconds(lambda ck=ck, step=step, state=state: ck.save(state, step=step)))
        arrays = [np.asarray(shard.data) for leaf in state.values() for shard in leaf.addressable_shards]
        hashing = min(_seconds(lambda: [xxhash.xxh3_64(array.data) for array in arrays])[1] for _ in range(5))
        save_cpu = statistics.median(cpu for _, cpu in saves)
        print(f'save: {statistics.median(wall for wall, _ in saves):.3f} s, {save_cpu:.3f} s of processors')
        print(f'hashing the same bytes: {hashing:.3f} s of processors, {hashing / save_cpu:.1%} of the save')
        template = cases.abstract(leaves, mesh)
        readers = {
            level: t5ckpt.Checkpointer(
                template, checkpoints_dir=directory, options=t5ckpt.CheckpointerOptions(verify=level)
            )
            for level in _LEVELS
        }
        found: dict[str, list[tuple[float, float]]] = {level: [] for level in _LEVELS}
        for turn in range(rounds):
            for level in (*_LEVELS[turn % 3 :], *_LEVELS[: turn % 3]):
                found[level].append(_seconds(lambda ck=readers[level]: jax.block_until_ready(ck.restore())))
        base = [statistics.median(values) for values in zip(*found['quick'], strict=True)]
        for level, samples in found.items():
            wall, cpu = (statistics.median(values) for values in zip(*samples, strict=True))
            paired = [one[0] / other[0] for one, other in zip(samples, found['quick'], strict=True)]
            print(
                f"restore, verify='{level}': {wall:.3f} s ({wall / base[0] - 1:+.1%}), {cpu:.3f} s of processors "
                f'({cpu / base[1] - 1:+.1%}); round by round {statistics.median(paired) - 1:+.1%}'
            )


if __name__ == '__main__':
    main()
