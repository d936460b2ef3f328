"""Completes a committed step on storage that cannot rename: removes what its manifest does not name, and writes T5X's names.

The files to remove are those of a checkpoint that was overwritten, or of a writer that was killed or came second, see
``commit/by_manifest.py``.
"""

from __future__ import annotations

import errno
from collections.abc import Collection

from t5ckpt.catalog.locate import Located
from t5ckpt.commit.lease_files import write_leases_of
from t5ckpt.commit.occupancy import generations_in
from t5ckpt.commit.removal import keys_below
from t5ckpt.commit.write_lease import WriteLease
from t5ckpt.core.keys import join
from t5ckpt.core.thread_pool import Pool
from t5ckpt.errors import StorageError
from t5ckpt.format.names import (
    MANIFEST,
    generation_dir,
    generation_of,
    positions_for_t5x,
    step_dir,
    superseded,
)
from t5ckpt.reading.contents import listed_files
from t5ckpt.reading.raw_files import read_raw
from t5ckpt.storage import Storage

_WORKERS = 16


def _located(storage: Storage, step: int) -> Located:
    return Located(storage, step_dir(step), MANIFEST, step)


def complete_step(storage: Storage, step: int, lease: WriteLease) -> None:
    """Removes the files of a committed step that its manifest does not name, and copies its positions to T5X's names.

    Lists the files before it checks the lease, so those of a process that takes the step over later are not among them. Those of
    other writers stay: the writer of a file that was listed has a record, which is listed after it, or it has ended, and its
    manifest is read after that if it has committed. The files of a step that T5X wrote in place are unknown, and all stay.

    Raises:
      CorruptCheckpointError: the facts, or the file checksums, are damaged.
      StorageError: a file could not be read or removed, or another process has taken the step over.
    """
    located = _located(storage, step)
    keys = keys_below(storage, located.directory)
    written = {generation_dir(other.nonce) for other in write_leases_of(storage, step)}
    raw = read_raw(located, checksums=True)
    if raw.facts is not None:
        listed = {*listed_files(located, raw), *raw.versions}
        # Without positions that were removed, so that T5X's names for them are of the checkpoint that was replaced.
        current = listed.intersection(keys)
    else:
        named = {'', *generations_in(raw.manifest or b'')}
        current = {key for key in keys if generation_of(key) in named}
    doomed = {key for key in superseded(keys, current) if generation_of(key) not in written}
    if not lease.is_ours():
        raise StorageError(errno.EBUSY, f'{located.url} was taken over by another process in the meantime')
    storage.delete_files([join(located.directory, key) for key in sorted(doomed)])
    copy_positions(storage, located.directory, [key for key in keys if key in current])


def copy_positions(storage: Storage, directory: str, keys: Collection[str]) -> None:
    """Copies the positions of data iterators among some files of a step to T5X's names."""
    names = positions_for_t5x(keys)

    def copy(item: tuple[str, str]) -> None:
        storage.write(join(directory, item[0]), storage.read(join(directory, item[1])))

    with Pool(_WORKERS) as pool:
        for future in [pool.submit(copy, item) for item in names.items()]:
            future.result()
