"""Reads of local files in one restore: repeats those that fail because of the disk, and remembers the files that stay unreadable.

A disk may fail for a moment. Only after the same time as in an upload, a file that cannot be read counts as absent. It is never
deleted, since a later start may be able to read it.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from t5ckpt.errors import StorageError
from t5ckpt.storage import is_disk_error

_log = logging.getLogger('t5ckpt')
UNREADABLE_SECONDS = 2.0
"""A local file that could not be read for so long counts as absent in a restore, and as damaged in an upload."""
_PAUSE_SECONDS = 0.1
_T = TypeVar('_T')


class LocalReads:
    """The reads of one restore in one process.

    Attributes:
      unreadable: by step, the files that could not be read in this time; they count as absent until they are replaced.
    """

    def __init__(self) -> None:
        """Reads nothing."""
        self.unreadable: defaultdict[int, set[str]] = defaultdict(set)
        self._seconds_left = UNREADABLE_SECONDS

    def repeated(self, read: Callable[[], _T]) -> _T:
        """Calls a function that reads local files, and again while the disk fails, for two seconds of all calls together.

        Raises:
          StorageError: the disk still fails, or the error is not one of the disk.
          Exception: any other error of the function.
        """
        while True:
            started = time.monotonic()
            try:
                return read()
            except StorageError as error:
                if not is_disk_error(error) or self._seconds_left <= 0:
                    raise
                if self._seconds_left == UNREADABLE_SECONDS:
                    _log.warning('t5ckpt: reading again, for at most %g s: %s', UNREADABLE_SECONDS, error)
            time.sleep(min(_PAUSE_SECONDS, self._seconds_left))
            self._seconds_left -= time.monotonic() - started
