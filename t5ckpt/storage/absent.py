"""The storage of a checkpointer without a directory.

T5X makes every restorer with ``checkpoints_dir=''`` and passes a path to ``restore``, so an empty directory is an error only
when it is used. Every operation of this storage raises that error, so no other code has to check for a directory.
"""

from __future__ import annotations

from typing import Any, NoReturn

from t5ckpt.errors import InvalidPathError
from t5ckpt.storage.base import Storage


def require_directory(storage: Storage) -> None:
    """Raises InvalidPathError for a checkpointer without a directory."""
    if storage.is_absent:
        storage.make_dir('')


class AbsentStorage(Storage):
    """No directory."""

    commits_by_rename = True
    is_absent = True
    driver = 'file'

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raises the error of every operation."""
        raise InvalidPathError(
            'checkpoints_dir is empty: this checkpointer can only restore(path=...). To save, to list steps and to '
            'restore a step, pass checkpoints_dir=, the directory of the run.'
        )

    def url(self, key: str = '') -> str:
        return key

    read = write = kind = size = entries = walk = make_dir = try_lock = _refuse
    sync_tree = publish = delete_files = delete_tree = array_kvstore = context = _refuse
