"""Writes to a bucket that the server refuses if the key has another version than the writer expects.

TensorStore sends Google's ``ifGenerationMatch`` with writes and deletions, and S3's ``If-Match`` and ``If-None-Match`` with
writes. Its S3 driver deletes without a condition (``DeleteTask`` in kvstore/s3/s3_key_value_store.cc of TensorStore 0.1.86), so
``storage/s3_requests.py`` sends such deletions. Some servers ignore or refuse the headers. The first key that a process creates
shows it: the same write is sent again, and must be refused.

Notes: one request a write, and one more in the life of a connection.
"""

from __future__ import annotations

import logging

from t5ckpt.errors import AccessDeniedError, StorageError
from t5ckpt.storage.connection import Connection
from t5ckpt.storage.error_mapping import bucket_errors
from t5ckpt.storage.server_requests import RefusedError, is_conflict, retried

ABSENT = b'\x02'
"""TensorStore's version of a key that does not exist."""
# Part of TensorStore's error if the server does not support a header.
_NOT_IMPLEMENTED = "[http_response_code='501']"
_log = logging.getLogger('t5ckpt')


class ConditionalWrites:
    """The conditional writes of one connection."""

    def __init__(self, connection: Connection):
        """Takes the connection; sends nothing."""
        self._is_ignored = self._is_known = False
        # Whether the server supports the condition that an object does not exist, but not that it is unchanged.
        self._refuses_changes = False
        self._connection = connection

    def are_ignored(self, version: bytes) -> bool:
        """Whether the server does not compare this version, ``ABSENT`` or that of an object, as far as is known."""
        return self._is_ignored or (self._refuses_changes and version != ABSENT)

    def write(self, path: str, url: str, data: bytes | None, version: bytes) -> bytes:
        """Writes or deletes a key of the bucket if it has this version; returns the new version, b'' if it was refused.

        ``url`` is that of the key, for errors.

        Raises:
          StorageError: the request failed; it may have been applied.
        """
        try:
            written = self._write(path, url, data, version)
        except AccessDeniedError:
            raise
        except StorageError as error:
            if _NOT_IMPLEMENTED in str(error.__cause__):
                self._refuses_changes = True
                if not self._is_known:
                    self._note(is_ignored=True)
            raise
        if not self._is_known and written and version == ABSENT:
            again = self._write(path, url, data, version)
            self._note(is_ignored=bool(again))
            return again or written
        return written

    def _write(self, path: str, url: str, data: bytes | None, version: bytes) -> bytes:
        with bucket_errors(url, 'deleting' if data is None else 'writing'):
            return retried(lambda: self._sent(path, data, version), self._connection.patience or 0.0)

    def _sent(self, path: str, data: bytes | None, version: bytes) -> bytes:
        if data is None:
            request = self._connection.delete(path, if_equal=version)
        else:
            request = self._connection.kvstore().write(path, data, if_equal=version)
        try:
            return self._connection.wait(request, is_conditional=True).generation
        except ValueError as error:
            # TensorStore does not repeat a request that the server refused because another one was under way.
            if is_conflict(str(error)):
                raise RefusedError(409, str(error)) from error
            raise

    def _note(self, *, is_ignored: bool) -> None:
        self._is_known, self._is_ignored = True, is_ignored
        if is_ignored:
            _log.warning(
                't5ckpt: the server of %s does not check the conditions of writes (If-None-Match, ifGenerationMatch), so '
                'only one program may write to this run, and no step can be replaced; see docs/storage.md',
                self._connection.url,
            )
