"""Says where a job hangs.

The timer is faulthandler's, a thread in C that needs no interpreter lock: it also fires when the lock is held by a
library that never gives it back, which is what most hangs are. There is one such timer in a process, so one watchdog at
a time; pytest's ``faulthandler_timeout`` is the same one.
"""

from __future__ import annotations

import faulthandler
import sys
from typing import IO, Any, Self

__all__ = ['Watchdog']


class Watchdog:
    """Dumps the stack of every thread when no step has come for ``seconds``, and again each ``seconds`` from then on.

    Use as a context manager and call :meth:`beat` in every step.

    Args:
      seconds: the longest that a step may take.
      first_seconds: the same until the first beat, which restores and compiles; ten times ``seconds`` by default.
      file: where to; standard error by default.
      kill: end the process with status 1 after the dump, so that whoever started it can start it again.

    Notes: a beat costs some 50 microseconds. The dump goes through a file descriptor, so ``file`` must be a real file
    and stay open.
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
        """A step is done: the time starts anew."""
        self._arm(self._seconds)

    def _arm(self, seconds: float) -> None:
        # sys.stderr is replaced in notebooks and tests by what has no descriptor.
        file = sys.__stderr__ if self._file is None else self._file
        if file is not None:
            faulthandler.dump_traceback_later(seconds, repeat=not self._kill, file=file, exit=self._kill)
