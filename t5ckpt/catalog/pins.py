"""Looks for and removes the file ``PINNED`` of a step; ``commit/pins.py`` writes it."""

from __future__ import annotations

from t5ckpt.format.names import PINNED
from t5ckpt.storage import Storage

__all__ = ['is_pinned_at', 'unpin_at']


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
