"""Warnings of one checkpointer, each given once for its cause."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Hashable, Mapping

from t5ckpt._types import caller_level
from t5ckpt.errors import MissingMetricWarning, T5CkptWarning

__all__ = ['Notices']


class Notices:
    """Remembers what was said.

    Notes: where a filter makes the warning an error, it is raised each time, since nobody has been warned yet. It may be
      given in the thread of a save, which then fails before its commit.
    """

    def __init__(self) -> None:
        self._given: set[Hashable] = set()

    def is_new(self, cause: Hashable) -> bool:
        """Whether nobody was warned of it yet."""
        return cause not in self._given

    def add(self, cause: Hashable) -> None:
        """Notes that it was said, as part of another warning."""
        self._given.add(cause)

    def warn(self, cause: Hashable, warning: T5CkptWarning) -> None:
        """Warns, unless that was done for this cause."""
        if cause in self._given:
            return
        warnings.warn(warning, stacklevel=caller_level())
        self._given.add(cause)

    def missing_metrics(self, missing: Mapping[str, tuple[int, Collection[str]]]) -> None:
        """Warns of metrics that a keep policy looks at: by name, a step that lacks it and the metrics that it has."""
        for name, (step, held) in missing.items():
            text = (
                f'step {step} has no metric {name!r}, which the keep policy looks at; it has: {", ".join(held) or "none"}. '
                f'Pass metrics={{{name!r}: ...}} to save, or name another metric in the policy.'
            )
            self.warn(('keep_policy', name), MissingMetricWarning(text))
