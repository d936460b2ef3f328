"""A clock that moves when it is told to."""

from __future__ import annotations

__all__ = ['FakeClock']


class FakeClock:
    """Unix seconds that stand still; pass it as ``clock=``."""

    def __init__(self, now: float = 1_700_000_000.0):
        """Starts at ``now``."""
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Moves the clock."""
        self.now += seconds
