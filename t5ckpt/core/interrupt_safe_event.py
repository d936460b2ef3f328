"""An event that an interrupt cannot leave locked.

``threading.Event``, ``Condition`` and ``Semaphore`` are implemented in Python around a lock. An exception from a signal handler,
such as Ctrl-C, between acquiring that lock and the following ``try`` leaves it locked forever (CPython issue 74174), and the
thread that would set the event blocks. Each operation used here is a single one in C.
"""

from __future__ import annotations

import contextlib
import queue


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

    def wait(self, seconds: float) -> bool:
        """Waits until the event is set, at most ``seconds``; returns whether it is set."""
        if not self._is_set:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=max(0.0, seconds))
                # Wakes the next waiting thread. After an interrupt here that thread waits until its time-out.
                self._wake.put(None)
        return self._is_set
