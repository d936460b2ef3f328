"""Locks of directories on stores that have none: they hold within this process."""

from __future__ import annotations

import threading

__all__ = ['ProcessLock']

_locked_urls: set[str] = set()
_guard = threading.Lock()


class ProcessLock:
    """A name in the set of directories that are being written in this process."""

    is_held = True

    def __init__(self, url: str):
        self._url = url

    @classmethod
    def take(cls, url: str) -> ProcessLock | None:
        """The lock of a directory; None while another one is open."""
        with _guard:
            if url in _locked_urls:
                return None
            _locked_urls.add(url)
        return cls(url)

    def close(self) -> None:
        """Lets go."""
        with _guard:
            _locked_urls.discard(self._url)
