"""Choosers: at random, by priorities (PCT), by a list of decisions, and all schedules with few decisions.

PCT (Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs", 2010) runs the ready task of the
highest priority, and lowers the priority of the running task at d random points. A bug that depends on d + 1 operations is found
with a probability of at least 1 / (n k^d), for n tasks and k points.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterable, Sequence

from simulation.scheduler import Decision, Scheduler
from simulation.tasks import Task

# The durations for which a process or a request is stopped: for a moment, and beyond the patience of a rival, a minute in which a
# deleter decides, the wait of a reader, one horizon of a marker, and two.
_PAUSES = (2.0, 8.0, 90.0, 700.0, 4000.0, 9000.0)
# A late request arrives within the second horizon (``commit/markers.py``).
_LATE = (2.0, 8.0, 90.0, 700.0, 2000.0)


class _WithFaults:
    """Injects some faults at random points."""

    def __init__(self, choice: random.Random, faults: Sequence[str], length: int):
        self._choice = choice
        count = choice.choices((0, 1, 2, 3), (35, 40, 18, 7))[0] if faults else 0
        self._faults = {choice.randrange(1, max(2, length + length // 4)): choice.choice(faults) for _ in range(count)}

    def fault(self, scheduler: Scheduler, task: Task) -> Decision | None:
        action = self._faults.pop(scheduler.points, None) if task.is_wanted is None else None
        is_spared = task.process.is_daemon or not task.process.has_faults
        if action is None or (is_spared and action != 'power'):
            return None
        value: str | float = ''
        if action in ('pause', 'delay', 'late'):
            value = self._choice.choice(_LATE if action == 'late' else _PAUSES)
        elif action == 'power':
            value = float(self._choice.randrange(10**6))
        return Decision(task.name, task.points, action, value)


class ByRandom(_WithFaults):
    """Switches with one probability at each point."""

    def __init__(self, seed: int, faults: Sequence[str], length: int):
        choice = random.Random(seed)
        super().__init__(choice, faults, length)
        self._switching = choice.choice((0.03, 0.1, 0.2, 0.5))

    def choose(self, scheduler: Scheduler, task: Task, *, goes_on: bool) -> Decision | None:
        if scheduler.points in self._faults:
            decision = self.fault(scheduler, task)
            if decision is not None:
                return decision
        if goes_on and self._choice.random() >= self._switching:
            return None
        ready = scheduler.ready()
        chosen = self._choice.choice(ready)
        is_default = chosen is (task if goes_on else ready[0])
        return None if is_default else Decision(task.name, task.points, 'run', chosen.name)


class ByPriority(_WithFaults):
    """PCT."""

    def __init__(self, seed: int, faults: Sequence[str], length: int):
        choice = random.Random(seed)
        super().__init__(choice, faults, length)
        self._seed = seed
        self._priorities: dict[str, float] = {}
        self._changes = {choice.randrange(1, max(2, length)) for _ in range(choice.choice((1, 2, 3)))}

    def _priority(self, task: Task) -> float:
        priority = self._priorities.get(task.name)
        if priority is None:
            priority = self._priorities[task.name] = zlib.crc32(f'{self._seed} {task.name}'.encode())
        return priority

    def choose(self, scheduler: Scheduler, task: Task, *, goes_on: bool) -> Decision | None:
        if scheduler.points in self._faults:
            decision = self.fault(scheduler, task)
            if decision is not None:
                return decision
        if scheduler.points in self._changes:
            self._changes.discard(scheduler.points)
            self._priorities[task.name] = -float(scheduler.points)
        chosen, highest = (task, self._priority(task)) if goes_on else (None, -math.inf)
        first, now = chosen, scheduler.now
        # Whether a task can run takes longer to find out than its priority.
        for candidate in scheduler.tasks:
            priority = self._priority(candidate)
            if (priority > highest or first is None) and candidate.can_run(now):
                first = first or candidate
                if priority > highest:
                    chosen, highest = candidate, priority
        return None if chosen is None or chosen is first else Decision(task.name, task.points, 'run', chosen.name)


class Replay:
    """Carries out a list of decisions.

    Attributes:
      alternatives: the other decisions that were possible after the last one of the list, as in an exhaustive search.
    """

    def __init__(self, decisions: Iterable[Decision]):
        self._left = {(decision.task, decision.index): decision for decision in decisions}
        self.alternatives: list[Decision] = []

    def choose(self, scheduler: Scheduler, task: Task, *, goes_on: bool) -> Decision | None:
        decision = self._left.pop((task.name, task.points), None)
        if decision is None and not self._left:
            ready = scheduler.ready()
            default = task if goes_on else ready[0]
            self.alternatives += [
                Decision(task.name, task.points, 'run', other_task.name)
                for other_task in ready
                if other_task is not default
            ]
        return decision


def chooser_of(seed: int, faults: Sequence[str], length: int) -> ByRandom | ByPriority:
    """The chooser of a seed: half of them at random, half by priorities."""
    return (ByRandom, ByPriority)[seed % 2](seed, faults, length)
