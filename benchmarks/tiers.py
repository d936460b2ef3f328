"""What saves to a local directory cost beside plain asynchronous saves to the same disk, and what a restart from it costs.

    python benchmarks/tiers.py [MB] [SAVES] [ROUNDS]

A loop of matrix products saves every few steps, in turns: not at all, to the disk, to the disk as `local_dir` without uploads,
and with an upload of each save to memory. The loss is the time of the loop beyond that without saves, for each save; the call is
the time of `save_async` alone. Then a new checkpointer restores the newest step from the page cache, without and with
`local_dir`. Prints the medians and their ratios to the plain turn of the same run. Needs a quiet machine.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import t5ckpt

_STEPS_BETWEEN = 10
_TURNS = ('no save', 'plain', 'local', 'local and upload')


@jax.jit
def _product(values: jax.Array) -> jax.Array:
    return jnp.tanh(values @ values)


def _state(megabytes: int, step: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    leaves = {f'w{n}': jnp.asarray(rng.random((512, 2048), np.float32)) for n in range(max(1, megabytes // 4))}
    return {'params': leaves, 'step': np.int32(step)}


def _checkpointer(turn: str, home: pathlib.Path, state: Any) -> t5ckpt.Checkpointer:
    policy = None if turn == 'local and upload' else t5ckpt.SaveAt([])
    tiers: dict[str, Any] = {'local_dir': home / 'local', 'persist_policy': policy}
    run = home / 'plain' if turn == 'plain' else f'memory://{home.parent.name}/{home.name}'
    return t5ckpt.Checkpointer(state, None, run, keep=2, **(tiers if turn.startswith('local') else {}))


def _loop(turn: str, home: pathlib.Path, state: dict[str, Any], saves: int) -> tuple[float, list[float]]:
    """The seconds of a loop, and of each call that saves in it; a save that still runs at the end counts for neither."""
    values, calls = jnp.full((768, 768), 1e-3), list[float]()
    with _checkpointer(turn, home, state) as checkpointer:
        checkpointer.save(state)
        began = time.perf_counter()
        for step in range(1, saves * _STEPS_BETWEEN + 1):
            values = _product(values).block_until_ready()
            if turn != 'no save' and step % _STEPS_BETWEEN == 0:
                called = time.perf_counter()
                checkpointer.save_async({**state, 'step': np.int32(step)})
                calls.append(time.perf_counter() - called)
        return time.perf_counter() - began, calls


def _restore(turn: str, home: pathlib.Path, state: dict[str, Any]) -> float:
    with _checkpointer(turn, home, state) as checkpointer:
        began = time.perf_counter()
        jax.block_until_ready(checkpointer.restore())
        return time.perf_counter() - began


def main() -> None:
    """Prints a line for each turn."""
    megabytes, saves, rounds = (int(word) for word in (*sys.argv[1:], *('128', '4', '3')[len(sys.argv) - 1 :]))
    state = _state(megabytes, 0)
    loops: dict[str, list[float]] = {turn: [] for turn in _TURNS}
    calls: dict[str, list[float]] = {turn: [] for turn in _TURNS}
    restores: dict[str, list[float]] = {'plain': [], 'local': []}
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory(dir=pathlib.Path(__file__).parent) as name:
            for turn in _TURNS:
                home = pathlib.Path(name, turn.replace(' ', '-'))
                seconds, called = _loop(turn, home, state, saves)
                if number:  # The first round warms up.
                    loops[turn].append(seconds)
                    calls[turn] += called
            for turn in (*restores, *restores):
                restores[turn].append(_restore(turn, pathlib.Path(name, turn), state))
    idle = statistics.median(loops['no save'])
    plain = {'loss': (statistics.median(loops['plain']) - idle) / saves, 'call': statistics.median(calls['plain'])}
    print(f'no save: {idle:.3f} s for {saves * _STEPS_BETWEEN} steps')
    for turn in _TURNS[1:]:
        loss, call = (statistics.median(loops[turn]) - idle) / saves, statistics.median(calls[turn])
        ratios = f'{loss / plain["loss"]:.2f}x and {call / plain["call"]:.2f}x plain'
        print(f'{turn}: {loss * 1e3:.1f} ms lost per save, {call * 1e3:.2f} ms in the call; {ratios}')
    seconds = {turn: statistics.median(found[2:]) for turn, found in restores.items()}
    ratio = seconds['local'] / seconds['plain']
    print(f'restore: plain {seconds["plain"]:.3f} s, from local_dir {seconds["local"]:.3f} s; {ratio:.2f}x')


if __name__ == '__main__':
    main()
