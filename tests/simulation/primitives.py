"""Locks, events, queues, threads and futures whose waits are points of the schedule."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

from simulation.scheduler import active, current_task, wait_until
from simulation.tasks import Task

__all__ = [
    'Condition',
    'Event',
    'Future',
    'Lock',
    'RLock',
    'Semaphore',
    'SimpleQueue',
    'Thread',
    'as_completed',
    'get_ident',
]


class Lock:
    """``threading.Lock``."""

    def __init__(self) -> None:
        self._is_held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._is_held and (
            not blocking or not wait_until(lambda: not self._is_held, None if timeout < 0 else timeout)
        ):
            return False
        self._is_held = True
        return True

    def release(self) -> None:
        self._is_held = False

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock(Lock):
    """``threading.RLock``."""

    def __init__(self) -> None:
        super().__init__()
        self._owner, self._depth = 0, 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not (self._is_held and self._owner == get_ident()) and not super().acquire(blocking, timeout):
            return False
        self._owner = get_ident()
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            super().release()


class Condition:
    """``threading.Condition``."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = RLock() if lock is None else lock
        self._tickets: list[list[bool]] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        ticket = [False]
        self._tickets.append(ticket)
        self._lock.release()
        try:
            return wait_until(lambda: ticket[0], timeout)
        finally:
            self._lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        while not (result := predicate()):
            if not self.wait(timeout):
                return predicate()
        return result

    def notify(self, n: int = 1) -> None:
        for ticket in self._tickets[:n]:
            ticket[0] = True
        del self._tickets[:n]

    def notify_all(self) -> None:
        self.notify(len(self._tickets))


class Event:
    """``threading.Event``."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return wait_until(lambda: self._is_set, timeout)


class Semaphore:
    """``threading.Semaphore``."""

    def __init__(self, value: int = 1) -> None:
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        if self._value == 0 and (not blocking or not wait_until(lambda: self._value > 0, timeout)):
            return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class SimpleQueue:
    """``queue.SimpleQueue``."""

    def __init__(self) -> None:
        self._items: collections.deque[Any] = collections.deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        del block, timeout
        self._items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._items and not (block and wait_until(lambda: bool(self._items), timeout)):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)

    @classmethod
    def __class_getitem__(cls, item: Any) -> type[Self]:
        del item
        return cls


class Thread:
    """``threading.Thread``: a task of the process that starts it."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        del group
        self._call = (target, tuple(args), dict(kwargs or {}))
        self.name = name or 'thread'
        self.daemon = bool(daemon)
        self._task: Task | None = None

    def run(self) -> None:
        target, args, kwargs = self._call
        if target is not None:
            target(*args, **kwargs)

    def start(self) -> None:
        scheduler = active()
        if scheduler is None:
            raise RuntimeError("can't start new thread")
        self._task = scheduler.start(current_task().process, self.run, self.name.removeprefix('t5ckpt-'))

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.has_ended

    def join(self, timeout: float | None = None) -> None:
        wait_until(lambda: not self.is_alive(), timeout)


def start_new_thread(function: Callable[..., object], args: tuple[Any, ...]) -> None:
    """``_thread.start_new_thread``."""
    Thread(target=function, args=args).start()


class Future(concurrent.futures.Future[Any]):
    """``concurrent.futures.Future``."""

    def result(self, timeout: float | None = None) -> Any:
        self._await(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._await(timeout)
        return super().exception(0)

    def _await(self, timeout: float | None) -> None:
        if not self.done() and not wait_until(self.done, timeout):
            raise TimeoutError


def as_completed(futures: Iterable[Future], timeout: float | None = None) -> Iterator[Future]:
    """``concurrent.futures.as_completed``, in the order of the futures where several are done."""
    left = list(futures)
    while left:
        if not wait_until(functools.partial(_is_any_done, left), timeout):
            raise TimeoutError
        done = [future for future in left if future.done()]
        left = [future for future in left if future not in done]
        yield from done


def _is_any_done(futures: Iterable[Future]) -> bool:
    return any(future.done() for future in futures)


def get_ident() -> int:
    """``threading.get_ident``: differs between the tasks that exist."""
    return threading.get_ident() if active() is None else id(current_task())
