"""Gives the warnings of one checkpointer, each once per cause."""

from __future__ import annotations

from collections.abc import Hashable

from t5ckpt.core.call_site import CallSite


class Notices:
    """Remembers the causes of which the user has been warned.

    Notes: if a filter turns the warning into an error, it is raised every time. A warning may be given in the thread of a
      save, which then fails before its commit.
    """

    def __init__(self) -> None:
        self._given: set[Hashable] = set()

    def is_new(self, cause: Hashable) -> bool:
        """Whether no warning has been given for this cause."""
        return cause not in self._given

    def add(self, cause: Hashable) -> None:
        """Records a cause that another warning has covered."""
        self._given.add(cause)

    def warn(self, cause: Hashable, warning: Warning, site: CallSite | None = None) -> None:
        """Warns once per cause. Outside the caller's thread, ``site`` is the line of the caller that is reported."""
        if cause in self._given:
            return
        (CallSite.here() if site is None else site).warn(warning)
        self._given.add(cause)
