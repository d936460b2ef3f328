"""Looks for and removes the file ``PINNED`` of a step; ``commit/pins.py`` writes it."""

from __future__ import annotations

import logging

from t5ckpt.format.names import PINNED
from t5ckpt.storage import Storage

__all__ = ['is_pinned_at', 'unpin_at']

_log = logging.getLogger('t5ckpt')


def unpin_at(storage: Storage) -> None:
    """Unpins the checkpoint at a storage's root, or logs that it is not pinned."""
    if is_pinned_at(storage):
        storage.delete_file(PINNED)
    else:
        _log.info('t5ckpt: %s is not pinned', storage.url().rstrip('/'))


def is_pinned_at(storage: Storage) -> bool:
    """Whether the checkpoint at a storage's root is pinned."""
    if storage.is_file(PINNED):
        return True
    storage.check_reachable(PINNED)
    return False
