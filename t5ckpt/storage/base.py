"""The interface that every backend implements, and the rules it keeps.

Keys are '/'-separated and relative to the storage's root. A backend makes three promises:

- ``write`` returns when the bytes are durable, and a reader sees all of them or none.
- ``publish`` makes a whole directory visible in one step where the backend can rename (``renames``); where it cannot,
  checkpoints are written in place and the manifest, written last, is that step.
- Errors are of ``t5ckpt.errors``; no foreign error leaves.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from t5ckpt.storage._errors import foreign_errors

if TYPE_CHECKING:
    # Listing steps and reading manifests need no TensorStore, whose import is most of what `t5ckpt ls` would wait for.
    import tensorstore as ts

__all__ = ['Entry', 'Storage', 'foreign_errors']


@dataclasses.dataclass(frozen=True)
class Entry:
    """One name in a directory.

    Attributes:
      name: the last component.
      is_dir: whether there is something below it.
      size: bytes, 0 for a directory.
      mtime: unix seconds, 0.0 where the backend does not say.
    """

    name: str
    is_dir: bool
    size: int = 0
    mtime: float = 0.0


class Storage(ABC):
    """One root on one backend."""

    renames: bool
    """Whether ``publish`` is one atomic rename."""
    is_shared = True
    """Whether other processes can see the same root, as far as it can be known."""
    driver: str
    """The kvstore driver that a manifest names for arrays written here: 'file' or 'gcs', the two T5X accepts."""

    @abstractmethod
    def url(self, key: str = '') -> str:
        """The key as a user would write it."""

    @abstractmethod
    def read(self, key: str) -> bytes:
        """The bytes of a key. Raises CheckpointNotFoundError when there is none."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Writes a key durably and whole."""

    @abstractmethod
    def kind(self, key: str) -> str | None:
        """``'file'``, ``'dir'`` or None."""

    @abstractmethod
    def size(self, key: str) -> int | None:
        """The bytes of a file, or None where there is no file."""

    def stamp(self, key: str, before: tuple[int, ...] | None = None) -> tuple[int, ...] | None:
        """What changes when a file is replaced, written to, or gets or loses a name; None where there is no such thing.

        With ``before``, an earlier stamp: None too if more has changed since than the names.
        """
        del key, before
        return None

    @abstractmethod
    def entries(self, key: str = '') -> list[Entry]:
        """What lies directly below ``key``, by name; empty when there is nothing."""

    @abstractmethod
    def walk(self, key: str) -> Iterator[tuple[str, int]]:
        """Every file below ``key`` as (key, bytes), by name."""

    @abstractmethod
    def make_dir(self, key: str, exclusive: bool = False) -> bool:
        """Makes a directory and its parents. With ``exclusive`` says False when it is there already."""

    @abstractmethod
    def claim(self, key: str) -> Any:
        """Takes the owner's lock of a directory, or None when another live process holds it.

        Returns:
          An object with ``close()``, which lets go, and ``is_held``: False where locks do not work.
        """

    @abstractmethod
    def sync_tree(self, key: str, below: Sequence[str]) -> None:
        """Makes the entries of a directory, and of those ``below`` it, durable; files are durable already.

        They are named, because to find them would be to list every file of a huge checkpoint.
        """

    @abstractmethod
    def publish(self, source: str, target: str) -> None:
        """Renames a directory onto a name that does not exist, durably. Only where ``renames``."""

    def link(self, source: str, target: str) -> bool:
        """Makes ``target`` another name of the file ``source``, with parents; says False where that does not work."""
        return self.link_from(self, source, target)

    def link_from(self, other: Storage, source: str, target: str) -> bool:
        """The same, with ``source`` a file of another storage."""
        del other, source, target
        return False

    @abstractmethod
    def delete_file(self, key: str) -> None:
        """Removes one key; nothing happens when there is none."""

    @abstractmethod
    def delete_tree(self, key: str) -> None:
        """Removes everything below ``key``, and the directory."""

    @abstractmethod
    def array_kvstore(self, key: str) -> dict[str, Any]:
        """The TensorStore kvstore spec of the directory ``key``, absolute."""

    @abstractmethod
    def context(self) -> ts.Context:
        """The TensorStore context in which that spec is to be opened."""

    def open_kvstore(self, key: str) -> ts.KvStore:
        """TensorStore's view of the directory ``key``, for many small writes at once."""
        import tensorstore as ts

        with foreign_errors(self.url(key)):
            return ts.KvStore.open(self.array_kvstore(key), context=self.context()).result()

    def local_path(self, key: str) -> str | None:
        """The key as a path of the operating system, or None where it has none."""
        del key
        return None
