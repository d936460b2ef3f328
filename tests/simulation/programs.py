"""Programs that processes run: they call the public interface of t5ckpt, and report their results to the observer."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from support.options import with_options

from simulation.scheduler import current_task, wait_until
from simulation.virtual import clock
from simulation.world import World, state_of
from t5ckpt.catalog.listing import steps_in
from t5ckpt.catalog.locate import Located
from t5ckpt.checkpointer import Checkpointer
from t5ckpt.commit.deletion import delete_step
from t5ckpt.commit.holds import hold, pin_in
from t5ckpt.errors import (
    ChangedMeanwhileError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StepKeptError,
    StorageError,
)
from t5ckpt.format.names import MANIFEST, step_dir
from t5ckpt.options import CheckpointerOptions
from t5ckpt.reading.array_reader import reader_of
from t5ckpt.reading.contents import decode_contents, read_raw

OPTIONS: dict[str, Any] = {'inline_bytes': 4, 'reuse_unchanged': False, 'compression': None}
"""The options of each checkpointer: ``n`` goes into the manifest, and ``w`` into plain files, which no other step has."""


def saver(
    world: World,
    value: float,
    steps: Sequence[int],
    *,
    how: str = 'save',
    run: str = 'run',
    **options: Any,
) -> Callable[[], None]:
    """A trainer that saves some steps.

    Args:
      world: the run.
      value: of the state.
      steps: the steps.
      how: 'save', 'async', 'overwrite', or 'late', where
        the process is stopped for longer than two hours before its manifest.
      run: the name of the run.
      options: of ``Checkpointer``.
    """

    def save(ck: Checkpointer, step: int) -> None:
        state, overwrite = state_of(value), how == 'overwrite'
        begun = ck.save_async(state, step=step, overwrite=overwrite) if how == 'async' else None
        done = ck.save(state, step=step, overwrite=overwrite) if begun is None else begun.result()
        if done is not None and run == 'run':
            world.observer.is_saved(step, value)

    def train() -> None:
        given = {**OPTIONS, **options}
        storage = world.storage(run)
        if how == 'late':
            replace, stops = storage.replace, [8000.0]
            storage.replace = lambda key, data, version: (
                _stop(stops.pop() if stops and key.endswith(f'/{MANIFEST}') else 0.0),
                replace(key, data, version),
            )[1]
        with Checkpointer(state_of(value), checkpoints_dir=storage, **with_options(**given)) as ck:
            for step in steps:
                # A step that is pinned or is held by a reader is not replaced.
                # One that was stopped for hours gives up.
                with contextlib.suppress(StepKeptError, *([StorageError] if how == 'late' else [])):
                    save(ck, step)

    return train


def _stop(seconds: float) -> None:
    """Stops this process, with its heartbeat."""
    if seconds:
        process = current_task().process
        process.stopped += seconds
        process.paused_until = clock() - process.ahead + seconds
        wait_until(lambda: False, seconds)


def reader(world: World, step: int, seconds: float = 600.0) -> Callable[[], None]:
    """An evaluator that reads a step under a hold."""

    def run() -> None:
        storage, process, began = world.storage(), current_task().process.name, world.scheduler.now
        with hold(storage, step, seconds, clock) as is_there:
            if not is_there:
                return
            until = began + seconds
            world.observer.is_held(process, step, until)
            try:
                _read(world, step)
            except (CheckpointNotFoundError, CorruptCheckpointError, ChangedMeanwhileError) as error:
                if world.scheduler.now < until:
                    world.scheduler.fail(f'a reader with a hold of step {step}: {type(error).__name__}: {error}')
            finally:
                world.observer.is_returned(process, step)

    return run


def _read(world: World, step: int) -> None:
    # As ``load_t5x_checkpoint`` reads, which takes a path.
    located = Located(world.storage(), step_dir(step), MANIFEST, step)
    contents = decode_contents(located, read_raw(located, checksums=True))
    leaves = contents.leaves()
    arrays = reader_of(contents, CheckpointerOptions(verify='full'))
    with contents.identity.reading():
        read = arrays.read(leaves['w',], 'w')
    value = int(np.asarray(leaves['n',]))
    if any(element != value for element in read):
        world.scheduler.fail(f'a reader of step {step} got w={read} and n={value}')


def viewer(world: World, step: int) -> Callable[[], None]:
    """A program that reads a step without a hold. The step may be deleted or replaced meanwhile, and is not damaged then."""

    def run() -> None:
        try:
            _read(world, step)
        except CheckpointNotFoundError:
            return
        except CorruptCheckpointError as error:
            world.scheduler.fail(f'a reader of step {step}: {type(error).__name__}: {error}')

    return run


def remover(world: World, step: int, *, has_rivals: bool = True) -> Callable[[], None]:
    """``t5ckpt rm``.

    Args:
      world: the run.
      step: the step.
      has_rivals: whether another process may hold the step.
    """

    def run() -> None:
        try:
            delete_step(world.storage(), step, clock)
        except (CheckpointNotFoundError, StepKeptError):
            pass
        except StorageError as error:
            if not has_rivals:
                world.scheduler.fail(f'step {step} could not be deleted: {error}')
            if 'may disappear' in str(error):
                world.observer.may_disappear.add(step)
                raise
            world.observer.ended.add((current_task().process.name, step))
            # The step that was read was replaced meanwhile.
            if error.errno != errno.EBUSY:
                raise
        world.observer.ended.add((current_task().process.name, step))

    return run


def lister(world: World, times: int = 2) -> Callable[[], None]:
    """A program that lists the steps, as each of the others does."""

    def run() -> None:
        for _ in range(times):
            observer = world.observer
            before, observer.appeared = set(observer.visible), set[int]()
            observer.disappeared.clear()
            listed = set(steps_in(world.storage()))
            unfinished = listed - before - observer.appeared
            if unfinished:
                world.scheduler.fail(f'steps {sorted(unfinished)} are listed, and were never whole')
            missing = before - listed - observer.disappeared
            if missing:
                world.scheduler.fail(f'steps {sorted(missing)} are whole, and are not listed')

    return run


def finisher(world: World, step: int = 99) -> Callable[[], None]:
    """A save after all other programs, and a listing."""

    def run() -> None:
        saver(world, step, [step])()
        lister(world, 1)()

    return run


def after(seconds: float, program: Callable[[], None]) -> Callable[[], None]:
    """Runs a program some simulated seconds later."""

    def run() -> None:
        wait_until(lambda: False, seconds)
        program()

    return run


def in_turn(*programs: Callable[[], None]) -> Callable[[], None]:
    """Runs one program after another in one process."""

    def run() -> None:
        for program in programs:
            program()

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
