"""Azure Blob Storage: ``az://container/path``, by azure-storage-blob.

TensorStore has no driver for Azure. t5ckpt reads and writes the blobs itself (``storage/azure_requests.py``), and TensorStore
reads chunks with its HTTP driver, which sends a shared access signature of the container. Listings have a delimiter and sizes,
unlike those of TensorStore. A manifest is the same as on a disk, so T5X reads a copy of the checkpoint there.
"""

from __future__ import annotations

import collections
import datetime
import os
import re
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorstore as ts

from t5ckpt.core.keys import join
from t5ckpt.errors import InvalidPathError
from t5ckpt.storage.azure_account import AzureAccount, azure_account
from t5ckpt.storage.azure_requests import AzureClient, AzurePrefix, azure_service, library
from t5ckpt.storage.base import Entry
from t5ckpt.storage.bucket import BucketStorage
from t5ckpt.storage.connection import Connection, http_contexts
from t5ckpt.storage.error_mapping import bucket_errors
from t5ckpt.storage.key_listing import KeyListing
from t5ckpt.storage.options import AzureOptions, Retries, file_cache, parse_options, retries_within, retry_context

# learn.microsoft.com/rest/api/storageservices/naming-and-referencing-containers--blobs--and-metadata
_NAME = re.compile(r'\$root|\$web|(?!.*--)[a-z0-9][a-z0-9-]{1,61}[a-z0-9]')
# A user delegation key is valid for a week at most.
_SIGNED_FOR = datetime.timedelta(days=6)
_RENEWED_BEFORE = datetime.timedelta(days=5)


class _AzureConnection(Connection):
    """Access to one container; ``_open`` makes an :class:`AzureClient` in place of TensorStore's kvstore."""

    def __init__(self, account: AzureAccount, container: str, options: AzureOptions):
        def resources(retries: Retries) -> dict[str, Any]:
            return {
                'http_request_concurrency': {'limit': options.concurrency},
                'http_request_retries': retry_context(retries),
            }

        spec = {'driver': 'http', 'base_url': f'{account.url}/{container}'}
        super().__init__(spec, http_contexts(options.retry_seconds, resources), options.retry_seconds)
        self._account, self._container, self._concurrency = account, container, options.concurrency
        self._sent: collections.Counter[str] = collections.Counter()
        self._service, close = azure_service(
            account,
            stall_seconds=retries_within(options.retry_seconds).stall_seconds,
            concurrency=options.concurrency,
            sent=self._sent,
        )
        weakref.finalize(self, close)
        self._signing = threading.Lock()
        self._signature, self._renewed = '', datetime.datetime.min.replace(tzinfo=datetime.UTC)

    def _open(self, context: ts.Context, *, is_probe: bool = False) -> Any:
        del context
        patience, threads = (0.0, 4) if is_probe else (self.patience or 0.0, self._concurrency)
        return AzureClient(self._service, self._container, patience=patience, concurrency=threads)

    def requests(self) -> dict[str, int]:
        """The requests of this connection, with those of TensorStore's HTTP driver in all of the process."""
        return dict(self._sent + collections.Counter(super().requests()))

    def readable_spec(self) -> dict[str, Any]:
        """The spec of TensorStore's HTTP driver, with a signature that permits to read the container for some days."""
        query = self._account.signature or self._own_signature()
        return {**self.spec, 'base_url': f'{self.spec["base_url"]}?{query}'} if query else self.spec

    def _own_signature(self) -> str:
        account, now = self._account, datetime.datetime.now(datetime.UTC)
        if account.credential is None:
            return ''
        with self._signing:
            if now > self._renewed:
                by: dict[str, Any] = {'account_key': account.key}
                if account.key is None:
                    start = now - datetime.timedelta(minutes=15)
                    by = {'user_delegation_key': self._service.get_user_delegation_key(start, now + _SIGNED_FOR)}
                sign = library('azure.storage.blob').generate_container_sas
                self._signature = sign(account.name, self._container, permission='r', expiry=now + _SIGNED_FOR, **by)
                self._renewed = now + _SIGNED_FOR - _RENEWED_BEFORE
            return self._signature


class _AzureListing(KeyListing):
    def _check_nothing(self) -> None:
        # The listing of a container that does not exist is an error.
        self.is_found = True


class AzureStorage(BucketStorage):
    """A prefix of a container."""

    driver = 'file'
    _compares_deletions = True
    _connection: _AzureConnection

    def __init__(self, container: str, prefix: str, account: AzureAccount, options: AzureOptions):
        """Takes the container, the prefix, the account and the options."""
        connection = _AzureConnection(account, container, options)
        super().__init__(container, prefix, connection, cache=file_cache(options), listing=_AzureListing)

    @property
    def copies(self) -> bool:
        return True

    def url(self, key: str = '') -> str:
        return f'az://{self._bucket}/{self._key(key)}'.rstrip('/')

    def _blobs(self, key: str, beginning: str = '') -> list[tuple[str, Any]]:
        """The names directly below ``key`` with this beginning, each with its properties, or None for a directory."""
        below = self._below(key)
        with bucket_errors(self.url(key), 'listing'):
            children = self.wait(self._kvstore().children(f'{below}{beginning}'))
        self._listing.is_found = True
        names = ((name.removeprefix(below), blob) for name, blob in children)
        # Consoles create keys that end with a slash to show a directory.
        return [
            (name.rstrip('/'), blob) for name, blob in names if name.strip('/') and not (blob and name.endswith('/'))
        ]

    def _children(self, key: str, beginning: str = '') -> list[tuple[str, bool]]:
        return [(name, blob is None) for name, blob in self._blobs(key, beginning)]

    def _entries(self, key: str, beginning: str) -> list[Entry]:
        entries: dict[str, Entry] = {}
        for name, blob in self._blobs(key, beginning):
            is_dir = blob is None
            mtime = 0.0 if is_dir else blob.last_modified.timestamp()
            entries.setdefault(name, Entry(name, is_dir, 0 if is_dir else blob.size, mtime))
        return [entries[name] for name in sorted(entries)]

    def walk(self, key: str) -> Iterator[tuple[str, int | None]]:
        below = self._below(key)
        with bucket_errors(self.url(key), 'listing'):
            sizes = self.wait(self._kvstore().sizes(below))
        self._listing.is_found = True
        for name, size in sorted(sizes):
            relative = name.removeprefix(below)
            if relative and not relative.endswith('/'):
                yield join(key, relative), size

    def size(self, key: str) -> int | None:
        parent, _, name = key.rpartition('/')
        return next((blob.size for child, blob in self._blobs(parent, name) if blob and child == name), None)

    def copy_unchanged(self, source: str, target: str, version: Any) -> Any:
        with bucket_errors(self.url(target), 'writing'):
            return self.wait(self._kvstore().copy(self._key(source), self._key(target), version))

    def delete_files(self, keys: Sequence[str]) -> None:
        with bucket_errors(self.url(), 'deleting'):
            self.wait(self._kvstore().delete_many([*map(self._key, keys)]))

    def open_kvstore(self, key: str) -> Any:
        with bucket_errors(self.url(key)):
            return AzurePrefix(self._kvstore(), self._below(key))

    def array_kvstore(self, key: str) -> dict[str, Any]:
        with bucket_errors(self.url(key)):
            return {**self._connection.readable_spec(), 'path': self._below(key)}


def open_at(container: str, prefix: str, given: Mapping[str, Any] | None) -> AzureStorage:
    """Opens ``az://container/prefix`` with ``storage_options``."""
    url = f'az://{container}/{prefix}'.rstrip('/')
    options = parse_options(AzureOptions, given, url)
    if not _NAME.fullmatch(container):
        raise InvalidPathError(
            f'{url}: a bucket cannot have the name "{container}". The names of containers have 3 to 63 lowercase letters, digits '
            'and single hyphens. Check the URL; the account is not part of it, but an option (account).'
        )
    library('azure.storage.blob')
    return AzureStorage(container, prefix, azure_account(options, os.environ, url), options)
