"""The clock by which holds and markers expire.

On a file system, both start at the modification time of their file. The current time is that of a file that the observer has
just written beside it. The file server sets both times, so the clocks of hosts do not matter. Where it cannot be read, as on a
full disk, nothing expires.

TensorStore does not return the modification times of objects. On an object store, the time in the hold or marker, by the clock
of its owner, is compared with the clock of the observer. The two may differ by ten minutes.
"""

from __future__ import annotations

import math
import secrets
import time

from t5ckpt.core.protocols import Clock
from t5ckpt.errors import AccessDeniedError, StorageError
from t5ckpt.format.names import HOLD_PREFIX, PARTIAL_SUFFIX
from t5ckpt.storage import Storage

CLOCK_SECONDS = 600.0
"""The most by which the clocks of machines that share a run on an object store may differ."""


def run_clock(storage: Storage, clock: Clock) -> Clock:
    """Returns the clock by which the holds and markers of a run expire; on file systems it writes its file at the first call.

    Args:
      storage: the run.
      clock: unix seconds of this machine, for object stores and for a run that may only be read.
    """
    offset: float | None = None

    def now() -> float:
        nonlocal offset
        if offset is None:
            try:
                server_time = storage.server_time(f'{HOLD_PREFIX}{secrets.token_hex(8)}{PARTIAL_SUFFIX}')
            except AccessDeniedError:
                return clock()
            except StorageError:
                server_time = None
            if server_time is None:
                return -math.inf if storage.commits_by_rename else clock()
            offset = server_time - time.monotonic()
        return time.monotonic() + offset

    return now
