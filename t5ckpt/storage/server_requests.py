"""Requests to an object store that TensorStore does not send: listings with a delimiter, copies, conditional or bulk deletions.

The requests are sent with the standard library, from any thread, over connections that are kept. A failed request is
retried with growing, random delays until the patience is over. Errors have the texts of TensorStore's, so
``storage/error_mapping.py`` maps them.

Without credentials that this module can read, or through an HTTP proxy, an object store has none of these requests: arrays are
uploaded, keys are deleted one by one, and a listing of steps lists the keys of their chunks.
"""

from __future__ import annotations

import collections
import http.client
import logging
import random
import re
import ssl
import time
import urllib.parse
import urllib.request
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from t5ckpt.storage.error_mapping import EXPIRED

_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
_CODES = {401: 'UNAUTHENTICATED', 403: 'PERMISSION_DENIED', 404: 'NOT_FOUND', 412: 'ABORTED', 416: 'OUT_OF_RANGE'}
# Of S3: another request to the same key was under way. Other answers of this status do not change.
_CONFLICT = re.compile(r'\b(ConditionalRequestConflict|OperationAborted)\b')
_FIRST_DELAY, _LAST_DELAY = 0.2, 8.0
_LONGEST_PAUSE = 3600.0
_log = logging.getLogger('t5ckpt')
_Answer = TypeVar('_Answer')


class RefusedError(ValueError):
    """The server refused a request, or failed each attempt at it; the text is as TensorStore's."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status
        self.code = ''

    @classmethod
    def of(cls, status: int, text: str) -> RefusedError:
        """The error of one attempt; a status of 0 is a connection that failed."""
        error = cls(status, f"{text} [http_response_code='{status}']" if status else text)
        return error if error.is_transient else cls(status, f'{_CODES.get(status, "INVALID_ARGUMENT")}: {error}')

    @property
    def is_transient(self) -> bool:
        """Whether another attempt may succeed; a status of 0 is a connection that failed."""
        return not self.status or self.status in _TRANSIENT or is_conflict(str(self))

    @property
    def is_of_credentials(self) -> bool:
        """Whether the credentials are refused, which may be renewed."""
        return self.status in (401, 403) or EXPIRED.search(str(self)) is not None

    @property
    def is_of_object(self) -> bool:
        """Whether the object is gone or another one, which is not a failure of the server."""
        return self.status in (404, 412)


def is_conflict(text: str) -> bool:
    """Whether an error says that another request to the key was under way, so that this one is to be sent again."""
    return "[http_response_code='409']" in text and _CONFLICT.search(text) is not None


def retried(attempt: Callable[[], _Answer], patience: float) -> _Answer:
    """Calls ``attempt`` with growing, random delays until it succeeds or is refused, for ``patience`` seconds.

    Raises:
      RefusedError: the last one of the attempts.
    """
    deadline, delay, attempts = time.monotonic() + patience, _FIRST_DELAY, 0
    while True:
        attempts += 1
        try:
            return attempt()
        except RefusedError as error:
            if not error.is_transient:
                raise
            pause = random.uniform(delay / 2, delay)  # noqa: S311 - no secret
            if time.monotonic() + pause > deadline:
                text = f'UNAVAILABLE: All {attempts} retry attempts failed: {error}'
                raise RefusedError(error.status, text) from error
        time.sleep(pause)
        delay = min(2 * delay, _LAST_DELAY)


class ServerRequests(ABC):
    """The requests to one bucket.

    Attributes:
      copies: whether objects are copied inside the store, as far as is known.
      sent: the number of requests by kind, retries included.
    """

    def __init__(self, endpoint: str, url: str, patience: float):
        """Takes the server's address, that of the bucket for log lines, and the seconds for retries; sends nothing."""
        self.copies = True
        self.sent: collections.Counter[str] = collections.Counter()
        self._endpoint = urllib.parse.urlsplit(endpoint)
        self._url = url
        self._patience = patience
        # After a copy that failed for all of the patience, none is sent for a while: as long at first, then twice as long.
        self._pause, self._paused_until = patience, 0.0
        self._idle: list[http.client.HTTPConnection] = []
        weakref.finalize(self, _close, self._idle)

    def copy(self, source: str, target: str, version: bytes) -> bytes | None:
        """Copies an object if it has this version; returns the version of the copy, None if nothing is known to be copied."""
        if not self.copies or time.monotonic() < self._paused_until:
            return None
        try:
            copied = self._copy(source, target, version)
        except RefusedError as error:
            if not error.is_of_object:
                self.copies = self.copies and (error.is_transient or error.is_of_credentials)
                self._pause_copies(error)
            return None
        self._pause = self._patience
        return copied

    def _pause_copies(self, error: RefusedError) -> None:
        now = time.monotonic()
        if now >= self._paused_until:
            self._paused_until = now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            _log.info('t5ckpt: unchanged arrays are uploaded to %s, which does not copy them: %s', self._url, error)

    @abstractmethod
    def _copy(self, source: str, target: str, version: bytes) -> bytes | None: ...

    @abstractmethod
    def children(self, prefix: str) -> list[str]:
        """The keys that begin with a prefix and have no slash after it, and the directories, which end with one."""

    def delete_unchanged(self, key: str, version: bytes) -> bool | None:
        """Deletes an object if it has this version; returns False if it has another or is gone, None if unsupported."""
        del key, version

    def delete_many(self, keys: Sequence[str]) -> bool:
        """Deletes objects with few requests; returns False if it is not known that all are gone."""
        del keys
        return False

    @abstractmethod
    def signed(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> dict[str, str]:
        """The headers of a request with those that show who sends it."""

    def _list(self, target: str) -> bytes:
        """Sends a request for a listing, for half of the patience: TensorStore's listing follows if it fails."""
        return self._send('LIST', 'GET', target, {}, patience=self._patience / 2)

    def _send(
        self,
        kind: str,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes = b'',
        patience: float | None = None,
    ) -> bytes:
        """Sends a request until it succeeds or is refused; returns the body of the answer.

        Raises:
          RefusedError: the server refused it, or failed each attempt.
        """

        def attempt() -> bytes:
            self.sent[kind] += 1
            try:
                status, data = self._exchange(method, target, self.signed(method, target, headers, body), body)
            except (OSError, http.client.HTTPException) as error:
                raise RefusedError.of(0, f'{type(error).__name__}: {error}') from error
            if 200 <= status < 300:
                return data
            raise RefusedError.of(status, data[:300].decode(errors='replace'))

        return retried(attempt, self._patience if patience is None else patience)

    def _exchange(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        while True:
            connection = self._reused()
            is_new = connection is None
            connection = self._connected() if connection is None else connection
            try:
                connection.request(method, f'{self._endpoint.path}{target}', body, dict(headers))
                reply = connection.getresponse()
                status, data = reply.status, reply.read()
            except BaseException as error:
                connection.close()
                # A server closes connections that are idle, and each of them would take one of the attempts.
                while (idle := self._reused()) is not None:
                    idle.close()
                if is_new or isinstance(error, TimeoutError) or not isinstance(error, OSError):
                    raise
            else:
                self._idle.append(connection)
                return status, data

    def _reused(self) -> http.client.HTTPConnection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _connected(self) -> http.client.HTTPConnection:
        # An attempt must end before the patience does.
        host, seconds = self._endpoint.netloc, max(1.0, self._patience / 2)
        if self._endpoint.scheme == 'https':
            return http.client.HTTPSConnection(host, timeout=seconds, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, timeout=seconds)


def _close(connections: list[http.client.HTTPConnection]) -> None:
    for connection in connections:
        connection.close()


def needs_no_proxy(endpoint: str) -> bool:
    """Whether a server is reached without an HTTP proxy, according to the environment."""
    parts = urllib.parse.urlsplit(endpoint)
    return parts.scheme not in urllib.request.getproxies() or bool(urllib.request.proxy_bypass(parts.netloc))
