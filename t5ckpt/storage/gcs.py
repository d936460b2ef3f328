"""Google Cloud Storage, through TensorStore.

TensorStore finds Google's usual credentials. It reads the server's address and the credentials once per process. So ``endpoint``
sets an environment variable, and a public bucket is read without credentials through Google's XML API, which implements S3's
protocol.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorstore as ts

from t5ckpt.storage.bucket import BucketStorage
from t5ckpt.storage.connection import Connection, http_contexts
from t5ckpt.storage.error_mapping import TENSORSTORE_ERRORS
from t5ckpt.storage.gcs_requests import gcs_requests
from t5ckpt.storage.key_listing import KeyListing
from t5ckpt.storage.options import (
    GcsOptions,
    Retries,
    S3Options,
    file_cache,
    parse_options,
    retries_within,
    retry_context,
)
from t5ckpt.storage.s3 import S3Storage

_ENDPOINT = 'TENSORSTORE_GCS_HTTP_URL'
# The most keys in one page of Google's listings.
_PAGE_KEYS = 1000
_PUBLIC = 'https://storage.googleapis.com'


class _GcsListing(KeyListing):
    is_complete = False

    def _pages(self, ranges: Sequence[Any]) -> list[list[bytes]]:
        # TensorStore treats a page that Google refuses (401, 404, 412, ...) as an empty last page. So if a listing may have
        # ended early, the rest is requested until it is empty.
        return [self._completed(keys, asked) for keys, asked in zip(self._requested(ranges), ranges, strict=True)]

    def _completed(self, keys: Sequence[bytes], asked: ts.KvStore.KeyRange) -> list[bytes]:
        all_keys, rest = list(keys), list(keys)
        while not all_keys or (rest and len(all_keys) >= _PAGE_KEYS):
            start = max(all_keys) + b'\0' if all_keys else asked.inclusive_min
            [rest] = self._requested([ts.KvStore.KeyRange(start, asked.exclusive_max)])
            if not rest:
                break
            all_keys += rest
        return all_keys

    def _check_nothing(self) -> None:
        # Reading a key needs the same permission as a listing, but does not distinguish a missing bucket from an empty one.
        self._explain()
        if not self.is_found and self._is_missing():
            raise ValueError(f"NOT_FOUND: the bucket {self._bucket!r} does not exist [http_response_code='404']")
        self.is_found = True

    def _is_missing(self) -> bool:
        """Requests the bucket's metadata, without credentials; for an existing bucket, the server returns or refuses them."""
        base = os.environ.get(_ENDPOINT) or _PUBLIC
        retries = retry_context(retries_within(self._connection.patience or 0))
        resources = {'cache_pool': {'total_bytes_limit': 0}, 'http_request_retries': retries}
        spec = {'driver': 'http', 'base_url': base, 'path': f'/storage/v1/b/{self._bucket}'}
        try:
            future = ts.KvStore.open(spec, context=ts.Context(resources)).result().read('')
            return self._connection.wait(future).state == 'missing'
        except TENSORSTORE_ERRORS:
            return False


class GcsStorage(BucketStorage):
    """A prefix of a bucket in Google Cloud Storage."""

    driver = 'gcs'
    orbax_commits = True
    _compares_deletions = True

    def __init__(self, bucket: str, prefix: str, options: GcsOptions):
        """Takes the bucket, the prefix and the options."""
        project = options.user_project

        def resources(retries: Retries) -> dict[str, Any]:
            return {
                'gcs_request_concurrency': {'limit': options.concurrency},
                'gcs_request_retries': retry_context(retries),
                'gcs_user_project': {} if project is None else {'project_id': project},
            }

        spec = {'driver': 'gcs', 'bucket': bucket}
        connection = Connection(spec, http_contexts(options.retry_seconds, resources), options.retry_seconds)
        if options.endpoint is not None:
            _set_endpoint(options.endpoint)
        requests = gcs_requests(bucket, os.environ.get(_ENDPOINT) or _PUBLIC, options.retry_seconds, project)
        super().__init__(bucket, prefix, connection, cache=file_cache(options), listing=_GcsListing, requests=requests)

    def url(self, key: str = '') -> str:
        return f'gs://{self._bucket}/{self._key(key)}'.rstrip('/')


class AnonymousGcsStorage(S3Storage):
    """A public bucket in Google Cloud Storage, without credentials."""

    driver = 'gcs'
    orbax_commits = True
    scheme = 'gs'


def _set_endpoint(endpoint: str) -> None:
    """Sets the address of the server; raises ValueError if this process already uses another one."""
    wanted = endpoint.rstrip('/')
    if os.environ.setdefault(_ENDPOINT, wanted).rstrip('/') != wanted:
        raise ValueError(
            f'storage_options: endpoint={endpoint!r}, but this process uses {_ENDPOINT}={os.environ[_ENDPOINT]!r}; '
            'TensorStore has one for all of gs://. Use one of them.'
        )


def open_at(bucket: str, prefix: str, given: Mapping[str, Any] | None) -> BucketStorage:
    """Opens ``gs://bucket/prefix`` with ``storage_options``."""
    options = parse_options(GcsOptions, given, f'gs://{bucket}/{prefix}')
    if not options.anonymous:
        return GcsStorage(bucket, prefix, options)
    if options.user_project is not None:
        raise ValueError(
            'storage_options: user_project pays for requests, which needs credentials, not anonymous=True.'
        )
    endpoint = options.endpoint or os.environ.get(_ENDPOINT) or _PUBLIC
    shared = {field: getattr(options, field) for field in ('concurrency', 'retry_seconds', 'cache_dir', 'cache_gb')}
    as_s3 = S3Options(endpoint=endpoint, anonymous=True, region='auto', **shared)
    return AnonymousGcsStorage(bucket, prefix, as_s3, {})
