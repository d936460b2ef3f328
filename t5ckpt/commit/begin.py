"""Begins a transaction: chooses the commit strategy, and adopts the files of an earlier attempt at the same write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from t5ckpt.catalog.step_index import Index, ensured_index
from t5ckpt.commit.by_manifest import ManifestTransaction
from t5ckpt.commit.by_rename import RenameTransaction
from t5ckpt.commit.garbage_collection import is_abandoned
from t5ckpt.commit.transaction import Transaction
from t5ckpt.commit.write_lease import TAKE_OVER_SECONDS
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import FormatError
from t5ckpt.format.names import SIDECAR, parse_leftover, step_dir
from t5ckpt.format.sidecar import decode_sidecar
from t5ckpt.storage import Storage

__all__ = ['begin', 'resume', 'unfinished']


def begin(
    storage: Storage,
    step: int,
    clock: Clock,
    writer: Mapping[str, Any],
    index: Index | None = None,
    may_replace: Callable[[], bool] = lambda: False,
) -> Transaction:
    """Creates and locks the directory that a save writes to.

    The caller runs garbage collection before, which returns ``index``. On object stores that also writes missing steps markers;
    listings do not search for these after the marker of this step exists. ``may_replace`` is called under the lock or the write
    lease, and returns whether a complete checkpoint of the step may be replaced.
    """
    storage.make_dir('')
    if not storage.renames:
        return ManifestTransaction.begin(storage, step, clock, index, may_replace)
    work = RenameTransaction.begin(storage, step, clock, writer)
    try:
        work.replaces = may_replace()
    except BaseException:
        work.rollback()
        raise
    return work


def resume(storage: Storage, step: int, clock: Clock, writer: Mapping[str, Any]) -> Transaction:
    """Resumes an unfinished write of the same contents, which ``writer['resume']`` identifies, or begins a new one."""
    if storage.renames:
        again = unfinished(storage, step, clock, writer)
        return begin(storage, step, clock, writer) if again is None else again
    index = ensured_index(storage)

    def is_same() -> bool:
        return _resume_text(storage, step_dir(step)) == writer['resume']

    return ManifestTransaction.resume(storage, step, clock, index, writer, is_same)


def unfinished(storage: Storage, step: int, clock: Clock, writer: Mapping[str, Any]) -> Transaction | None:
    """Adopts the temporary directory of a killed write of the same contents; None if there is none."""
    for entry in storage.entries() if storage.renames else ():
        leftover = parse_leftover(entry.name)
        if leftover is None or leftover.state != 'tmp' or leftover.step != step:
            continue
        lock = storage.try_lock(entry.name)
        if lock is None:
            continue
        is_same = lock.is_held and _resume_text(storage, entry.name) == writer['resume']
        if is_same and is_abandoned(storage, leftover, clock(), TAKE_OVER_SECONDS, has_lock=True):
            work = RenameTransaction(storage, step, entry.name, clock, lock)
            work.take_lease(writer)
            return work
        lock.close()
    return None


def _resume_text(storage: Storage, directory: str) -> Any:
    """Returns the text that identifies the contents of an unfinished write; None if its lease has none."""
    key = join(directory, SIDECAR)
    if storage.kind(key) != 'file':
        return None
    try:
        return decode_sidecar(storage.read(key), storage.url(key)).writer.get('resume')
    except FormatError:
        return None
