"""A clock for tests, which only the test advances."""

from __future__ import annotations


class FakeClock:
    """Returns the same unix time until it is advanced; pass it as ``clock=``."""

    def __init__(self, now: float = 1_700_000_000.0):
        """Starts at ``now``."""
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Advances the clock."""
        self.now += seconds
