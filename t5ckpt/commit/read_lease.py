"""Read leases: a file beside the steps whose name has the step and the expiry, see ``format/names.py``.

A reader checks that the step still exists after it wrote its lease. A deleter lists the leases after it made the step
invisible. The later of the two sees the other, so no step is deleted while a reader has a lease on it. A lease that a crash
left expires.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator, Iterable

from t5ckpt.catalog.locate import has_step
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import AccessDeniedError
from t5ckpt.format.names import INDEX, READ_LEASE_PREFIX, ReadLease, parse_read_lease, read_lease_file
from t5ckpt.storage import Storage

__all__ = ['leased_directory', 'leased_steps', 'list_read_leases', 'live_steps', 'read_lease']


@contextlib.contextmanager
def read_lease(storage: Storage, step: int, seconds: float, clock: Clock) -> Generator[bool]:
    """Leases a step for at most ``seconds``; yields False where the step was deleted before.

    Raises:
      AccessDeniedError: the run may be read and not be written.
    """
    name = join(leased_directory(storage), read_lease_file(step, int(clock() + seconds) + 1, secrets.token_hex(8)))
    try:
        storage.write(name, b'')
    except AccessDeniedError as error:
        raise AccessDeniedError(
            error.errno,
            f'{storage.url(name)}: step {step} cannot be kept from deletion: {error} Where the run may only be read, leave '
            'hold_seconds out; a keep policy may then delete the step while it is read.',
        ) from error
    try:
        yield has_step(storage, step)
    finally:
        storage.delete_file(name)


def leased_steps(storage: Storage, clock: Clock) -> set[int]:
    """Returns the steps with a read lease that has not expired."""
    return live_steps(list_read_leases(storage), clock())


def live_steps(leases: Iterable[ReadLease], now: float) -> set[int]:
    """Returns the steps of those leases that have not expired."""
    return {lease.step for lease in leases if lease.until >= now}


def list_read_leases(storage: Storage) -> list[ReadLease]:
    """Lists all read leases, also expired ones."""
    found = storage.names(leased_directory(storage), READ_LEASE_PREFIX)
    return [lease for name in found if (lease := parse_read_lease(name)) is not None]


def leased_directory(storage: Storage) -> str:
    """Returns the directory of the leases."""
    return '' if storage.renames else INDEX
