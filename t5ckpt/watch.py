"""Iterates over the new checkpoints of a running training, for evaluation jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from t5ckpt.catalog.listing import steps_in
from t5ckpt.catalog.locate import open_run_storage, refuse_other_contents
from t5ckpt.commit.holds import hold
from t5ckpt.core.arguments import integer
from t5ckpt.storage import PathOrStorage, Storage


def checkpoints_iterator(
    directory: PathOrStorage,
    *,
    after: int | None = None,
    timeout: float | None = None,
    poll_seconds: float = 10.0,
    every: bool = False,
    hold_seconds: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[int]:
    """Yields each complete step of a run once, and waits for new ones; smaller ones, too, if the training has gone back.

        for step in checkpoints_iterator('run', timeout=3600, hold_seconds=1800):
            evaluate(checkpointer.restore(step))

    Args:
      directory: of the run; it may be created later.
      after: of the steps that are there, only larger ones, such as the last one that was evaluated before a restart.
      timeout: ends the iteration after this many seconds without a new step; None waits forever.
      poll_seconds: the seconds between two listings.
      every: yields every new step, ascending; by default only the latest, so that a slow evaluation skips steps.
      hold_seconds: the duration of a hold, which keeps the step from being deleted until the next one is requested or the
        iterator is closed. Needs write permission in the directory, and a trainer that uses t5ckpt.
      storage_options: see docs/storage.md.

    Raises:
      StorageError: the directory cannot be listed, or the hold cannot be written.
    """
    if hold_seconds is not None and not hold_seconds > 0:
        raise ValueError(f'hold_seconds must be above 0, got {hold_seconds}.')
    if poll_seconds < 0 or (timeout is not None and timeout < 0):
        raise ValueError(f'timeout={timeout}, poll_seconds={poll_seconds}: neither may be below 0.')
    after = None if after is None else integer('after', after, least=-1)
    storage = open_run_storage(directory, storage_options)
    return _steps(storage, after, every, _waiter(timeout, poll_seconds), hold_seconds)


def _steps(
    storage: Storage, after: int | None, every: bool, wait: Callable[[bool], bool], hold_seconds: float | None
) -> Iterator[int]:
    has_new, seen = False, set[int]()
    while wait(has_new):
        has_new, steps = False, steps_in(storage)
        if after is not None:
            seen, after = {step for step in steps if step <= after}, None
        # A step that was deleted may be saved again.
        seen.intersection_update(steps)
        new = [step for step in steps if step not in seen]
        if not steps:
            refuse_other_contents(storage)
        for step in new if every else reversed(new):
            holding = nullcontext(True) if hold_seconds is None else hold(storage, step, hold_seconds, time.time)
            with holding as has_new:
                if has_new:
                    seen.update([step] if every else [other for other in steps if other <= step])
                    yield step
            # A step that is about to be deleted is tried again after the next listing.
            if has_new:
                break


def _waiter(timeout: float | None, poll_seconds: float) -> Callable[[bool], bool]:
    """Makes a function that waits before the next listing; its argument is whether the last one had a new step.

    It returns False at the time-out.
    """
    started: float | None = None

    def wait(has_new: bool) -> bool:
        nonlocal started
        now = time.monotonic()
        if has_new or started is None:
            # Without waiting, because new steps may have been saved while the last one was evaluated.
            started = now
            return True
        if timeout is not None and now - started >= timeout:
            return False
        left = poll_seconds if timeout is None else min(poll_seconds, started + timeout - now)
        time.sleep(max(0.0, left))
        return True

    return wait
