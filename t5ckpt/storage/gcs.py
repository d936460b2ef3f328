"""Google Cloud Storage, through TensorStore.

Credentials are Google's usual ones, found by TensorStore. It reads the server's address and looks for credentials once
for the whole process, so ``endpoint`` here is a variable of the environment, and a public bucket is read without
credentials through Google's XML API, which speaks S3's protocol.
"""

from __future__ import annotations

import os
from typing import Any

import tensorstore as ts

from t5ckpt.storage.bucket import BucketStorage
from t5ckpt.storage.error_mapping import TENSORSTORE_ERRORS
from t5ckpt.storage.options import GcsOptions, Retries, S3Options, file_cache, retries_within, retry_context
from t5ckpt.storage.s3 import S3Storage

__all__ = ['AnonymousGcsStorage', 'GcsStorage', 'open_gcs']

_ENDPOINT = 'TENSORSTORE_GCS_HTTP_URL'
_PUBLIC = 'https://storage.googleapis.com'


class GcsStorage(BucketStorage):
    """A prefix of a bucket of Google's."""

    driver = 'gcs'
    orbax_commits = True
    _lists_truly = False

    def __init__(self, bucket: str, prefix: str, options: GcsOptions):
        """Takes the bucket, the prefix and the options."""
        super().__init__(bucket, prefix, options.retry_seconds, file_cache(options))
        self._options = options
        if options.endpoint is not None:
            _set_endpoint(options.endpoint)

    def url(self, key: str = '') -> str:
        return f'gs://{self._bucket}/{self._key(key)}'.rstrip('/')

    def _base_spec(self) -> dict[str, Any]:
        return {'driver': 'gcs', 'bucket': self._bucket}

    def _check_nothing(self) -> None:
        # TensorStore takes every listing that Google refuses for an empty one: where it may not, and where there is no
        # bucket. Reading a key needs the same permission, but does not tell a bucket that is not there from an empty one.
        self._explain()
        if not self._is_found and self._is_missing():
            raise ValueError(f"NOT_FOUND: the bucket {self._bucket!r} does not exist [http_response_code='404']")
        self._is_found = True

    def _is_missing(self) -> bool:
        """Asks for the bucket's own description, without credentials; a bucket that is there is shown or refused."""
        base = os.environ.get(_ENDPOINT) or _PUBLIC
        retries = retries_within(self._options.retry_seconds)
        resources = {'cache_pool': {'total_bytes_limit': 0}, 'http_request_retries': retry_context(retries)}
        spec = {'driver': 'http', 'base_url': base, 'path': f'/storage/v1/b/{self._bucket}'}
        try:
            found = ts.KvStore.open(spec, context=ts.Context(resources)).result().read('')
            return self.wait(found).state == 'missing'
        except TENSORSTORE_ERRORS:
            return False

    def _resources(self, retries: Retries | None) -> dict[str, Any]:
        project = self._options.user_project
        return {
            'gcs_request_concurrency': {'limit': self._options.concurrency},
            'gcs_request_retries': retry_context(retries or retries_within(self._options.retry_seconds)),
            'gcs_user_project': {} if project is None else {'project_id': project},
        }


class AnonymousGcsStorage(S3Storage):
    """A public bucket of Google's, without credentials."""

    driver = 'gcs'
    scheme = 'gs'


def _set_endpoint(endpoint: str) -> None:
    """Raises ValueError if this process talks to another server already."""
    wanted = endpoint.rstrip('/')
    if os.environ.setdefault(_ENDPOINT, wanted).rstrip('/') != wanted:
        raise ValueError(
            f'storage_options: endpoint={endpoint!r}, but this process uses {_ENDPOINT}={os.environ[_ENDPOINT]!r}; '
            'TensorStore has one for all of gs://. Use one of them.'
        )


def open_gcs(bucket: str, prefix: str, options: GcsOptions) -> BucketStorage:
    """The storage for these options."""
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
