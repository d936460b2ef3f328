"""Simulated processes, and their threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


class Process:
    """A process: its tasks, its clock, and whether it lives."""

    def __init__(self, name: str, pid: int, machine: str, ahead: float):
        self.name, self.pid, self.machine, self.ahead = name, pid, machine, ahead
        self.is_dead = False
        self.is_daemon = False
        self.has_faults = True
        self.paused_until = -math.inf
        # Seconds, in all.
        self.stopped = 0.0
        self.tasks = 0
        self.counters: dict[str, int] = {}
        self.on_death: list[Callable[[], None]] = []


class Task:
    """A thread of a simulated process."""

    def __init__(self, name: str, process: Process, function: Callable[[], object], label: str):
        self.name, self.process, self.function, self.label = name, process, function, label
        self.points = 0
        self.delayed_until = -math.inf
        self.is_wanted: Callable[[], bool] | None = None
        self.deadline = math.inf
        self.has_ended = False
        self.is_main = False
        # The process whose request arrives late in this task.
        self.sender: Process | None = None
        self.error: BaseException | None = None
        self.value: object = None
        self.carrier: Any = None

    def can_run(self, now: float) -> bool:
        """Whether it neither waits nor is stopped."""
        process = self.process
        if process.is_dead:
            return True
        if process.paused_until > now or self.delayed_until > now:
            return False
        is_wanted = self.is_wanted
        return is_wanted is None or self.deadline <= now or is_wanted()

    def wakes(self) -> float:
        """The latest time at which it can run, as far as this depends only on time."""
        stopped = max(self.process.paused_until, self.delayed_until)
        if self.is_wanted is None or self.is_wanted():
            return stopped
        return max(stopped, self.deadline)
