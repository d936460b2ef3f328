"""The thread that uploads the steps that wait, the newest first.

When the thread is free it takes the newest step, and drops older ones: they would be of no use to a restart. The newest step is
the one that was saved last; after a restore of an older step, it may have a smaller number. A step that overwrites one of the
run is not dropped, since the run would keep the old values. A failed upload is repeated, after a pause that grows to a minute.
The log has one warning per outage.

Notes: the thread is not a daemon and ends when no step waits. An interpreter that exits without ``close`` waits for an upload,
but not for a storage that fails.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence

from t5ckpt.core.text import numbered_are
from t5ckpt.core.thread_pool import start_thread
from t5ckpt.errors import LocalDirError, NotPersistedError, T5CkptError
from t5ckpt.tiers.upload import NotUploadableError

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_LOOK_SECONDS = 0.5
_log = logging.getLogger('t5ckpt')


class UploadStopped(Exception):  # noqa: N818 - not an error
    """The running upload is to end; its files stay for the next one."""


class UploadOutdated(UploadStopped):
    """The step is being overwritten; its upload begins again."""


def not_uploaded_anymore(steps: Sequence[int], target: str) -> NotPersistedError:
    """The error of a wait for steps that no thread of this process uploads."""
    return NotPersistedError(
        f'{numbered_are("step", steps)} not in {target}, since the checkpointer is closed. The next start with this local_dir '
        'uploads it.'
    )


class Outcomes:
    """The results of the uploads of steps. Safe from any thread."""

    def __init__(self, target: str):
        """``target`` is the URL of the run."""
        self._target = target
        self._guard = threading.RLock()
        self._uploaded = set[int]()
        self._dropped: dict[int, str] = {}
        # Those that could not be uploaded, until a wait raises the reason or a newer step is uploaded.
        self._failed = set[int]()

    def was_uploaded(self, step: int) -> bool:
        """Whether this process has uploaded a step that was neither saved again nor deleted by the user since."""
        return step in self._uploaded

    def forget(self, step: int) -> None:
        """Forgets a step, which waits again or was deleted."""
        with self._guard:
            self._uploaded.discard(step)
            self._failed.discard(step)
            self._dropped.pop(step, None)

    def note_uploaded(self, step: int) -> None:
        """Records that a step is uploaded."""
        with self._guard:
            self.forget(step)
            self._uploaded.add(step)
            self._failed = {each for each in self._failed if each > step}

    def note_dropped(self, step: int, reason: str, *, is_failure: bool = False) -> None:
        """Records that a step is not uploaded; ``is_failure`` if it cannot be, so that also a wait for all steps raises it."""
        with self._guard:
            self.forget(step)
            self._dropped[step] = reason
            if is_failure:
                self._failed.add(step)

    def check(self, step: int | None) -> None:
        """Raises NotPersistedError if a step was not uploaded; with None, if a step could not be uploaded."""
        with self._guard:
            ended = max(self._failed, default=None) if step is None else step
            reason = None if ended is None else self._dropped.get(ended)
            if reason is None:
                return
            self._failed -= {ended} if step is not None else self._failed.copy()
        raise NotPersistedError(f'step {ended} was not uploaded to {self._target}: {reason}.')


class StepUploads(ABC):
    """The uploads of one process. Its methods are called from any thread.

    Attributes:
      refusal: why nothing is uploaded at all, or None.
      outcomes: of the uploads.
    """

    refusal: LocalDirError | None = None

    def __init__(self, target: str):
        """``target`` is the URL of the run."""
        self.outcomes = Outcomes(target)
        # The lock in C, since an exception from a signal handler may leave that of ``with condition`` taken.
        self._guard = threading.RLock()
        self._condition = threading.Condition(self._guard)
        self._failed_attempts = 0
        # The process that has the thread.
        self._process = os.getpid()

    @abstractmethod
    def is_uploading(self) -> bool:
        """Whether this process is sending files."""

    def is_failing(self) -> bool:
        """Whether the latest attempt of an upload failed."""
        return self._failed_attempts > 0

    @abstractmethod
    def add(self, steps: Iterable[int], kept: Collection[int] = ()) -> None:
        """Adds steps, the newest last, and drops those that are older than the newest one and are not being uploaded.

        Args:
          steps: to upload.
          kept: those of them that are never dropped for a newer one.
        """

    @abstractmethod
    def check(self) -> None:
        """Raises UploadStopped if the running upload is to end."""

    @abstractmethod
    def cancel(self, step: int) -> None:
        """Ends the upload of a step, and forgets that it waits; returns when nothing reads its files."""

    @abstractmethod
    def wait(self, step: int | None) -> None:
        """Waits until a step is uploaded; None waits for all.

        Raises:
          NotPersistedError: an attempt that ended during this wait failed, the step was dropped, a step could not be uploaded,
            or no thread uploads it.
          LocalDirError: the local directory is of another run.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ends the thread, after the files that are on their way; the other files stay for the next upload."""


class UploadQueue(StepUploads):
    """Uploads steps in a thread, in a job of one process or in process 0."""

    def __init__(self, upload: Callable[[int], None], drop: Callable[[int, str], None], target: str):
        """Starts nothing.

        Args:
          upload: uploads a step; calls :meth:`check` often.
          drop: forgets that a step waits, for a reason.
          target: the URL of the run, for messages.
        """
        super().__init__(target)
        self._upload = upload
        self._drop = drop
        self._target = target
        # The steps, in the order of their saves; the value is whether a newer step does not replace it.
        self._waiting: dict[int, bool] = {}
        self._current: int | None = None
        # Whether the current step was saved again since its attempt began.
        self._is_added_again = False
        self._is_cancelled = self._is_stopped = self._is_running = False
        self._error: Exception | None = None
        self._wakes = 0

    def is_uploading(self) -> bool:
        return self._current is not None

    def add(self, steps: Iterable[int], kept: Collection[int] = ()) -> None:
        with self._guard:
            for step in steps:
                # At the end, also if it waits already.
                self._waiting.pop(step, None)
                self._waiting[step] = step in kept
                self._is_added_again |= step == self._current
                self.outcomes.forget(step)
            older = self._take_older()
            is_new = bool(self._waiting) and not (self._is_running or self._is_stopped)
            self._is_running = self._is_running or is_new
            if is_new:
                self._process = os.getpid()
            self._condition.notify_all()
        self._drop_all(older)
        if is_new and start_thread(self._run, 't5ckpt-upload', daemon=False) is None:
            self._run()

    def _newest(self) -> int | None:
        """The step to upload next: the last that was saved, without overwrites of older ones."""
        largest = max(self._waiting, default=None)
        newest_first = reversed(self._waiting.items())
        return next((step for step, is_kept in newest_first if not is_kept or step == largest), None)

    def _take_older(self) -> dict[int, str]:
        """Removes the steps that a newer one replaces; called with the lock."""
        newest = self._newest()
        older: dict[int, str] = {}
        for step, is_kept in self._waiting.items():
            if newest is not None and not is_kept and step not in (newest, self._current):
                older[step] = f'step {newest} ' + ('is newer' if newest > step else 'was saved later')
        for step, reason in older.items():
            del self._waiting[step]
            self.outcomes.note_dropped(step, reason)
        return older

    def _drop_all(self, older: dict[int, str]) -> None:
        for step, reason in sorted(older.items()):
            _log.info('t5ckpt: skipping the upload of step %d to %s: %s', step, self._target, reason)
            self._drop(step, reason)

    def _run(self) -> None:
        while True:
            with self._guard:
                older = self._take_older()
                step = self._newest()
                if step is None or self._is_stopped or self.refusal is not None:
                    self._is_running = False
                    self._condition.notify_all()
                    return
                self._current, self._is_cancelled, self._is_added_again = step, False, False
            self._drop_all(older)
            pause = self._attempt(step)
            with self._guard:
                self._current = None
                self._condition.notify_all()
                if pause and not self._pause(pause):
                    self._is_running = False
                    return

    def _attempt(self, step: int) -> float:
        """Uploads a step; returns the seconds to the next attempt."""
        try:
            self._upload(step)
        except UploadOutdated:
            return _FIRST_PAUSE_SECONDS
        except UploadStopped:
            return 0.0
        except NotUploadableError as caught:
            _log.error('t5ckpt: step %d is not uploaded to %s: %s', step, self._target, caught)
            with self._guard:
                if not self._is_added_again:
                    self._waiting.pop(step, None)
                    self.outcomes.note_dropped(step, str(caught).removesuffix('.'), is_failure=caught.is_failure)
            return 0.0
        except LocalDirError as caught:
            _log.error('t5ckpt: nothing is uploaded: %s', caught)
            self.refusal = caught
            return 0.0
        except Exception as caught:  # noqa: BLE001 - repeated, and raised by wait
            return self._note_failure(step, caught)
        with self._guard:
            if not self._is_added_again:
                self._waiting.pop(step, None)
                self.outcomes.note_uploaded(step)
            if self._failed_attempts:
                _log.warning('t5ckpt: uploads to %s work again', self._target)
            self._failed_attempts, self._error = 0, None
        return 0.0

    def _note_failure(self, step: int, error: Exception) -> float:
        if self._failed_attempts == 0:
            _log.warning(
                't5ckpt: the upload of step %d to %s failed, and is repeated until it succeeds; saves to the local directory go '
                'on: %s',
                step,
                self._target,
                error,
                exc_info=None if isinstance(error, (T5CkptError, NotUploadableError)) else error,
            )
        with self._guard:
            self._failed_attempts += 1
            self._error = error
        return min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** min(self._failed_attempts - 1, 10))

    def _pause(self, seconds: float) -> bool:
        """Waits, with the lock; returns False if the interpreter exits. Ends when a caller waits for an upload."""
        end, wakes = time.monotonic() + seconds, self._wakes
        while (left := end - time.monotonic()) > 0 and not self._is_stopped and wakes == self._wakes:
            if not threading.main_thread().is_alive():
                return False
            self._condition.wait(min(left, _LOOK_SECONDS))
        return True

    def check(self) -> None:
        if self._is_cancelled or self._is_stopped:
            raise UploadStopped

    def cancel(self, step: int) -> None:
        with self._guard:
            self._waiting.pop(step, None)
            self.outcomes.forget(step)
            self._is_cancelled = self._current == step
            while self._is_running and self._current == step:
                self._condition.wait(_LOOK_SECONDS)

    def wait(self, step: int | None) -> None:
        if os.getpid() != self._process:
            return
        with self._guard:
            failed = self._failed_attempts
            self._wakes += 1
            self._condition.notify_all()
            while (self._waiting if step is None else step in self._waiting) and self.refusal is None:
                if self._is_stopped or not self._is_running:
                    raise not_uploaded_anymore(sorted(self._waiting), self._target)
                if self._error is not None and self._failed_attempts > failed:
                    waiting = numbered_are('step', sorted(self._waiting))
                    raise NotPersistedError(
                        f'{waiting} not in {self._target} yet: {self._error} The upload is repeated.'
                    ) from self._error
                failed = min(failed, self._failed_attempts)
                self._condition.wait(_LOOK_SECONDS)
            if self.refusal is not None:
                raise self.refusal
            self.outcomes.check(step)

    def stop(self) -> None:
        with self._guard:
            self._is_stopped = True
            self._condition.notify_all()
            while self._is_running and os.getpid() == self._process:
                self._condition.wait(_LOOK_SECONDS)
