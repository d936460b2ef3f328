"""Finds the leases of a step, and when a read lease expires.

On object stores, leases are in ``.t5ckpt/``. On file systems, they are in the run's directory, and the write lease of a save
is in its temporary directory.
"""

from __future__ import annotations

from collections.abc import Iterable

from t5ckpt.catalog.listing import catalog_of
from t5ckpt.commit.lease_time import CLOCK_SECONDS, lease_clock, warn_if_ahead
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.format.names import ReadLease, WriteLeaseName, parse_write_lease
from t5ckpt.storage import Storage

# The assumed longest duration of a lease whose name does not have one.
_LONGEST_SECONDS = 30 * 86400


def leased_directory(storage: Storage) -> str:
    """Returns the directory of the leases."""
    return catalog_of(storage).lease_directory


def write_leases_of(storage: Storage, step: int) -> list[WriteLeaseName]:
    """Lists the write leases of one step."""
    beginning = catalog_of(storage).write_lease_key(step, '').removesuffix('.')
    directory, _, prefix = beginning.rpartition('/')
    leases = [
        parse_write_lease(f'{directory}/{name}' if directory else name) for name in storage.names(directory, prefix)
    ]
    return [lease for lease in leases if lease is not None and lease.step == step]


def live_steps(storage: Storage, leases: Iterable[ReadLease], clock: Clock) -> set[int]:
    """Returns the steps of those read leases that have not expired."""
    now = lease_clock(storage, clock)
    return {lease.step for lease in leases if is_live(storage, lease, now)}


def is_live(storage: Storage, lease: ReadLease, clock: Clock) -> bool:
    """Returns whether a read lease has not expired; ``clock`` is a :func:`~t5ckpt.commit.lease_time.lease_clock`."""
    return _expiry(storage, lease) >= clock()


def warn_of_lease(storage: Storage, lease: ReadLease, clock: Clock) -> None:
    """Warns of a read lease that expires later than a new one would; the arguments are those of :func:`is_live`."""
    key = join(leased_directory(storage), lease.name)
    lasts = _LONGEST_SECONDS if lease.seconds is None else lease.seconds
    warn_if_ahead(storage, key, _expiry(storage, lease), lasts, clock())


def _expiry(storage: Storage, lease: ReadLease) -> float:
    # A reader writes its file once. The name of an older version does not say how long the lease lasts.
    written = None if lease.seconds is None else storage.modified(join(leased_directory(storage), lease.name))
    return lease.until + CLOCK_SECONDS if written is None or lease.seconds is None else written + lease.seconds
