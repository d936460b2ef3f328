"""Dumps the stacks of all threads when no step ends for some time.

The timer is faulthandler's, a thread in C that does not need the interpreter lock. So it also fires in the most frequent hang,
when a library holds the lock and never releases it. A process has one such timer, so it can have one watchdog at a time; pytest's
``faulthandler_timeout`` uses the same timer.
"""

from __future__ import annotations

import faulthandler
import sys
from typing import IO, Any, Self


class Watchdog:
    """Dumps the stack of every thread if no step ends for ``seconds``, and again every ``seconds`` from then on.

    Use it as a context manager and call :meth:`beat` in every step.

    Args:
      seconds: the longest time that a step may take.
      first_seconds: the time until the first beat, which includes restoring and compiling; ten times ``seconds`` by default.
      file: the output of the dump; standard error by default.
      kill: ends the process with status 1 after the dump, so that a supervisor can restart it.

    Notes: a beat takes about 50 microseconds. The dump goes to a file descriptor, so ``file`` must be a real file and stay open.
    """

    def __init__(
        self, seconds: float, *, first_seconds: float | None = None, file: IO[Any] | None = None, kill: bool = False
    ):
        if not seconds > 0 or (first_seconds is not None and not first_seconds > 0):
            raise ValueError(f'seconds={seconds}, first_seconds={first_seconds}: both must be above 0.')
        self._seconds = seconds
        self._first_seconds = 10 * seconds if first_seconds is None else first_seconds
        self._file = file
        self._kill = kill

    def __enter__(self) -> Self:
        self._arm(self._first_seconds)
        return self

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()

    def beat(self) -> None:
        """Restarts the timer at the end of a step."""
        self._arm(self._seconds)

    def _arm(self, seconds: float) -> None:
        # Notebooks and tests replace sys.stderr by an object without a file descriptor.
        file = sys.__stderr__ if self._file is None else self._file
        if file is not None:
            faulthandler.dump_traceback_later(seconds, repeat=not self._kill, file=file, exit=self._kill)
