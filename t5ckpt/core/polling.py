"""Polls for the effect of another process."""

from __future__ import annotations

import time
from collections.abc import Iterator

from t5ckpt.core.protocols import Clock

_FIRST_SECONDS, _LAST_SECONDS = 0.005, 0.1


def attempts(seconds: float, clock: Clock) -> Iterator[bool]:
    """Yields at once and then after growing pauses: True while there is time for another attempt, and False at the last one.

    The time is over after ``seconds`` of the clock or of pauses, whichever comes first. A clock that stands still leaves the
    pauses, so the number of attempts does not depend on how fast the machine is.
    """
    start, paused, pause = clock(), 0.0, _FIRST_SECONDS
    while (left := seconds - max(paused, clock() - start)) > 0:
        yield True
        time.sleep(min(pause, left))
        paused += min(pause, left)
        pause = min(2 * pause, _LAST_SECONDS)
    yield False
