"""Finds the line of the user's program that called the package, so that warnings point at it.

The ``stacklevel`` of a warning counts frames of one thread. In the thread of a save, or in a callback from another library, it
would point at a line outside the user's program. So the line is recorded in the caller's thread. ``Notices`` gives each warning
of a checkpointer once.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Hashable
from types import FrameType
from typing import Any


@dataclasses.dataclass(frozen=True)
class CallSite:
    """A line of a program. It holds no frame, since a frame would keep the caller's arrays alive."""

    filename: str
    line: int
    module: str
    # The module's record of the warnings given so far.
    registry: dict[Any, Any] = dataclasses.field(repr=False, compare=False)

    @classmethod
    def here(cls) -> CallSite:
        """The innermost line of this thread outside the package."""
        frame: FrameType = sys._getframe(1)  # noqa: SLF001 - the only way before Python 3.12  # pyright: ignore[reportPrivateUsage]
        # By the module, since the constructor of a dataclass has no file.
        while f'{frame.f_globals.get("__name__")}.'.startswith('t5ckpt.') and frame.f_back is not None:
            frame = frame.f_back
        names = frame.f_globals
        registry = names.setdefault('__warningregistry__', {})
        return cls(frame.f_code.co_filename, frame.f_lineno, str(names.get('__name__', '<unknown>')), registry)

    def warn(self, warning: Warning) -> None:
        """Gives a warning at this line, from any thread."""
        warnings.warn_explicit(warning, type(warning), self.filename, self.line, self.module, self.registry)


def warn_caller(warning: Warning) -> None:
    """Gives a warning at the line of this thread that called the package."""
    CallSite.here().warn(warning)


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
