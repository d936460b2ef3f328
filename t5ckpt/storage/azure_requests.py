"""The requests to a container of Azure Blob Storage, by azure-storage-blob, with the methods of TensorStore's kvstore.

TensorStore has no driver for Azure. Each request is sent by a thread and returns a future, as in TensorStore. Errors have the
texts of TensorStore's, so ``storage/error_mapping.py`` maps them. A request that fails is repeated with growing, random delays
until the patience is over (``storage/server_requests.py``); azure-storage-blob repeats none.

Notes: 256 MiB in one PUT or GET, and in parts of 64 MiB above; 256 keys a deletion, 5000 keys a page of a listing.
"""

from __future__ import annotations

import collections
import importlib
import logging
import time
import urllib.parse
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorstore as ts

from t5ckpt.core.thread_pool import Future, Pool
from t5ckpt.errors import MissingDependencyError
from t5ckpt.storage.azure_account import AzureAccount
from t5ckpt.storage.conditional_writes import ABSENT
from t5ckpt.storage.server_requests import RefusedError, retried

_WHOLE_BYTES, _PART_BYTES = 256 * 2**20, 64 * 2**20
_BULK_KEYS = 256
_PROBES = 4
_COPY_SECONDS = 0.1
_EXISTS = 'BlobAlreadyExists'
_NO_BLOB, _NO_CONTAINER = 'BlobNotFound', 'ContainerNotFound'
_UNSIGNED = 'Check the key or the shared access signature, and the clock of this machine.'
# The errors of azure-storage-blob for an answer that is not one of Azure's, such as a web page.
_MALFORMED = (AttributeError, KeyError, SyntaxError, TypeError, ValueError)
_log = logging.getLogger('t5ckpt')
_Answer = TypeVar('_Answer')


def library(name: str) -> Any:
    """A module of azure-storage-blob or azure-core.

    Raises:
      MissingDependencyError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            "az:// needs azure-storage-blob: pip install azure-storage-blob, or pip install 't5ckpt[azure]'"
        ) from error


def azure_service(
    account: AzureAccount, *, stall_seconds: float, concurrency: int, sent: collections.Counter[str]
) -> tuple[Any, Callable[[], None]]:
    """The BlobServiceClient of an account, and a function that closes its connections; sends nothing.

    Args:
      account: the storage account.
      stall_seconds: an attempt in which no byte moves for this time has failed.
      concurrency: how many connections are kept.
      sent: counts the requests by kind.
    """
    session = _session(concurrency)
    service = library('azure.storage.blob').BlobServiceClient(
        account.url,
        credential=account.credential,
        transport=_transport(session, sent),
        retry_total=0,
        connection_timeout=stall_seconds,
        read_timeout=stall_seconds,
        max_single_put_size=_WHOLE_BYTES,
        max_block_size=_PART_BYTES,
        max_single_get_size=_WHOLE_BYTES,
        max_chunk_get_size=_PART_BYTES,
        logger=_quiet_log(),
    )
    return service, session.close


class AzureClient:
    """The requests to one container. Safe from any thread."""

    def __init__(self, service: Any, container: str, *, patience: float, concurrency: int):
        """Sends nothing.

        Args:
          service: a BlobServiceClient.
          container: its name.
          patience: seconds for the repetitions of a request; 0 for one attempt.
          concurrency: the largest number of requests in flight.
        """
        self.container = container
        self._patience = patience
        self._unmodified = library('azure.core').MatchConditions.IfNotModified
        self._modified = library('azure.core').MatchConditions.IfModified
        self._azure_error = library('azure.core.exceptions').AzureError
        self._pool = Pool(concurrency)
        self._blobs = service.get_container_client(container)
        weakref.finalize(self, self._pool.shutdown, wait=False)

    def read(self, key: str, *, byte_range: slice | None = None, if_not_equal: bytes | None = None) -> Future[Any]:
        """As TensorStore's; an empty range is a HEAD."""
        return self._pool.submit(self._read, key, byte_range or slice(0, None), if_not_equal)

    def write(self, key: str, value: bytes | None, *, if_equal: bytes | None = None) -> Future[Any]:
        """As TensorStore's; None deletes."""
        if value is None:
            return self._pool.submit(self._delete, key, if_equal)
        return self._pool.submit(self._put, key, value, if_equal)

    def list(self, keys: Any) -> Future[list[bytes]]:
        """As TensorStore's, for the range of the keys that begin with a prefix."""
        return self._pool.submit(lambda: [name.encode() for name, _ in self._listed(keys.inclusive_min.decode())])

    def delete_range(self, keys: Any) -> Future[None]:
        """Likewise; deletes in bulk."""
        prefix = keys.inclusive_min.decode()
        return self._pool.submit(lambda: self._delete_many([name for name, _ in self._listed(prefix)]))

    def delete_many(self, keys: Sequence[str]) -> Future[None]:
        """Deletes keys in bulk."""
        return self._pool.submit(self._delete_many, keys)

    def sizes(self, prefix: str) -> Future[list[tuple[str, int]]]:
        """The keys that begin with a prefix, with their sizes in bytes."""
        return self._pool.submit(lambda: [(name, blob.size) for name, blob in self._listed(prefix)])

    def children(self, prefix: str) -> Future[list[tuple[str, Any]]]:
        """The keys that begin with a prefix and have no further slash, with their properties, and the directories, with None."""
        return self._pool.submit(lambda: list(self._listed(prefix, '/')))

    def copy(self, source: str, target: str, version: bytes) -> Future[bytes | None]:
        """Copies a blob inside the account if it has this version; the version of the copy, None if it was not copied."""
        return self._pool.submit(self._copy, source, target, version)

    def _copy(self, source: str, target: str, version: bytes) -> bytes | None:
        blob = self._blobs.get_blob_client(target)
        conditions = {'source_etag': version.decode(), 'source_match_condition': self._unmodified}
        url = self._blobs.get_blob_client(source).url
        try:
            reply = self._send(lambda: blob.start_copy_from_url(url, **conditions))
            status, etag = reply['copy_status'], reply['etag']
            deadline = time.monotonic() + self._patience
            while status == 'pending' and time.monotonic() < deadline:
                # The service copies in the background.
                time.sleep(_COPY_SECONDS)
                properties = self._send(blob.get_blob_properties)
                status, etag = properties.copy.status, properties.etag
            if status == 'pending':
                _log.info(
                    't5ckpt: an unchanged chunk is uploaded, because its copy was pending for %g s', self._patience
                )
                # The server refuses an upload to a blob with a pending copy.
                self._send(lambda: blob.abort_copy(reply['copy_id']))
        except RefusedError as error:
            if not error.is_of_object:
                _log.info('t5ckpt: an unchanged chunk is uploaded, because the server did not copy it: %s', error)
            return None
        return etag.encode() if status == 'success' else None

    def _read(self, key: str, part: slice, known: bytes | None) -> ts.KvStore.ReadResult:
        blob = self._blobs.get_blob_client(key)
        options: dict[str, Any] = {}
        if known is not None:
            options = {'etag': known.decode(), 'match_condition': self._modified}
        if (part.start, part.stop) != (0, None):
            options['offset'] = part.start or 0
        if part.stop is not None:
            options['length'] = part.stop - options['offset']

        def whole() -> tuple[bytes, str]:
            stream = blob.download_blob(**options)
            data, size = stream.readall(), stream.size
            if not data and not options:
                # azure-storage-blob takes a blob that it cannot read from the first byte (416) for an empty one.
                size = blob.get_blob_properties().size
            if len(data) != size:
                raise RefusedError.of(416, f'{len(data)} of {size} bytes arrived')
            return data, stream.properties.etag

        def head() -> tuple[bytes, str]:
            return b'', blob.get_blob_properties().etag

        try:
            data, etag = self._send(head if part.stop == part.start else whole)
        except RefusedError as error:
            if error.code == _NO_BLOB:
                return ts.KvStore.ReadResult('missing', b'', ts.KvStore.TimestampedStorageGeneration(ABSENT))
            if error.status in (304, 412):
                return ts.KvStore.ReadResult()
            raise
        return ts.KvStore.ReadResult('value', data, _generation(etag))

    def _put(self, key: str, value: bytes, expected: bytes | None) -> ts.KvStore.TimestampedStorageGeneration:
        blob = self._blobs.get_blob_client(key)
        options: dict[str, Any] = {'overwrite': expected != ABSENT}
        if expected not in (None, ABSENT):
            options |= {'etag': expected.decode(), 'match_condition': self._unmodified}
        try:
            return _generation(self._send(lambda: blob.upload_blob(value, length=len(value), **options))['etag'])
        except RefusedError as error:
            if error.code == _EXISTS or error.status in (304, 412) or (expected and error.code == _NO_BLOB):
                return ts.KvStore.TimestampedStorageGeneration(b'')
            raise

    def _delete(self, key: str, expected: bytes | None) -> ts.KvStore.TimestampedStorageGeneration:
        blob = self._blobs.get_blob_client(key)
        options: dict[str, Any] = {'delete_snapshots': 'include'}
        if expected is not None:
            options |= {'etag': expected.decode(), 'match_condition': self._unmodified}
        try:
            self._send(lambda: blob.delete_blob(**options))
        except RefusedError as error:
            if error.code != _NO_BLOB and error.status not in (304, 412):
                raise
            if expected is not None or error.code != _NO_BLOB:
                return ts.KvStore.TimestampedStorageGeneration(b'')
        return ts.KvStore.TimestampedStorageGeneration(ABSENT)

    def _delete_many(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _BULK_KEYS):
            batch = keys[start : start + _BULK_KEYS]
            try:
                self._send(lambda batch=batch: self._delete_batch(batch))
            except RefusedError as error:
                if error.is_transient:
                    raise
                # The account has no bulk deletion. If it refuses the deletion itself, that of each key is refused, too.
                for key in batch:
                    self._delete(key, None)

    def _delete_batch(self, keys: Sequence[str]) -> None:
        options = {'delete_snapshots': 'include', 'raise_on_any_failure': False}
        statuses = [part.status_code for part in self._blobs.delete_blobs(*keys, **options)]
        failed = [status for status in statuses if status not in (202, 404)]
        if failed or len(statuses) != len(keys):
            raise RefusedError.of((failed or [0])[0], f'{len(statuses)} of {len(keys)} deletions were answered')

    def _listed(self, prefix: str, delimiter: str | None = None) -> Iterator[tuple[str, Any]]:
        token = None
        while True:
            page, token = self._send(lambda token=token: self._page(prefix, delimiter, token))
            yield from page
            if not token:
                return

    def _page(self, prefix: str, delimiter: str | None, token: str | None) -> tuple[list[tuple[str, Any]], str | None]:
        # In an account with a hierarchical namespace, the metadata show which blobs are directories.
        options = {'name_starts_with': prefix, 'include': ['metadata']}
        if delimiter is None:
            pages = self._blobs.list_blobs(**options).by_page(token)
        else:
            pages = self._blobs.walk_blobs(delimiter=delimiter, **options).by_page(token)
        blobs = [(blob.name, blob if hasattr(blob, 'size') else None) for blob in next(pages, ())]
        return [(name, blob) for name, blob in blobs if not _is_directory(blob)], pages.continuation_token

    def _send(self, ask: Callable[[], _Answer]) -> _Answer:
        """Sends a request until it succeeds or is refused.

        Raises:
          RefusedError: the server refused it, or failed each attempt.
        """

        def attempt() -> _Answer:
            try:
                return ask()
            except RefusedError:
                raise
            except self._azure_error as error:
                raise _refused(error, self.container) from error
            except OSError as error:
                raise RefusedError.of(0, f'{type(error).__name__}: {error}') from error
            except _MALFORMED as error:
                raise RefusedError.of(200, f'the answer is not one of Azure ({error})') from error

        return retried(attempt, self._patience)


class AzurePrefix:
    """A directory of a container, for writes."""

    def __init__(self, client: AzureClient, prefix: str):
        """Takes the client, and a prefix that is empty or ends with a slash."""
        self._client, self._prefix = client, prefix

    def write(self, key: str, value: bytes) -> Future[Any]:
        """As TensorStore's."""
        return self._client.write(f'{self._prefix}{key}', value)


def _generation(etag: str | None) -> ts.KvStore.TimestampedStorageGeneration:
    if not etag:
        raise RefusedError.of(200, 'the answer has no ETag')
    return ts.KvStore.TimestampedStorageGeneration(etag.encode())


def _is_directory(blob: Any) -> bool:
    return blob is not None and not blob.size and (blob.metadata or {}).get('hdi_isfolder') == 'true'


def _refused(error: Any, container: str) -> RefusedError:
    code = getattr(error, 'error_code', None)
    code = str(getattr(code, 'value', code) or '')
    status = getattr(error, 'status_code', None) or 0
    if not status and type(error).__name__ in ('ClientAuthenticationError', 'CredentialUnavailableError'):
        # From azure-identity.
        status = 401
    first, *more = str(error.message).splitlines() or ['']
    # Only this one of the other lines does not repeat the first.
    details = [line for line in more if line.startswith('authenticationerrordetail')]
    text = ' '.join([first, *details, *([f'({code})'] if code else [])])
    if code == _NO_CONTAINER:
        text = f'the container {container!r} does not exist'
    if code.startswith('Auth'):
        text = f'{text} {_UNSIGNED}'
    refused = RefusedError.of(status, text)
    refused.code = code
    return refused


def _quiet_log() -> logging.Logger:
    """The logger of azure-core, which logs each request at INFO: too much for a training job that logs at this level."""
    log = logging.getLogger('t5ckpt.azure')
    if log.level == logging.NOTSET:
        log.setLevel(logging.WARNING)
    return log


def _session(concurrency: int) -> Any:
    """An HTTP client that keeps as many connections as requests may be in flight."""
    requests: Any = library('requests')
    session = requests.Session()
    for scheme in ('http://', 'https://'):
        session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=concurrency + _PROBES, max_retries=0))
    return session


def _transport(session: Any, sent: collections.Counter[str]) -> Any:
    """azure-core's HTTP client, which counts the requests."""
    base: Any = library('azure.core.pipeline.transport').RequestsTransport

    class Transport(base):
        def send(self, request: Any, **options: Any) -> Any:
            sent[_kind(request)] += 1
            # An answer that azure-storage-blob does not read to its end would leave the connection open.
            return super().send(request, **(options | {'stream': False}))

    return Transport(session=session, session_owner=False)


def _kind(request: Any) -> str:
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(request.url).query)
    operation = query.get('comp', [''])[0]
    if operation == 'list':
        return 'LIST'
    if request.method == 'DELETE' or operation == 'batch':
        return 'DELETE'
    if 'x-ms-copy-source' in request.headers:
        return 'COPY'
    return 'GET' if request.method in ('GET', 'HEAD') else 'PUT'
