"""An event that an interrupt cannot leave locked.

``threading.Event``, ``Condition`` and ``Semaphore`` are implemented in Python around a lock. An exception from a signal handler,
such as Ctrl-C, between acquiring that lock and the following ``try`` leaves it locked forever (CPython issue 74174), and the
thread that would set the event blocks. Each operation used here is a single one in C.
"""

from __future__ import annotations

import contextlib
import math
import queue
import time

_WAIT_SECONDS = 0.5


class InterruptSafeEvent:
    """An event that is set once, by any thread."""

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
