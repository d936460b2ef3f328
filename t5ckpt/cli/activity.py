"""Prints the progress of a verb to standard error: bytes and rate, or after ten silent seconds that it is still working."""

from __future__ import annotations

import _thread
import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Self

import click

from t5ckpt.core.protocols import Clock, Progress
from t5ckpt.core.text import printable
from t5ckpt.core.thread_pool import InterruptSafeEvent
from t5ckpt.progress import ProgressReporter, progress_text

_SILENT_SECONDS = 10.0
# A verb that ends within two seconds prints no progress.
_FIRST_LINE_SECONDS, _LINE_SECONDS = 2.0, 9.0


class Activity:
    """While the block runs, prints a line after every ten seconds without output.

    Args:
      paths: of the verb.
      seconds: the longest time without output.
      clock: seconds from any origin.
    """

    def __init__(self, paths: Sequence[str], seconds: float = _SILENT_SECONDS, clock: Clock = time.monotonic):
        """Starts nothing."""
        self._remote = [path for path in paths if '://' in path]
        self._seconds = seconds
        self._clock = clock
        self._started = self._printed_at = clock()
        self._is_over = InterruptSafeEvent()
        self._has_open_line = False

    def __enter__(self) -> Self:
        # An interrupt may come at any time; ``threading.Thread`` could hang then.
        with contextlib.suppress(RuntimeError):
            _thread.start_new_thread(self._watch, ())
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._print('')

    def _print(self, text: str) -> None:
        """Prints a line, after the end of that of a terminal's progress."""
        if text or self._has_open_line:
            click.echo(f'{chr(10) * (self._has_open_line and bool(text))}{printable(text)}', err=True)
        self._has_open_line, self._printed_at = False, self._clock()

    def _watch(self) -> None:
        while not self._is_over.wait(max(0.05, self._printed_at + self._seconds - self._clock())):
            now = self._clock()
            if now - self._printed_at < self._seconds:
                continue
            so_far = f'{now - self._started:.0f} s so far'
            if self._remote:
                self._print(
                    f't5ckpt: waiting for {" and ".join(self._remote)}, {so_far}; the storage option retry_seconds ends the wait'
                )
            else:
                self._print(f't5ckpt: still working, {so_far}')

    def progress(self, title: str) -> Progress:
        """A callback for the bytes done and in all: one line that changes on a terminal, else a line every few seconds."""
        line, started = ProgressReporter(title), self._clock()
        due = started + _FIRST_LINE_SECONDS

        def report(done: int, total: int) -> None:
            nonlocal due
            now = self._clock()
            if sys.stderr.isatty():
                line(done, total)
                self._has_open_line, self._printed_at = done < total, now
            elif now >= due:
                due = now + _LINE_SECONDS
                self._print(progress_text(title, done, total, now - started))

        return report
