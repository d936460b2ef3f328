"""Programs that processes run: the public interface of t5ckpt, with what the observer has to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from t5ckpt.catalog.locate import Located
from t5ckpt.checkpointer import Checkpointer
from t5ckpt.commit.deletion import delete_step
from t5ckpt.commit.pins import pin_in
from t5ckpt.commit.read_lease import read_lease
from t5ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StepKeptError,
)
from t5ckpt.format.names import MANIFEST, step_dir
from t5ckpt.reading.contents import leaves_of, read_contents
from t5ckpt.reading.open_reader import ReadOptions, reader_of
from t5ckpt.reading.raw_files import read_raw
from t5ckpt.testing.simulation.scheduler import current_task
from t5ckpt.testing.simulation.virtual import clock
from t5ckpt.testing.simulation.world import World, state_of

__all__ = ['pinner', 'reader', 'remover', 'saver']


def saver(
    world: World,
    value: float,
    steps: Sequence[int],
    *,
    keep: int | None = None,
    is_async: bool = False,
    overwrite: bool = False,
) -> Callable[[], None]:
    """A trainer that saves some steps."""

    def run() -> None:
        state = state_of(value)
        with Checkpointer(
            state, checkpoints_dir=world.storage(), keep=keep, inline_bytes=4, reuse_unchanged=False
        ) as ck:
            for step in steps:
                begun = ck.save_async(state, step=step, overwrite=overwrite) if is_async else None
                done = ck.save(state, step=step, overwrite=overwrite) if begun is None else begun.result()
                if done is not None:
                    world.observer.is_saved(step, value)

    return run


def reader(world: World, step: int, seconds: float = 600.0, *, leased: bool = True) -> Callable[[], None]:
    """An evaluator that reads a step, under a read lease or without one."""

    def run() -> None:
        storage, process = world.storage(), current_task().process.name
        if not leased:
            _read(world, step)
            return
        with read_lease(storage, step, seconds, clock) as is_there:
            if not is_there:
                return
            # The lease lasts from its write, of which the observer knows only the end.
            until = world.scheduler.now + seconds - 60
            world.observer.is_leased(process, step, until)
            try:
                _read(world, step)
            except (CheckpointNotFoundError, CorruptCheckpointError) as error:
                if world.scheduler.now < until:
                    world.scheduler.fail(f'a reader with a lease of step {step}: {type(error).__name__}: {error}')
            finally:
                world.observer.is_returned(process, step)

    return run


def _read(world: World, step: int) -> None:
    # As ``load_t5x_checkpoint`` reads, which takes a path.
    located = Located(world.storage(), step_dir(step), MANIFEST, step)
    contents = read_contents(located, read_raw(located, checksums=True))
    leaves, _ = leaves_of(contents, (), {})
    arrays = reader_of(contents, ReadOptions(mmap=False, verify='full'))
    with contents.identity.reading():
        read = arrays.read(leaves['w',], 'w')
    value = int(np.asarray(leaves['n',]))
    if any(each != value for each in read):
        world.scheduler.fail(f'a reader of step {step} got {read} beside {value}')


def remover(world: World, step: int) -> Callable[[], None]:
    """``t5ckpt rm``."""

    def run() -> None:
        try:
            delete_step(world.storage(), step, clock)
        except (CheckpointNotFoundError, StepKeptError):
            return

    return run


def pinner(world: World, step: int) -> Callable[[], None]:
    """``t5ckpt pin``."""

    def run() -> None:
        try:
            pin_in(world.storage(), step_dir(step), '1', clock)
        except CheckpointNotFoundError:
            return
        world.observer.pins.add(step)
        if step not in world.observer.visible:
            world.scheduler.fail(f'step {step} was pinned, and is not there')

    return run
