"""Looks for, reads and removes the file ``PINNED`` of a step; ``commit/holds.py`` writes it."""

from __future__ import annotations

import logging

from t5ckpt.core.keys import join
from t5ckpt.errors import T5CkptError
from t5ckpt.format.names import PINNED
from t5ckpt.storage import Storage

NO_REASON = '1'
"""The contents of the file of a pin without a reason (T5X's)."""
_TEXT_BYTES = 1000
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
    # An error if the bucket does not exist.
    storage.kind('')
    return False


def pin_text(storage: Storage, directory: str) -> str:
    """The reason in the pin of a step's directory; '' if it has none, or cannot be read."""
    try:
        text = storage.read(join(directory, PINNED), 0, _TEXT_BYTES).decode(errors='replace').strip()
    except T5CkptError:
        return ''
    return '' if text == NO_REASON else text


def pin_reason(storage: Storage, directory: str) -> str:
    """The reason to keep a pinned step: 'pinned', or 'pinned: ' and the user's reason."""
    return ': '.join(filter(None, ['pinned', pin_text(storage, directory)]))
