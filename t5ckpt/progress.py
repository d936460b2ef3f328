"""A progress line for saves and restores: bytes, seconds, rate and remaining time.

Off by default, since a training loop has its own log; the command line turns it on.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TextIO

from t5ckpt.core.protocols import Clock, Progress
from t5ckpt.core.text import human_age, human_bytes


class Meter:
    """Counts bytes for a progress callback."""

    def __init__(self, progress: Progress | None, total: int):
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, nbytes: int) -> None:
        """Adds ``nbytes`` to the bytes done and calls the callback, unless there are none."""
        self._done += nbytes
        if nbytes and self._progress is not None:
            self._progress(self._done, self._total)


class ProgressReporter:
    """Updates one line: ``save 512.0 MB of 2.9 GB (17 %), 1.2 s, 426.7 MB/s, 5 s left``.

    Pass it as ``progress=`` to a Checkpointer. A decrease of the bytes done marks a new operation.

    Args:
      label: the first word of the line.
      stream: the output; standard error by default.
      every: seconds between two updates.
      clock: seconds from any origin.

    Notes: safe from the thread of a background save; writes at most every ``every`` seconds, and at the end.
    """

    def __init__(
        self, label: str = 't5ckpt', stream: TextIO | None = None, every: float = 0.1, clock: Clock = time.monotonic
    ):
        self._label = label
        self._stream = stream
        self._every = every
        self._clock = clock
        self._guard = threading.Lock()
        self._last_done = -1
        self._started = 0.0
        self._written = float('-inf')

    def __call__(self, done: int, total: int) -> None:
        """Updates the line for the bytes done so far and in all."""
        with self._guard:
            now = self._clock()
            if self._last_done < 0 or done < self._last_done:
                self._started, self._written = now, float('-inf')
            self._last_done = done if done < total else -1
            if now - self._written < self._every and done < total:
                return
            self._written = now
            stream: TextIO | None = sys.stderr if self._stream is None else self._stream
            # A terminal that is closed, a full disk or a narrow encoding does not end a save. Without a console, there is none.
            with contextlib.suppress(OSError, ValueError):
                if stream is not None:
                    line = progress_text(self._label, done, total, now - self._started)
                    stream.write(f'\r{line}{"" if done < total else chr(10)}')
                    stream.flush()


def progress_text(label: str, done: int, total: int, seconds: float) -> str:
    """One line: bytes done and in all, time, rate and remaining time."""
    share = 100 * done // total if total else 100
    text = f'{label} {human_bytes(done)} of {human_bytes(total)} ({share} %), {seconds:.1f} s'
    if seconds <= 0 or done <= 0:
        return text
    rate = done / seconds
    # The rate of the first bytes is not that of the others.
    left = f', {human_age((total - done) / rate)} left' if done < total and share >= 1 else ''
    return f'{text}, {human_bytes(int(rate))}/s{left}'
