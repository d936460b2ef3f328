"""The mark ``PINNED`` in a step's directory, which no retention deletes (T5X's name)."""

from __future__ import annotations

from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.format.names import MANIFEST, PINNED
from t5ckpt.storage import Storage

__all__ = ['is_pinned_at', 'pin_at', 'unpin_at']


def pin_at(storage: Storage, text: str) -> None:
    """Marks the checkpoint at a storage's root.

    Raises:
      CheckpointNotFoundError: it is not a checkpoint, or another process has deleted it meanwhile.
    """
    if not storage.is_file(MANIFEST):
        storage.check_reachable(MANIFEST)
        raise CheckpointNotFoundError(f'{storage.url()} is no checkpoint; pass the directory of a step.')
    storage.write(PINNED, text.encode())
    if not storage.renames and not storage.is_file(MANIFEST):
        # A deleter that was first does not see the mark, and would leave it behind.
        storage.delete_file(PINNED)
        raise CheckpointNotFoundError(f'{storage.url()}: another process has deleted it.')


def unpin_at(storage: Storage) -> None:
    """Takes the mark away; nothing happens when there is none."""
    storage.delete_file(PINNED)
    storage.check_reachable(PINNED)


def is_pinned_at(storage: Storage) -> bool:
    """Whether the mark is there."""
    if storage.is_file(PINNED):
        return True
    storage.check_reachable(PINNED)
    return False
