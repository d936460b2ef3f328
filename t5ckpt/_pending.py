"""A save that goes on in the background.

Notes: the thread is not a daemon, so the interpreter waits for a save that is under way before it exits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from t5ckpt._commit import CommittedCheckpoint
from t5ckpt.errors import SaveFailedError

__all__ = ['PendingSave']


class PendingSave:
    """What ``save_async`` returns."""

    def __init__(self, step: int, work: Callable[[], CommittedCheckpoint | None] | None):
        """Starts ``work`` in a thread; with None there is nothing to do, the step was there already."""
        self.step = step
        self._outcome: CommittedCheckpoint | None = None
        self._error: BaseException | None = None
        self._seen = False
        self._work = work
        self._thread: threading.Thread | None = None
        if work is not None:
            self._thread = threading.Thread(target=self._run, name=f't5ckpt-save-{step}', daemon=False)
            self._thread.start()

    def _run(self) -> None:
        work, self._work = self._work, None
        try:
            self._outcome = None if work is None else work()
        except BaseException as error:  # noqa: BLE001 - kept for the caller, who gets it from result()
            self._error = error

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
