"""The requests to Google Cloud Storage that TensorStore does not send.

- ``objects.list`` with a delimiter.
- ``rewriteTo`` with ``ifSourceGenerationMatch``.

The token is that of google-auth, if it is installed, or of the machine's service account.
"""

from __future__ import annotations

import importlib
import json
import os
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from t5ckpt.storage.server_requests import RefusedError, ServerRequests, needs_no_proxy

_SCOPE = 'https://www.googleapis.com/auth/devstorage.read_write'
_METADATA = 'http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token'
# TensorStore reads the same variable.
_TEST_TOKEN = 'GOOGLE_AUTH_TOKEN_FOR_TESTING'  # noqa: S105 - a name
# TensorStore's version of an object is a zero byte and the generation in eight bytes.
_GENERATION = slice(1, 9)
_MOST_PARTS = 1000


class GcsRequests(ServerRequests):
    """The requests to one bucket of Google's storage."""

    def __init__(self, bucket: str, endpoint: str, patience: float, token: Callable[[], str], project: str | None):
        """Takes the bucket, the server, the seconds for retries, a function that returns a token, and the project that pays."""
        super().__init__(endpoint, f'gs://{bucket}', patience)
        self._bucket, self._token, self._project = bucket, token, project

    def _copy(self, source: str, target: str, version: bytes) -> bytes | None:
        quoted = [urllib.parse.quote(text, safe='') for text in (self._bucket, source, target)]
        path = f'/storage/v1/b/{quoted[0]}/o/{quoted[1]}/rewriteTo/b/{quoted[0]}/o/{quoted[2]}'
        query = {'ifSourceGenerationMatch': str(int.from_bytes(version[_GENERATION], 'little')), **self._payer()}
        for _ in range(_MOST_PARTS):
            reply = self._send('COPY', 'POST', f'{path}?{urllib.parse.urlencode(query)}', {})
            try:
                answer = json.loads(reply)
                if answer['done']:
                    return b'\0' + int(answer['resource']['generation']).to_bytes(8, 'little')
                query['rewriteToken'] = str(answer['rewriteToken'])
            except (ValueError, KeyError, TypeError):
                return None
        return None

    def children(self, prefix: str) -> list[str]:
        """See the base class."""
        path = f'/storage/v1/b/{urllib.parse.quote(self._bucket, safe="")}/o'
        query = {
            'delimiter': '/',
            'fields': 'kind,nextPageToken,prefixes,items/name',
            'prefix': prefix,
            **self._payer(),
        }
        children: list[str] = []
        while True:
            reply = self._list(f'{path}?{urllib.parse.urlencode(query)}')
            try:
                answer = json.loads(reply)
                children += [*answer.get('prefixes', ()), *(item['name'] for item in answer.get('items', ()))]
                is_listing = answer['kind'] == 'storage#objects'
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise RefusedError.of(200, f'the answer is not a listing of Google ({error})') from error
            if not is_listing:
                raise RefusedError.of(200, f'the answer is a {answer["kind"]}, not a listing of Google')
            if not answer.get('nextPageToken'):
                return children
            query['pageToken'] = answer['nextPageToken']

    def _payer(self) -> dict[str, str]:
        return {} if self._project is None else {'userProject': self._project}

    def signed(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> dict[str, str]:
        """The headers with a token."""
        del method, target, body
        return {**headers, 'Authorization': f'Bearer {self._token()}'}


def gcs_requests(bucket: str, endpoint: str, patience: float, project: str | None) -> GcsRequests | None:
    """The requests of a bucket; None if they cannot be sent or no token is found."""
    token = _tokens() if needs_no_proxy(endpoint) else None
    return None if token is None else GcsRequests(bucket, endpoint, patience, token, project)


def _tokens() -> Callable[[], str] | None:
    given = os.environ.get(_TEST_TOKEN)
    if given:
        return lambda: given
    try:
        auth: Any = importlib.import_module('google.auth')
        transport: Any = importlib.import_module('google.auth.transport.requests')
        credentials, _ = auth.default(scopes=[_SCOPE])
    except Exception:  # noqa: BLE001 - an optional library: not installed, or without credentials
        return _Metadata() if _is_google() else None
    guard = threading.Lock()

    def token() -> str:
        with guard:
            if not credentials.valid:
                try:
                    credentials.refresh(transport.Request())
                except Exception as error:
                    raise OSError(f'google-auth has no token: {error}') from error
            return credentials.token

    return token


class _Metadata:
    """The token of the machine's service account."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._token, self._ends = '', 0.0

    def __call__(self) -> str:
        with self._guard:
            if time.monotonic() > self._ends:
                request = urllib.request.Request(_METADATA, headers={'Metadata-Flavor': 'Google'})
                with urllib.request.urlopen(request, timeout=10) as reply:  # noqa: S310 - a constant
                    answer = json.loads(reply.read())
                self._token = str(answer['access_token'])
                self._ends = time.monotonic() + float(answer['expires_in']) - 300
            return self._token


def _is_google() -> bool:
    """Whether this is a machine of Google's, according to its firmware; its account is used if no file names another."""
    if os.environ.get('GOOGLE_APPLICATION_CREDENTIALS'):
        return False
    try:
        with open('/sys/class/dmi/id/product_name', encoding='utf-8') as file:
            return 'Google' in file.read()
    except OSError:
        return False
