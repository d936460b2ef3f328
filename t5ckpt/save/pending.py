"""The handle of a save, which runs in a thread: a blocking save is one whose caller waits for it.

Notes: the thread is not a daemon, so the interpreter waits for a save that is under way before it exits. If no thread can be
started, the save runs in the caller's thread.
"""

from __future__ import annotations

import collections
import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from t5ckpt.commit.transaction import CommittedCheckpoint
from t5ckpt.core.arguments import check_callables
from t5ckpt.core.interrupt_safe_event import InterruptSafeEvent
from t5ckpt.core.text import lines, printable
from t5ckpt.core.thread_pool import start_thread
from t5ckpt.errors import SaveFailedError
from t5ckpt.save.execute import run_save
from t5ckpt.save.parts import save_parts
from t5ckpt.save.prepare import PreparedSave

_log = logging.getLogger('t5ckpt')
_WAIT_SECONDS = 0.5
_START_SECONDS = 10.0


class PendingSave:
    """A running save, as returned by ``save_async``."""

    def __init__(self, step: int, save: PreparedSave | None):
        """Wraps a prepared save, which :meth:`start` begins; None stands for a skipped save."""
        self.step = step
        self._outcome: CommittedCheckpoint | None = None
        self._error: BaseException | None = None
        self._is_reported = False
        self._is_blocking = False
        self._work = save
        # Thread.join is not used: an interrupt during join marks a running thread as ended (CPython issue 90010).
        self._ended = InterruptSafeEvent()
        self._is_started = False
        # The runner of the work: the thread of the save, or the call that cancelled it before a thread had begun. Set with
        # dict.setdefault, which is atomic and idempotent, because an interrupt may come between any two operations.
        self._runner: dict[str, object] = {}
        self._begun = InterruptSafeEvent()
        self._thread = -1
        # Held while the save reads the caller's arrays. Leaving ``with lock`` is one operation in C, so it releases the lock even
        # when two interrupts come, while a ``finally`` block may itself be interrupted.
        self._arrays_in_use = threading.Lock()
        self._is_staged = False
        self._process = os.getpid()
        self._callbacks: collections.deque[Callable[[PendingSave], object]] = collections.deque()

    def start(self) -> None:
        """Starts the save in a thread; returns when the caller's arrays are staged.

        An interrupt at any moment, even between the start of the thread and the next line, cancels the save.
        """
        work = self._work
        try:
            if work is not None:
                self._run_until(work.staging.is_staged)
        except BaseException:
            # Interrupted.
            self.cancel()
            raise

    def complete(self) -> CommittedCheckpoint | None:
        """Starts a save that reads the caller's arrays in place, and waits for its commit. An interrupt cancels it.

        Raises:
          T5CkptError: as for ``result``.
        """
        self._is_blocking = True
        try:
            if self._work is not None:
                self._run_until(self._ended)
            return self.result()
        except BaseException:
            self.cancel()
            raise

    def _run_until(self, until: InterruptSafeEvent) -> None:
        """Starts the save, which reads the caller's arrays, and blocks the caller until a flag is set or the save has ended."""
        with self._arrays_in_use:
            # Set here, because nothing waits for a save that was interrupted before its start.
            self._is_started = True
            self._launch()
            while not (self.done() or until.wait(_WAIT_SECONDS)):
                pass
            self._is_staged = True

    def _launch(self) -> None:
        if start_thread(self._run, f't5ckpt-save-{self.step}', daemon=False) is None:
            self._run()

    def _ensure_begun(self) -> bool:
        """Whether a thread runs the work; starts one if a signal handler came first. Of two threads, one does the work."""
        if not self._runner:
            self._launch()
            # Bounded: while a thread starts, a lock inside ``threading`` blocks the start of others.
            self._begun.wait(_START_SECONDS)
        return bool(self._runner)

    def _has_caller(self) -> bool:
        """Whether the caller still waits while its arrays are read, or they are staged.

        The lock is read first, since the call sets ``_is_staged`` before it releases the lock.
        """
        return self._arrays_in_use.locked() or self._is_staged

    def _check_not_interrupted(self) -> None:
        """Raises if the caller was interrupted and may have changed its arrays before all values were read."""
        if not self._has_caller():
            raise SaveFailedError(f'the save of step {self.step} was interrupted; nothing is committed.')

    def _run(self) -> None:
        # Not the thread's identifier, which Python may reuse.
        token = object()
        if self._runner.setdefault('is', token) is not token:
            return
        self._begun.set()
        self._thread = threading.get_ident()
        try:
            if self._work is not None:
                run = save_parts if self._work.request.in_parts else run_save
                self._outcome = run(self._work, self._check_not_interrupted)
        except BaseException as error:  # noqa: BLE001 - kept for the caller, who gets it from result()
            self._error = error
            _clear_frames(error)
            # The caller may never ask for the result, for instance in a script that ends.
            if not self._is_blocking:
                _log.error('t5ckpt: the save of step %d failed and is lost: %s', self.step, error)
        finally:
            self._work = None
            self._ended.set()
            self._call_back()

    def cancel(self) -> None:
        """Cancels the save unless it is committed, and waits until its thread has ended.

        An interrupt of this wait leaves a thread that will not commit.
        """
        try:
            self._cancel_once()
        except BaseException:
            # Another interrupt does not stop the cancellation.
            self._cancel_once()
            raise
        self.wait()

    def _cancel_once(self) -> None:
        self._is_reported = True
        work = self._work
        if work is not None:
            work.staging.stop()
        if self._runner.setdefault('is', self) is self:
            if work is not None:
                self._error = SaveFailedError(f'the save of step {self.step} was interrupted before it began.')
                self._work = None
            self._ended.set()
            self._call_back()

    def __repr__(self) -> str:
        state = f'failed: {self._error}' if self.failed() else 'done' if self.done() else 'under way'
        return printable(f'PendingSave(step={self.step}, {state})')

    def __reduce__(self) -> Any:
        raise TypeError(
            f'{self!r} cannot be pickled or copied: it is a thread of this process. Pass the value of its result() instead.'
        )

    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return not self._is_started or self._ended.is_set()

    def failed(self) -> bool:
        """Whether the save has ended with an error."""
        return self.done() and self._error is not None

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
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        if not (self._has_caller() and self._ensure_begun()):
            self._cancel_once()
        return _wait_until(self._ended, end)

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


def _wait_until(event: InterruptSafeEvent, end: float) -> bool:
    """Waits for an event until a time of ``time.monotonic``; returns whether it is set.

    A signal just before a wait does not end it. The waits are short because Python runs signal handlers between them.
    """
    while not event.wait(min(_WAIT_SECONDS, end - time.monotonic())):
        if time.monotonic() >= end:
            return event.is_set()
    return True


def _clear_frames(error: BaseException | None) -> None:
    """Clears the frames of an error, which would keep the staged state in memory as long as the error exists."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
