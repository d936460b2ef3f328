"""The storage of a checkpointer that was given no directory.

T5X makes every restorer with ``checkpoints_dir=''`` and gives a path to ``restore``, so an empty directory is an error
only where it is used. Every operation here raises that error; nothing else has to ask whether there is a directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from t5ckpt.errors import InvalidPathError
from t5ckpt.storage.base import Entry, Storage

__all__ = ['AbsentStorage', 'require_directory']


def require_directory(storage: Storage) -> None:
    """Raises InvalidPathError where no directory was given."""
    if isinstance(storage, AbsentStorage):
        storage.refuse()


class AbsentStorage(Storage):
    """No directory."""

    renames = True
    driver = 'file'

    def refuse(self) -> NoReturn:
        """Raises the error of every operation."""
        raise InvalidPathError(
            'checkpoints_dir is empty: this checkpointer can only restore(path=...). To save, to list steps and to '
            'restore a step, pass checkpoints_dir=, the directory of the run.'
        )

    def url(self, key: str = '') -> str:
        return key

    def read(self, key: str) -> bytes:
        self.refuse()

    def write(self, key: str, data: bytes) -> None:
        self.refuse()

    def kind(self, key: str) -> str | None:
        self.refuse()

    def size(self, key: str) -> int | None:
        self.refuse()

    def entries(self, key: str = '') -> list[Entry]:
        self.refuse()

    def walk(self, key: str) -> Iterator[tuple[str, int | None]]:
        self.refuse()

    def make_dir(self, key: str, exclusive: bool = False) -> bool:
        self.refuse()

    def try_lock(self, key: str) -> Any:
        self.refuse()

    def sync_tree(self, key: str, below: Sequence[str]) -> None:
        self.refuse()

    def publish(self, source: str, target: str) -> None:
        self.refuse()

    def delete_file(self, key: str) -> None:
        self.refuse()

    def delete_tree(self, key: str) -> None:
        self.refuse()

    def array_kvstore(self, key: str) -> dict[str, Any]:
        self.refuse()

    def context(self) -> Any:
        self.refuse()
