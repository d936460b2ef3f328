"""Jobs of several processes that save one state together, each with one element of ``w``, and their scenarios."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np
from support.options import with_options

from simulation.coordination import CoordinationService, SimulatedProcesses
from simulation.programs import OPTIONS, after, in_turn, reader, saver
from simulation.scheduler import current_task, wait_until
from simulation.tasks import Task
from simulation.world import World
from t5ckpt.checkpointer import Checkpointer
from t5ckpt.errors import T5CkptError
from t5ckpt.save_policies import SaveOnPreemption

# For the operations of a save and its own retries, in addition to the wait for the others.
_OWN_SECONDS = 60.0
# The number of steps that a process dispatches before it waits for the slowest one.
_STEPS_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class _Device:
    id: int
    platform: str = 'cpu'

    @property
    def process_index(self) -> int:
        return self.id


class _Sharding:
    """The part of a sharding that a save uses, for a jax.Array with one element on each device."""

    def __init__(self, count: int):
        self.devices = [_Device(index) for index in range(count)]
        self.device_set, self.num_devices = frozenset(self.devices), count

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0] // self.num_devices,)

    def devices_indices_map(self, shape: tuple[int, ...]) -> dict[_Device, tuple[slice, ...]]:
        del shape
        return {device: (slice(device.id, device.id + 1),) for device in self.devices}


class _Vector:
    """The part of a jax.Array that a save uses, with one element for each process."""

    is_fully_addressable = is_fully_replicated = False
    dtype = np.dtype(np.float32)

    def __init__(self, value: float, index: int, sharding: _Sharding):
        self.shape, self.size, self.nbytes = (sharding.num_devices,), sharding.num_devices, 4 * sharding.num_devices
        self.sharding = sharding
        # Staging copies it, as of a real array.
        data, device = jax.device_put(np.full(1, value, np.float32)), sharding.devices[index]
        region = sharding.devices_indices_map(self.shape)[device]
        self._shards = [types.SimpleNamespace(index=region, data=data, device=device, replica_id=0)]

    @property
    def addressable_shards(self) -> Sequence[Any]:
        return self._shards

    def is_ready(self) -> bool:
        return True


class Job:
    """One job: its processes, and their coordination service."""

    def __init__(self, world: World, count: int, value: float, timeout: float = 300.0, **options: Any):
        """Takes the value that the job saves, ``process_timeout``, and other options of ``Checkpointer``."""
        self._world, self._count, self._value, self._timeout = world, count, value, timeout
        self._options = {**OPTIONS, **options}
        self._service = CoordinationService()
        self._processes = [SimulatedProcesses(self._service, index, count) for index in range(count)]
        self._sharding = _Sharding(count)
        self._last: set[int] = set()
        self._reached = [0] * count
        self._has_failed = False

    def start(self, name: str, program: Callable[[int], Callable[[], None]], **options: Any) -> list[Task]:
        """Starts the processes, each on a machine of its own; the options are those of ``World.start``."""
        tasks: list[Task] = []
        for index in range(self._count):
            tasks.append(self._world.start(f'{name}{index}', program(index), machine=f'{name}-{index}', **options))
            self._service.join(tasks[-1].process)
        return tasks

    def _state(self, index: int) -> dict[str, Any]:
        return {'n': np.int32(self._value), 'w': _Vector(self._value, index, self._sharding)}

    def _checkpointer(self, index: int, **options: Any) -> Checkpointer:
        return Checkpointer(
            self._state(index),
            checkpoints_dir=self._world.storage(),
            **with_options(processes=self._processes[index], process_timeout=self._timeout, **self._options, **options),
        )

    @contextlib.contextmanager
    def _in_time(self) -> Generator[None]:
        """After the death of a process, the others end within the time-out; unless a process is stopped."""
        scheduler = self._world.scheduler
        began = scheduler.now
        try:
            yield
        finally:
            late = scheduler.now - max(began, self._service.first_death) - self._timeout - _OWN_SECONDS
            is_stopped = any(decision.action not in ('run', 'crash') for decision in scheduler.taken)
            if late > 0 and not is_stopped and not current_task().process.is_dead:
                scheduler.fail(f'a process was not notified for {self._timeout + late:.0f} s that another one had died')

    def saver(self, steps: Sequence[int], *, how: str = 'save') -> Callable[[int], Callable[[], None]]:
        """Each process saves the steps; ``how`` is 'save' or 'async'."""

        def program(index: int) -> Callable[[], None]:
            def run() -> None:
                with self._checkpointer(index) as ck:
                    for step in steps:
                        with self._in_time():
                            state = self._state(index)
                            done = (
                                ck.save(state, step=step) if how == 'save' else ck.save_async(state, step=step).result()
                            )
                            if done is not None:
                                self._world.observer.is_saved(step, self._value)

            return run

        return program

    def preempted(self, first: int, *, at: int, notified: int) -> Callable[[int], Callable[[], None]]:
        """Each process trains from a step on, until process ``notified`` gets a notice at step ``at`` and all of them save."""

        def program(index: int) -> Callable[[], None]:
            def run() -> None:
                reached = [0]
                is_notified = index == notified
                options = {'save_policy': SaveOnPreemption(), 'preempted': lambda: is_notified and reached[0] >= at}
                with self._noting_failure(), self._checkpointer(index, **options) as ck, self._in_time():
                    for step in range(first, at + 1000):
                        if not self._has_trained(index, step):
                            return
                        reached[0] = step
                        pending = ck.maybe_save(step, self._state(index))
                        if ck.should_stop:
                            self._end(step, pending)
                            return

            return run

        return program

    @contextlib.contextmanager
    def _noting_failure(self) -> Generator[None]:
        try:
            yield
        except T5CkptError:
            self._has_failed = True
            raise

    def _has_trained(self, index: int, step: int) -> bool:
        """Trains one step; returns False where another process has died or failed.

        A step needs values of the other processes. Since JAX dispatches steps without waiting for them, a process may be ahead by
        some. The coordination service ends each process of a job in which one has died.
        """
        wait_until(lambda: False, 1.0)
        self._reached[index] = step
        wait_until(lambda: min(self._reached) >= step - _STEPS_AHEAD or self._is_over())
        return not self._is_over()

    def _is_over(self) -> bool:
        return self._has_failed or bool(self._service.death())

    def _end(self, step: int, pending: Any) -> None:
        self._last.add(step)
        if len(self._last) > 1:
            self._world.scheduler.fail(f'the processes were preempted at steps {sorted(self._last)}')
        if pending is not None and pending.result() is not None:
            self._world.observer.is_saved(step, self._value)
        elif pending is None:
            self._world.scheduler.fail(f'the job was preempted at step {step}, and did not save')


def job(world: World) -> Sequence[Task]:
    """Two processes save a step together, and then one in the background."""
    made = Job(world, 2, 1)
    return made.start('job', _in_both(made.saver([3]), made.saver([4], how='async')))


def _in_both(*programs: Callable[[int], Callable[[], None]]) -> Callable[[int], Callable[[], None]]:
    return lambda index: in_turn(*(program(index) for program in programs))


def jobs(world: World) -> Sequence[Task]:
    """Three processes save a step, and a job of two, begun when the horizon of the first is over, the same and the next."""
    first, second = Job(world, 3, 1, timeout=60.0), Job(world, 2, 2, timeout=60.0)
    later = second.saver([3, 4])
    return [
        *first.start('job', first.saver([3])),
        *second.start('next', lambda index: after(650.0, later(index))),
    ]


def stopped_job(world: World) -> Sequence[Task]:
    """Two processes save a step; a trainer collects their leftovers while process 1 may still be stopped.

    Process 0 is not stopped: its manifest would be there for a moment after the collection.
    """
    made = Job(world, 2, 1, timeout=60.0)
    tasks = made.start('job', made.saver([3]))
    tasks[0].process.has_faults = False
    return [
        *tasks,
        world.start('trainer', after(7500.0, saver(world, 3, [8])), machine='c'),
    ]


def preempted(world: World) -> Sequence[Task]:
    """Process 1 of a job with retention is preempted, while an evaluator reads the step that goes."""
    made = Job(world, 2, 1, keep=1)
    tasks = made.start('job', made.preempted(3, at=5, notified=1), may_delete=lambda step: step < 3)
    return [*tasks, world.start('reader', reader(world, 2), machine='b')]
