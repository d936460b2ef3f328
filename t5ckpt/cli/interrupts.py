"""Ctrl-C ends the program at once, also while threads wait for a slow bucket.

Before a verb runs there is nothing to undo. Then Ctrl-C raises KeyboardInterrupt, and the verb undoes what it has begun: it
releases locks and removes markers and temporary files. TensorStore cannot cancel a request, so this may take as long as the
server takes. Half a second after the signal, the process ends in any case. It then leaves the same files as a killed process: no
visible step, and markers. A later save removes them.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import time
from typing import Any, NoReturn

from t5ckpt.cli.streams import OutputError

INTERRUPTED = 130
_UNDO_SECONDS = 0.5


class Interrupts:
    """Handles Ctrl-C, unless the process was started with interrupts ignored, as a shell does in the background.

    Attributes:
      is_running: whether a verb runs.
      was_received: whether the program was interrupted. A library that is being imported may turn the interrupt into another
        error.
    """

    def __init__(self) -> None:
        self.is_running = self.was_received = False
        self._is_ending = _thread.allocate_lock()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, *_: Any) -> NoReturn:
        self.was_received = True
        if not self.is_running:
            self._end()
        # Without a thread for it, the process ends when all is undone. Thread.start takes locks, which this thread may hold.
        with contextlib.suppress(RuntimeError):
            _thread.start_new_thread(self._end_soon, ())
        raise KeyboardInterrupt

    def _end_soon(self) -> None:
        time.sleep(_UNDO_SECONDS)
        self._end()

    def end(self) -> NoReturn:
        """Ends the process when all is undone, and does not wait for its threads."""
        with contextlib.suppress(OutputError):
            sys.stdout.flush()
        self._end()

    def _end(self) -> NoReturn:
        # The second of both callers waits for the exit.
        self._is_ending.acquire()
        with contextlib.suppress(OSError):
            os.write(2, b't5ckpt: interrupted\n')
        os._exit(INTERRUPTED)
