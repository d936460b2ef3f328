"""A save that goes on in the background.

Notes: the thread is not a daemon, so the interpreter waits for a save that is under way before it exits.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from t5ckpt._commit import CommittedCheckpoint
from t5ckpt.errors import SaveFailedError

__all__ = ['PendingSave']

_log = logging.getLogger('t5ckpt')


class Work(Protocol):
    """A prepared save: ``run`` writes and commits, ``feed`` stages what is left, ``stop`` ends both."""

    def run(self) -> CommittedCheckpoint | None:
        """Writes and commits; in a thread of its own."""
        ...

    def feed(self) -> None:
        """Stages what did not fit at once; in the caller's thread."""
        ...

    def stop(self) -> None:
        """Makes ``run`` fail at the next chunk."""
        ...


class PendingSave:
    """What ``save_async`` returns."""

    def __init__(self, step: int, save: Work | None):
        """Starts the save in a thread and feeds it from this one; with None there is nothing to do."""
        self.step = step
        self._outcome: CommittedCheckpoint | None = None
        self._error: BaseException | None = None
        self._seen = False
        self._work = save
        self._thread: threading.Thread | None = None
        if save is not None:
            self._thread = threading.Thread(target=self._run, name=f't5ckpt-save-{step}', daemon=False)
            self._thread.start()
            save.feed()

    def _run(self) -> None:
        try:
            self._outcome = None if self._work is None else self._work.run()
        except BaseException as error:  # noqa: BLE001 - kept for the caller, who gets it from result()
            self._error = error
            # The caller may never ask: a script that ends, for instance.
            _log.error('t5ckpt: the save of step %d failed and is lost: %s', self.step, error)
        finally:
            work, self._work = self._work, None
            if work is not None:
                work.stop()

    def cancel(self) -> None:
        """Ends the save as soon as it can, unless it is committed already, and waits for that. Raises nothing."""
        work = self._work
        if work is not None:
            work.stop()
        self.wait()

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the save has ended; says whether it has. Raises nothing."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self.done()

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
            raise SaveFailedError(
                f'the save of step {self.step} in the background failed: {self._error}'
            ) from self._error
