"""Limits the rate of an upload."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_LOOK_SECONDS = 0.2


class RateLimit:
    """Spaces files so that their bytes keep a rate. Safe from any thread.

    Notes: the rate is an average over a few files, since each file is sent at once.
    """

    def __init__(self, gigabits: float | None):
        """Takes the rate in gigabits (10^9 bits) per second; None sets no limit."""
        self._seconds_per_byte = 0.0 if gigabits is None else 8 / (gigabits * 1e9)
        self._guard = threading.Lock()
        self._free = 0.0

    def wait(self, nbytes: int, check: Callable[[], None]) -> None:
        """Waits until a file of this size may be sent; ``check`` is called meanwhile, and may raise."""
        check()
        with self._guard:
            begin = max(time.monotonic(), self._free)
            self._free = begin + nbytes * self._seconds_per_byte
        while (left := begin - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_SECONDS))
            check()
