"""Limits the rate of an upload, and pauses it while a save writes to the same disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_LOOK_SECONDS = 0.2
_SAVE_LOOK_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 10.0


class RateLimit:
    """Spaces files so that their bytes keep a rate. Safe from any thread.

    Notes: the rate is an average over a few files, since each file is sent at once.
    """

    def __init__(self, gigabits: float | None):
        """Takes the rate in gigabits (10^9 bits) per second; None sets no limit."""
        self._seconds_per_byte = 0.0 if gigabits is None else 8 / (gigabits * 1e9)
        self._guard = threading.Lock()
        self._free = 0.0

    def wait(self, nbytes: int, check: Callable[[], None]) -> None:
        """Waits until a file of this size may be sent; ``check`` is called meanwhile, and may raise."""
        check()
        with self._guard:
            begin = max(time.monotonic(), self._free)
            self._free = begin + nbytes * self._seconds_per_byte
        try:
            while (left := begin - time.monotonic()) > 0:
                time.sleep(min(left, _LOOK_SECONDS))
                check()
        except BaseException:
            self.give_back(nbytes)
            raise

    def give_back(self, nbytes: int) -> None:
        """Returns the time of a file of this size, which is not sent, to other files."""
        with self._guard:
            self._free -= nbytes * self._seconds_per_byte


class SavesFirst:
    """Pauses an upload between two files while a save runs. Safe from any thread.

    After a pause, the upload goes on for at least as long as it paused. Saves that follow each other without a pause therefore
    slow it by at most half.
    """

    def __init__(self, longest_seconds: float = _LONGEST_PAUSE_SECONDS):
        """Takes the longest pause."""
        self._longest = longest_seconds
        self._guard = threading.Lock()
        self._has_ended: Callable[[], bool] = lambda: True
        # When the pause began, by ``time.monotonic``; None without one.
        self._since: float | None = None
        self._free_until = 0.0

    def note_save(self, has_ended: Callable[[], bool]) -> None:
        """Records the save that is about to start."""
        self._has_ended = has_ended

    def wait(self, check: Callable[[], None]) -> None:
        """Waits until the next file may be sent; ``check`` is called meanwhile, and may raise."""
        while self._is_paused():
            time.sleep(_SAVE_LOOK_SECONDS)
            check()

    def _is_paused(self) -> bool:
        with self._guard:
            now = time.monotonic()
            if self._since is None:
                if now < self._free_until or self._has_ended():
                    return False
                self._since = now
            elif self._has_ended() or now - self._since >= self._longest:
                self._free_until, self._since = now + (now - self._since), None
                return False
            return True
