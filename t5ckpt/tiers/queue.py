"""The thread that uploads the steps that wait, the newest first.

When the thread is free it takes the newest step, and drops older ones: they would be of no use to a restart. A failed upload is
repeated, after a pause that grows to a minute. The log has one warning per outage.

Notes: the thread is not a daemon and ends when no step waits. An interpreter that exits without ``close`` waits for an upload,
but not for a storage that fails.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

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


class StepUploads(ABC):
    """The uploads of one process. Its methods are called from any thread.

    Attributes:
      refusal: why nothing is uploaded at all, or None.
    """

    refusal: LocalDirError | None = None

    @abstractmethod
    def is_uploading(self) -> bool:
        """Whether this process is sending files."""

    @abstractmethod
    def add(self, steps: Iterable[int]) -> None:
        """Adds steps, and drops those that are older than the newest one and are not being uploaded."""

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
          NotPersistedError: an attempt that ended during this wait failed, or the step was dropped.
          LocalDirError: the local directory is of another run.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ends the thread, after the files that are on their way; the other files stay for the next upload."""


class UploadQueue(StepUploads):
    """Uploads steps in a thread, in a job of one process or in process 0."""

    def __init__(self, upload: Callable[[int], None], drop: Callable[[int], None], target: str):
        """Starts nothing.

        Args:
          upload: uploads a step; calls :meth:`check` often.
          drop: forgets that a step waits.
          target: the URL of the run, for messages.
        """
        self._upload = upload
        self._drop = drop
        self._target = target
        self._condition = threading.Condition()
        self._waiting: set[int] = set()
        self._current: int | None = None
        self._is_cancelled = self._is_stopped = self._is_running = False
        self._failed_attempts = 0
        self._error: Exception | None = None
        self._wakes = 0
        self._dropped: dict[int, str] = {}
        self._process = os.getpid()

    def is_uploading(self) -> bool:
        return self._current is not None

    def add(self, steps: Iterable[int]) -> None:
        with self._condition:
            self._waiting |= set(steps)
            for step in self._waiting:
                self._dropped.pop(step, None)
            older = self._take_older()
            is_new = bool(self._waiting) and not (self._is_running or self._is_stopped)
            self._is_running = self._is_running or is_new
            self._condition.notify_all()
        self._drop_all(older)
        if is_new and start_thread(self._run, 't5ckpt-upload', daemon=False) is None:
            self._run()

    def _take_older(self) -> dict[int, str]:
        """Removes the steps that a newer one replaces; called with the lock."""
        newest = max(self._waiting, default=None)
        older = {step: f'step {newest} is newer' for step in self._waiting if step not in (newest, self._current)}
        self._waiting -= older.keys()
        self._dropped |= older
        return older

    def _drop_all(self, older: dict[int, str]) -> None:
        for step, reason in sorted(older.items()):
            _log.info('t5ckpt: step %d is not uploaded to %s: %s', step, self._target, reason)
            self._drop(step)

    def _run(self) -> None:
        while True:
            with self._condition:
                older = self._take_older()
                step = max(self._waiting, default=None)
                if step is None or self._is_stopped or self.refusal is not None:
                    self._is_running = False
                    self._condition.notify_all()
                    return
                self._current, self._is_cancelled = step, False
            self._drop_all(older)
            pause = self._attempt(step)
            with self._condition:
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
            self._drop(step)
            with self._condition:
                self._waiting.discard(step)
                self._dropped[step] = str(caught)
            return 0.0
        except LocalDirError as caught:
            _log.error('t5ckpt: nothing is uploaded: %s', caught)
            self.refusal = caught
            return 0.0
        except Exception as caught:  # noqa: BLE001 - repeated, and raised by wait
            return self._note_failure(step, caught)
        with self._condition:
            self._waiting.discard(step)
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
        with self._condition:
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
        with self._condition:
            self._waiting.discard(step)
            self._is_cancelled = self._current == step
            while self._is_running and self._current == step:
                self._condition.wait(_LOOK_SECONDS)

    def wait(self, step: int | None) -> None:
        if os.getpid() != self._process:
            return
        with self._condition:
            failed = self._failed_attempts
            self._wakes += 1
            self._condition.notify_all()
            while (self._waiting if step is None else {step} & self._waiting) and self.refusal is None:
                if self._error is not None and self._failed_attempts > failed:
                    waiting = ', '.join(map(str, sorted(self._waiting)))
                    raise NotPersistedError(
                        f'step {waiting} is not in {self._target} yet: {self._error} The upload is repeated.'
                    ) from self._error
                failed = min(failed, self._failed_attempts)
                self._condition.wait(_LOOK_SECONDS)
            reason = None if step is None else self._dropped.get(step)
        if self.refusal is not None:
            raise self.refusal
        if reason is not None:
            raise NotPersistedError(f'step {step} was not uploaded to {self._target}: {reason}.')

    def stop(self) -> None:
        with self._condition:
            self._is_stopped = True
            self._condition.notify_all()
            while self._is_running and os.getpid() == self._process:
                self._condition.wait(_LOOK_SECONDS)
