"""The base of all object stores: keys and prefixes through TensorStore's KvStore.

There is no rename, so checkpoints are written in place, with the manifest last. A PUT is atomic. If its reply is lost it may
have been applied, so after a failed write the key is read and compared.

Notes: checking whether a key exists costs one HEAD request. Listings are in ``storage/key_listing.py``.
"""

from __future__ import annotations

import collections
import errno
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorstore as ts

from t5ckpt.core.keys import join
from t5ckpt.core.text import counted
from t5ckpt.errors import AccessDeniedError, CheckpointNotFoundError, StorageError, T5CkptError
from t5ckpt.storage.base import Entry, Storage
from t5ckpt.storage.conditional_writes import ABSENT, ConditionalWrites
from t5ckpt.storage.connection import Connection
from t5ckpt.storage.error_mapping import bucket_errors
from t5ckpt.storage.file_cache import FileCache
from t5ckpt.storage.key_listing import KeyListing, key_range
from t5ckpt.storage.key_reader import KeyReader
from t5ckpt.storage.process_locks import ProcessLock
from t5ckpt.storage.server_requests import RefusedError, ServerRequests

# A key that is never written. Reading it shows whether the server answers and grants access.
_PROBE = '.t5ckpt/probe'


class BucketStorage(Storage):
    """A prefix of a bucket.

    A subclass has ``url``, ``driver`` and a :class:`Connection`; ``open_at`` in its module is listed in ``storage/open.py``.
    """

    commits_by_rename = False
    _compares_deletions = False
    """Whether TensorStore and the server compare the version in the request that deletes."""

    def __init__(
        self,
        bucket: str,
        prefix: str,
        connection: Connection,
        *,
        cache: FileCache | None = None,
        listing: type[KeyListing] = KeyListing,
        requests: ServerRequests | None = None,
    ):
        """Takes the bucket, the prefix, and the connection, which belongs to this storage; sends nothing."""
        self.caches = cache is not None
        self._reader = KeyReader(connection, cache)
        self._bucket = bucket
        self._prefix = prefix.strip('/')
        self._connection = connection
        self._conditional = ConditionalWrites(connection)
        self._requests = requests
        connection.url = self.url()
        connection.probe_key = self._key(_PROBE)
        self._listing = listing(connection, bucket)

    def _size_of(self, key: str) -> int | None:
        """The size that an entry of a listing gets."""
        del key

    def _kvstore(self) -> Any:
        return self._connection.kvstore()

    def wait(self, future: Any) -> Any:
        return self._connection.wait(future)

    def _key(self, key: str) -> str:
        return join(self._prefix, key)

    def _below(self, key: str) -> str:
        full = self._key(key)
        return f'{full}/' if full else ''

    def _keys(self, key: str, beginnings: Sequence[str] = ('',)) -> list[str]:
        """Returns the keys below ``key`` that begin with one of some texts, relative to it, in order."""
        return self._listing.keys(self._below(key), beginnings, self.url(key))

    def read(self, key: str) -> bytes:
        return self.read_with_version(key)[0]

    def read_with_version(self, key: str) -> tuple[bytes, Any]:
        result = self._reader.read(self._key(key), self.url(key))
        return bytes(result.value), result.stamp.generation

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        return self._reader.read_range(self._key(key), self.url(key), start, stop)

    def version(self, key: str) -> Any:
        return self._reader.version(self._key(key), self.url(key))

    def read_cached(self, key: str, is_good: Callable[[bytes], bool] | None) -> bytes:
        return self._reader.read_cached(self._key(key), self.url(key), is_good)

    def write(self, key: str, data: bytes) -> None:
        try:
            with bucket_errors(self.url(key), 'writing'):
                self.wait(self._kvstore().write(self._key(key), data))
        except AccessDeniedError:
            raise
        except StorageError:
            if not self._has_data(key, data):
                raise

    def replace(self, key: str, data: bytes, version: Any) -> Any:
        expected = ABSENT if version is None else version
        if self._conditional.are_ignored(expected):
            return super().replace(key, data, version)
        try:
            written = self._conditional.write(self._key(key), self.url(key), data, expected)
        except AccessDeniedError:
            raise
        except StorageError:
            if self._conditional.are_ignored(expected):
                return super().replace(key, data, version)
            if not self._has_data(key, data):
                raise
            written = b''
        # If the first attempt was applied and its reply was lost, the retry finds its own version.
        return written or (self.version(key) if self._has_data(key, data) else None)

    @property
    def compares_versions(self) -> bool:
        return not self._conditional.are_ignored(b'')

    def delete_unchanged(self, key: str, version: Any) -> bool:
        try:
            is_done = self._delete_if_unchanged(key, version)
        except AccessDeniedError:
            raise
        except StorageError as error:
            # The reply may have been lost.
            if self.is_file(key):
                raise StorageError(error.errno, f'{error} It may disappear, if the request arrives later.') from error
            return True
        return super().delete_unchanged(key, version) if is_done is None else is_done or not self.is_file(key)

    def _delete_if_unchanged(self, key: str, version: Any) -> bool | None:
        """Deletes a key that has this version; returns False if it was refused, None if no condition can be sent."""
        if self._compares_deletions:
            try:
                if not self._conditional.are_ignored(version):
                    return bool(self._conditional.write(self._key(key), self.url(key), None, version))
            except StorageError:
                if not self._conditional.are_ignored(version):
                    raise
            return None
        with bucket_errors(self.url(key), 'deleting'):
            return None if self._requests is None else self._requests.delete_unchanged(self._key(key), version)

    @property
    def copies(self) -> bool:
        return self._requests is not None and self._requests.copies

    def copy_unchanged(self, source: str, target: str, version: Any) -> Any:
        return None if self._requests is None else self._requests.copy(self._key(source), self._key(target), version)

    def requests(self) -> Mapping[str, int]:
        sent = collections.Counter(self._connection.requests())
        return sent if self._requests is None else sent + self._requests.sent

    def _has_data(self, key: str, data: bytes) -> bool:
        try:
            return self.read(key) == data
        except T5CkptError:
            return False

    def is_file(self, key: str) -> bool:
        return self.are_files([key])[0]

    def are_files(self, keys: Sequence[str]) -> list[bool]:
        return [head is not None for head in self.heads(keys, 0)]

    def heads(self, keys: Sequence[str], nbytes: int) -> list[bytes | None]:
        return self._reader.heads({self._key(key): self.url(key) for key in keys}, nbytes)

    def kind(self, key: str) -> str | None:
        if self._key(key) and self.is_file(key):
            return 'file'
        return 'dir' if self._has_keys(key) else None

    def _has_keys(self, key: str) -> bool:
        return bool(self._children(key))

    def root_kind(self) -> str | None:
        return 'dir'

    def check_reachable(self, key: str) -> None:
        # For a missing bucket, a server answers the read of a key as for a missing key, but it refuses a listing.
        if not self._listing.is_found:
            self._has_keys(key)

    def size(self, key: str) -> int | None:
        try:
            return len(self.read(key))
        except CheckpointNotFoundError:
            return None

    def known_size(self, key: str) -> int | None:
        del key
        return -1

    def entries(self, key: str = '') -> list[Entry]:
        return self._entries(key, '')

    def names(self, key: str, beginning: str | tuple[str, ...]) -> list[str]:
        # One request for all of several beginnings.
        entries = self._entries(key, beginning if isinstance(beginning, str) else '')
        return [entry.name for entry in entries if entry.name.startswith(beginning)]

    def _entries(self, key: str, beginning: str) -> list[Entry]:
        entries: dict[str, Entry] = {}
        for name, is_dir in self._children(key, beginning):
            # A file and a directory may have one name.
            entries.setdefault(name, Entry(name, is_dir, 0 if is_dir else self._size_of(join(key, name))))
        return [entries[name] for name in sorted(entries)]

    def _children(self, key: str, beginning: str = '') -> list[tuple[str, bool]]:
        """The names directly below ``key`` with this beginning, and whether each is a directory."""
        below = self._below(key)
        names = self._delimited(f'{below}{beginning}')
        keys = self._keys(key, (beginning,)) if names is None else [name[len(below) :] for name in names]
        # Consoles create keys that end with a slash to show a directory.
        return sorted({(first, bool(slash)) for first, slash, _ in (name.partition('/') for name in keys) if first})

    def _delimited(self, prefix: str) -> list[str] | None:
        """The children of a prefix; None if TensorStore is to list all keys below it, which also explains a failure."""
        if self._requests is None:
            return None
        # Also checks the name of the bucket.
        self._connection.check()
        started = time.monotonic()
        try:
            children = self._requests.children(prefix)
        except RefusedError as error:
            if error.is_transient:
                self._connection.check(started)
            return None
        self._listing.is_found = True
        return children

    def walk(self, key: str) -> Iterator[tuple[str, int | None]]:
        for name in self._keys(key):
            below = join(key, name)
            yield below, self._size_of(below)

    def make_dir(self, key: str, exclusive: bool = False) -> bool:
        return not (exclusive and self._has_keys(key))

    def try_lock(self, key: str) -> ProcessLock | None:
        return ProcessLock.take(self.url(key))

    def sync_tree(self, key: str, below: Sequence[str]) -> None:
        del key, below

    def publish(self, source: str, target: str) -> None:
        raise NotImplementedError(f'{self.url()} cannot rename {source} to {target}; write in place')

    def delete_file(self, key: str) -> None:
        with bucket_errors(self.url(key), 'deleting'):
            self.wait(self._connection.delete(self._key(key)))

    def delete_files(self, keys: Sequence[str]) -> None:
        with bucket_errors(self.url(), 'deleting'):
            if self._requests is not None and len(keys) > 1 and self._requests.delete_many([*map(self._key, keys)]):
                return
            for future in [self._connection.delete(self._key(key)) for key in keys]:
                self.wait(future)

    def delete_tree(self, key: str) -> None:
        with bucket_errors(self.url(key), 'deleting'):
            self.wait(self._kvstore().delete_range(key_range(self._below(key))))
        # A driver that treats a refused listing as an empty one deletes nothing here.
        left = [] if self._listing.is_complete else self._keys(key)
        if left:
            raise StorageError(
                errno.EIO,
                f'{self.url(key)}: {counted(len(left), "key is", "keys are")} still there, such as {left[0]}.',
            )

    def context(self) -> ts.Context:
        return self._connection.context()

    def open_kvstore(self, key: str) -> Any:
        with bucket_errors(self.url(key)):
            return super().open_kvstore(key)

    def array_kvstore(self, key: str) -> dict[str, Any]:
        return {**self._connection.spec, 'path': self._below(key)}
