"""Thread pools that accept work while the interpreter exits.

``concurrent.futures`` accepts no work once the interpreter has begun to exit, but a background save is finished then. The threads
are daemons; the code that submits work waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

_Result = TypeVar('_Result')
_Given = ParamSpec('_Given')


def start_thread(function: Callable[[], None], name: str, *, daemon: bool) -> threading.Thread | None:
    """Calls a function in a new thread; returns None if no thread can be started.

    Python 3.12 starts none in ``atexit``, and the machine may have reached its limit. Callers do the work themselves then.
    """
    thread = threading.Thread(target=function, name=name, daemon=daemon)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


class Pool(Executor):
    """A ``ThreadPoolExecutor`` that also accepts work while the interpreter exits, as a restore in ``atexit`` needs it.

    If no thread can be started, ``submit`` does the work itself.
    """

    def __init__(self, count: int, name: str = 't5ckpt'):
        """Starts nothing."""
        self._count = count
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, fn: Callable[_Given, _Result], /, *args: _Given.args, **kwargs: _Given.kwargs) -> Future[_Result]:
        """Calls ``fn`` in a thread; the future holds its result."""
        future: Future[_Result] = Future()
        task = (functools.partial(fn, *args, **kwargs), future)
        with self._lock:
            if self._is_closed:
                raise RuntimeError('the pool is closed')
            if len(self._threads) < self._count:
                thread = start_thread(self._work, f'{self._name}-{len(self._threads)}', daemon=True)
                self._threads += [] if thread is None else [thread]
            is_queued = bool(self._threads)
            if is_queued:
                self._tasks.put(task)
        if not is_queued:
            _call(*task)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads once all submitted tasks are done or, with ``cancel_futures``, those that have begun."""
        with self._lock:
            if cancel_futures:
                with contextlib.suppress(queue.Empty):
                    while (task := self._tasks.get_nowait()) is not None:
                        task[1].cancel()
            if not self._is_closed or cancel_futures:
                for _ in self._threads:
                    self._tasks.put(None)
            self._is_closed = True
        if wait:
            for thread in self._threads:
                thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            _call(*task)
            # Otherwise the task would keep a chunk alive during the next wait.
            del task


def _call(function: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - raised by the future
        # The frames would keep the chunk alive, too.
        traceback.clear_frames(error.__traceback__)
        future.set_exception(error)
    else:
        future.set_result(result)
