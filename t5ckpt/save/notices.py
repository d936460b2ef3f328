"""Warnings of one checkpointer, each given once for its cause."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection, Hashable, Mapping
from types import FrameType

from t5ckpt.errors import MissingMetricWarning, T5CkptWarning

__all__ = ['Notices']

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


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
        warnings.warn(warning, stacklevel=_caller_level())
        self._given.add(cause)

    def missing_metrics(self, missing: Mapping[str, tuple[int, Collection[str]]]) -> None:
        """Warns of metrics that a keep policy looks at: by name, a step that lacks it and the metrics that it has."""
        for name, (step, held) in missing.items():
            text = (
                f'step {step} has no metric {name!r}, which the keep policy looks at; it has: {", ".join(held) or "none"}. '
                f'Pass metrics={{{name!r}: ...}} to save, or name another metric in the policy.'
            )
            self.warn(('keep_policy', name), MissingMetricWarning(text))


def _caller_level() -> int:
    """The stack level of the code that called the package, as seen from the caller of this function."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the only way before Python 3.12
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
