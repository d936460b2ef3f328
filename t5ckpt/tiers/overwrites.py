"""Decides whether the overwrite of a local step has to be uploaded although the persist policy does not choose it.

An overwrite of a step that the run has, or may have, is always uploaded: the run would keep the old values, and a restore would
return them once the local step is deleted.
"""

from __future__ import annotations

import contextlib

from t5ckpt.catalog.listing import has_step, newest
from t5ckpt.errors import T5CkptError
from t5ckpt.storage import Storage
from t5ckpt.tiers.intents import Intents
from t5ckpt.tiers.queue import StepUploads


class Overwrites:
    """The steps of the run, as its storage has last answered."""

    def __init__(self, run: Storage, intents: Intents):
        """Reads nothing."""
        self._run = run
        self._intents = intents
        # The largest step that the run's storage has had; None before its first answer.
        self._newest_of_run: int | None = None

    def may_replace(self, step: int, uploads: StepUploads) -> bool:
        """Whether the run has a step, or gets it; also if its storage does not answer, unless it can only have smaller steps."""
        if step in self._intents.steps():
            return True
        if not uploads.is_failing():
            with contextlib.suppress(T5CkptError):
                found = newest(self._run)
                self._newest_of_run = -1 if found is None else found.step
                return has_step(self._run, step)
        is_surely_newer = self._newest_of_run is not None and step > self._newest_of_run
        return not is_surely_newer or uploads.outcomes.was_uploaded(step)
