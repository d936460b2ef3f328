"""Runs tasks one at a time. Each operation that other processes can see is a point where the schedule chooses the next task.

A task is a thread of a simulated process. Exactly one task runs, so the order of all operations is that of the schedule, and a
schedule runs again to the same end. Time is simulated: it advances a little at each point, and where every task waits it jumps to
the end of the earliest wait.

A schedule is a list of decisions, each for one point of one task. Where it has none, the task goes on; where the task waits or
ends, the first task that can run goes on.

Notes: the tasks are threads of Python, which hand one baton to each other. They are kept for the next schedule, since starting
a thread takes longer than a point.
"""

from __future__ import annotations

import dataclasses
import math
import random
import threading
import types
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from simulation.tasks import Process, Task

TICK = 0.002
"""Seconds of simulated time that one point takes."""
EPOCH = 1_700_000_000.0
MAX_POINTS = 20_000
MAX_SECONDS = 10 * 86400.0
_active: list[Scheduler] = []


class Killed(BaseException):
    """The process of the task is dead. Raised at the next operation, and at each one that the thread tries afterwards."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """The action at one point of one task.

    Attributes:
      task: its name.
      index: the number of the point in the task, from 1.
      action: 'run' another task, 'crash', 'power' (a cut), 'pause' the process, 'delay' the task, or the fault of
        the operation: 'error', 'lost' (it is done, and reported as an error), 'late' (reported as an error, and done later).
      value: the task to run, or seconds.
    """

    task: str
    index: int
    action: str
    value: str | float = ''


class Chooser(Protocol):
    """Decides at each point."""

    def choose(self, scheduler: Scheduler, task: Task, *, goes_on: bool) -> Decision | None:
        """Returns the decision; None lets the task go on, or the first of ``scheduler.ready()``.

        Args:
          scheduler: of the schedule.
          task: the one that runs, or ran last.
          goes_on: whether it can go on: it neither waits nor has ended.
        """
        ...


class _Carrier:
    """A thread that runs one task after another."""

    _idle: list[_Carrier] = []  # noqa: RUF012 - of all schedulers

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.work: tuple[Scheduler, Task] | None = None
        threading.Thread(target=self._run, daemon=True, name='carrier').start()

    @classmethod
    def take(cls, scheduler: Scheduler, task: Task) -> _Carrier:
        carrier = cls._idle.pop() if cls._idle else cls()
        carrier.work = (scheduler, task)
        return carrier

    def _run(self) -> None:
        while True:
            self.gate.acquire()
            if self.work is None:
                return
            scheduler, task = self.work
            try:
                task.value = task.function()
            except BaseException as error:  # noqa: BLE001 - kept for the scenario
                task.error = error
            self.work = None
            _Carrier._idle.append(self)
            scheduler.end(task)


class Scheduler:
    """One schedule.

    Attributes:
      now: unix seconds of the simulated world.
      trace: the lines of a readable trace, if it is kept.
      failure: the first violation, or None.
      taken: the decisions that had an effect.
      is_ending: whether all processes are being killed, because the schedule is over.
    """

    def __init__(self, chooser: Chooser, seed: int = 0, *, keeps_trace: bool = False):
        self.chooser = chooser
        self.seed = seed
        self.now = EPOCH
        self.points = 0
        self.trace: list[str] | None = [] if keeps_trace else None
        self.failure: str | None = None
        self.taken: list[Decision] = []
        self.processes: dict[str, Process] = {}
        self.current: Task | None = None
        self._tasks: list[Task] = []
        self._done = threading.Lock()
        self._done.acquire()
        self.is_ending = False
        self._is_quiet = False
        self.cut_power: Callable[[int], None] = lambda seed: self._abort()

    # --- processes and tasks ---------------------------------------------------------------------------------------------

    def process(self, name: str, *, machine: str = 'machine', ahead: float = 0.0) -> Process:
        """Adds a process; ``ahead``: seconds by which its machine's clock is ahead."""
        process = Process(name, 100 + len(self.processes), machine, ahead)
        self.processes[name] = process
        return process

    def start(self, process: Process, function: Callable[[], object], label: str = 'main') -> Task:
        """Adds a task, which runs when it is chosen."""
        task = Task(f'{process.name}.{process.tasks}', process, function, label)
        process.tasks += 1
        self._tasks.append(task)
        return task

    def run(self, mains: Sequence[Task], *, quietly: bool = False) -> None:
        """Runs until these tasks have ended, and kills all others; ``quietly`` without decisions."""
        _active.append(self)
        self._is_quiet = quietly
        try:
            for task in mains:
                task.is_main = True
            self._hand_over(self._next(None))
            self._done.acquire()
        finally:
            _active.remove(self)

    # --- called by the task that runs ------------------------------------------------------------------------------------

    def point(self, operation: str | Callable[[], str]) -> Decision | None:
        """Comes before an operation that others can see; returns the fault that the operation has.

        A function returns the operation's text, if that takes time; it is called for a trace alone.
        """
        task = self.current
        assert task is not None
        if task.process.is_dead:
            raise Killed
        self.now += TICK
        self.points += 1
        task.points += 1
        if self.points > MAX_POINTS:
            self.fail(f'{task.name} is still busy after {MAX_POINTS} operations; the last one is {_text(operation)}')
        if self._is_quiet:
            self._note(task, operation)
            return None
        decision = self.chooser.choose(self, task, goes_on=True)
        if decision is None:
            if self.trace is not None:
                self._note(task, operation)
            return None
        self.taken.append(decision)
        return self._carry_out(task, decision, _text(operation))

    def _carry_out(self, task: Task, decision: Decision, operation: str) -> Decision | None:
        match decision.action:
            case 'run':
                other = self._named(decision.value)
                if other is not None:
                    self._switch(task, other)
            case 'pause':
                self._note(task, f'PAUSED for {decision.value} s before {operation}')
                task.process.paused_until = self.now + float(decision.value)
                task.process.stopped += float(decision.value)
                self._switch(task, None)
            case 'delay':
                self._note(task, f'DELAYED for {decision.value} s: {operation}')
                task.delayed_until = self.now + float(decision.value)
                task.process.stopped += float(decision.value)
                self._switch(task, None)
            case 'crash':
                self._note(task, f'CRASHES before {operation}')
                self.kill(task.process)
                raise Killed
            case 'power':
                self._note(task, f'POWER CUT before {operation}')
                self.cut_power(int(float(decision.value)))
                raise Killed
            case _:
                fault = f'{decision.action.upper()} {decision.value}'.strip()
                self._note(task, f'{operation} [{fault}]')
                return decision
        self._note(task, operation)
        return None

    def wait(self, is_wanted: Callable[[], bool], seconds: float | None = None) -> bool:
        """Waits until a condition holds, at most some simulated seconds; returns whether it holds."""
        task = self.current
        assert task is not None
        if task.process.is_dead:
            raise Killed
        if is_wanted():
            return True
        task.is_wanted = is_wanted
        task.deadline = math.inf if seconds is None else self.now + seconds
        self._switch(task, self._next(task))
        task.is_wanted, task.deadline = None, math.inf
        return is_wanted()

    def kill(self, process: Process) -> None:
        """Ends a process. Its other tasks raise at once, one after another, when they are next chosen."""
        process.is_dead = True
        while process.on_death:
            process.on_death.pop()()

    def fail(self, message: str) -> None:
        """Ends the schedule with a violation."""
        if self.failure is None:
            self.failure = message
            if self.trace is not None:
                self.trace.append(f'VIOLATED: {message}')
        self._abort()
        if self.current is not None:
            raise Killed

    def note(self, text: str) -> None:
        """Adds a line to the trace."""
        if self.trace is not None and self.current is not None:
            self._note(self.current, text)

    def _note(self, task: Task, text: str | Callable[[], str]) -> None:
        if self.trace is not None:
            self.trace.append(f'{self.now - EPOCH:10.3f}  {task.name:<12} {task.label:<14} {_text(text)}')

    def end(self, task: Task) -> None:
        """The task's function has returned."""
        task.has_ended = True
        self._tasks.remove(task)
        if task.is_main and not self.is_ending and not any(other.is_main for other in self._tasks):
            self._abort()
        if task.error is not None and not isinstance(task.error, Killed) and self.trace is not None:
            self._note(task, f'raised {type(task.error).__name__}: {task.error}')
        following = self._next(task) if self._tasks else None
        if following is None:
            self.current = None
            self.is_ending = False
            self._done.release()
        else:
            self._hand_over(following)

    # --- the next task ---------------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> Sequence[Task]:
        """Those that have not ended, in the order of their starts."""
        return self._tasks

    def ready(self) -> list[Task]:
        """The tasks that can run."""
        now = self.now
        return [task for task in self._tasks if task.can_run(now)]

    def _abort(self) -> None:
        self.is_ending = True
        for process in self.processes.values():
            self.kill(process)

    def _named(self, name: str | float) -> Task | None:
        return next((task for task in self._tasks if task.name == name and task.can_run(self.now)), None)

    def _next(self, task: Task | None) -> Task:
        """The next task where the one that ran cannot go on."""
        while True:
            ready = self.ready()
            for candidate in ready:
                if candidate.process.is_dead:
                    return candidate
            if ready:
                if task is None or self._is_quiet:
                    return ready[0]
                task.points += 1
                decision = self.chooser.choose(self, task, goes_on=task in ready)
                chosen = None if decision is None or decision.action != 'run' else self._named(decision.value)
                if decision is not None and chosen is not None:
                    self.taken.append(decision)
                return chosen or ready[0]
            wakes = min((waiter.wakes() for waiter in self._tasks), default=math.inf)
            if math.isinf(wakes) or wakes - EPOCH > MAX_SECONDS:
                waiting = ', '.join(f'{waiter.name} ({waiter.label})' for waiter in self._tasks)
                self.failure = self.failure or f'all tasks wait forever: {waiting}'
                self._abort()
            else:
                self.now = max(self.now, wakes)

    def _switch(self, task: Task, other: Task | None) -> None:
        """Lets another task run; returns when this one is chosen again."""
        following = other or self._next(task)
        if following is not task:
            assert task.carrier is not None
            gate = task.carrier.gate
            self._hand_over(following)
            gate.acquire()
        if task.process.is_dead:
            task.is_wanted = None
            raise Killed

    def _hand_over(self, task: Task) -> None:
        self.current = task
        if task.carrier is None:
            task.carrier = _Carrier.take(self, task)
        task.carrier.gate.release()

    # --- values by process and seed -------------------------------------------------------------------------------------

    def token(self, nbytes: int) -> str:
        """Hexadecimal digits that depend on the seed, the process, and how many it has had."""
        assert self.current is not None
        process = self.current.process
        count = process.counters['token'] = process.counters.get('token', 0) + 1
        source = random.Random(zlib.crc32(f'{self.seed % 8} {process.name} {count}'.encode()))
        return f'{source.getrandbits(8 * nbytes):0{2 * nbytes}x}'


def _text(operation: str | Callable[[], str]) -> str:
    return operation if isinstance(operation, str) else operation()


def active() -> Scheduler | None:
    """The scheduler of the calling task; None outside a simulation."""
    return _active[-1] if _active and _active[-1].current is not None else None


def current_task() -> Task:
    """The task that runs."""
    scheduler = active()
    assert scheduler is not None
    assert scheduler.current is not None
    return scheduler.current


def wait_until(is_wanted: Callable[[], bool], seconds: float | None = None) -> bool:
    """Waits in a simulation. Outside of one, only the time-out can end the wait."""
    scheduler = active()
    if scheduler is None:
        if is_wanted():
            return True
        raise RuntimeError('this would wait forever: no simulation is running')
    return scheduler.wait(is_wanted, seconds)


def facade(name: str, real: Any, **members: Any) -> types.ModuleType:
    """A module with these members, and the real one's for all others."""
    module = types.ModuleType(name)
    module.__dict__.update(members)
    module.__dict__['__getattr__'] = lambda attribute: getattr(real, attribute)
    return module
