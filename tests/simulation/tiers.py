"""Programs and scenarios of a run in a bucket with a local directory, from which uploads follow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np
from support.options import with_options

from simulation.bucket import Bucket
from simulation.directory import LOCAL, SimulatedDirectory
from simulation.programs import OPTIONS, after, in_turn, lister, remover
from simulation.scheduler import wait_until
from simulation.tasks import Task
from simulation.virtual import clock
from simulation.world import World, state_of
from t5ckpt.checkpointer import Checkpointer
from t5ckpt.commit.deletion import delete_step
from t5ckpt.commit.taken_steps import BeingHiddenError
from t5ckpt.errors import CheckpointNotFoundError, LocalDirError, NotPersistedError, StepKeptError
from t5ckpt.format.names import to_persist_file
from t5ckpt.tiers.local_tier import LocalTier


def _checkpointer(world: World, value: float) -> Checkpointer:
    return Checkpointer(
        state_of(value), checkpoints_dir=world.storage(), local=LocalTier(LOCAL, keep=1), **with_options(**OPTIONS)
    )


def tier_saver(world: World, value: float, steps: Sequence[int], *, waits: bool = False) -> Callable[[], None]:
    """A trainer that saves some steps to the local directory; ``waits`` for the upload of each."""

    def train() -> None:
        # Of two trainers with one local directory, the second is refused.
        with contextlib.suppress(LocalDirError), _checkpointer(world, value) as ck:
            for step in steps:
                if ck.save(state_of(value), step=step) is None:
                    # Another trainer has saved it.
                    continue
                world.local.is_saved(step, value)
                if waits:
                    _wait_for(world, ck, step, value)

    return train


def _wait_for(world: World, ck: Checkpointer, step: int, value: float) -> None:
    try:
        ck.wait_until_persisted(step)
    except NotPersistedError:
        # The bucket is away, or another program has deleted the step.
        return
    world.observer.is_saved(step, value)


def tier_remover(step: int) -> Callable[[], None]:
    """``t5ckpt rm`` of a local step."""

    def run() -> None:
        # The trainer deletes it, too, and may have been stopped.
        with contextlib.suppress(CheckpointNotFoundError, StepKeptError, BeingHiddenError):
            delete_step(SimulatedDirectory('local'), step, clock)

    return run


def may_delete_local(world: World, newest: int) -> Callable[[int], bool]:
    """The steps that retention may delete from the local directory: those before the newest that do not wait for their upload."""
    return lambda step: step < newest and world.read_local(to_persist_file(step)) is None


def outage(world: World, seconds: float) -> Callable[[], None]:
    """The bucket answers no request for some simulated seconds."""

    def run() -> None:
        assert isinstance(world.server, Bucket)
        world.scheduler.point('the bucket is away')
        world.server.is_away = True
        wait_until(lambda: False, seconds)
        world.server.is_away = False

    return run


def tier_finisher(world: World, step: int = 99) -> Callable[[], None]:
    """A restart on the same machine. It restores the newest step, uploads the waiting steps, and saves."""
    world.local.may_delete['finish'] = may_delete_local(world, step)

    def run() -> None:
        assert isinstance(world.server, Bucket)
        world.server.is_away = False
        local, of_run = dict(world.local.visible), dict(world.observer.visible)
        newest = max([*local, *of_run], default=None)
        with _checkpointer(world, step) as ck:
            if newest is not None:
                expected = local.get(newest, of_run.get(newest))
                value = int(np.asarray(ck.restore()['n']))
                if value != expected:
                    world.scheduler.fail(
                        f'a restart restored {value}, and the newest step {newest} is that of {expected}'
                    )
                ck.wait_until_persisted()
                _check_uploaded(world, local)
            ck.save(state_of(step), step=step)
        if world.observer.visible.get(step) != step:
            world.scheduler.fail(f'step {step} was saved, and is not in the bucket after the end of the trainer')
        if any(key.startswith('.t5ckpt/to_persist/') for key in world.local_keys()):
            world.scheduler.fail('a step waits for its upload after the end of the trainer')
        lister(world, 1)()

    return run


def _check_uploaded(world: World, local: dict[int, float]) -> None:
    """Of the local steps, the newest is in the bucket; older ones need not be, since a newer upload replaces theirs."""
    newest = max(local, default=-1)
    is_there = max(world.observer.visible, default=-1) >= newest
    if not is_there and not world.observer.is_deletable(newest):
        world.scheduler.fail(f'step {newest} was saved to the local directory, and the restart has not uploaded it')


def tiers_before(world: World) -> Sequence[Task]:
    """A step that was uploaded."""
    return [world.start('before', tier_saver(world, 5, [1], waits=True), machine='a')]


def tiers(world: World) -> Sequence[Task]:
    """A trainer uploads two steps, steps of either tier are deleted, and a second trainer has the same local directory."""
    trainer = world.start('trainer', tier_saver(world, 1, [2, 3], waits=True), machine='a')
    second = world.start('second', after(0.5, tier_saver(world, 2, [3, 4])), machine='a')
    for name in ('trainer', 'second'):
        world.local.may_delete[name] = may_delete_local(world, 4)
    world.local.may_delete['rm-local'] = may_delete_local(world, 4)
    rm = in_turn(*(tier_remover(step) for step in (1, 2, 3)))
    return [
        trainer,
        second,
        world.start('rm-local', rm, machine='a'),
        world.start('rm', remover(world, 1), machine='b', may_delete=lambda step: step == 1),
    ]


def tiers_apart(world: World) -> Sequence[Task]:
    """The bucket is away for a while, in which a trainer saves; a restart follows where that one was killed."""
    tasks = [
        world.start('trainer', tier_saver(world, 1, [2, 3]), machine='a'),
        world.start('restart', after(700.0, tier_saver(world, 2, [4])), machine='a'),
        world.start('outage', outage(world, 40.0), machine='b'),
    ]
    tasks[-1].process.has_faults = False
    for name in ('trainer', 'restart'):
        world.local.may_delete[name] = may_delete_local(world, 5)
    return tasks
