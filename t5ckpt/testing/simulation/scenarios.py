"""The scenarios: who uses one run at the same time, and what may go wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from t5ckpt.testing.simulation.programs import pinner, reader, remover, saver
from t5ckpt.testing.simulation.scheduler import Task
from t5ckpt.testing.simulation.world import World

__all__ = ['SCENARIOS', 'Scenario']


class Scenario(ABC):
    """Some processes on one run. Each schedule begins with what :meth:`prepare` has left.

    Attributes:
      name: for the command line.
      kind: 'bucket' or 'disk'.
      faults: the actions of ``Decision`` that may happen, except for 'run'.
    """

    name: ClassVar[str]
    kind: ClassVar[str] = 'bucket'
    faults: ClassVar[Sequence[str]] = ()

    def prepare(self, world: World) -> Sequence[Task]:
        """Starts the processes that run first, without faults, one after another."""
        del world
        return ()

    @abstractmethod
    def start(self, world: World) -> Sequence[Task]:
        """Starts the processes whose schedule is explored."""

    def finish(self, world: World) -> Callable[[], object]:
        """The program that runs last, without faults: a save of a new step, after which no leftover may be there."""
        return saver(world, 99, [99])

    def check(self, world: World) -> str | None:
        """What else must be true at the end; returns a violation."""
        del world
        return None


class TwoSavers(Scenario):
    name = 'two-savers'

    def start(self, world: World) -> Sequence[Task]:
        return [
            world.start('one', saver(world, 1, [1]), machine='a'),
            world.start('two', saver(world, 2, [1]), machine='b'),
        ]


class TwoSaversWithFaults(TwoSavers):
    name = 'two-savers-faults'
    faults = ('crash', 'crash', 'pause', 'delay', 'error', 'lost', 'late')


class Prune(Scenario):
    """A trainer with retention, and an evaluator with a read lease of the step that goes."""

    name = 'prune-read'

    def prepare(self, world: World) -> Sequence[Task]:
        return [world.start('before', saver(world, 5, [1, 2]))]

    def start(self, world: World) -> Sequence[Task]:
        return [
            world.start('trainer', saver(world, 1, [3], keep=1), machine='a', may_delete=lambda step: step < 3),
            world.start('reader', reader(world, 2), machine='b'),
        ]


class PruneWithFaults(Prune):
    name = 'prune-read-faults'
    faults = TwoSaversWithFaults.faults


class Remove(Scenario):
    """Two people delete a step, one pins it, one reads it."""

    name = 'remove-pin-read'

    def prepare(self, world: World) -> Sequence[Task]:
        return [world.start('before', saver(world, 5, [1]))]

    def start(self, world: World) -> Sequence[Task]:
        return [
            world.start('rm', remover(world, 1), machine='a', may_delete=lambda step: step == 1),
            world.start('pin', pinner(world, 1), machine='b'),
            world.start('reader', reader(world, 1), machine='c'),
        ]


class OnDisk:
    kind = 'disk'


class TwoSaversOnDisk(OnDisk, TwoSavers):
    name = 'disk-two-savers'


class TwoSaversOnDiskWithFaults(OnDisk, TwoSavers):
    name = 'disk-two-savers-faults'
    faults = ('crash', 'pause', 'delay', 'error', 'lost', 'power')


class PruneOnDisk(OnDisk, Prune):
    name = 'disk-prune-read'


class PruneOnDiskWithFaults(OnDisk, Prune):
    name = 'disk-prune-read-faults'
    faults = TwoSaversOnDiskWithFaults.faults


class RemoveOnDisk(OnDisk, Remove):
    name = 'disk-remove-pin-read'


SCENARIOS: dict[str, Scenario] = {
    each.name: each()
    for each in (
        TwoSavers,
        TwoSaversWithFaults,
        Prune,
        PruneWithFaults,
        Remove,
        TwoSaversOnDisk,
        TwoSaversOnDiskWithFaults,
        PruneOnDisk,
        PruneOnDiskWithFaults,
        RemoveOnDisk,
    )
}
