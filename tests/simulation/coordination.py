"""The coordination service of a job, as jaxlib's client and server behave, for ``Checkpointer(processes=...)``.

The server runs in process 0. If that process is dead, calls fail with UNAVAILABLE. If it is stopped, calls wait, at most for the
heartbeat time-out. The server reports another process as dead when it has not sent heartbeats for that time. A barrier that has
failed also fails for processes that enter it later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from simulation.scheduler import active, current_task, wait_until
from simulation.tasks import Process
from t5ckpt.distributed.processes import Processes, ServiceError, parse_status

HEARTBEAT_SECONDS = 100.0
_GRACE_SECONDS = 5.0
_GONE = 'UNAVAILABLE: failed to connect to all addresses'


class _Barrier:
    def __init__(self) -> None:
        self.entered: set[int] = set()
        self.error = ''


class CoordinationService:
    """The server.

    Attributes:
      processes: of the job; the first one is the leader.
      keys: the key-value store.
    """

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.keys: dict[str, bytes] = {}
        self.first_death = math.inf
        self._barriers: dict[str, _Barrier] = {}
        self._reported: set[int] = set()

    def join(self, process: Process) -> None:
        """Adds the next process."""
        index = len(self.processes)
        self.processes.append(process)
        process.on_death.append(lambda: self._note_death(index))

    @property
    def is_down(self) -> bool:
        """Whether the process of the server is dead."""
        return self.processes[0].is_dead

    def is_stopped(self, now: float) -> bool:
        """Whether the process of the server does not run."""
        return self.processes[0].paused_until > now

    def _note_death(self, index: int) -> None:
        scheduler = active()
        if scheduler is None or scheduler.is_ending:
            return
        self.first_death = min(self.first_death, scheduler.now)

        def report() -> None:
            wait_until(lambda: False, HEARTBEAT_SECONDS)
            self._reported.add(index)
            for barrier in self._barriers.values():
                if len(barrier.entered) < len(self.processes):
                    barrier.error = barrier.error or self.death()

        scheduler.start(scheduler.processes['network'], report, 'heartbeats')

    def death(self) -> str:
        """The error that names the processes that are reported as dead; '' if there is none."""
        dead = '\n'.join(f'task: {index}' for index in sorted(self._reported))
        return f'INTERNAL: Barrier failed because: task is set to ERROR\n{dead}' if dead else ''

    def barrier(self, name: str) -> _Barrier:
        """The barrier of a name."""
        barrier = self._barriers.setdefault(name, _Barrier())
        if self._reported:
            barrier.error = barrier.error or self.death()
        return barrier


class SimulatedProcesses(Processes):
    """The job as one of its processes sees it.

    A thread whose call failed because the others cannot be reached may not wait for them again.
    """

    def __init__(self, service: CoordinationService, index: int, count: int):
        super().__init__()
        self.service, self.index, self.count = service, index, count
        self._cut_off: set[str] = set()

    def put(self, key: str, value: bytes, timeout_seconds: float) -> None:
        def apply() -> None:
            if key in self.service.keys:
                raise _error(f'ALREADY_EXISTS: key {key} already exists.')
            self.service.keys[key] = value

        self._call(f'puts {key}', apply, timeout_seconds)

    def get(self, key: str, timeout_seconds: float) -> bytes:
        self._call(f'gets {key}', lambda: None, timeout_seconds)
        self._wait(lambda: key in self.service.keys or self.service.is_down, timeout_seconds)
        if self.service.is_down:
            raise self._failed(_error(_GONE))
        if key not in self.service.keys:
            raise self._failed(TimeoutError(f'DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}'))
        return self.service.keys[key]

    def get_all(self, prefix: str, timeout_seconds: float) -> dict[str, bytes]:
        def apply() -> dict[str, bytes]:
            return {
                key.rpartition('/')[2]: value
                for key, value in self.service.keys.items()
                if key.startswith(f'{prefix}/')
            }

        return self._call(f'gets all {prefix}', apply, timeout_seconds)

    def remove(self, prefix: str, timeout_seconds: float) -> None:
        def apply() -> None:
            for key in [key for key in self.service.keys if key == prefix or key.startswith(f'{prefix}/')]:
                del self.service.keys[key]

        self._call(f'removes {prefix}', apply, timeout_seconds)

    def barrier(self, name: str, timeout_seconds: float) -> None:
        self.barriers += 1

        def apply() -> _Barrier:
            barrier = self.service.barrier(name)
            barrier.entered.add(self.index)
            return barrier

        barrier = self._call(f'enters {name}', apply, timeout_seconds)

        def is_over() -> bool:
            return bool(barrier.error) or len(barrier.entered) == self.count or self.service.is_down

        self._wait(is_over, timeout_seconds)
        if self.service.is_down:
            raise self._failed(_error(_GONE))
        if not is_over():
            # Also for processes that enter it later.
            barrier.error = f'DEADLINE_EXCEEDED: Barrier timed out. Id: {name}'
        if barrier.error.startswith('DEADLINE'):
            raise self._failed(TimeoutError(barrier.error))
        if barrier.error:
            raise self._failed(_error(barrier.error))

    def _call(self, text: str, apply: Callable[[], Any], seconds: float) -> Any:
        scheduler = active()
        assert scheduler is not None
        fault = scheduler.point(text)
        if fault is not None:
            if fault.action == 'lost':
                apply()
            raise self._failed(_error('UNAVAILABLE: injected: the reply is lost'))
        if self.index and self.service.is_stopped(scheduler.now):
            self._wait(lambda: not self.service.is_stopped(scheduler.now), min(seconds, HEARTBEAT_SECONDS))
            if self.service.is_stopped(scheduler.now):
                timed_out = TimeoutError('DEADLINE_EXCEEDED: no answer')
                raise self._failed(timed_out if seconds < HEARTBEAT_SECONDS else _error(_GONE))
        if self.service.is_down:
            raise self._failed(_error(_GONE))
        return apply()

    def _wait(self, is_over: Callable[[], bool], seconds: float) -> None:
        if current_task().name in self._cut_off and seconds > _GRACE_SECONDS and not is_over():
            scheduler = active()
            assert scheduler is not None
            scheduler.fail(f'process {self.index} waits for the others again, after a call failed')
        wait_until(is_over, seconds)

    def _failed(self, error: Exception) -> Exception:
        self._cut_off.add(current_task().name)
        return error


def _error(text: str) -> ServiceError:
    return ServiceError(parse_status(text))
