"""The interface that every backend implements. CONTRIBUTING.md lists the steps to add one.

Keys are '/'-separated and relative to the storage's root. Every backend guarantees:

- ``write`` returns when the bytes are durable, and a reader sees all of them or none.
- If it ``commits_by_rename``, ``publish`` makes a whole directory visible in one atomic operation. Otherwise checkpoints are
  written in place, and the write of the manifest, which is the last one, makes them visible.
- All errors are those of ``t5ckpt.errors``.
"""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from t5ckpt.format.file_checksums import FileEntry, entry_of

if TYPE_CHECKING:
    # Listing steps and reading manifests do not need TensorStore, whose import takes most of the time of `t5ckpt ls`.
    import tensorstore as ts


@dataclasses.dataclass(frozen=True)
class Entry:
    """One name in a directory.

    Attributes:
      name: the last component.
      is_dir: whether it is a directory or a prefix of other keys.
      size: bytes; 0 for a directory, None if the listing does not have it.
    """

    name: str
    is_dir: bool
    size: int | None = 0


class Lock(ABC):
    """The lock of a directory; see :meth:`Storage.try_lock`."""

    is_held = True
    """Whether other processes are kept away; False if locks do not work."""
    reason = ''
    """The cause if locks do not work, such as the error of the file system."""

    @abstractmethod
    def is_current(self) -> bool:
        """Whether the directory is still the one that was locked; False if it was removed, also if it was created again."""

    @abstractmethod
    def close(self) -> None:
        """Releases the lock."""


class Storage(ABC):
    """One root on one backend."""

    commits_by_rename: bool
    """Whether a checkpoint becomes visible by ``publish``, one atomic rename, or else by the write of its manifest.

    Without it, a request that a process has given up may still be applied, as by the server of an object store.
    """
    links = False
    """Whether ``link`` works."""
    copies = False
    """Whether ``copy_unchanged`` may work, as far as is known."""
    compares_versions = False
    """Whether ``replace`` of an existing key compares and writes in one operation, as far as is known."""
    orbax_commits = False
    """Whether Orbax writes in place here, and marks a complete checkpoint with a file ``commit_success.txt``."""
    is_shared = True
    """Whether other processes can see the same root, as far as is known."""
    is_absent = False
    """Whether it is the storage of a checkpointer without a directory, so that every operation is an error."""
    driver: str
    """The kvstore driver in the manifest for arrays on this storage: 'file' or 'gcs', the two that T5X accepts."""

    @abstractmethod
    def url(self, key: str = '') -> str:
        """The path or URL of a key."""

    @abstractmethod
    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of a key, or of a range of it; fewer if it is shorter. CheckpointNotFoundError if it does not exist."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Writes a complete key durably."""

    def write_chunk(self, key: str, data: Any) -> tuple[FileEntry, Any]:
        """Writes a file of an unfinished checkpoint, durably except for its directory entry; creates its directory.

        Each byte of ``data`` is read once, since another thread may change it: the bytes that are hashed are those written.

        Args:
          key: the file.
          data: a contiguous buffer of bytes.

        Returns:
          The length and the checksum of the file, and its version: its ``stamp``, or that for ``copy_unchanged``; None if the
          storage has neither.

        Raises:
          OSError, ValueError: of the system or of TensorStore. The caller maps it, and names the leaf.
        """
        self.make_dir(key.rpartition('/')[0])
        copied = bytes(data)
        self.write(key, copied)
        return entry_of(copied), self.stamp(key)

    @abstractmethod
    def kind(self, key: str) -> str | None:
        """``'file'``, ``'dir'`` or None."""

    def root_kind(self) -> str | None:
        """``kind`` of the root, without a request: always ``'dir'`` on an object store, which has no directories."""
        return self.kind('') if self.commits_by_rename else 'dir'

    def is_file(self, key: str) -> bool:
        """Whether a key is a file; cheaper than ``kind`` on object stores."""
        return self.are_files([key])[0]

    def are_files(self, keys: Sequence[str]) -> list[bool]:
        """``is_file`` of each key, with concurrent requests where possible."""
        return [head is not None for head in self.heads(keys, 0)]

    def heads(self, keys: Sequence[str], nbytes: int) -> list[bytes | None]:
        """The first ``nbytes`` of each key, None where there is no file, with concurrent requests where possible."""
        return [(self.read(key, 0, nbytes) if nbytes else b'') if self.kind(key) == 'file' else None for key in keys]

    @abstractmethod
    def size(self, key: str) -> int | None:
        """The size of a file, or None if it does not exist; -1 on an object store, where only a read finds it."""

    def stamp(self, key: str, before: tuple[int, ...] | None = None) -> tuple[int, ...] | None:
        """Returns a value that changes when a file is replaced, written to, or gets or loses a hard link; None if unsupported.

        With ``before``, an earlier stamp: also None if more than the hard links has changed since then.
        """
        return None

    def modified(self, key: str) -> float | None:
        """The time of the last write to a file, by the file server's clock; None if the file does not exist, and in buckets."""

    def server_time(self, key: str) -> float | None:
        """The time on the clock of :meth:`modified`, None without one; writes and deletes the file ``key`` to find it."""

    def version(self, key: str) -> Any:
        """A value that changes when a file is replaced, also by one with equal bytes; None if it does not exist."""
        return self.stamp(key)

    def read_with_version(self, key: str) -> tuple[bytes, Any]:
        """The bytes of a key and its ``version``. If the file is replaced meanwhile, the version is not newer than the bytes."""
        version = self.version(key)
        return self.read(key), version

    def replace(self, key: str, data: bytes, version: Any) -> Any:
        """Writes a key if it still has this ``version``. Returns the new version, or None if it has another one.

        The version None creates a key. Object stores compare and write in one request if they can, other storages in two
        operations.
        """
        if self.version(key) != version:
            return None
        self.write(key, data)
        return self.version(key)

    @abstractmethod
    def entries(self, key: str = '') -> list[Entry]:
        """Returns the entries directly below ``key``, by name; an empty list if there are none.

        A symbolic link to nothing is listed as a directory; ``kind`` and ``size`` of it raise StorageError.
        """

    def names(self, key: str, beginning: str | tuple[str, ...]) -> list[str]:
        """The names directly below ``key`` with this beginning, in order."""
        return [entry.name for entry in self.entries(key) if entry.name.startswith(beginning)]

    @abstractmethod
    def walk(self, key: str) -> Iterator[tuple[str, int | None]]:
        """Every file below ``key`` as (key, bytes), by name; the bytes are None if the listing does not have them."""

    @abstractmethod
    def make_dir(self, key: str) -> None:
        """Creates a directory and its parents, unless they exist."""

    def try_lock(self, key: str) -> Lock | None:
        """Locks a directory for its writer without waiting; returns None if another live process has the lock.

        Only with ``commits_by_rename``: elsewhere each save writes to a directory of its own.

        Returns:
          The lock. Its ``is_held`` is False if locks do not work.
        """
        raise NotImplementedError

    def sync_tree(self, key: str, below: Sequence[str]) -> None:
        """Makes the entries of a directory, and of the directories ``below`` it, durable; files are durable already.

        The caller names the directories, since finding them would list every file of a huge checkpoint.
        """

    def publish(self, source: str, target: str) -> None:
        """Renames a directory durably to a name that does not exist. Only with ``commits_by_rename``."""
        raise NotImplementedError

    def exchange(self, source: str, target: str) -> bool:
        """Swaps two directories durably in one atomic operation; returns False if the storage cannot."""
        return False

    def link(self, source: str, target: str, of: Storage | None = None) -> bool:
        """Hard-links a file, ``of`` another storage, to ``target``, and creates parents; returns False if the storage cannot."""
        return False

    def copy_unchanged(self, source: str, target: str, version: Any) -> Any:
        """Copies a key inside an object store if it has this ``version``; returns the version of the copy.

        Returns None if the key has another version or does not exist, and if the storage cannot copy it.
        """

    def delete_file(self, key: str) -> None:
        """Removes a key; does nothing if it does not exist."""
        self.delete_files([key])

    @abstractmethod
    def delete_files(self, keys: Sequence[str]) -> None:
        """Removes keys, with concurrent requests where possible; ignores those that do not exist."""

    def delete_unchanged(self, key: str, version: Any) -> bool:
        """Removes a key that was just read with this version; returns False if it was replaced or removed since then.

        Only storages that compare and remove in one request compare.

        Raises:
          StorageError: the key may still be removed, by a request that is on its way.
        """
        self.delete_file(key)
        return True

    @abstractmethod
    def delete_tree(self, key: str) -> None:
        """Removes everything below ``key``, and the directory."""

    @abstractmethod
    def array_kvstore(self, key: str) -> dict[str, Any]:
        """The absolute TensorStore kvstore spec of the directory ``key``, for reads; ``azure`` has none for writes."""

    @abstractmethod
    def context(self) -> ts.Context:
        """The TensorStore context for that spec; an error in a process that was forked after the first use."""

    def wait(self, future: Any) -> Any:
        """The result of a TensorStore future; on an object store, the wait for a silent server is bounded.

        Errors of TensorStore are not mapped: the caller maps them with ``foreign_errors`` and a better name.
        """
        return future.result()

    def local_path(self, key: str) -> str | None:
        """The path of the key in the local file system, or None if it has none."""
        return None

    @property
    def is_file_system(self) -> bool:
        """Whether its files have paths in the local file system."""
        return self.local_path('') is not None


PathOrStorage: TypeAlias = str | os.PathLike[str] | Storage
"""A path or URL, or a Storage with the directory as its root."""
