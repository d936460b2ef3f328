"""The errors of a step that another process has written or is about to hide, and waits for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator

from t5ckpt.errors import CheckpointExistsError, StorageError

# The pauses between attempts.
_FIRST_SECONDS, _LAST_SECONDS = 0.005, 0.1


class StepTakenError(Exception):
    """The step cannot be written, because another process has written it or is replacing or deleting it."""


class AlreadyCommittedError(StepTakenError):
    """The step has a complete checkpoint."""


class BeingHiddenError(StorageError, StepTakenError):
    """Another process is replacing or deleting the step."""


@contextlib.contextmanager
def taken_step_exists(cure: str) -> Generator[None]:
    """Raises a StepTakenError as the error of the public functions, with the sentence that says what to do."""
    try:
        yield
    except StepTakenError as error:
        raise CheckpointExistsError(f'{error}. {cure}') from error


def attempts(seconds: float) -> Iterator[bool]:
    """Yields at once and then after growing pauses: True while there is time for another attempt, and False at the last one."""
    deadline, pause = time.monotonic() + seconds, _FIRST_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        yield True
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LAST_SECONDS)
    yield False
