"""Lists the keys of a bucket, in the order of the object store.

A listing pages through all keys below a prefix, since TensorStore has no delimiter, and reports no sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorstore as ts

from t5ckpt.errors import AccessDeniedError, T5CkptError
from t5ckpt.storage.connection import NOTHING, Connection
from t5ckpt.storage.error_mapping import TENSORSTORE_ERRORS, bucket_errors, map_bucket_error


class KeyListing:
    """The listings of one bucket.

    Attributes:
      is_found: whether the bucket is known to exist.
    """

    is_complete = True
    """Whether an empty listing means that there are no keys."""

    def __init__(self, connection: Connection, bucket: str):
        """Takes the connection; sends nothing."""
        self.is_found = False
        self._connection = connection
        self._bucket = bucket

    def keys(self, below: str, beginnings: Sequence[str], where: str) -> list[str]:
        """The keys in the directory ``below`` that begin with one of some texts, relative to it; ``where`` is its address."""
        with bucket_errors(where, 'listing'):
            keys = self._list([key_range(below + beginning) for beginning in beginnings])
        # Consoles create keys that end with a slash to show a directory.
        return sorted(name for raw in keys if (name := raw.decode()[len(below) :]) and not name.endswith('/'))

    def _list(self, ranges: Sequence[Any]) -> list[bytes]:
        try:
            listed_names = [name for names in self._pages(ranges) for name in names]
        except TENSORSTORE_ERRORS:
            # S3's driver parses a refusal as a listing, so its error does not name the cause.
            self._explain(AccessDeniedError)
            raise
        if listed_names:
            self.is_found = True
        else:
            self._check_nothing()
        return listed_names

    def _pages(self, ranges: Sequence[Any]) -> list[list[bytes]]:
        """Returns all keys of each range."""
        return self._requested(ranges)

    def _requested(self, ranges: Sequence[Any]) -> list[list[bytes]]:
        futures = [self._connection.kvstore().list(keys) for keys in ranges]
        return [self._connection.wait(future) for future in futures]

    def _explain(self, kind: type[T5CkptError] = T5CkptError) -> None:
        """Reads a key that does not exist, which needs the same permission as a listing; raises a refusal of this kind."""
        try:
            self._connection.wait(self._connection.kvstore().read(self._connection.probe_key, byte_range=NOTHING))
        except TENSORSTORE_ERRORS as error:
            if isinstance(map_bucket_error(error, self._connection.url), kind):
                raise

    def _check_nothing(self) -> None:
        """Raises if an empty listing does not mean that there are no keys."""


def key_range(prefix: str) -> Any:
    """TensorStore's range of the keys that begin with a prefix."""
    return ts.KvStore.KeyRange(prefix, _after(prefix)) if prefix else ts.KvStore.KeyRange()


def _after(prefix: str) -> str:
    """The first key after all keys that begin with a prefix."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
