"""A save that goes on in the background.

Notes: the thread is not a daemon, so the interpreter waits for a save that is under way before it exits.
"""

from __future__ import annotations

import collections
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from t5ckpt._commit import CommittedCheckpoint
from t5ckpt._flag import Flag
from t5ckpt._text import lines, printable
from t5ckpt._types import check_callables
from t5ckpt.errors import SaveFailedError

__all__ = ['PendingSave']

_log = logging.getLogger('t5ckpt')
_WAIT_SECONDS = 0.5


class Work(Protocol):
    """A prepared save: ``run`` writes and commits, ``feed`` stages what is left, ``stop`` ends both."""

    def run(self, ask: Callable[[], None]) -> CommittedCheckpoint | None:
        """Writes, asks whether to commit, which raises where the answer is no, and commits; in a thread of its own."""
        ...

    def feed(self) -> None:
        """Stages what did not fit at once; in the caller's thread."""
        ...

    def stop(self) -> None:
        """Makes ``run`` fail at the next chunk."""
        ...


class PendingSave:
    """What ``save_async`` returns."""

    def __init__(self, step: int, save: Work | None, *, is_blocking: bool = False):
        """Takes a save that is to be started; with None there is nothing to do.

        A save that the caller waits for (``is_blocking``) writes the caller's arrays as they are, so it is committed only
        when the caller, still waiting, says so: whoever was interrupted may have changed them.
        """
        self.step = step
        self._outcome: CommittedCheckpoint | None = None
        self._error: BaseException | None = None
        self._seen = False
        self._is_blocking = is_blocking
        self._work = save
        # Not Thread.join: an interrupt during join leaves a thread that seems to have ended (CPython issue 90010).
        self._ended = Flag()
        self._is_started = False
        # Who has the work: the thread that saves, or the caller, who gave it up before that thread had begun. The first to
        # write it down, in one atomic operation that may be done again, since an interrupt may come between any two.
        self._owner: dict[str, str] = {}
        # Whether to commit, likewise; the thread waits for the answer.
        self._verdict: dict[str, bool] = {}
        self._written, self._answered = Flag(), Flag()
        self._caller, self._thread = threading.get_ident(), -1
        # The call that waits, and whether it has nothing to do but to wait.
        self._frame: FrameType | None = None
        self._is_fed = False
        self._process = os.getpid()
        self._callbacks: collections.deque[Callable[[PendingSave], object]] = collections.deque()

    def start(self) -> None:
        """Starts the save in a thread and feeds it from this one; returns when it needs the caller's arrays no more.

        An interrupt may come at any moment, also between a thread's start and the next line: it ends the save.
        """
        work = self._work
        if work is None:
            return
        try:
            # Only now: what was interrupted before it was started is nothing to wait for.
            self._is_started = True
            self._frame = self._frame or sys._getframe()  # noqa: SLF001 - the only way
            threading.Thread(target=self._run, name=f't5ckpt-save-{self.step}', daemon=False).start()
            work.feed()
            self._is_fed = True
            if not self._is_blocking:
                self._answer(True)
        except BaseException:
            # Interrupted, no more threads, or a copy failed: the rest will never be staged.
            self.cancel()
            raise

    def complete(self) -> CommittedCheckpoint | None:
        """Starts a blocking save and waits until it is committed; ends it with whatever comes between.

        Raises:
          T5CkptError: as ``result``.
        """
        try:
            self._frame = sys._getframe()  # noqa: SLF001
            self.start()
            while not (self.done() or self._written.wait(_WAIT_SECONDS)):
                pass
            self._answer(True)
            return self.result()
        except BaseException:
            self.cancel()
            raise

    def _answer(self, commit: bool) -> None:
        """The first answer counts."""
        self._verdict.setdefault('commit', commit)
        self._answered.set()
        self._frame = None

    def _has_caller(self) -> bool:
        """Whether the call that is to answer is on its thread's stack.

        Not ``Thread.is_alive``: the main thread counts as ended once the interpreter waits for the others to exit, and handlers
        of signals and of ``atexit``, which save what there is, run in it after that.
        """
        frame, waiting = sys._current_frames().get(self._caller), self._frame  # noqa: SLF001
        while frame is not None and frame is not waiting:
            frame = frame.f_back
        return frame is not None

    def _ask(self) -> None:
        """In the thread, when all is written. No answer will come from a call that was left, by two interrupts, say."""
        self._written.set()
        while 'commit' not in self._verdict and self._has_caller():
            self._answered.wait(_WAIT_SECONDS)
        if not self._verdict.setdefault('commit', False):
            raise SaveFailedError(f'the save of step {self.step} was interrupted; nothing is committed.')

    def _run(self) -> None:
        if self._owner.setdefault('is', 'thread') != 'thread':
            return
        self._thread = threading.get_ident()
        try:
            self._outcome = None if self._work is None else self._work.run(self._ask)
        except BaseException as error:  # noqa: BLE001 - kept for the caller, who gets it from result()
            self._error = error
            _clear_frames(error)
            # The caller may never ask: a script that ends, for instance.
            if not self._is_blocking:
                _log.error('t5ckpt: the save of step %d failed and is lost: %s', self.step, error)
        finally:
            work, self._work = self._work, None
            if work is not None:
                work.stop()
            self._ended.set()
            self._written.set()
            self._call_back()

    def cancel(self) -> None:
        """Ends the save as soon as it can, unless it is committed already, and waits for that.

        The caller knows that it has ended. Whoever interrupts the wait leaves a save that will not be committed.
        """
        try:
            self._give_up()
        except BaseException:
            # Another interrupt: the save has to be told all the same.
            self._give_up()
            raise
        self.wait()

    def _give_up(self) -> None:
        self._seen = True
        self._answer(False)
        work = self._work
        if work is not None:
            work.stop()
        if self._owner.setdefault('is', 'caller') == 'caller':
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

        In a forked process there is nothing to wait for: the save goes on in the one that began it. A save that has no answer
        yet when its own thread comes to wait is one that its caller left, and is given up; or this is a handler of a signal
        that came while the caller waits, and so waits in its place.

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
        if 'commit' not in self._verdict and threading.get_ident() == self._caller:
            if not (self._is_fed and self._has_caller()):
                self._give_up()
            elif _wait_until(self._written, end):
                self._answer(True)
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
