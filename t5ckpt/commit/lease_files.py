"""Lists the read and write leases of a run in one listing.

On object stores, leases are in ``.t5ckpt/``. On file systems, they are in the run's directory, and the write lease of a save
is in its temporary directory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from t5ckpt.catalog.listing import catalog_of
from t5ckpt.commit.lease_time import CLOCK_SECONDS, lease_clock, warn_if_ahead
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.format.names import (
    DELETING_PREFIX,
    PARTIAL_SUFFIX,
    READ_LEASE_PREFIX,
    ReadLease,
    WriteLeaseName,
    busy_key,
    deleting_file,
    parse_read_lease,
    parse_write_lease,
)
from t5ckpt.storage import Storage

# How long a lease may last of which nothing says it.
_LONGEST_SECONDS = 30 * 86400


@dataclasses.dataclass(frozen=True)
class Leases:
    """The leases in one listing, including expired ones.

    ``partial`` has the names of leases that a process is writing, or was writing when it was killed.
    """

    of_writers: tuple[WriteLeaseName, ...]
    of_readers: tuple[ReadLease, ...]
    partial: tuple[str, ...] = ()


def leased_directory(storage: Storage) -> str:
    """Returns the directory of the leases."""
    return catalog_of(storage).lease_directory


def list_leases(storage: Storage) -> Leases:
    """Lists all leases of a run."""
    index = catalog_of(storage).index()
    if index is not None:
        return Leases(index.write_leases, index.read_leases)
    names = storage.names('', (READ_LEASE_PREFIX, DELETING_PREFIX))
    return Leases(
        tuple(lease for name in names if (lease := parse_write_lease(name)) is not None),
        tuple(lease for name in names if (lease := parse_read_lease(name)) is not None),
        tuple(name for name in names if name.endswith(PARTIAL_SUFFIX)),
    )


def write_leases_of(storage: Storage, step: int) -> list[WriteLeaseName]:
    """Lists the write leases of one step."""
    beginning = write_lease_key(storage, step, '').removesuffix('.')
    directory, _, prefix = beginning.rpartition('/')
    names = storage.names(directory, prefix)
    found = [parse_write_lease(f'{directory}/{name}' if directory else name) for name in names]
    return [lease for lease in found if lease is not None and lease.step == step]


def write_lease_key(storage: Storage, step: int, nonce: str) -> str:
    """Returns the key of the write lease of a step."""
    return busy_key(step, nonce) if leased_directory(storage) else deleting_file(step, nonce)


def live_steps(storage: Storage, leases: Iterable[ReadLease], clock: Clock) -> set[int]:
    """Returns the steps of those read leases that have not expired."""
    now = lease_clock(storage, clock)
    return {lease.step for lease in leases if is_live(storage, lease, now)}


def is_live(storage: Storage, lease: ReadLease, clock: Clock) -> bool:
    """Returns whether a read lease has not expired; ``clock`` is a :func:`~t5ckpt.commit.lease_time.lease_clock`."""
    return _expiry(storage, lease) >= clock()


def warn_of_lease(storage: Storage, lease: ReadLease, clock: Clock) -> None:
    """Warns of a read lease that expires later than one that is taken now; the arguments are those of :func:`is_live`."""
    key = join(leased_directory(storage), lease.name)
    lasts = _LONGEST_SECONDS if lease.seconds is None else lease.seconds
    warn_if_ahead(storage, key, _expiry(storage, lease), lasts, clock())


def _expiry(storage: Storage, lease: ReadLease) -> float:
    # A reader writes its file once. The name of an older version does not say how long the lease lasts.
    written = None if lease.seconds is None else storage.modified(join(leased_directory(storage), lease.name))
    return lease.until + CLOCK_SECONDS if written is None or lease.seconds is None else written + lease.seconds
