"""The clock by which holds and markers expire.

On a file system, both start at the modification time of their file. The current time is that of a file that the observer has
just written beside it. The file server sets both times, so the clocks of hosts do not matter.

TensorStore does not return the modification times of objects. On an object store, the time in the hold or marker, by the clock
of its owner, is compared with the clock of the observer. The two may differ by ten minutes.
"""

from __future__ import annotations

import secrets
import time

from t5ckpt.core.protocols import Clock
from t5ckpt.errors import T5CkptError
from t5ckpt.format.names import HOLD_PREFIX
from t5ckpt.storage import Storage

CLOCK_SECONDS = 600.0
"""The most by which the clocks of machines that share a run on an object store may differ."""
TIME_PREFIX = f'{HOLD_PREFIX}0.0.'
"""The prefix of the file that is written to read the time of the file server: a hold that expired in 1970."""


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
            # Tries twice, because garbage collection may have removed the first file.
            server_time = _server_time(storage) or _server_time(storage)
            if server_time is None:
                return clock()
            offset = server_time - time.monotonic()
        return time.monotonic() + offset

    return now


def _server_time(storage: Storage) -> float | None:
    # Garbage collection removes the file after a crash, and may remove one that is being written.
    try:
        return storage.server_time(f'{TIME_PREFIX}{secrets.token_hex(8)}s0')
    except T5CkptError:
        return None
