"""The clock by which all leases expire.

On a file system, a lease starts at the modification time of its file. The current time is that of a file that the observer has
just written beside it. The file server sets both times, so the clocks of hosts do not matter.

TensorStore does not return the modification times of objects. On an object store, the time in the lease, by the clock of its
owner, is compared with the clock of the observer. The two may differ by ten minutes.
"""

from __future__ import annotations

import logging
import secrets
import time

from t5ckpt.core.protocols import Clock
from t5ckpt.errors import T5CkptError
from t5ckpt.format.names import READ_LEASE_PREFIX
from t5ckpt.storage import Storage

CLOCK_SECONDS = 600.0
"""The most by which the clocks of machines that share a run on an object store may differ."""
TIME_PREFIX = f'{READ_LEASE_PREFIX}0.0.'
"""The prefix of the file that is written to read the time of the file server: a read lease that expired in 1970."""
_log = logging.getLogger('t5ckpt')


def lease_clock(storage: Storage, clock: Clock) -> Clock:
    """Returns the clock by which the leases of a run expire; on file systems it writes its file at the first call.

    Args:
      storage: the run.
      clock: unix seconds of this machine, for object stores and for a run that may only be read.
    """
    return _LeaseClock(storage, clock)


class _LeaseClock:
    def __init__(self, storage: Storage, clock: Clock):
        self._storage = storage
        self._clock = clock
        self._offset: float | None = None

    def __call__(self) -> float:
        if self._offset is None:
            # Tries twice, because garbage collection may have removed the first file.
            now = self._server_time() or self._server_time()
            if now is None:
                return self._clock()
            self._offset = now - time.monotonic()
        return time.monotonic() + self._offset

    def _server_time(self) -> float | None:
        # Garbage collection removes the file after a crash, and may remove one that is being written.
        try:
            return self._storage.server_time(f'{TIME_PREFIX}{secrets.token_hex(8)}s0')
        except T5CkptError:
            return None


def warn_if_ahead(storage: Storage, key: str, expires: float, lasts: float, now: float) -> None:
    """Warns of a lease that expires later than any new lease would; it may block its step for years."""
    if expires - now > lasts + 2 * CLOCK_SECONDS:
        _log.warning(
            't5ckpt: %s expires at %s, although it lasts %.0f s and now is %s: the clock of its owner or of this machine '
            'is wrong. Correct the clock. If the owner has ended, remove the file',
            storage.url(key),
            time_text(expires),
            lasts,
            time_text(now),
        )


def time_text(unix: float) -> str:
    """The date and time of unix seconds."""
    # A time beyond the year 9999 has no date.
    try:
        return time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(unix))
    except (OverflowError, ValueError, OSError):
        return f'{unix:.0f} s since 1970'
