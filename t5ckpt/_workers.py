"""A few threads that do what another thread gives them.

``concurrent.futures`` takes no more work once the interpreter has begun to exit, and a save that goes on in the background is
finished then. These threads are daemons: whoever gives them work waits for it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future

__all__ = ['Workers']

_Task = tuple[Callable[[], None], 'Future[None]']


class Workers:
    """Threads that are started when there is something to do, and end with :meth:`close`."""

    def __init__(self, count: int, name: str):
        """Starts nothing."""
        self._room = count
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._started = 0

    def submit(self, function: Callable[[], None]) -> Future[None]:
        """Has it called; the future says when it is done, or raises what it raised."""
        future: Future[None] = Future()
        if self._started < self._room:
            # Where the system has no more threads, those that there are do the work, or the caller.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._work, name=f'{self._name}-{self._started}', daemon=True).start()
                self._started += 1
        if self._started:
            self._tasks.put((function, future))
        else:
            _do(function, future)
        return future

    def drop(self) -> None:
        """Cancels what was submitted and not begun."""
        with contextlib.suppress(queue.Empty):
            while (task := self._tasks.get_nowait()) is not None:
                task[1].cancel()

    def close(self) -> None:
        """Ends the threads when all that was submitted is done; does not wait for that."""
        for _ in range(self._started):
            self._tasks.put(None)
        self._started = 0

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            _do(*task)
            # The next wait must not keep a chunk alive.
            del task


def _do(function: Callable[[], None], future: Future[None]) -> None:
    try:
        function()
    except BaseException as error:  # noqa: BLE001 - raised by the future
        # Nor must the error.
        traceback.clear_frames(error.__traceback__)
        future.set_exception(error)
    else:
        future.set_result(None)
