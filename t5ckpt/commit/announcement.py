"""Announces that a step is about to be hidden or changed, before looking for its readers."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator

from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.markers import HIDE, Marker
from t5ckpt.commit.taken_steps import locked
from t5ckpt.core.protocols import Clock
from t5ckpt.format.names import step_dir
from t5ckpt.storage import Storage


@contextlib.contextmanager
def announced(storage: Storage, step: int, clock: Clock) -> Generator[Collection[int]]:
    """Yields the steps that readers hold, after readers can see that this one is about to be hidden or changed.

    Where locks work, no other process of this machine hides or replaces the step meanwhile.

    Args:
      storage: the run.
      step: the step.
      clock: unix seconds.

    Raises:
      BeingHiddenError: another process replaces or deletes the step.
    """
    with locked(storage, step_dir(step)):
        marker = Marker(storage, step, clock, HIDE)
        try:
            yield held_steps(storage, clock)
        finally:
            marker.remove()
