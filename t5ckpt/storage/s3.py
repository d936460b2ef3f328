"""Amazon S3 and compatible stores (MinIO, Ceph, R2, ...), through TensorStore.

A bucket is addressed by path (``<endpoint>/<bucket>/<key>``) where an endpoint is given. TensorStore signs with keys from
the environment, a profile or a role. A manifest is the same as on a disk, so T5X reads a copy of the checkpoint there.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from t5ckpt.errors import InvalidPathError
from t5ckpt.storage.bucket import BucketStorage
from t5ckpt.storage.connection import Connection, http_contexts
from t5ckpt.storage.options import (
    Retries,
    S3Options,
    file_cache,
    parse_options,
    retry_context,
    s3_credentials,
    s3_endpoint,
    s3_region,
)
from t5ckpt.storage.s3_requests import s3_requests

_log = logging.getLogger('t5ckpt')

# docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
_NAME = re.compile(r'[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]')
_RULES = 'Its names have 3 to 63 lowercase letters, digits, dots and hyphens.'


class S3Storage(BucketStorage):
    """A prefix of an S3 bucket."""

    driver = 'file'
    scheme = 's3'

    def __init__(self, bucket: str, prefix: str, options: S3Options, environ: Mapping[str, str] = os.environ):
        """Takes the bucket, the prefix and the options; the environment replaces missing options."""
        # TensorStore would send a HEAD before each conditional write to an endpoint that is not Amazon's.
        spec: dict[str, Any] = {'driver': 's3', 'bucket': bucket, 'use_conditional_write': True}
        spec['requester_pays'] = options.requester_pays
        endpoint, region = s3_endpoint(options, environ), s3_region(options, environ)
        if endpoint is not None:
            spec['endpoint'] = endpoint
        if region is not None:
            spec['aws_region'] = region
        credentials = s3_credentials(options, environ)

        def resources(retries: Retries) -> dict[str, Any]:
            return {
                'aws_credentials': credentials,
                's3_request_concurrency': {'limit': options.concurrency},
                's3_request_retries': retry_context(retries),
            }

        connection = Connection(spec, http_contexts(options.retry_seconds, resources), options.retry_seconds)
        requests = s3_requests(bucket, options, environ) if self.scheme == 's3' else None
        super().__init__(bucket, prefix, connection, cache=file_cache(options), requests=requests)

    def url(self, key: str = '') -> str:
        return f'{self.scheme}://{self._bucket}/{self._key(key)}'.rstrip('/')


def open_at(bucket: str, prefix: str, given: Mapping[str, Any] | None) -> S3Storage:
    """Opens ``s3://bucket/prefix`` with ``storage_options``."""
    url = f's3://{bucket}/{prefix}'
    options = parse_options(S3Options, given, url)
    _check_name(bucket, url, s3_endpoint(options, os.environ))
    return S3Storage(bucket, prefix, options)


def _check_name(bucket: str, url: str, endpoint: str | None) -> None:
    """Compares a name with Amazon's rules for buckets. Other servers may allow more, so there it is only a warning.

    Amazon has buckets of before 2018 with other names. They are addressed by path, with an endpoint.
    """
    if _NAME.fullmatch(bucket) and '..' not in bucket:
        return
    if endpoint is not None:
        _warn_of_name(bucket, endpoint)
        return
    raise InvalidPathError(
        f'{url}: a bucket cannot have the name "{bucket}". Check the URL. For a bucket from before 2018, pass '
        "storage_options={'endpoint': 'https://s3.us-east-1.amazonaws.com'}."
    )


@functools.cache
def _warn_of_name(bucket: str, endpoint: str) -> None:
    _log.warning('t5ckpt: s3://%s: S3 gives no new bucket this name; %s may have one. %s', bucket, endpoint, _RULES)
