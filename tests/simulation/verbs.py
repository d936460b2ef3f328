"""Programs of the command line's verbs and of a restart, on paths: ``cp``, ``prune``, and ``restore_or_init``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from support.options import with_options

from simulation.programs import OPTIONS
from simulation.scheduler import current_task
from simulation.virtual import clock
from simulation.world import World, state_of
from t5ckpt.checkpointer import Checkpointer
from t5ckpt.commit.deletion import rename_damaged
from t5ckpt.commit.holds import hold
from t5ckpt.commit.retention import Retention
from t5ckpt.convert.copy import copy_checkpoint
from t5ckpt.errors import (
    ChangedMeanwhileError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StepKeptError,
)
from t5ckpt.format.names import PINNED, step_dir
from t5ckpt.policies import KeepAll, KeepLatest
from t5ckpt.resume import restore_or_init

# The errors of the verbs if another program has changed the step in the meantime.
_OVERTAKEN = (CheckpointExistsError, CheckpointNotFoundError, ChangedMeanwhileError, StepKeptError)


def copier(world: World, step: int, value: float, *, source: str = 'source') -> Callable[[], None]:
    """``t5ckpt cp`` of a step of another run, whose value is known."""

    def run() -> None:
        with contextlib.suppress(*_OVERTAKEN):
            copy_checkpoint(f'{world.path(source)}/{step_dir(step)}', world.path())
            world.observer.is_saved(step, value)

    return run


def pruner(world: World, keep: int) -> Callable[[], None]:
    """``t5ckpt prune --keep``, which deletes at most the steps that were confirmed."""

    def run() -> None:
        retention = Retention(world.storage(), KeepAll(), clock, None, None)
        retention.policy = KeepLatest(keep)
        doomed = [decision.step for decision in retention.plan() if not decision.keep]
        if doomed:
            world.observer.may_delete[current_task().process.name] = doomed.__contains__
            retention.carry_out(confirmed=doomed)

    return run


def put_aside(world: World, step: int) -> Callable[[], None]:
    """Renames a damaged step, as ``restore_or_init`` does."""

    def run() -> None:
        with contextlib.suppress(*_OVERTAKEN):
            rename_damaged(world.storage(), step, clock)

    return run


def stripper(world: World) -> Callable[[], None]:
    """Removes data-iterator files, as a trainer with ``keep_dataset_checkpoints=1`` does after a save."""

    def run() -> None:
        Retention(world.storage(), KeepAll(), clock, 1).carry_out()

    return run


def holder(world: World, step: int, seconds: float = 600.0) -> Callable[[], None]:
    """A program that holds a step, and reads all of its files twice."""

    def run() -> None:
        storage, process, began = world.storage(), current_task().process.name, world.scheduler.now
        with hold(storage, step, seconds, clock) as is_there:
            if not is_there:
                return
            world.observer.is_held(process, step, began + seconds)
            try:
                keys = [key for key, _ in storage.walk(step_dir(step)) if not key.endswith(PINNED)]
                for key in [*keys, *keys]:
                    storage.read(key)
            except CheckpointNotFoundError as error:
                if world.scheduler.now < began + seconds:
                    world.scheduler.fail(f'a file of step {step}, which is held by a reader, is gone: {error}')
            finally:
                world.observer.is_returned(process, step)

    return run


def restarter(world: World) -> Callable[[], None]:
    """A trainer that starts with ``restore_or_init``. It may not begin a new run if the run has a step, nor get a mixture."""

    def run() -> None:
        observer = world.observer
        before, damaged = set(observer.visible), set(observer.damaged)
        observer.disappeared.clear()
        with Checkpointer(state_of(0), checkpoints_dir=world.storage(), **with_options(**OPTIONS)) as ck:
            try:
                state: dict[str, Any] = restore_or_init(ck, lambda: state_of(-1))
            except (CheckpointNotFoundError, ChangedMeanwhileError, CorruptCheckpointError) as error:
                # A step that is deleted while it is read is an error.
                if before - damaged and not before & observer.disappeared:
                    world.scheduler.fail(f'steps {sorted(before)} were there: {type(error).__name__}: {error}')
                return
        value = int(np.asarray(state['n']))
        if any(element != value for element in np.asarray(state['w'])):
            world.scheduler.fail(f'restore_or_init returned w={state["w"]} and n={value}')
        if value == -1 and before - observer.disappeared:
            world.scheduler.fail(f'restore_or_init made a new state, although steps {sorted(before)} exist')

    return run
