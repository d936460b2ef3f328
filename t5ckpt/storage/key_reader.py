"""Reads keys of one bucket, through the cache of this machine if there is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from t5ckpt.errors import CheckpointNotFoundError, StorageError
from t5ckpt.storage.connection import NOTHING, Connection
from t5ckpt.storage.error_mapping import bucket_errors
from t5ckpt.storage.file_cache import CachedFile, FileCache

# The status in TensorStore's error for a range of bytes beyond the end of the file.
_BEYOND_THE_END = 'OUT_OF_RANGE'


class KeyReader:
    """Reads keys of one bucket. Each method takes the complete key, and its URL for errors."""

    def __init__(self, connection: Connection, cache: FileCache | None):
        """Sends nothing."""
        self._connection = connection
        self._cache = cache

    def read(self, key: str, url: str, known: bytes | None = None, **options: Any) -> Any:
        """TensorStore's result of a read; its state is 'unspecified' if the key has the version ``known``.

        Raises:
          CheckpointNotFoundError: there is no such key.
        """
        with bucket_errors(url):
            request = self._connection.kvstore().read(key, if_not_equal=known, **options)
            result = self._connection.wait(request, is_conditional=known is not None)
        if result.state == 'missing':
            raise CheckpointNotFoundError(f'{url}: no such key')
        return result

    def read_range(self, key: str, url: str, start: int, stop: int) -> bytes:
        """Bytes of a key; fewer if it is shorter."""
        # If the range is refused, reads to the end of the file. A range that begins beyond the end is refused again.
        for last in (stop, None):
            try:
                return bytes(self.read(key, url, byte_range=slice(start, last)).value)
            except StorageError as error:
                if _BEYOND_THE_END not in str(error):
                    raise
        return b''

    def heads(self, urls: Mapping[str, str], nbytes: int) -> list[bytes | None]:
        """The first bytes of some keys, with concurrent requests; None for a key that does not exist."""
        kvstore = self._connection.kvstore()
        futures = {key: kvstore.read(key, byte_range=slice(0, nbytes)) for key in urls}
        heads: list[bytes | None] = []
        for key, future in futures.items():
            try:
                with bucket_errors(urls[key]):
                    result = self._connection.wait(future)
                heads.append(bytes(result.value) if result.state == 'value' else None)
            except StorageError as error:
                if _BEYOND_THE_END not in str(error) or not nbytes:
                    raise
                heads.append(self.read_range(key, urls[key], 0, nbytes))
        return heads

    def version(self, key: str, url: str) -> Any:
        """The version of a key; None if there is none."""
        with bucket_errors(url):
            result = self._connection.wait(self._connection.kvstore().read(key, byte_range=NOTHING))
        return result.stamp.generation if result.state == 'value' else None

    def read_cached(self, key: str, url: str, is_good: Callable[[bytes], bool] | None) -> bytes:
        """The bytes of a key from the cache, see ``Storage.read_cached``."""
        if self._cache is None:
            return bytes(self.read(key, url).value)

        def fetch(known: bytes | None) -> CachedFile | None:
            result = self.read(key, url, known)
            return CachedFile(bytes(result.value), result.stamp.generation) if result.state == 'value' else None

        # Buckets at different endpoints may have the same name.
        return self._cache.read(f'{self._connection.spec} {key}', is_good, fetch)
