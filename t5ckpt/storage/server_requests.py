"""Requests to an object store that TensorStore does not send: listings with a delimiter, copies, conditional or bulk deletions.

They are sent from any thread. A failed request is retried with growing, random delays until the patience is over. Errors have the
texts of TensorStore's, so ``storage/error_mapping.py`` maps them.

Without the libraries and the credentials, an object store has none of these requests: arrays are uploaded, keys are deleted one
by one, and a listing of steps lists the keys of their chunks.
"""

from __future__ import annotations

import functools
import logging
import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from t5ckpt.storage.error_mapping import EXPIRED

_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
OF_OBJECT = (404, 412)
"""The answers that an object is gone or another one, which are not failures of the server."""
_CODES = {401: 'UNAUTHENTICATED', 403: 'PERMISSION_DENIED', 404: 'NOT_FOUND', 412: 'ABORTED', 416: 'OUT_OF_RANGE'}
# Of S3: another request to the same key was under way. Other answers of this status do not change.
_CONFLICT = re.compile(r'\b(ConditionalRequestConflict|OperationAborted)\b')
_FIRST_DELAY, _LAST_DELAY = 0.2, 8.0
MOST_CONNECTIONS = 100
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
            left = deadline - time.monotonic()
            if left <= 0:
                text = f'UNAVAILABLE: All {attempts} retry attempts failed: {error}'
                raise RefusedError(error.status, text) from error
        time.sleep(min(random.uniform(delay / 2, delay), left))  # noqa: S311 - no secret
        delay = min(2 * delay, _LAST_DELAY)


def pages(page: Callable[[Any], tuple[list[str], Any]], patience: float) -> list[str]:
    """The names in all pages of a listing.

    Args:
      page: returns the names in a page and the token of the next page, if there is one; takes its own token, None for the first.
      patience: seconds for retries of each request.
    """
    names: list[str] = []
    token = None
    while True:
        found, token = retried(functools.partial(page, token), patience)
        names += found
        if not token:
            return names


@functools.cache
def log_lack(scheme: str, cause: str) -> None:
    """Logs once why there are none of these requests."""
    _log.warning('t5ckpt: each listing of steps at %s:// lists the keys of all chunks: %s', scheme, cause)


class ServerRequests(ABC):
    """The requests to one bucket. A subclass sends them, each once: this class repeats those that fail.

    Attributes:
      bulk_keys: how many keys one request deletes, where there is such a request.
      copies: whether objects are copied inside the store, as far as is known.
    """

    bulk_keys = 1000

    def __init__(self, url: str, patience: float):
        """Takes the bucket's address for log lines, and the seconds for retries; sends nothing."""
        self.copies = self._deletes_many = True
        self._url = url
        self._patience = patience
        # After a copy that failed for all of the patience, none is sent for a while.
        self._paused_until = 0.0

    def copy(self, source: str, target: str, version: bytes) -> bytes | None:
        """Copies an object if it has this version; returns the version of the copy, None if nothing is known to be copied."""
        if not self.copies or time.monotonic() < self._paused_until:
            return None
        try:
            return retried(functools.partial(self._copy, source, target, version), self._patience)
        except RefusedError as error:
            if error.status not in OF_OBJECT:
                self.copies = error.is_transient or error.is_of_credentials
                self._paused_until = time.monotonic() + 4 * self._patience
                _log.info('t5ckpt: unchanged arrays are uploaded to %s, which does not copy them: %s', self._url, error)
            return None

    @abstractmethod
    def _copy(self, source: str, target: str, version: bytes) -> bytes | None: ...

    def children(self, prefix: str) -> list[str]:
        """The keys that begin with a prefix and have no slash after it, and the directories, which end with one."""
        # For half of the patience: TensorStore's listing or a probe follows if it fails.
        return pages(functools.partial(self._page, prefix), self._patience / 2)

    @abstractmethod
    def _page(self, prefix: str, token: Any) -> tuple[list[str], Any]: ...

    def delete_many(self, keys: Sequence[str]) -> bool:
        """Deletes objects with few requests; returns False if it is not known that all are gone."""
        try:
            return self._deletes_many and all(
                retried(functools.partial(self._delete_batch, keys[start : start + self.bulk_keys]), self._patience)
                for start in range(0, len(keys), self.bulk_keys)
            )
        except RefusedError as error:
            if error.is_transient:
                raise
            # The server has no such request. If it refuses the deletion itself, that of each key is refused, too.
            self._deletes_many = error.is_of_credentials
            return False

    def _delete_batch(self, keys: Sequence[str]) -> bool:
        del keys
        return False
