"""Bounds the host memory that a save or a restore uses at once.

In a save, ``save/stage.py`` gives one half of ``concurrent_gb`` to staged copies and the other half to ``save/write.py``. A
restore has one budget for all leaves in flight, in ``restore/read_arrays.py``.

A request larger than the budget is admitted alone, when no other bytes are held. T5X's condition variable waits forever in
this case, because its comparison is strict.

Notes: thread-safe. Requests are not served in order, but every release wakes all waiters.
"""

from __future__ import annotations

import threading

from t5ckpt.core.arguments import number


def bytes_of_gb(concurrent_gb: float, option: str = 'concurrent_gb') -> int:
    """Converts a budget from gigabytes of 10^9 bytes to bytes."""
    return max(1, int(number(option, concurrent_gb) * 10**9))


class ByteBudget:
    """Limits the bytes that are held at once."""

    def __init__(self, limit: int):
        """Makes a budget of ``limit`` bytes."""
        self.limit = limit
        self._held = 0
        self._peak = 0
        self._changed = threading.Condition()

    @property
    def peak(self) -> int:
        """The largest number of bytes held at once so far."""
        return self._peak

    def acquire(self, size: int, seconds: float | None = None) -> bool:
        """Takes ``size`` bytes, waiting until they fit, at most ``seconds``; returns whether it took them."""
        with self._changed:
            fits = self._changed.wait_for(lambda: self._held == 0 or self._held + size <= self.limit, seconds)
            if fits:
                self._held += size
                self._peak = max(self._peak, self._held)
            return fits

    def release(self, size: int) -> None:
        """Releases ``size`` bytes."""
        with self._changed:
            self._held -= size
            self._changed.notify_all()
