"""The handle of a save, which runs in a thread: a blocking save is one whose caller waits for it.

The thread alone writes, and alone owns the state of the save. A caller starts it, waits, and sets flags, each as often as it
likes, so an interrupt between any two operations leaves nothing half done. A save is refused its commit until its call has seen
that all values are read: a call that was interrupted before, in whatever way, does not say so, and its owner may change the
arrays. Its cancellation only saves time.

Notes: the thread is not a daemon, so the interpreter waits for a save that is under way before it exits. If no thread can be
started, the save runs in the caller's thread.
"""

from __future__ import annotations

import collections
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from t5ckpt.commit.transaction import CommittedCheckpoint
from t5ckpt.core.arguments import check_callables
from t5ckpt.core.text import lines, printable
from t5ckpt.core.thread_pool import InterruptSafeEvent, start_thread
from t5ckpt.errors import SaveFailedError
from t5ckpt.save.execute import PreparedSave

_log = logging.getLogger('t5ckpt')
_WAIT_SECONDS = 0.5
_LAST_SECONDS = 10.0


class PendingSave:
    """A running save, as returned by ``save_async``."""

    def __init__(self, save: PreparedSave):
        """Wraps a prepared save, which :meth:`start` begins."""
        self.step = save.request.step
        self._outcome: CommittedCheckpoint | None = None
        self._error: BaseException | None = None
        self._is_reported = False
        self._is_blocking = not save.request.in_background
        # Of the thread, which clears it.
        self._work: PreparedSave | None = save
        # Taken by the thread that does the work, and never released.
        self._begun = threading.Lock()
        self._is_cancelled = False
        # All values are read from the caller's arrays; the call has seen it; the save has ended. Thread.join is not used: an
        # interrupt during join marks a running thread as ended (CPython issue 90010).
        self._is_read = InterruptSafeEvent() if self._is_blocking else save.staging.is_staged
        self._is_released = InterruptSafeEvent()
        self._ended = InterruptSafeEvent()
        self._thread, self._caller = -1, threading.get_ident()
        self._process = os.getpid()
        self._callbacks: collections.deque[Callable[[PendingSave], object]] = collections.deque()

    def start(self) -> None:
        """Starts the save; returns when the caller's arrays may change."""
        try:
            self._release()
        except BaseException:
            self.cancel()
            raise

    def _release(self) -> None:
        """Starts the save, and lets it commit when all values are read; in its call, or in a signal handler above it."""
        if not self._begun.locked() and not start_thread(self._run, f't5ckpt-save-{self.step}'):
            # An interrupt goes through the save itself.
            self._is_released.set()
            self._run()
        while not (self._ended.is_set() or self._is_read.wait(_WAIT_SECONDS)):
            pass
        self._is_released.set()

    def _is_called_here(self) -> bool:
        """Whether the call that started the save is on the stack of this thread: a signal handler has interrupted it."""
        frame: FrameType | None = sys._getframe()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        while frame is not None and not (
            frame.f_code is PendingSave.start.__code__ and frame.f_locals.get('self') is self
        ):
            frame = frame.f_back
        return frame is not None

    def _check_not_interrupted(self) -> None:
        """Raises if the save is cancelled, or its call was interrupted before all values were read."""
        self._is_read.set()
        while not (self._is_cancelled or self._is_released.wait(_WAIT_SECONDS)):
            # No call follows while the interpreter exits.
            if not threading.main_thread().is_alive() and not self._is_released.wait(_LAST_SECONDS):
                self.cancel()
        self._check_not_cancelled()

    def _check_not_cancelled(self) -> None:
        if self._is_cancelled:
            raise SaveFailedError(f'the save of step {self.step} was interrupted; nothing is committed.')

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        self._thread = threading.get_ident()
        try:
            self._check_not_cancelled()
            if self._work is not None:
                self._outcome = self._work.run(self._check_not_interrupted)
        except BaseException as error:  # noqa: BLE001 - kept for the caller, who gets it from result()
            self._error = error
            _clear_frames(error)
            # The caller may never ask for the result, for instance in a script that ends.
            if not (self._is_blocking or self._is_reported):
                _log.error('t5ckpt: the save of step %d failed and is lost: %s', self.step, error)
        finally:
            self._work = None
            self._ended.set()
            self._call_back()

    def cancel(self) -> None:
        """Cancels the save unless it is committed. Returns at once; its thread ends after the chunks that it is writing."""
        self._is_reported = self._is_cancelled = True
        work = self._work
        if work is not None:
            work.staging.is_interrupted = True

    def __repr__(self) -> str:
        state = f'failed: {self._error}' if self.failed() else 'done' if self.done() else 'under way'
        return printable(f'PendingSave(step={self.step}, {state})')

    def __reduce__(self) -> Any:
        raise TypeError(
            f'{self!r} cannot be pickled or copied: it is a thread of this process. Pass the value of its result() instead.'
        )

    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        # One whose call was interrupted before a thread began writes nothing.
        return self._ended.is_set() or (self._is_cancelled and not self._begun.locked())

    def failed(self) -> bool:
        """Whether the save has ended with an error."""
        return self._ended.is_set() and self._error is not None

    def add_done_callback(self, callback: Callable[[PendingSave], object]) -> None:
        """Calls ``callback(pending)`` once the commit is durable, or the save has failed (``pending.failed()``).

        In a job of several processes, each process calls the callbacks that were added there. A callback runs in the thread
        of the save, after retention, or at once in this thread if the save has ended. It may call ``result()``. An exception
        in it is logged. The next save may begin while it runs.
        """
        check_callables(callback=callback)
        self._callbacks.append(callback)
        if self.done():
            self._call_back()

    def _call_back(self) -> None:
        """Calls each callback once, whichever thread comes first."""
        while True:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return
            try:
                callback(self)
            except BaseException as error:
                # Logged with its traceback, since the save itself has not failed. In the caller's thread an interrupt is
                # raised. In the thread of the save, a SystemExit would go unnoticed and skip the other callbacks.
                if not isinstance(error, Exception) and threading.get_ident() != self._thread:
                    raise
                _log.exception('t5ckpt: a callback of the save of step %d failed', self.step)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the save has ended; returns whether it has.

        A forked process does not wait, since the save runs in its parent. A save whose caller was interrupted before its arrays
        were staged is cancelled. A signal handler that runs during this wait may call it, too.

        Raises:
          SaveFailedError: the save waits for itself, for instance in a progress callback.
        """
        if os.getpid() != self._process or self.done():
            return True
        if threading.get_ident() == self._thread:
            raise SaveFailedError(
                f'the save of step {self.step} was asked to wait for itself, by a callback that it called. Call save, wait '
                'and close in the thread that trains.'
            )
        if threading.get_ident() == self._caller and not self._is_released.is_set():
            if self._is_called_here():
                self._release()
            else:
                self.cancel()
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        # The waits are short because Python runs signal handlers between them, and a signal just before a wait does not end it.
        while not (self.done() or self._ended.wait(min(_WAIT_SECONDS, end - time.monotonic()))):
            if time.monotonic() >= end:
                return self.done()
        return True

    def result(self, timeout: float | None = None) -> CommittedCheckpoint | None:
        """Waits for the save.

        Args:
          timeout: seconds; None waits forever.

        Returns:
          The checkpoint; None if the save was dropped, see ``Checkpointer.save``.

        Raises:
          TimeoutError: the save is still running.
          T5CkptError: the save failed; every call raises the same error.
        """
        if not self.wait(timeout):
            raise TimeoutError(f'the save of step {self.step} is still running after {timeout} s')
        if self._error is not None:
            self._is_reported = True
            raise self._error
        return self._outcome

    def raise_unreported(self) -> None:
        """Raises the error of a failed save, once, unless ``result`` has raised it."""
        if self.failed() and not self._is_reported:
            self._is_reported = True
            raise SaveFailedError(
                lines(f'the save of step {self.step} in the background failed: ', f'{self._error}', between='')
            ) from self._error


def _clear_frames(error: BaseException | None) -> None:
    """Clears the frames of an error, which would keep the staged state in memory as long as the error exists."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
