"""A reader's hold on a step: a file beside the steps whose name says which and until when, see ``format/names.py``.

Who takes hold looks afterwards whether the step is still there; who deletes looks for holds after making it invisible.
Whichever comes second sees the other, so a held step is not deleted under its reader. A hold that was left by a crash
ends by itself.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator, Iterable

from t5ckpt.catalog.locate import has_step
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.format.names import INDEX, READ_LEASE_PREFIX, ReadLease, parse_read_lease, read_lease_file
from t5ckpt.storage import Storage

__all__ = ['leased_directory', 'leased_steps', 'list_read_leases', 'live_steps', 'read_lease']


@contextlib.contextmanager
def read_lease(storage: Storage, step: int, seconds: float, clock: Clock) -> Generator[bool]:
    """Holds a step for so many seconds at most; gives False where it is gone already."""
    name = join(leased_directory(storage), read_lease_file(step, int(clock() + seconds) + 1, secrets.token_hex(8)))
    storage.write(name, b'')
    try:
        yield has_step(storage, step)
    finally:
        storage.delete_file(name)


def leased_steps(storage: Storage, clock: Clock) -> set[int]:
    """The steps that readers ask not to be deleted now."""
    return live_steps(list_read_leases(storage), clock())


def live_steps(holds: Iterable[ReadLease], now: float) -> set[int]:
    """The steps of the leases that have not expired."""
    return {hold.step for hold in holds if hold.until >= now}


def list_read_leases(storage: Storage) -> list[ReadLease]:
    """All of them, also expired ones."""
    found = storage.names(leased_directory(storage), READ_LEASE_PREFIX)
    return [hold for name in found if (hold := parse_read_lease(name)) is not None]


def leased_directory(storage: Storage) -> str:
    """The directory of the leases."""
    return '' if storage.renames else INDEX
