"""New checkpoints as they come: for the job that evaluates what another one trains."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from t5ckpt.catalog.locate import steps_in
from t5ckpt.commit.read_lease import read_lease
from t5ckpt.core.arguments import integer
from t5ckpt.storage import Storage, open_storage

__all__ = ['checkpoints_iterator']


def checkpoints_iterator(
    directory: str | os.PathLike[str] | Storage,
    *,
    after: int | None = None,
    timeout: float | None = None,
    poll_seconds: float = 10.0,
    every: bool = False,
    hold_seconds: float | None = None,
) -> Iterator[int]:
    """Gives the steps of a run as they come, each complete, ascending and once; waits in between.

        for step in checkpoints_iterator('run', timeout=3600, hold_seconds=1800):
            evaluate(checkpointer.restore(step))

    Args:
      directory: the run's; it need not exist yet.
      after: only larger steps, such as the last one that was evaluated before a restart.
      timeout: seconds without a new step after which it ends; None waits for ever.
      poll_seconds: how often it looks.
      every: gives every step in turn; otherwise the latest, so that a slow evaluation skips some.
      hold_seconds: keeps the step that was given from being deleted until the next is asked for, or the iterator is
        closed, but at most so long; needs the right to write into the directory, and a trainer that uses t5ckpt.

    Raises:
      StorageError: the directory cannot be listed, or a hold not be written.
    """
    if hold_seconds is not None and not hold_seconds > 0:
        raise ValueError(f'hold_seconds must be above 0, got {hold_seconds}.')
    if poll_seconds < 0 or (timeout is not None and timeout < 0):
        raise ValueError(f'timeout={timeout}, poll_seconds={poll_seconds}: neither may be below 0.')
    after = None if after is None else integer('after', after, least=-1)
    storage = open_storage(directory)
    return _steps(storage, after, every, _waiter(timeout, poll_seconds), hold_seconds)


def _steps(
    storage: Storage, after: int | None, every: bool, wait: Callable[[bool], bool], hold_seconds: float | None
) -> Iterator[int]:
    found = False
    while wait(found):
        new = [step for step in steps_in(storage) if after is None or step > after]
        found = bool(new)
        if not new:
            continue
        step = new[0] if every else new[-1]
        holding = (
            contextlib.nullcontext(True) if hold_seconds is None else read_lease(storage, step, hold_seconds, time.time)
        )
        with holding as is_there:
            if is_there:
                after = step
                yield step


def _waiter(timeout: float | None, poll_seconds: float) -> Callable[[bool], bool]:
    """Waits before the next look; says False when the time is up. Called with whether the last look found something."""
    started: float | None = None

    def wait(found: bool) -> bool:
        nonlocal started
        now = time.monotonic()
        if found or started is None:
            # At once: while the last step was looked at, others may have come.
            started = now
            return True
        if timeout is not None and now - started >= timeout:
            return False
        left = poll_seconds if timeout is None else min(poll_seconds, started + timeout - now)
        time.sleep(max(0.0, left))
        return True

    return wait
