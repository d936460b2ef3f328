"""What a save in the background takes from a training loop: a plain one, and one to a local directory of the same disk.

A part of ``benchmarks/tiers.py``.

One loop trains without a break. Every step multiplies matrices, updates all weights and donates the old ones. A round saves once
with each of four checkpointers, in an order that rotates:

    plain           to a directory
    plain again     the same with another directory: how much two equal saves differ in this run
    local           to a local directory on the same disk; nothing is uploaded
    local, upload   the same, and each step is uploaded to memory of this process, without a network

A save is under way from its call until it is committed, and uploaded, and three steps more, in which the old step is deleted. The
loss is the time of these steps beyond that of as many steps of the windows without a save before and after them. The next save
begins only after such a window, so no save waits for another one. The processor time of the process is compared in the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import t5ckpt

KINDS = ('plain', 'plain again', 'local', 'local, upload')
_QUIET_STEPS = 12
_STEPS_AFTER = 3
_ROWS, _COLUMNS = 512, 2048


@dataclasses.dataclass(frozen=True)
class Save:
    """One save in the loop; all times in seconds.

    Attributes:
      kind: one of ``KINDS``.
      call: of ``save_async``.
      write: from the call until the step is committed.
      upload: from the call until it is uploaded; NaN without an upload.
      steps: while it was under way.
      loss: of the loop.
      processor: what it took of the processors.
    """

    kind: str
    call: float
    write: float
    upload: float
    steps: int
    loss: float
    processor: float


@functools.partial(jax.jit, donate_argnums=0)
def _step(params: dict[str, jax.Array], product: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    product = jnp.tanh(product @ product)
    return {name: leaf * 0.999 + product[0, 0] for name, leaf in params.items()}, product


class _Loop:
    """The training."""

    def __init__(self, megabytes: int):
        rng = np.random.default_rng(0)
        count = max(1, round(megabytes * 1e6 / (4 * _ROWS * _COLUMNS)))
        self._params = {f'w{n}': jnp.asarray(rng.random((_ROWS, _COLUMNS), np.float32)) for n in range(count)}
        self._product = jnp.full((768, 768), 1e-3)
        self.steps = 0

    @property
    def state(self) -> dict[str, Any]:
        return {'params': self._params, 'step': np.int32(self.steps)}

    def step(self) -> None:
        self._params, self._product = _step(self._params, self._product)
        jax.block_until_ready((self._params, self._product))
        self.steps += 1

    def timed(self, is_over: Callable[[], bool]) -> tuple[int, np.ndarray]:
        """Trains until a condition holds after a step; the number of steps, and their seconds of the clock and the processors."""
        began, steps = _clocks(), 0
        while steps == 0 or not is_over():
            self.step()
            steps += 1
        return steps, _clocks() - began

    def quiet(self) -> np.ndarray:
        """The mean seconds of a step without a save."""
        left = iter(range(_QUIET_STEPS - 1))
        steps, seconds = self.timed(lambda: next(left, None) is None)
        return seconds / steps


def _clocks() -> np.ndarray:
    return np.array([time.perf_counter(), time.process_time()])


def _checkpointer(kind: str, home: pathlib.Path, state: Any) -> t5ckpt.Checkpointer:
    directory, tier = home / kind.replace(' ', '-').replace(',', ''), None
    if kind.startswith('local'):
        policy = None if kind == 'local, upload' else t5ckpt.SaveAt([])
        tier = t5ckpt.LocalTier(directory, persist=policy)
    run = f'memory://{secrets.token_hex(8)}/run' if tier else directory
    return t5ckpt.Checkpointer(state, None, run, keep=2, local=tier)


def _saved(loop: _Loop, kind: str, checkpointer: t5ckpt.Checkpointer) -> Callable[[np.ndarray], Save]:
    """Saves in the loop; returns a function that makes the result from the mean seconds of a step without a save."""
    began, called = _clocks(), time.perf_counter()
    pending = checkpointer.save_async(loop.state)
    call = time.perf_counter() - called
    ends: dict[str, float] = {}
    pending.add_done_callback(lambda _: ends.setdefault('written', time.perf_counter()))
    over = threading.Event()

    def wait() -> None:
        try:
            pending.result()
            if kind == 'local, upload':
                checkpointer.wait_until_persisted(pending.step)
                ends['uploaded'] = time.perf_counter()
        finally:
            over.set()

    threading.Thread(target=wait, daemon=True).start()
    steps, _ = loop.timed(over.is_set)
    pending.result()
    for _ in range(_STEPS_AFTER):
        loop.step()
    steps, seconds = steps + _STEPS_AFTER, _clocks() - began

    def result(quiet: np.ndarray) -> Save:
        loss, processor = (seconds - steps * quiet).tolist()
        upload = ends.get('uploaded', math.nan) - called
        return Save(kind, call, ends['written'] - called, upload, steps, loss, processor)

    return result


def measure(megabytes: int, rounds: int, directory: pathlib.Path) -> tuple[list[Save], float]:
    """The saves of all rounds but the first, which warms up; and the median seconds of a step between them."""
    loop, saves, steps = _Loop(megabytes), list[Save](), list[float]()
    with tempfile.TemporaryDirectory(dir=directory) as name, contextlib.ExitStack() as stack:
        checkpointers = {
            kind: stack.enter_context(_checkpointer(kind, pathlib.Path(name), loop.state)) for kind in KINDS
        }
        loop.step()
        before = loop.quiet()
        for number in range(rounds + 1):
            first = number % len(KINDS)
            for kind in (*KINDS[first:], *KINDS[:first]):
                make = _saved(loop, kind, checkpointers[kind])
                after = loop.quiet()
                if number:
                    saves.append(make((before + after) / 2))
                    steps.append(float(after[0]))
                before = after
    return saves, statistics.median(steps)


def summary(saves: Sequence[Save]) -> dict[str, dict[str, Any]]:
    """For each kind: the number of saves, medians in milliseconds, and ratios to plain saves with their 90 % intervals."""
    found: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        own = [save for save in saves if save.kind == kind]
        # The row of the null comparison is compared with the other plain saves alone.
        base = [save for save in saves if save.kind in (KINDS[:1] if kind in KINDS[:2] else KINDS[:2])]
        row: dict[str, Any] = {'saves': len(own)}
        for field in ('call', 'write', 'upload', 'loss', 'processor'):
            values = [getattr(save, field) for save in own]
            if not math.isnan(values[0]):
                row[f'{field}_ms'] = round(1e3 * statistics.median(values), 1)
        for field in ('loss', 'processor'):
            numbers = ([getattr(save, field) for save in part] for part in (own, base))
            row[f'{field}_ratio'], row[f'{field}_interval'] = ratio(*numbers)
        found[kind] = row
    return found


def ratio(values: Sequence[float], base: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The ratio of two medians, and the interval that has 90 % of those of 2,000 resamples of both."""
    rng = np.random.default_rng(0)
    drawn = [np.median(rng.choice(np.asarray(part), (2000, len(part))), axis=1) for part in (values, base)]
    low, high = np.percentile(drawn[0] / drawn[1], [5, 95]).tolist()
    return round(statistics.median(values) / statistics.median(base), 2), (round(low, 2), round(high, 2))


def table(found: dict[str, dict[str, Any]], step_seconds: float, megabytes: int) -> list[str]:
    """The lines of a table in Markdown."""
    made = [
        f'A save of {megabytes} MB in a loop of steps of {step_seconds * 1e3:.0f} ms, medians, ratios with their 90 % intervals:',
        '',
        '| save | saves | call | written | uploaded | loss | loss / plain | processor | processor / plain |',
        '|---|---:|---:|---:|---:|---:|---:|---:|---:|',
    ]
    for kind, row in found.items():
        upload = f'{row["upload_ms"]:.0f} ms' if 'upload_ms' in row else ''
        times = f'{row["call_ms"]:.1f} ms | {row["write_ms"]:.0f} ms | {upload}'
        ratios = {
            field: ''
            if kind == 'plain'
            else f'{row[f"{field}_ratio"]} ({row[f"{field}_interval"][0]} to {row[f"{field}_interval"][1]})'
            for field in ('loss', 'processor')
        }
        made.append(
            f'| {kind} | {row["saves"]} | {times} | {row["loss_ms"]:.0f} ms | {ratios["loss"]} '
            f'| {row["processor_ms"]:.0f} ms | {ratios["processor"]} |'
        )
    return made


def run(megabytes: int, rounds: int, directory: pathlib.Path) -> tuple[list[str], dict[str, Any]]:
    """Measures; the lines of the table, and the numbers."""
    saves, step = measure(megabytes, rounds, directory)
    found = summary(saves)
    return table(found, step, megabytes), {'megabytes': megabytes, 'step_ms': round(1e3 * step, 1), **found}
