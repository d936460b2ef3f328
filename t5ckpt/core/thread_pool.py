"""Threads that an exception from a signal handler cannot hang, and that take work while the interpreter exits.

Python runs signal handlers in the main thread, between any two bytecodes. If one raises, such as on Ctrl-C, it may leave a lock
inside ``threading.Thread.start``, ``Condition`` or ``concurrent.futures.Future`` taken forever. Here the main thread only calls
operations that are a single one in C: it starts a thread with ``_thread.start_new_thread``, and threads exchange values through
``SimpleQueue``.

``concurrent.futures`` accepts no work once the interpreter has begun to exit, but a background save is finished then. The threads
of a pool are daemons; the code that submits work waits for it.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import functools
import math
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from typing import Any, Generic, ParamSpec, Self, TypeVar

_Result = TypeVar('_Result')
_Given = ParamSpec('_Given')


_WAIT_SECONDS = 0.5


class InterruptSafeEvent:
    """An event that is set once, by any thread, and that an interrupt cannot leave locked.

    ``threading.Event``, ``Condition`` and ``Semaphore`` are implemented in Python around a lock. An exception from a signal
    handler, such as Ctrl-C, between acquiring that lock and the following ``try`` leaves it locked forever (CPython issue 74174),
    and the thread that would set the event blocks. Each operation used here is a single one in C.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        """Whether the event is set."""
        return self._is_set

    def set(self) -> None:
        """Sets the event and wakes all waiting threads."""
        self._is_set = True
        self._wake.put(None)

    def wait(self, seconds: float = math.inf) -> bool:
        """Waits until the event is set, at most ``seconds``; returns whether it is set."""
        end = time.monotonic() + seconds
        while not self._is_set and (left := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                # Short, because Python handles a signal just before a wait after it.
                self._wake.get(timeout=min(left, _WAIT_SECONDS))
                # Wakes the next waiting thread. After an interrupt here that thread waits until its time-out.
                self._wake.put(None)
        return self._is_set


_LAST_SECONDS = 5.0
# What the interpreter waits for before it ends daemon threads: their end inside C++ would abort the process.
_unfinished: set[InterruptSafeEvent] = set()
# Whether nothing waits for a thread that starts now: functions that were registered earlier in ``atexit`` are called later.
_has_finished = False


@functools.cache
def _wait_at_exit() -> None:
    # At the first use, so before JAX ends its backends, which registers its own function when it is imported.
    atexit.register(_finish)
    os.register_at_fork(after_in_child=_unfinished.clear)
    if threading.current_thread() is threading.main_thread() and not threading.main_thread().is_alive():
        # In ``atexit``, which calls no function that is registered now.
        _finish()


def _finish() -> None:
    global _has_finished  # noqa: PLW0603 - there is one end
    while left := list(_unfinished):
        left[0].wait()
    _has_finished = True


@contextlib.contextmanager
def finished_before_exit() -> Generator[None]:
    """If this is a daemon thread, the interpreter waits for the block before it exits.

    Raises:
      RuntimeError: the interpreter exits already.
    """
    if not threading.current_thread().daemon:
        yield
        return
    _wait_at_exit()
    ended = InterruptSafeEvent()
    _unfinished.add(ended)
    try:
        if threading.main_thread().is_alive():
            yield
            return
    finally:
        _unfinished.discard(ended)
        ended.set()
        is_over = not threading.main_thread().is_alive()
        if is_over:
            # The interpreter ends this daemon thread here; but it may be joined, so not forever.
            time.sleep(_LAST_SECONDS)
    if is_over:
        raise RuntimeError(
            'the interpreter exits, and ends daemon threads. Join the thread that saves before the program ends.'
        )


def start_thread(function: Callable[[], None], name: str) -> bool:
    """Calls a function in a new thread, for whose end the interpreter waits; returns whether it could be started.

    Python 3.12 starts none in ``atexit``, nothing waits for one after ``_finish``, and the machine may have reached its limit.
    Callers do the work themselves then.
    """
    _wait_at_exit()
    if _has_finished:
        return False
    ended = InterruptSafeEvent()
    has_started: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def run() -> None:
        try:
            function()
        finally:
            _unfinished.discard(ended)
            ended.set()

    def launch() -> None:
        # In a thread without signal handlers. Python waits for a ``Thread`` that is not a daemon, unless it was started late.
        _unfinished.add(ended)
        is_running = False
        try:
            threading.Thread(target=run, name=name, daemon=False).start()
            is_running = True
        except RuntimeError:
            _unfinished.discard(ended)
        finally:
            # Whatever was raised: the caller waits for this value.
            has_started.put(is_running)

    try:
        _thread.start_new_thread(launch, ())
    except RuntimeError:
        return False
    return has_started.get()


class Future(Generic[_Result]):
    """The result of a task, with the methods of ``concurrent.futures.Future`` that are used here."""

    def __init__(self, task: Callable[[], _Result]):
        """Runs nothing yet."""
        self._task = task
        self._values: list[_Result] = []
        self._error: BaseException | None = None
        self._ended = InterruptSafeEvent()

    def cancel(self) -> None:
        """Makes the result a CancelledError unless the task has begun."""
        self._task = _cancelled

    def done(self) -> bool:
        """Whether the task has ended."""
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        """Waits for the task; returns its error."""
        self._ended.wait()
        return self._error

    def result(self, timeout: float = math.inf) -> _Result:
        """Waits for the task, at most ``timeout`` seconds; returns its result, or raises its error."""
        if not self._ended.wait(timeout):
            raise TimeoutError
        try:
            if self._error is not None:
                raise self._error
            return self._values[0]
        finally:
            # The traceback refers to this frame.
            del self

    def run(self) -> None:
        """Runs the task in this thread."""
        # The task would keep a chunk alive.
        task, self._task = self._task, _cancelled
        try:
            self._values.append(task())
        except BaseException as error:  # noqa: BLE001 - raised by ``result``
            # The frames would keep a chunk alive.
            traceback.clear_frames(error.__traceback__)
            self._error = error
        finally:
            self._ended.set()


def _cancelled() -> Any:
    raise CancelledError


class Pool:
    """Threads that run tasks in their order. If no thread can be started, ``submit`` runs the task itself.

    The end of a ``with`` block waits for the tasks; an exception cancels those that have not begun.
    """

    def __init__(self, count: int):
        """Starts nothing."""
        self._count = count
        self._tasks: queue.SimpleQueue[Future[Any] | None] = queue.SimpleQueue()
        self._started = 0
        self._running: set[object] = set()
        # A C lock, and reentrant for signal handlers and finalizers: ``with`` takes and releases it in one operation.
        self._lock = threading.RLock()
        self._is_closed = self._is_cancelled = False
        self._ended = InterruptSafeEvent()

    def submit(self, fn: Callable[_Given, _Result], /, *args: _Given.args, **kwargs: _Given.kwargs) -> Future[_Result]:
        """Calls ``fn`` in a thread; the future holds its result."""
        future = Future(functools.partial(fn, *args, **kwargs))
        with self._lock:
            if self._is_closed:
                raise RuntimeError('the pool is closed')
            if self._started < self._count:
                with contextlib.suppress(RuntimeError):
                    _thread.start_new_thread(self._work, ())
                    self._started += 1
            is_queued = self._started > 0
            if is_queued:
                self._tasks.put(future)
        if not is_queued:
            future.run()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads once all submitted tasks are done or, with ``cancel_futures``, those that have begun."""
        self._is_cancelled |= cancel_futures
        with self._lock:
            if not self._is_closed:
                self._tasks.put(None)
                self._is_closed = True
        if wait and self._started:
            self._ended.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.shutdown(cancel_futures=kind is not None)

    def _work(self) -> None:
        # Registered by the thread itself, since an exception may come between its start and the next line of ``submit``.
        token = object()
        self._running.add(token)
        while (future := self._tasks.get()) is not None:
            if self._is_cancelled:
                future.cancel()
            future.run()
            # Otherwise the task would keep a chunk alive during the next wait.
            del future
        # For the next thread. All tasks were taken by threads that are registered.
        self._tasks.put(None)
        self._running.discard(token)
        if not self._running:
            self._ended.set()
