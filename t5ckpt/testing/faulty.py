"""A storage whose n-th operation fails.

It wraps a real storage and forwards all other operations, so that it leaves the files of a real failure.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorstore as ts

from t5ckpt.errors import NoSpaceError, StorageError
from t5ckpt.format.file_checksums import FileEntry
from t5ckpt.storage import Entry, Storage
from t5ckpt.storage.base import Lock


class FaultyStorage(Storage):
    """Fails one operation, or that and all later ones.

    Attributes:
      operations: every operation so far, as (name, key). With ``fail_at=None``, a test counts the operations by it.
    """

    def __init__(
        self, inner: Storage, fail_at: int | None = None, *, sticky: bool = False, error: StorageError | None = None
    ):
        """Wraps a storage.

        Args:
          inner: the real storage.
          fail_at: the index of the operation that fails, from 0; None for none.
          sticky: whether all later ones fail, too, as on a full disk.
          error: the error that is raised; no space by default.
        """
        self.commits_by_rename = inner.commits_by_rename
        self.links = inner.links
        self.orbax_commits = inner.orbax_commits
        self.is_shared = inner.is_shared
        self.copies = inner.copies
        self.driver = inner.driver
        self.operations: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._inner = inner
        self._fail_at = fail_at
        self._sticky = sticky
        self._error = NoSpaceError(errno.ENOSPC, 'injected: no space left on device') if error is None else error

    def before_operation(self, name: str, key: str) -> None:
        """Called before each operation; raises the error of the one that fails. A subclass may override it to act at one."""
        # Threads write chunks at the same time.
        with self._lock:
            index = len(self.operations)
            self.operations.append((name, key))
        if self._fail_at is not None and (index == self._fail_at or (self._sticky and index > self._fail_at)):
            raise self._error

    def url(self, key: str = '') -> str:
        return self._inner.url(key)

    def local_path(self, key: str) -> str | None:
        return self._inner.local_path(key)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.before_operation('read', key)
        return self._inner.read(key, start, stop)

    def write(self, key: str, data: bytes) -> None:
        self.before_operation('write', key)
        self._inner.write(key, data)

    def replace(self, key: str, data: bytes, version: Any) -> Any:
        self.before_operation('replace', key)
        return self._inner.replace(key, data, version)

    @property
    def compares_versions(self) -> bool:
        return self._inner.compares_versions

    def delete_unchanged(self, key: str, version: Any) -> bool:
        self.before_operation('delete_unchanged', key)
        return self._inner.delete_unchanged(key, version)

    def copy_unchanged(self, source: str, target: str, version: Any) -> Any:
        self.before_operation('copy_unchanged', target)
        return self._inner.copy_unchanged(source, target, version)

    def write_chunk(self, key: str, data: Any) -> tuple[FileEntry, Any]:
        self.before_operation('write_chunk', key)
        return self._inner.write_chunk(key, data)

    def kind(self, key: str) -> str | None:
        self.before_operation('kind', key)
        return self._inner.kind(key)

    def is_file(self, key: str) -> bool:
        self.before_operation('is_file', key)
        return self._inner.is_file(key)

    def are_files(self, keys: Sequence[str]) -> list[bool]:
        self.before_operation('are_files', ' '.join(keys))
        return self._inner.are_files(keys)

    def heads(self, keys: Sequence[str], nbytes: int) -> list[bytes | None]:
        self.before_operation('heads', ' '.join(keys))
        return self._inner.heads(keys, nbytes)

    def names(self, key: str, beginning: str | tuple[str, ...]) -> list[str]:
        self.before_operation('names', f'{key}/{beginning}')
        return self._inner.names(key, beginning)

    def wait(self, future: Any) -> Any:
        return self._inner.wait(future)

    def stamp(self, key: str, before: tuple[int, ...] | None = None) -> tuple[int, ...] | None:
        return self._inner.stamp(key, before)

    def modified(self, key: str) -> float | None:
        return self._inner.modified(key)

    def server_time(self, key: str) -> float | None:
        self.before_operation('write', key)
        return self._inner.server_time(key)

    def version(self, key: str) -> Any:
        return self._inner.version(key)

    def size(self, key: str) -> int | None:
        self.before_operation('size', key)
        return self._inner.size(key)

    def root_kind(self) -> str | None:
        self.before_operation('root_kind', '')
        return self._inner.root_kind()

    def entries(self, key: str = '') -> list[Entry]:
        self.before_operation('entries', key)
        return self._inner.entries(key)

    def walk(self, key: str) -> Iterator[tuple[str, int | None]]:
        self.before_operation('walk', key)
        return self._inner.walk(key)

    def make_dir(self, key: str) -> None:
        self.before_operation('make_dir', key)
        self._inner.make_dir(key)

    def try_lock(self, key: str) -> Lock | None:
        self.before_operation('try_lock', key)
        return self._inner.try_lock(key)

    def sync_tree(self, key: str, below: Sequence[str]) -> None:
        self.before_operation('sync_tree', key)
        self._inner.sync_tree(key, below)

    def publish(self, source: str, target: str) -> None:
        self.before_operation('publish', target)
        self._inner.publish(source, target)

    def exchange(self, source: str, target: str) -> bool:
        self.before_operation('exchange', target)
        return self._inner.exchange(source, target)

    def link(self, source: str, target: str, of: Storage | None = None) -> bool:
        self.before_operation('link', target)
        return self._inner.link(source, target, of)

    def delete_files(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.before_operation('delete_file', key)
            self._inner.delete_file(key)

    def delete_tree(self, key: str) -> None:
        self.before_operation('delete_tree', key)
        self._inner.delete_tree(key)

    def array_kvstore(self, key: str) -> dict[str, Any]:
        self.before_operation('array_kvstore', key)
        return self._inner.array_kvstore(key)

    def context(self) -> ts.Context:
        return self._inner.context()
