"""Polls for the effect of another process."""

from __future__ import annotations

import time
from collections.abc import Iterator

__all__ = ['attempts']

_FIRST_SECONDS, _LAST_SECONDS = 0.005, 0.1


def attempts(seconds: float) -> Iterator[bool]:
    """Yields at once and then after growing pauses: True while there is time for another attempt, and False at the last one."""
    deadline = time.monotonic() + seconds
    pause = _FIRST_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        yield True
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LAST_SECONDS)
    yield False
