"""A training loop of donated arrays on one GPU that saves in the background, and blocking saves and restores, beside Orbax.

    python benchmarks/gpu.py --scratch DIR              # 1 GB; a state of 16 x 4096 x 4096 float32
    python benchmarks/gpu.py --scratch DIR --rows 64    # tiny: only shows that everything works, also on a CPU

Prints, for each round, the seconds of the loop and of each call that saves. `none` is the loop without saves.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import t5ckpt

_SAVES = 4


def _state(rows: int, value: float) -> dict[str, Any]:
    weights = [jnp.full((rows, rows), value + index, jnp.float32) for index in range(16)]
    return {'weights': weights, 'count': jnp.int32(0)}


_step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)


def _loop(rows: int, steps: int, save: Callable[[int, Any], object], wait: Callable[[], object]) -> str:
    state = jax.block_until_ready(_step(_state(rows, 0.0)))
    calls: list[float] = []
    began = time.perf_counter()
    for number in range(1, _SAVES + 1):
        call = time.perf_counter()
        save(number, state)
        calls.append(time.perf_counter() - call)
        for _ in range(steps):
            state = _step(state)
        jax.block_until_ready(state)
    wait()
    return f'{time.perf_counter() - began:7.3f} s; calls {" ".join(f"{call:.4f}" for call in calls)}'


def _without(rows: int, steps: int, directory: str) -> str:
    del directory
    return _loop(rows, steps, lambda *_: None, lambda: None)


def _with_t5ckpt(rows: int, steps: int, directory: str) -> str:
    with t5ckpt.Checkpointer(_state(rows, 0.0), checkpoints_dir=directory, keep=2) as ck:
        return _loop(rows, steps, lambda number, state: ck.save_async(state, step=number), ck.wait_until_finished)


def _with_orbax(rows: int, steps: int, directory: str) -> str:
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
    with ocp.CheckpointManager(directory, options=options) as manager:
        save = ocp.args.StandardSave
        return _loop(
            rows,
            steps,
            lambda number, state: manager.save(number, args=save(state)),
            manager.wait_until_finished,
        )


def _blocking(rows: int, directory: str) -> str:
    state = jax.block_until_ready(_state(rows, 1.0))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    marks = [time.perf_counter()]

    def mark() -> None:
        marks.append(time.perf_counter())

    with t5ckpt.Checkpointer(state, checkpoints_dir=f'{directory}/ours', keep=1) as ck:
        ck.save(state, step=1)
        mark()
        ours = jax.block_until_ready(ck.restore())
        mark()
    orbax = ocp.StandardCheckpointer()
    orbax.save(f'{directory}/theirs', state)
    orbax.wait_until_finished()
    mark()
    theirs = jax.block_until_ready(
        orbax.restore(f'{directory}/theirs', jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
    )
    mark()
    orbax.close()
    for found in (ours, theirs):
        jax.tree.map(lambda one, two: np.testing.assert_array_equal(np.asarray(one), np.asarray(two)), found, state)
    save, restore, orbax_save, orbax_restore = np.diff(marks)
    return (
        f'{nbytes / 1e9:.2f} GB: save {save:.3f} s, orbax {orbax_save:.3f} s; '
        f'restore {restore:.3f} s, orbax {orbax_restore:.3f} s'
    )


def main() -> None:
    """Measures what the options say."""
    parser = argparse.ArgumentParser(description='A training loop on a GPU that saves.')
    parser.add_argument('--scratch', type=pathlib.Path, required=True, help='on the disk to measure; is emptied')
    parser.add_argument('--rows', type=int, default=4096)
    parser.add_argument('--steps', type=int, default=4000, help='between two saves')
    parser.add_argument('--rounds', type=int, default=3)
    given = parser.parse_args()
    sys.stdout.write(f'{jax.devices()[0]} jax {jax.__version__} orbax {ocp.__version__}\n')
    scratch = os.fspath(given.scratch.absolute())
    for _ in range(given.rounds):
        for name, run in (('none', _without), ('t5ckpt', _with_t5ckpt), ('orbax', _with_orbax)):
            shutil.rmtree(scratch, ignore_errors=True)
            sys.stdout.write(f'{name:7} {run(given.rows, given.steps, f"{scratch}/run")}\n')
            sys.stdout.flush()
    for _ in range(given.rounds):
        shutil.rmtree(scratch, ignore_errors=True)
        os.makedirs(scratch)
        sys.stdout.write(f'{_blocking(given.rows, scratch)}\n')
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == '__main__':
    main()
