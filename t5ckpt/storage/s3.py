"""Amazon S3 and what speaks its protocol (MinIO, Ceph, R2, ...), through TensorStore.

A bucket is addressed by path (``<endpoint>/<bucket>/<key>``) where an endpoint is given. TensorStore signs with keys from
the environment, a profile or a role; the arrays of a checkpoint are written as for a disk, so that a copy on a disk is
what T5X reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from t5ckpt.storage.bucket import BucketStorage
from t5ckpt.storage.options import (
    Retries,
    S3Options,
    file_cache,
    retries_within,
    retry_context,
    s3_credentials,
    s3_endpoint,
    s3_region,
)

__all__ = ['S3Storage']


class S3Storage(BucketStorage):
    """A prefix of an S3 bucket."""

    driver = 'file'
    # TensorStore asks S3 for a prefix, never for what comes after a key.
    seeks = False
    scheme = 's3'

    def __init__(self, bucket: str, prefix: str, options: S3Options, environ: Mapping[str, str] = os.environ):
        """Takes the bucket, the prefix and the options; what these leave open, the environment says."""
        super().__init__(bucket, prefix, options.retry_seconds, file_cache(options))
        self._options = options
        self._spec: dict[str, Any] = {'driver': 's3', 'bucket': bucket, 'requester_pays': options.requester_pays}
        endpoint, region = s3_endpoint(options, environ), s3_region(options, environ)
        if endpoint is not None:
            self._spec['endpoint'] = endpoint
        if region is not None:
            self._spec['aws_region'] = region
        self._credentials = s3_credentials(options, environ)

    def url(self, key: str = '') -> str:
        return f'{self.scheme}://{self._bucket}/{self._key(key)}'.rstrip('/')

    def _base_spec(self) -> dict[str, Any]:
        return self._spec

    def _resources(self, retries: Retries | None) -> dict[str, Any]:
        return {
            'aws_credentials': self._credentials,
            's3_request_concurrency': {'limit': self._options.concurrency},
            's3_request_retries': retry_context(retries or retries_within(self._options.retry_seconds)),
        }
