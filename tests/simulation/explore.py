"""Runs schedules of a scenario, and reduces one that fails to the shortest that still fails."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from simulation.choosers import Replay, chooser_of
from simulation.scenarios import Scenario
from simulation.scheduler import Chooser, Decision, Killed, Scheduler
from simulation.tasks import Task
from simulation.world import World
from t5ckpt.errors import T5CkptError, UnsupportedFormatError

# Two horizons of a marker, and as much for processes that were stopped.
_LEFTOVER_SECONDS = 20_000.0
# The files that may remain after a save without faults.
_RANDOM = re.compile(r'[0-9a-f]{16}|(?<=(?:tmp|ted)-)[0-9]+')
_OWN = re.compile(r'checkpoint_([0-9]+)/|\.t5ckpt/(run_id|tier\.json|taken\.json)$|checkpoint_[0-9]+\.damaged-')
_MARKER = re.compile(r'(?:\.t5ckpt/busy/|busy_)[0-9]+\.([0-9]+)\.')


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One schedule.

    Attributes:
      failure: the violation; None if the schedule is good.
      decisions: those that had an effect, for a replay.
      points: the number of operations.
      trace: the lines of the trace, if it was kept.
    """

    failure: str | None
    decisions: tuple[Decision, ...]
    points: int
    trace: tuple[str, ...] = ()
    alternatives: tuple[Decision, ...] = ()


@dataclasses.dataclass
class Report:
    """Counts of all schedules so far."""

    schedules: int = 0
    points: int = 0
    states: set[int] = dataclasses.field(default_factory=set)
    faults: Counter[str] = dataclasses.field(default_factory=Counter)


class Explorer:
    """Runs schedules of one scenario."""

    def __init__(self, scenario: Scenario):
        """Prepares the storage, from which each schedule begins."""
        self.scenario = scenario
        self.report = Report()
        scheduler = Scheduler(Replay(()))
        self._before = World(scenario.kind, scheduler)
        first = scenario.prepare(self._before)
        if first:
            scheduler.run(first, quietly=True)
        self._broken = scheduler.failure or self._error(scheduler, first)
        self._finished: set[object] = set()
        self.length = self.run(Replay(()), 0).points

    def run(self, chooser: Chooser, seed: int, *, keeps_trace: bool = False) -> Outcome:
        """Runs one schedule."""
        if self._broken is not None:
            self.report.schedules += 1
            return Outcome(f'in the preparation: {self._broken}', (), 0)
        scheduler = Scheduler(chooser, seed, keeps_trace=keeps_trace)
        world = World(self.scenario.kind, scheduler, self._before)
        tasks = self.scenario.start(world)
        scheduler.run(tasks)
        failure = scheduler.failure or self._error(scheduler, tasks)
        points = scheduler.points
        if failure is None:
            failure = (self.scenario.check(world) if self._is_checked(scheduler, tasks) else None) or self._finish(
                world
            )
        self._count(scheduler, world)
        alternatives = tuple(chooser.alternatives) if isinstance(chooser, Replay) else ()
        return Outcome(failure, tuple(scheduler.taken), points, tuple(scheduler.trace or ()), alternatives)

    def _is_checked(self, scheduler: Scheduler, tasks: Sequence[Task]) -> bool:
        faults = {decision.action for decision in scheduler.taken} - {'run'}
        return faults <= {*self.scenario.checked_after} and all(task.error is None for task in tasks)

    def _count(self, scheduler: Scheduler, world: World) -> None:
        self.report.schedules += 1
        self.report.points += scheduler.points
        self.report.states |= world.observer.states
        self.report.faults.update(each.action for each in scheduler.taken)

    @staticmethod
    def _error(scheduler: Scheduler, tasks: Sequence[Task]) -> str | None:
        """An error that a program may not have: any without a fault, and with faults one that is not of ``t5ckpt.errors``.

        No fault leaves files with names that t5ckpt does not use.
        """
        has_fault = any(decision.action != 'run' for decision in scheduler.taken)
        for task in tasks:
            error = task.error
            is_of_fault = isinstance(error, T5CkptError) and not isinstance(error, UnsupportedFormatError)
            if error is None or isinstance(error, Killed) or (has_fault and is_of_fault):
                continue
            return f'{task.process.name} raised {type(error).__name__}: {error}'
        return None

    def _finish(self, world: World) -> str | None:
        for observer in (world.observer, world.local):
            for step, value in observer.saved.items():
                if observer.visible.get(step) != value:
                    return f'step {step} was saved as {value:g}, and is {observer.visible.get(step)}'
        left = None if self._leftover(world) else self._left(world)
        # Not again from an equal storage, but a trace is the same each time.
        if left in self._finished and world.scheduler.trace is None:
            return None
        failure = self._finish_anew(world)
        if left is not None and failure is None:
            self._finished.add(left)
        return failure

    @staticmethod
    def _leftover(world: World) -> str | None:
        for observer, keys in ((world.observer, world.keys()), (world.local, world.local_keys())):
            for key in sorted(keys):
                # The last save may have replaced a broken step, whose files may still arrive.
                marker = _MARKER.match(key)
                if marker is not None and int(marker.group(1)) > world.scheduler.now:
                    continue
                match = _OWN.match(key)
                step = None if match is None else match.group(1)
                if match is None or (step is not None and int(step) not in observer.visible):
                    return key
        return None

    @staticmethod
    def _left(world: World) -> object:
        """The state that the next save depends on, without leftovers: the names without random parts, and the steps' values."""
        names = sorted(_RANDOM.sub('', name) for name in world.names())
        return (*names, *sorted(world.observer.visible.items()), *sorted(world.local.visible.items()))

    def _finish_anew(self, world: World) -> str | None:
        scheduler = world.scheduler
        scheduler.now += _LEFTOVER_SECONDS
        task = world.start('finish', self.scenario.finish(world), machine='later')
        scheduler.run([task], quietly=True)
        if scheduler.failure is not None:
            return scheduler.failure
        if task.error is not None:
            return f'the next save raised {type(task.error).__name__}: {task.error}'
        left = self._leftover(world)
        return None if left is None else f'{left} is left over after the next save'

    def seeds(self, first: int, count: int) -> Iterator[tuple[int, Outcome]]:
        """Runs the schedules of some seeds; ends after the first that fails."""
        for seed in range(first, first + count):
            outcome = self.run(chooser_of(seed, self.scenario.faults, self.length), seed)
            yield seed, outcome
            if outcome.failure is not None:
                return

    def exhaustive(self, switches: int, seed: int = 0) -> Iterator[tuple[int, Outcome]]:
        """Runs all schedules with at most some decisions, fewer first; ends after the first that fails."""
        waiting: list[tuple[Decision, ...]] = [()]
        number = 0
        while waiting:
            decisions = waiting.pop(0)
            outcome = self.run(Replay(decisions), seed)
            yield number, outcome
            if outcome.failure is not None:
                return
            number += 1
            if len(decisions) < switches:
                waiting += [(*decisions, alternative) for alternative in outcome.alternatives]

    def shortest(self, outcome: Outcome, seed: int, *, attempts: int = 400) -> Outcome:
        """Removes decisions as long as the schedule fails; returns the shortest one, with its trace."""
        best = list(outcome.decisions)
        size = max(1, len(best) // 2)
        while size and attempts > 0:
            start = 0
            while start < len(best) and attempts > 0:
                shorter = best[:start] + best[start + size :]
                attempts -= 1
                again = self.run(Replay(shorter), seed)
                if again.failure is not None:
                    best = [decision for decision in again.decisions if decision in shorter]
                else:
                    start += size
            size = size // 2
        return self.run(Replay(best), seed, keeps_trace=True)
