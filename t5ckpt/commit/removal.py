"""Deletes a checkpoint: hidden first, in one operation, then removed."""

from __future__ import annotations

from t5ckpt.catalog.step_index import Index
from t5ckpt.commit.deletion import (
    is_pinned,
    kept_by,
    remove_checkpoint,
    renamed_for_deletion,
)
from t5ckpt.commit.in_place import Hidden, hide_in_place, remove_in_place
from t5ckpt.commit.read_lease import leased_steps
from t5ckpt.core.protocols import Clock
from t5ckpt.format.names import PINNED, step_dir
from t5ckpt.policies import HELD
from t5ckpt.storage import Storage

__all__ = ['hide_checkpoint', 'remove_hidden']


def hide_checkpoint(
    storage: Storage,
    step: int,
    clock: Clock,
    *,
    even_pinned: bool = False,
    has_looked: bool = False,
    index: Index | None = None,
) -> Hidden | None:
    """Makes a step invisible, in one atomic operation. With ``has_looked`` the caller has just found no read lease on it.

    With ``index``, the markers of an object store as they were just listed, one request less is needed.

    A reader that leases the step in the meantime checks, after it wrote its lease, that the step still exists. If its lease
    is found now, it may have begun to read, and the step is made visible again. So is a step that was pinned in the meantime,
    unless ``even_pinned`` is given.

    Returns:
      What :func:`remove_hidden` is to remove; None where the step has a read lease or is pinned.

    Raises:
      CheckpointNotFoundError: it is gone; another process has deleted it.
      StorageError: it could not be made invisible, and is there whole.
    """

    def is_kept(pinned: bool) -> bool:
        reason = kept_by(storage, step, clock, pinned=pinned)
        return reason is not None and (reason == HELD or not even_pinned or step in leased_steps(storage, clock))

    if not has_looked and step in leased_steps(storage, clock):
        return None
    if storage.renames:
        doomed = renamed_for_deletion(storage, step_dir(step), step, clock)
        if is_kept(is_pinned(storage, doomed)):
            storage.publish(doomed, step_dir(step))
            return None
        return Hidden(doomed, step)
    return hide_in_place(storage, step, clock, lambda keys: is_kept(PINNED in keys), index)


def remove_hidden(storage: Storage, hidden: Hidden, clock: Clock) -> None:
    """Removes what :func:`hide_checkpoint` left, unless garbage collection does; after a crash, the next one does."""
    if hidden.lease is not None:
        remove_in_place(storage, hidden, hidden.lease, clock)
        return
    lock = storage.try_lock(hidden.directory)
    if lock is None:
        return
    try:
        remove_checkpoint(storage, hidden.directory, hidden.step, clock)
    finally:
        lock.close()
