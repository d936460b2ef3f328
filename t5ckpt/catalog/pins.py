"""Reads and writes the file ``PINNED`` (T5X's name) in a step's directory, which keeps retention from deleting the step."""

from __future__ import annotations

from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.format.names import MANIFEST, PINNED
from t5ckpt.storage import Storage

__all__ = ['is_pinned_at', 'pin_at', 'unpin_at']


def pin_at(storage: Storage, text: str) -> None:
    """Pins the checkpoint at a storage's root.

    Raises:
      CheckpointNotFoundError: it is not a checkpoint, or another process deletes it at the same time.
    """
    if not storage.is_file(MANIFEST):
        storage.check_reachable(MANIFEST)
        raise CheckpointNotFoundError(f'{storage.url()} is not a checkpoint; pass the directory of a step.')
    storage.write(PINNED, text.encode())
    if not storage.renames and not storage.is_file(MANIFEST):
        # A deletion that began earlier does not see the file, and would not remove it.
        storage.delete_file(PINNED)
        raise CheckpointNotFoundError(f'{storage.url()}: another process has deleted it.')


def unpin_at(storage: Storage) -> None:
    """Unpins the checkpoint at a storage's root, if it is pinned."""
    storage.delete_file(PINNED)
    storage.check_reachable(PINNED)


def is_pinned_at(storage: Storage) -> bool:
    """Whether the checkpoint at a storage's root is pinned."""
    if storage.is_file(PINNED):
        return True
    storage.check_reachable(PINNED)
    return False
