"""Locks of directories on stores without locks; they are valid within this process."""

from __future__ import annotations

import threading

from t5ckpt.storage.base import Lock

_locked_urls: set[str] = set()
_guard = threading.Lock()


class ProcessLock(Lock):
    """The lock of a directory: its URL in the set of locked directories of this process."""

    def __init__(self, url: str):
        self._url: str | None = url

    @classmethod
    def take(cls, url: str) -> ProcessLock | None:
        """Locks a directory; returns None if it is locked already."""
        with _guard:
            if url in _locked_urls:
                return None
            _locked_urls.add(url)
        return cls(url)

    def is_current(self) -> bool:
        """Returns True: directories of these stores have no identity."""
        return True

    def close(self) -> None:
        """Releases the lock."""
        with _guard:
            # A second call must not release the lock of the next caller.
            url, self._url = self._url, None
            if url is not None:
                _locked_urls.discard(url)
