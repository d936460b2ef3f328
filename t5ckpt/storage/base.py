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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from t5ckpt.errors import StorageError
from t5ckpt.storage.error_mapping import foreign_errors

if TYPE_CHECKING:
    # Listing steps and reading manifests need no TensorStore, whose import is most of what `t5ckpt ls` would wait for.
    import numpy as np
    import tensorstore as ts

__all__ = ['Entry', 'Storage', 'foreign_errors']


@dataclasses.dataclass(frozen=True)
class Entry:
    """One name in a directory.

    Attributes:
      name: the last component.
      is_dir: whether there is something below it.
      size: bytes, 0 for a directory, None where a listing does not say it.
      mtime: unix seconds, 0.0 where the backend does not say.
    """

    name: str
    is_dir: bool
    size: int | None = 0
    mtime: float = 0.0


class Storage(ABC):
    """One root on one backend."""

    renames: bool
    """Whether ``publish`` is one atomic rename."""
    links = False
    """Whether ``link`` works."""
    seeks = True
    """Whether a listing can begin in the middle, so that ``names`` can leave directories out without walking them."""
    orbax_commits = False
    """Whether Orbax writes in place here, and shows with a file ``commit_success.txt`` that it has written everything."""
    is_shared = True
    """Whether other processes can see the same root, as far as it can be known."""
    caches = False
    """Whether ``read_cached`` keeps files on this machine."""
    driver: str
    """The kvstore driver that a manifest names for arrays written here: 'file' or 'gcs', the two T5X accepts."""

    @abstractmethod
    def url(self, key: str = '') -> str:
        """The key as a user would write it."""

    @abstractmethod
    def read(self, key: str) -> bytes:
        """The bytes of a key. Raises CheckpointNotFoundError when there is none."""

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes of a key from ``start`` to ``stop``; fewer where the file ends before."""
        return self.read(key)[start:stop]

    def read_cached(self, key: str, is_good: Callable[[bytes], bool] | None) -> bytes:
        """Reads a key through the cache of this machine, where the storage has one (``caches``).

        Args:
          key: the file.
          is_good: whether bytes from the cache are those of the file; None to compare the file's version instead.

        Raises:
          CheckpointNotFoundError: the key does not exist.
        """
        del is_good
        return self.read(key)

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Writes a key durably and whole."""

    def direct_bytes(self, *, in_background: bool) -> int | None:
        """The smallest size in bytes of a chunk file that a save writes with ``write_direct``; None if it writes none so."""
        del in_background

    def write_direct(self, key: str, data: np.ndarray) -> None:
        """Writes a file of an unfinished checkpoint past the page cache, and makes its directory.

        Args:
          key: of the file.
          data: uint8 (n,), contiguous.

        Raises:
          OSError: the file cannot be written.
        """
        raise NotImplementedError

    @abstractmethod
    def kind(self, key: str) -> str | None:
        """``'file'``, ``'dir'`` or None."""

    def broken_links(self) -> Mapping[str, StorageError]:
        """An error for each name in the root that is a symbolic link to nothing, which ``entries`` leaves out."""
        return {}

    def root_kind(self) -> str | None:
        """``kind`` of the root, without a request: always ``'dir'`` on an object store, which has no directories."""
        return self.kind('')

    def is_file(self, key: str) -> bool:
        """Whether there is a file of this name; cheaper than ``kind`` where there are no directories."""
        return self.kind(key) == 'file'

    def are_files(self, keys: Sequence[str]) -> list[bool]:
        """``is_file`` of each, all asked for at once where that helps."""
        return [self.is_file(key) for key in keys]

    def check_reachable(self, key: str) -> None:
        """Called before a missing checkpoint is reported: raises StorageError where the bucket does not exist."""
        del key

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Returns the bytes of a file, or None where it does not exist. On an object store this reads the file."""

    def known_size(self, key: str) -> int | None:
        """``size``, without reading the file: -1 on an object store."""
        return self.size(key)

    def mtime(self, key: str) -> float | None:
        """When a file was written, in unix seconds; None if it does not exist, or takes a listing as on an object store."""
        del key

    def stamp(self, key: str, before: tuple[int, ...] | None = None) -> tuple[int, ...] | None:
        """Returns a value that changes when a file is replaced, written to, or gets or loses a name; None where there is none.

        With ``before``, an earlier stamp: also None if more than the names has changed since then.
        """
        del key, before
        return None

    def modified(self, key: str) -> float | None:
        """Returns when a file was last written, in unix seconds of the file server's clock.

        None where the file does not exist, and where the storage has no such time, as on an object store.
        """
        del key

    def version(self, key: str) -> Any:
        """Returns a value that changes when a file is replaced, also by one with equal bytes; None where it does not exist.

        On an object store this is one small request.
        """
        return self.stamp(key)

    def read_with_version(self, key: str) -> tuple[bytes, Any]:
        """The bytes of a key and its ``version``. If the file is replaced meanwhile, the version is not newer than the bytes."""
        version = self.version(key)
        return self.read(key), version

    def replace(self, key: str, data: bytes, version: Any) -> Any:
        """Writes a key if its ``version`` is still this one. Returns the new version, or None if it is another by now.

        An object store compares and writes in one request, as far as it can; the rest of the storages in two.
        """
        if self.version(key) != version:
            return None
        self.write(key, data)
        return self.version(key)

    @abstractmethod
    def entries(self, key: str = '') -> list[Entry]:
        """Returns the entries directly below ``key``, by name; an empty list where there are none."""

    def names(self, key: str, beginning: str | tuple[str, ...], without: Collection[str] = ()) -> list[str]:
        """The names directly below ``key`` that begin so, in order; those of the directories ``without`` left out.

        On an object store this lists everything below these names, and nothing else.
        """
        found = (entry.name for entry in self.entries(key))
        return [name for name in found if name.startswith(beginning) and name not in without]

    @abstractmethod
    def walk(self, key: str) -> Iterator[tuple[str, int | None]]:
        """Every file below ``key`` as (key, bytes), by name; None where a listing does not say the bytes."""

    @abstractmethod
    def make_dir(self, key: str, exclusive: bool = False) -> bool:
        """Makes a directory and its parents. With ``exclusive`` says False when it is there already."""

    @abstractmethod
    def try_lock(self, key: str) -> Any:
        """Locks a directory for its writer without waiting; returns None if another live process has the lock.

        Returns:
          An object with ``close()``, which releases the lock, and ``is_held``: False where locks do not work.
        """

    @abstractmethod
    def sync_tree(self, key: str, below: Sequence[str]) -> None:
        """Makes the entries of a directory, and of those ``below`` it, durable; files are durable already.

        They are named, because to find them would be to list every file of a huge checkpoint.
        """

    @abstractmethod
    def publish(self, source: str, target: str) -> None:
        """Renames a directory onto a name that does not exist, durably. Only where ``renames``."""

    def exchange(self, source: str, target: str) -> bool:
        """Swaps two directories, durably and at once; says False where that does not work."""
        del source, target
        return False

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

    def delete_files(self, keys: Sequence[str]) -> None:
        """Removes many keys, all at once where that helps."""
        for key in keys:
            self.delete_file(key)

    @abstractmethod
    def delete_tree(self, key: str) -> None:
        """Removes everything below ``key``, and the directory."""

    @abstractmethod
    def array_kvstore(self, key: str) -> dict[str, Any]:
        """The TensorStore kvstore spec of the directory ``key``, absolute."""

    @abstractmethod
    def context(self) -> ts.Context:
        """The TensorStore context in which that spec is to be opened; an error in a process forked after a first use."""

    def open_kvstore(self, key: str) -> ts.KvStore:
        """TensorStore's view of the directory ``key``, for many small writes at once."""
        import tensorstore as ts

        with foreign_errors(self.url(key)):
            return ts.KvStore.open(self.array_kvstore(key), context=self.context()).result()

    def wait(self, future: Any) -> Any:
        """The result of a TensorStore future on this storage; never for ever, where that can happen.

        Errors of TensorStore come as they are: the caller maps them with ``foreign_errors`` and a better name.
        """
        return future.result()

    def local_path(self, key: str) -> str | None:
        """The key as a path of the operating system, or None where it has none."""
        del key
        return None
