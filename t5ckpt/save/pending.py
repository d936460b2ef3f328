"""A save that goes on in the background.

Notes: the thread is not a daemon, so the interpreter waits for a save that is under way before it exits. Where no thread can be
started, the save is done in the caller's.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from t5ckpt.commit.transaction import CommittedCheckpoint
from t5ckpt.core.arguments import check_callables
from t5ckpt.core.interrupt_safe_event import Flag
from t5ckpt.core.text import lines, printable
from t5ckpt.core.thread_pool import start_thread
from t5ckpt.errors import SaveFailedError
from t5ckpt.save.execute import run_save
from t5ckpt.save.prepare import PreparedSave

__all__ = ['PendingSave']

_log = logging.getLogger('t5ckpt')
_WAIT_SECONDS = 0.5
_START_SECONDS = 10.0


class PendingSave:
    """What ``save_async`` returns."""

    def __init__(self, step: int, save: PreparedSave | None):
        """Takes a save that is to be started; with None there is nothing to do."""
        self.step = step
        self._outcome: CommittedCheckpoint | None = None
        self._error: BaseException | None = None
        self._seen = False
        self._is_blocking = False
        self._work = save
        # Not Thread.join: an interrupt during join leaves a thread that seems to have ended (CPython issue 90010).
        self._ended = Flag()
        self._is_started = False
        # Who has the work: a thread that saves, or who gave it up before one had begun. The first to write it down, in one
        # atomic operation that may be done again, since an interrupt may come between any two.
        self._owner: dict[str, object] = {}
        self._begun = Flag()
        self._thread = -1
        # Held by the call that lends its arrays. The exit of a lock is one operation of C: a ``with`` block lets go of it
        # however it is left, by two interrupts, say, while a ``finally`` may be interrupted itself.
        self._lent = threading.Lock()
        self._is_staged = False
        self._process = os.getpid()
        self._callbacks: collections.deque[Callable[[PendingSave], object]] = collections.deque()

    def start(self) -> None:
        """Starts the save in a thread; returns when it needs the caller's arrays no more.

        An interrupt may come at any moment, also between a thread's start and the next line: it ends the save.
        """
        work = self._work
        if work is None:
            return
        try:
            self._lend(work.staging.is_staged)
        except BaseException:
            # Interrupted.
            self.cancel()
            raise

    def complete(self) -> CommittedCheckpoint | None:
        """Starts a save that uses the caller's arrays as they are, and waits until it is committed; an interrupt ends it.

        Raises:
          T5CkptError: as ``result``.
        """
        self._is_blocking = True
        try:
            if self._work is not None:
                self._lend(self._ended)
            return self.result()
        except BaseException:
            self.cancel()
            raise

    def _lend(self, until: Flag) -> None:
        """Starts the save, and leaves the caller's arrays as they are until a flag is set or the save has ended."""
        with self._lent:
            # Only now: what was interrupted before it was started is nothing to wait for.
            self._is_started = True
            self._launch()
            while not (self.done() or until.wait(_WAIT_SECONDS)):
                pass
            self._is_staged = True

    def _launch(self) -> None:
        if start_thread(self._run, f't5ckpt-save-{self.step}', daemon=False) is None:
            self._run()

    def _has_begun(self) -> bool:
        """Whether a thread has the work. A handler may have come before there was one; of two threads, one does it."""
        if not self._owner:
            self._launch()
            # Not for ever: while a thread is being started, a lock of ``threading`` keeps others from being started.
            self._begun.wait(_START_SECONDS)
        return bool(self._owner)

    def _has_caller(self) -> bool:
        """Whether the caller's arrays are still lent, or are needed no more.

        Read in this order: the call says that they are staged before it lets go.
        """
        return self._lent.locked() or self._is_staged

    def _check_caller(self) -> None:
        """In the thread, when all values are taken: whoever was interrupted may have changed them before."""
        if not self._has_caller():
            raise SaveFailedError(f'the save of step {self.step} was interrupted; nothing is committed.')

    def _run(self) -> None:
        # Not this thread's identifier, which another one may have had.
        token = object()
        if self._owner.setdefault('is', token) is not token:
            return
        self._begun.set()
        self._thread = threading.get_ident()
        try:
            self._outcome = None if self._work is None else run_save(self._work, self._check_caller)
        except BaseException as error:  # noqa: BLE001 - kept for the caller, who gets it from result()
            self._error = error
            _clear_frames(error)
            # The caller may never ask: a script that ends, for instance.
            if not self._is_blocking:
                _log.error('t5ckpt: the save of step %d failed and is lost: %s', self.step, error)
        finally:
            self._work = None
            self._ended.set()
            self._call_back()

    def cancel(self) -> None:
        """Ends the save as soon as it can, unless it is committed already, and waits for that.

        The caller knows that it has ended. Whoever interrupts the wait leaves a save that will not be committed.
        """
        try:
            self._cancel_once()
        except BaseException:
            # Another interrupt: the save has to be told all the same.
            self._cancel_once()
            raise
        self.wait()

    def _cancel_once(self) -> None:
        self._seen = True
        work = self._work
        if work is not None:
            work.staging.stop()
        if self._owner.setdefault('is', self) is self:
            if work is not None:
                self._error = SaveFailedError(f'the save of step {self.step} was interrupted before it began.')
                self._work = None
            self._ended.set()
            self._call_back()

    def __repr__(self) -> str:
        state = 'under way' if not self.done() else 'done' if self._error is None else f'failed: {self._error}'
        return printable(f'PendingSave(step={self.step}, {state})')

    def __reduce__(self) -> Any:
        raise TypeError(
            f'{self!r} cannot be pickled or copied: it is a thread of this process. Pass on what its result() returns.'
        )

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return not self._is_started or self._ended.is_set()

    def failed(self) -> bool:
        """Whether it has ended badly."""
        return self.done() and self._error is not None

    def add_done_callback(self, callback: Callable[[PendingSave], object]) -> None:
        """Has ``callback(pending)`` called once the commit is durable, or the save has failed (``pending.failed()``).

        In a job of several processes it is called in each one that added it, when that process knows. It runs in the
        thread of the save, or at once in this one if the save has ended. An exception of it is logged. It may call
        ``result()``. Retention of this step has been carried out by then; the next save may begin while it runs.
        """
        check_callables(callback=callback)
        self._callbacks.append(callback)
        if self.done():
            self._call_back()

    def _call_back(self) -> None:
        """Calls each callback once, whichever thread comes first."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return
            try:
                callback(self)
            except BaseException as error:
                # Logged with its traceback, since the save itself has not failed. In the caller's thread an interrupt goes on;
                # in that of the save nobody would hear of a SystemExit, and the other callbacks would be lost.
                if not isinstance(error, Exception) and threading.get_ident() != self._thread:
                    raise
                _log.exception('t5ckpt: a callback of the save of step %d failed', self.step)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the save has ended; says whether it has.

        In a forked process there is nothing to wait for: the save goes on in the one that began it. A save that its caller left
        before its arrays were staged is given up. A handler of a signal that came while the caller waits may wait as well.

        Raises:
          SaveFailedError: the save itself waits, in a progress callback, say: it would for ever.
        """
        if os.getpid() != self._process or self.done():
            return True
        if threading.get_ident() == self._thread:
            raise SaveFailedError(
                f'the save of step {self.step} was asked to wait for itself, by a callback that it called. Save, wait and '
                'close where the training does.'
            )
        end = None if timeout is None else time.monotonic() + timeout
        if not (self._has_caller() and self._has_begun()):
            self._cancel_once()
        return _wait_until(self._ended, end)

    def result(self, timeout: float | None = None) -> CommittedCheckpoint | None:
        """Waits for the save.

        Args:
          timeout: seconds; None waits for ever.

        Returns:
          The checkpoint, or None when the step was there already and nothing was written.

        Raises:
          TimeoutError: the save is still under way.
          T5CkptError: the save failed; the same error each time it is asked for.
        """
        if not self.wait(timeout):
            raise TimeoutError(f'the save of step {self.step} is still under way after {timeout} s')
        if self._error is not None:
            self._seen = True
            raise self._error
        return self._outcome

    def raise_unseen(self) -> None:
        """Raises the error of a save that has ended and whose ``result`` nobody asked for; once."""
        if self.done() and self._error is not None and not self._seen:
            self._seen = True
            text = f'the save of step {self.step} in the background failed: '
            raise SaveFailedError(lines(text, str(self._error), between='')) from self._error


def _wait_until(flag: Flag, end: float | None) -> bool:
    """Waits for a flag until a time of ``time.monotonic``; says whether it is set.

    A signal that comes just before a wait begins does not end it: Python looks for signals between two waits.
    """
    while not flag.wait(_WAIT_SECONDS if end is None else min(_WAIT_SECONDS, end - time.monotonic())):
        if end is not None and time.monotonic() >= end:
            return flag.is_set()
    return True


def _clear_frames(error: BaseException | None) -> None:
    """The frames hold what was staged: a state's worth of memory, for as long as somebody keeps the error."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
