"""Azure Blob Storage: ``az://container/path``, by azure-storage-blob.

TensorStore has no driver for Azure. :class:`AzureClient` has the methods of TensorStore's kvstore that t5ckpt uses. Each of these
requests is sent by a thread and returns a future. TensorStore reads chunks with its HTTP driver, which sends a shared access
signature of the container. A manifest is the same as on a disk, so T5X reads a copy of the checkpoint there.

Errors have the texts of TensorStore's, so ``storage/error_mapping.py`` maps them. t5ckpt repeats a request that fails
(``storage/server_requests.py``); azure-storage-blob repeats none.

The variables are those of Azure's command line (``AZURE_STORAGE_ACCOUNT``, ``AZURE_STORAGE_KEY``, ``AZURE_STORAGE_SAS_TOKEN``,
``AZURE_STORAGE_CONNECTION_STRING``), and ``AZURE_STORAGE_ENDPOINT``.

Notes: 256 MiB in one PUT or GET, and in parts of 64 MiB above; 256 keys a deletion, 5000 keys a page of a listing.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import logging
import os
import re
import threading
import urllib.parse
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tensorstore as ts

from t5ckpt.core.thread_pool import Future, Pool
from t5ckpt.errors import InvalidPathError, MissingDependencyError
from t5ckpt.storage.bucket import ABSENT, BucketStorage
from t5ckpt.storage.error_mapping import bucket_errors
from t5ckpt.storage.options import AzureOptions, stall_seconds
from t5ckpt.storage.server_requests import RefusedError, ServerRequests, pages, retried

# learn.microsoft.com/rest/api/storageservices/naming-and-referencing-containers--blobs--and-metadata
_NAME = re.compile(r'\$root|\$web|(?!.*--)[a-z0-9][a-z0-9-]{1,61}[a-z0-9]')
# A user delegation key is valid for a week at most.
_SIGNED_FOR = datetime.timedelta(days=6)
_RENEWED_AFTER = datetime.timedelta(days=1)
_WHOLE_BYTES, _PART_BYTES = 256 * 2**20, 64 * 2**20
# Fewer than the ten connections that azure-core keeps.
_CONCURRENCY, _PROBES = 8, 2
_EXISTS = 'BlobAlreadyExists'
_NO_BLOB, _NO_CONTAINER = 'BlobNotFound', 'ContainerNotFound'
_UNSIGNED = 'Check the key or the shared access signature, and the clock of this machine.'
# The errors of azure-storage-blob for an answer that is not one of Azure's, such as a web page.
_MALFORMED = (AttributeError, KeyError, SyntaxError, TypeError, ValueError)
_Answer = TypeVar('_Answer')
_Generation = ts.KvStore.TimestampedStorageGeneration


class AzureStorage(BucketStorage):
    """A prefix of a container."""

    scheme = 'az'
    driver = 'file'

    def __init__(self, container: str, prefix: str, options: AzureOptions):
        """Takes the container, the prefix and the options; the environment replaces missing options."""
        url = f'az://{container}/{prefix}'.rstrip('/')
        if not _NAME.fullmatch(container):
            raise InvalidPathError(
                f'{url}: a bucket cannot have the name "{container}". The names of containers have 3 to 63 lowercase letters, '
                'digits and single hyphens. Check the URL; the account is not part of it, but an option (account).'
            )
        self._service = blob_service(options, os.environ, url)
        self._client = AzureClient(self._service, container, options.retry_seconds, _CONCURRENCY)
        super().__init__(container, prefix, {'driver': 'http'}, options.retry_seconds, requests=self._client)

    def _open(self, context: ts.Context, *, is_probe: bool = False) -> Any:
        del context
        # With threads of its own, in place of TensorStore's kvstore.
        patience, threads = (0.0, _PROBES) if is_probe else (self._patience, _CONCURRENCY)
        return AzureClient(self._service, self._bucket, patience, threads)

    def array_kvstore(self, key: str) -> dict[str, Any]:
        with bucket_errors(self.url(key)):
            return {'driver': 'http', 'base_url': self._client.readable_url(), 'path': self._below(key)}


open_at = AzureStorage


def blob_service(options: AzureOptions, environ: Mapping[str, str], url: str) -> Any:
    """The BlobServiceClient of the account in the options or the environment, with its credentials; sends nothing.

    The credentials are a key, a shared access signature, or those that azure-identity finds.

    Args:
      options: of the storage.
      environ: the environment.
      url: the user's URL, for errors.

    Raises:
      ValueError: neither names an account, or the endpoint is malformed or has a query.
      MissingDependencyError: azure-storage-blob is not installed.
    """
    service: Any = _library('azure.storage.blob').BlobServiceClient
    text = environ.get('AZURE_STORAGE_CONNECTION_STRING', '')
    parts = [part.strip().partition('=') for part in text.split(';')]
    stated = {name.strip().lower(): value for name, _, value in parts}
    owner = stated.get('accountname') or _name_in(stated.get('blobendpoint', ''))
    if text and (not owner or '"' in text or "'" in text):
        # Docker keeps quotation marks in a file of variables.
        raise ValueError(
            f'storage option: {url}: AZURE_STORAGE_CONNECTION_STRING names no account, or has quotation marks. Set it to '
            'AccountName=...;AccountKey=... without.'
        )
    if options.account not in (None, owner):
        # The connection string is for another account.
        stated, owner = {}, options.account
    endpoint = options.endpoint or environ.get('AZURE_STORAGE_ENDPOINT') or stated.get('blobendpoint', '')
    if '?' in endpoint:
        raise ValueError(
            f'storage option: {url}: endpoint={endpoint.partition("?")[0]!r} is followed by a query. Leave it out; if it is a '
            'shared access signature, set AZURE_STORAGE_SAS_TOKEN to it.'
        )
    try:
        _ = urllib.parse.urlsplit(endpoint).port
    except ValueError as error:
        raise ValueError(
            f'storage option: {url}: endpoint={endpoint!r} is not an address: {error}. Write '
            'https://account.blob.core.windows.net, or http://host:port/account for an emulator.'
        ) from error
    name = owner or environ.get('AZURE_STORAGE_ACCOUNT') or _name_in(endpoint)
    if not name:
        raise ValueError(
            f'storage option: {url}: no storage account. Pass the option account, or set '
            'AZURE_STORAGE_ACCOUNT, or AZURE_STORAGE_CONNECTION_STRING to AccountName=...;AccountKey=...'
        )
    credential: Any = stated.get('sharedaccesssignature')
    key = stated.get('accountkey')
    if not (credential or key):
        credential, key = environ.get('AZURE_STORAGE_SAS_TOKEN'), environ.get('AZURE_STORAGE_KEY')
    if options.anonymous:
        credential = None
    elif not credential:
        credential = {'account_name': name, 'account_key': key} if key else _identity()
    settings = _settings(options.retry_seconds)
    scheme, suffix = stated.get('defaultendpointsprotocol', 'https'), stated.get('endpointsuffix', 'core.windows.net')
    address = endpoint or f'{scheme}://{name}.blob.{suffix}'
    made = service(address, credential=credential, **settings)
    made.account_name = name
    return made


def _name_in(endpoint: str) -> str | None:
    """The account in the address of its blob service: the first label of the host, or the path if it is an emulator's."""
    parts = urllib.parse.urlsplit(endpoint)
    host = parts.hostname or ''
    return parts.path.strip('/') or (host.partition('.')[0] if '.blob.' in host else None)


def _identity() -> Any:
    try:
        return importlib.import_module('azure.identity').DefaultAzureCredential()
    except ImportError:
        return None


def _library(name: str) -> Any:
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


def _settings(retry_seconds: float) -> dict[str, Any]:
    """Settings of the BlobServiceClient: sizes, no retries."""
    base: Any = _library('azure.core.pipeline.transport').RequestsTransport

    class Transport(base):
        def send(self, request: Any, **options: Any) -> Any:
            # An answer that azure-storage-blob does not read to its end would leave the connection open.
            return super().send(request, **(options | {'stream': False}))

    log = logging.getLogger('t5ckpt.azure')
    if log.level == logging.NOTSET:
        # azure-core logs each request at INFO: too much for a training job that logs at this level.
        log.setLevel(logging.WARNING)
    seconds = stall_seconds(retry_seconds)
    return {
        'transport': Transport(connection_timeout=seconds, read_timeout=seconds),
        'retry_total': 0,
        'max_single_put_size': _WHOLE_BYTES,
        'max_block_size': _PART_BYTES,
        'max_single_get_size': _WHOLE_BYTES,
        'max_chunk_get_size': _PART_BYTES,
        'logger': log,
    }


class AzureClient(ServerRequests):
    """The requests to one container. Safe from any thread."""

    bulk_keys = 256

    def __init__(self, service: Any, container: str, patience: float, threads: int):
        """Sends nothing.

        Args:
          service: a BlobServiceClient.
          container: its name.
          patience: seconds for the repetitions of a request; 0 for one attempt.
          threads: the largest number of requests in flight.
        """
        super().__init__(f'az://{container}', patience)
        self._service, self._blobs = service, service.get_container_client(container)
        self._unmodified = _library('azure.core').MatchConditions.IfNotModified
        self._azure_error = _library('azure.core.exceptions').AzureError
        self._signing = threading.Lock()
        self._signature, self._renewed = '', datetime.datetime.min.replace(tzinfo=datetime.UTC)
        self._pool = Pool(threads)
        weakref.finalize(self, self._pool.shutdown, wait=False)

    def readable_url(self) -> str:
        """The address of the container with a signature that permits to read it for some days."""
        service, now = self._service, datetime.datetime.now(datetime.UTC)
        if service.credential is None:
            # The requests are anonymous, or the address has the signature of the user.
            return self._blobs.url
        with self._signing:
            if now > self._renewed:
                by: dict[str, Any] = {'account_key': getattr(service.credential, 'account_key', None)}
                if by['account_key'] is None:
                    start, end = now - datetime.timedelta(minutes=15), now + _SIGNED_FOR
                    by = {
                        'user_delegation_key': retried(
                            lambda: self._ask(lambda: service.get_user_delegation_key(start, end)), self._patience
                        )
                    }
                sign, name = _library('azure.storage.blob').generate_container_sas, self._blobs.container_name
                self._signature = sign(service.account_name, name, permission='r', expiry=now + _SIGNED_FOR, **by)
                self._renewed = now + _RENEWED_AFTER
            return f'{self._blobs.url}?{self._signature}'

    def read(self, key: str, *, byte_range: slice) -> Future[Any]:
        """As TensorStore's; an empty range is a HEAD."""
        return self._start(self._read, key, byte_range)

    def write(self, key: str, value: bytes | None, *, if_equal: bytes | None = None) -> Future[Any]:
        """As TensorStore's; None deletes."""
        return self._start(self._write, key, value, if_equal)

    def list(self, keys: Any) -> Future[list[bytes]]:
        """As TensorStore's, for the range of the keys that begin with a prefix."""
        page = functools.partial(self._page_of, self._blobs.list_blobs, keys.inclusive_min.decode())
        return self._pool.submit(lambda: [name.encode() for name in pages(page, self._patience)])

    def _start(self, request: Callable[..., _Answer], *arguments: Any) -> Future[_Answer]:
        return self._pool.submit(retried, functools.partial(request, *arguments), self._patience)

    def _copy(self, source: str, target: str, version: bytes) -> bytes | None:
        blob = self._blobs.get_blob_client(target)
        conditions = {'source_etag': version.decode(), 'source_match_condition': self._unmodified}
        url = self._blobs.get_blob_client(source).url
        reply = self._ask(lambda: blob.start_copy_from_url(url, **conditions))
        if reply['copy_status'] == 'success':
            return reply['etag'].encode()
        # The service copies in the background, and refuses an upload to this blob meanwhile.
        with contextlib.suppress(RefusedError):
            retried(lambda: self._ask(lambda: blob.abort_copy(reply['copy_id'])), self._patience)
        return None

    def _read(self, key: str, part: slice) -> ts.KvStore.ReadResult:
        blob = self._blobs.get_blob_client(key)
        options: dict[str, Any] = {}
        if part.start or part.stop is not None:
            options['offset'] = part.start
        if part.stop is not None:
            options['length'] = part.stop - part.start

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
            data, etag = self._ask(head if part.stop == part.start else whole)
        except RefusedError as error:
            if error.code == _NO_BLOB:
                return ts.KvStore.ReadResult('missing', b'', _Generation(ABSENT))
            if error.status in (304, 412):
                return ts.KvStore.ReadResult()
            raise
        return ts.KvStore.ReadResult('value', data, _generation(etag))

    def _write(self, key: str, value: bytes | None, expected: bytes | None) -> _Generation:
        blob = self._blobs.get_blob_client(key)
        options: dict[str, Any] = {}
        if expected not in (None, ABSENT):
            options = {'etag': expected.decode(), 'match_condition': self._unmodified}
        try:
            if value is None:
                self._ask(lambda: blob.delete_blob(delete_snapshots='include', **options))
                return _Generation(ABSENT)
            options['overwrite'] = expected != ABSENT
            return _generation(self._ask(lambda: blob.upload_blob(value, length=len(value), **options))['etag'])
        except RefusedError as error:
            is_gone = error.code == _NO_BLOB
            if is_gone and expected is None:
                return _Generation(ABSENT)
            if is_gone or error.code == _EXISTS or error.status in (304, 412):
                return _Generation(b'')
            raise

    def _delete_batch(self, keys: Sequence[str]) -> bool:
        options = {'delete_snapshots': 'include', 'raise_on_any_failure': False}

        statuses = self._ask(lambda: [part.status_code for part in self._blobs.delete_blobs(*keys, **options)])
        failed = [status for status in statuses if status not in (202, 404)]
        if failed or len(statuses) != len(keys):
            raise RefusedError.of((failed or [0])[0], f'{len(statuses)} of {len(keys)} deletions were answered')
        return True

    def _page(self, prefix: str, token: Any) -> tuple[list[str], Any]:
        return self._page_of(self._blobs.walk_blobs, prefix, token)

    def _page_of(self, listing: Callable[..., Any], prefix: str, token: Any) -> tuple[list[str], Any]:
        def page() -> tuple[list[str], Any]:
            # In an account with a hierarchical namespace, the metadata show which blobs are directories.
            pages = listing(name_starts_with=prefix, include=['metadata']).by_page(token)
            return [blob.name for blob in next(pages, ()) if not _is_directory(blob)], pages.continuation_token

        return self._ask(page)

    def _ask(self, ask: Callable[[], _Answer]) -> _Answer:
        """Sends a request.

        Raises:
          RefusedError: the server refused or failed it.
        """
        try:
            return ask()
        except RefusedError:
            raise
        except self._azure_error as error:
            raise _refused(error, self._blobs.container_name) from error
        except OSError as error:
            raise RefusedError.of(0, f'{type(error).__name__}: {error}') from error
        except _MALFORMED as error:
            raise RefusedError.of(200, f'the answer is not one of Azure ({error})') from error


def _generation(etag: str | None) -> _Generation:
    if not etag:
        raise RefusedError.of(200, 'the answer has no ETag')
    return _Generation(etag.encode())


def _is_directory(blob: Any) -> bool:
    """Whether a blob is a directory, and not one that a listing with a delimiter has made of the names."""
    return not getattr(blob, 'size', 1) and (blob.metadata or {}).get('hdi_isfolder') == 'true'


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
