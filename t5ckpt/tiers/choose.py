"""Chooses the step to restore, and the tier that it is read from. Pure. ``tiers/intents.py`` chooses the steps to upload."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection


@dataclasses.dataclass(frozen=True)
class Choice:
    """The step to restore.

    Attributes:
      step: its number; None if no tier has a step.
      is_local: whether it is read from the local directory.
    """

    step: int | None
    is_local: bool


def choose(local: Collection[int], run: Collection[int], step: int | None = None) -> Choice:
    """Chooses the newest step that a tier has; the local one if both have it.

    Args:
      local: the complete steps of the local directory.
      run: the complete steps of the run's storage, or the newest of them.
      step: the requested step; None takes the newest.
    """
    newest = max([*local, *run], default=None) if step is None else step
    return Choice(newest, newest in local)
