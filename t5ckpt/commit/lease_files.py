"""The leases of a run: one listing shows those of its writers, deleters and readers.

On object stores they lie in ``.t5ckpt/``. Where directories can be renamed they lie beside the steps, and the write lease of
a save is in its temporary directory instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from t5ckpt.catalog.listing import catalog_of
from t5ckpt.format.names import (
    DELETING_PREFIX,
    INDEX,
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

__all__ = ['Leases', 'leased_directory', 'list_leases', 'live_steps', 'write_lease_key', 'write_leases_of']


@dataclasses.dataclass(frozen=True)
class Leases:
    """What one listing shows; expired leases are among them.

    ``partial`` are the names of write leases that a process began to write, or was killed over.
    """

    of_writers: tuple[WriteLeaseName, ...]
    of_readers: tuple[ReadLease, ...]
    partial: tuple[str, ...] = ()


def leased_directory(storage: Storage) -> str:
    """Returns the directory of the leases."""
    return '' if storage.renames else INDEX


def list_leases(storage: Storage) -> Leases:
    """Lists all leases of a run."""
    index = catalog_of(storage).index()
    if index is not None:
        return Leases(index.write_leases, index.read_leases)
    names = storage.names('', (READ_LEASE_PREFIX, DELETING_PREFIX))
    return Leases(
        tuple(lease for name in names if (lease := parse_write_lease(name)) is not None),
        tuple(lease for name in names if (lease := parse_read_lease(name)) is not None),
        tuple(name for name in names if name.startswith(DELETING_PREFIX) and name.endswith(PARTIAL_SUFFIX)),
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


def live_steps(leases: Iterable[ReadLease], now: float) -> set[int]:
    """Returns the steps of those read leases that have not expired."""
    return {lease.step for lease in leases if lease.until >= now}
