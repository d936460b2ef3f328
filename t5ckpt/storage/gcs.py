"""Google Cloud Storage, through TensorStore.

TensorStore finds Google's usual credentials; without any, its requests are anonymous. It takes another server's address from the
environment alone, once per process.

t5ckpt itself sends the requests that TensorStore does not send, with a token of google-auth: ``objects.list`` with a delimiter,
and ``rewriteTo`` with ``ifSourceGenerationMatch``.
"""

from __future__ import annotations

import importlib
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt.storage.bucket import BucketStorage
from t5ckpt.storage.options import BucketOptions, stall_seconds
from t5ckpt.storage.server_requests import MOST_CONNECTIONS, RefusedError, ServerRequests, log_lack

_ENDPOINT = 'TENSORSTORE_GCS_HTTP_URL'
# The most keys in one page of Google's listings.
_PAGE_KEYS = 1000
_PUBLIC = 'https://storage.googleapis.com'
_SCOPE = 'https://www.googleapis.com/auth/devstorage.read_write'
# TensorStore reads the same variable.
_TEST_TOKEN = 'GOOGLE_AUTH_TOKEN_FOR_TESTING'  # noqa: S105 - a name
# TensorStore's version of an object is a zero byte and the generation in eight bytes.
_GENERATION = slice(1, 9)


class GcsStorage(BucketStorage):
    """A prefix of a bucket in Google Cloud Storage."""

    scheme = 'gs'
    driver = 'gcs'
    orbax_commits = True

    def __init__(self, bucket: str, prefix: str, options: BucketOptions):
        """Takes the bucket, the prefix and the options."""
        self._server = (os.environ.get(_ENDPOINT) or _PUBLIC).rstrip('/')
        requests = None
        try:
            requests = GcsRequests(bucket, self._server, options.retry_seconds)
        except ImportError:
            log_lack(self.scheme, "google-auth is not installed: pip install google-auth, or pip install 't5ckpt[gcs]'")
        except Exception:  # noqa: BLE001, S110 - without credentials, requests are anonymous
            pass
        spec = {'driver': 'gcs', 'bucket': bucket}
        super().__init__(bucket, prefix, spec, options.retry_seconds, requests=requests)

    def _list(self, prefix: str, start: bytes | None = None) -> Sequence[bytes]:
        # TensorStore treats a page that Google refuses (401, 404, 412, ...) as an empty last page. So if a listing may have
        # ended early, the rest is requested until it is empty.
        rest = super()._list(prefix, start)
        keys = [*rest]
        while not keys or (rest and len(keys) >= _PAGE_KEYS):
            rest = super()._list(prefix, max(keys) + b'\0' if keys else start)
            if not rest:
                break
            keys += rest
        return keys

    def _check_nothing(self) -> None:
        # Reading a key needs the same permission as a listing, but does not distinguish a missing bucket from an empty one.
        self._explain()
        if not self._is_found and self._is_missing():
            raise ValueError(f"NOT_FOUND: the bucket {self._bucket!r} does not exist [http_response_code='404']")

    def _is_missing(self) -> bool:
        """Requests the bucket's metadata, without credentials; for an existing bucket, the server returns or refuses them."""
        url = f'{self._server}/storage/v1/b/{urllib.parse.quote(self._bucket, safe="")}'
        try:
            with urllib.request.urlopen(url, timeout=self._patience):  # noqa: S310 - the user's server
                return False
        except urllib.error.HTTPError as error:
            with error:
                return error.code == 404
        except OSError:
            return False


open_at = GcsStorage


class GcsRequests(ServerRequests):
    """The requests to one bucket of Google's storage."""

    def __init__(self, bucket: str, endpoint: str, patience: float):
        """Takes the bucket, the server and the seconds for retries; an error of google-auth without credentials."""
        super().__init__(f'gs://{bucket}', patience)
        self._objects = f'/b/{urllib.parse.quote(bucket, safe="")}/o'
        self._api = f'{endpoint}/storage/v1'
        transport: Any = importlib.import_module('google.auth.transport.requests')
        given = os.environ.get(_TEST_TOKEN)
        if given:
            credentials: Any = importlib.import_module('google.oauth2.credentials').Credentials(given)
        else:
            credentials, _ = importlib.import_module('google.auth').default(scopes=[_SCOPE])
        # Renews a token before it expires.
        self._session = transport.AuthorizedSession(credentials, refresh_status_codes=())
        adapter: Any = importlib.import_module('requests.adapters').HTTPAdapter(pool_maxsize=MOST_CONNECTIONS)
        self._session.mount(endpoint, adapter)
        # Else requests replaces the token by a password of ~/.netrc.
        self._session.auth = lambda request: request

    def _request(self, method: str, path: str, query: Mapping[str, str]) -> Any:
        """Sends a request; returns the JSON of the answer."""
        url, seconds = f'{self._api}{path}', stall_seconds(self._patience)
        try:
            reply = self._session.request(method, url, params=query, timeout=seconds, allow_redirects=False)
        except Exception as error:
            # Of requests, or of google-auth.
            raise RefusedError.of(0, f'{type(error).__name__}: {error}') from error
        if reply.status_code >= 300:
            raise RefusedError.of(reply.status_code, reply.content[:300].decode(errors='replace'))
        return json.loads(reply.content)

    def _copy(self, source: str, target: str, version: bytes) -> bytes | None:
        quoted = [f'{self._objects}/{urllib.parse.quote(key, safe="")}' for key in (source, target)]
        query = {'ifSourceGenerationMatch': str(int.from_bytes(version[_GENERATION], 'little'))}
        try:
            # In one bucket, one request copies all of an object: an answer without a resource is another one.
            answer = self._request('POST', '/rewriteTo'.join(quoted), query)
            return b'\0' + int(answer['resource']['generation']).to_bytes(8, 'little')
        except RefusedError:
            raise
        except (ValueError, KeyError, TypeError):
            return None

    def _page(self, prefix: str, token: Any) -> tuple[list[str], Any]:
        fields = 'kind,nextPageToken,prefixes,items/name'
        query = {'delimiter': '/', 'fields': fields, 'prefix': prefix, **({'pageToken': token} if token else {})}
        try:
            answer = self._request('GET', self._objects, query)
            names = [*answer.get('prefixes', ()), *(item['name'] for item in answer.get('items', ()))]
            kind = answer['kind']
        except RefusedError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RefusedError.of(200, f'the answer is not a listing of Google ({error})') from error
        if kind != 'storage#objects':
            raise RefusedError.of(200, f'the answer is a {kind}, not a listing of Google')
        return names, answer.get('nextPageToken')
