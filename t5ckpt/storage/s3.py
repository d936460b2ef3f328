"""Amazon S3 and compatible stores (MinIO, Ceph, R2, ...), through TensorStore.

A bucket is addressed by path (``<endpoint>/<bucket>/<key>``) where an endpoint is given. TensorStore signs with keys from
the environment, a profile or a role. A manifest is the same as on a disk, so T5X reads a copy of the checkpoint there.

t5ckpt itself sends the requests that TensorStore does not send. botocore finds the credentials, signs and sends:

- ``ListObjectsV2`` with a delimiter.
- ``CopyObject`` with ``x-amz-copy-source-if-match``.
- ``DeleteObject`` with ``If-Match``: a late deletion of a manifest does not hide the step that was saved again. Without these
  requests, no manifest is deleted.
- ``DeleteObjects``: 1000 keys a request.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt.core.thread_pool import Pool
from t5ckpt.errors import AccessDeniedError, InvalidPathError
from t5ckpt.storage.bucket import BucketStorage
from t5ckpt.storage.error_mapping import bucket_errors
from t5ckpt.storage.options import S3Options, stall_seconds
from t5ckpt.storage.server_requests import MOST_CONNECTIONS, OF_OBJECT, RefusedError, ServerRequests, log_lack, retried

# docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
_NAME = re.compile('[a-z0-9.-]+')
_OF_CONTAINERS = (
    'AWS_CONTAINER_CREDENTIALS_RELATIVE_URI',
    'AWS_CONTAINER_CREDENTIALS_FULL_URI',
    'AWS_WEB_IDENTITY_TOKEN_FILE',
)
_KEYS = ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY', 'AWS_SESSION_TOKEN')
# TensorStore's version of an object is this byte and its ETag.
_ETAG_FOLLOWS = b'\0'


class S3Storage(BucketStorage):
    """A prefix of an S3 bucket."""

    scheme = 's3'
    driver = 'file'
    _requests: S3Requests | None

    def __init__(self, bucket: str, prefix: str, options: S3Options):
        """Takes the bucket, the prefix and the options; the environment replaces missing options."""
        endpoint = _endpoint(options)
        # TensorStore knows the other rules. Amazon has buckets of before 2018 with such names, which have an endpoint.
        if endpoint is None and not _NAME.fullmatch(bucket):
            raise InvalidPathError(
                f's3://{bucket}/{prefix}: a bucket cannot have the name "{bucket}". Check the URL. For a bucket from before '
                '2018, pass the storage option endpoint=https://s3.us-east-1.amazonaws.com.'
            )
        region = options.region or os.environ.get('AWS_REGION') or os.environ.get('AWS_DEFAULT_REGION') or None
        if region is None and endpoint is not None:
            # Only Amazon's servers tell TensorStore the region of a bucket.
            region = 'us-east-1'
        # TensorStore would send a HEAD before each conditional write to an endpoint that is not Amazon's.
        spec: dict[str, Any] = {'driver': 's3', 'bucket': bucket, 'use_conditional_write': True}
        spec |= {name: value for name, value in (('endpoint', endpoint), ('aws_region', region)) if value}
        credentials = _credentials(options)
        requests, self._lack = None, ''
        try:
            requests = S3Requests(bucket, endpoint, region, options.retry_seconds, credentials)
        except ImportError:
            self._lack = "botocore is not installed: pip install botocore, or pip install 't5ckpt[s3]'"
        except Exception as error:  # noqa: BLE001 - of botocore, too, which may find no such profile
            self._lack = str(error)
        if requests is None:
            log_lack(self.scheme, self._lack)
        resources = {'aws_credentials': credentials}
        super().__init__(bucket, prefix, spec, options.retry_seconds, resources=resources, requests=requests)

    def _delete_if_unchanged(self, key: str, version: Any) -> bool | None:
        if self._requests is None:
            raise AccessDeniedError(
                errno.EPERM, f'{self.url(key)} is not deleted, since its version would not be compared: {self._lack}'
            )
        with bucket_errors(self.url(key), 'deleting'):
            return self._requests.delete_unchanged(self._key(key), version)


def _endpoint(options: S3Options) -> str | None:
    """The address of the server; None for Amazon's servers."""
    given = options.endpoint or os.environ.get('AWS_ENDPOINT_URL_S3') or os.environ.get('AWS_ENDPOINT_URL')
    return given.rstrip('/') if given else None


def _credentials(options: S3Options) -> dict[str, Any]:
    """The spec of TensorStore's credentials provider.

    TensorStore's default chain ends with a request to the metadata service, which takes seconds if there is none. So the default
    chain is used only if there is a sign of a role.
    """
    environ = os.environ
    if options.anonymous:
        return {'type': 'anonymous'}
    if options.profile is not None:
        return {'type': 'profile', 'profile': options.profile}
    if options.anonymous is False:
        return {'type': 'default'}
    if environ.get('AWS_ACCESS_KEY_ID') and environ.get('AWS_SECRET_ACCESS_KEY'):
        return {'type': 'environment'}
    if environ.get('AWS_PROFILE'):
        return {'type': 'profile', 'profile': environ['AWS_PROFILE']}
    return {'type': 'default' if _has_role() else 'anonymous'}


def _has_role() -> bool:
    """Whether there are configuration files or variables of a container, or this is a machine of Amazon EC2 by its firmware."""
    environ = os.environ
    files = [
        environ.get('AWS_SHARED_CREDENTIALS_FILE') or '~/.aws/credentials',
        environ.get('AWS_CONFIG_FILE') or '~/.aws/config',
    ]
    if any(map(os.path.isfile, map(os.path.expanduser, files))) or any(map(environ.get, _OF_CONTAINERS)):
        return True
    if environ.get('AWS_EC2_METADATA_DISABLED', '').lower() == 'true':
        return False
    try:
        with open('/sys/class/dmi/id/sys_vendor', encoding='utf-8') as file:
            return 'Amazon EC2' in file.read()
    except OSError:
        return False


open_at = S3Storage


class S3Requests(ServerRequests):
    """The requests to one bucket of S3, addressed by path. botocore signs and sends them."""

    def __init__(
        self, bucket: str, endpoint: str | None, region: str | None, patience: float, provider: Mapping[str, Any]
    ):
        """Sends nothing.

        Args:
          bucket: its name.
          endpoint: of another server than Amazon's.
          region: of the bucket, None for that of the profile.
          patience: seconds for retries.
          provider: the spec of TensorStore's credentials provider.

        Raises:
          ImportError: botocore is not installed.
          ValueError: there are no credentials, or no region.
        """
        super().__init__(f's3://{bucket}', patience)
        self._bucket, self._compares = bucket, True
        kind = provider['type']
        # With keys in the environment, the profile that it names does not matter.
        variables = {} if kind == 'default' else {'profile': (None, None, None, None)}
        session: Any = importlib.import_module('botocore.session').Session(variables, profile=provider.get('profile'))
        session.register_component('data_loader', _data_loader())
        # Raises if the files cannot be read.
        session.get_scoped_config()
        region = region or session.get_config_variable('region')
        if region is None:
            raise ValueError('the region is not known: pass the storage option region, or set AWS_REGION')
        if kind == 'environment':
            session.set_credentials(*(os.environ.get(name) or None for name in _KEYS))
        if kind != 'anonymous' and session.get_credentials() is None:
            raise ValueError(
                'botocore finds no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE'
            )
        seconds = stall_seconds(patience)
        config: Any = importlib.import_module('botocore.config').Config(
            region_name=region,
            signature_version=importlib.import_module('botocore').UNSIGNED if kind == 'anonymous' else 's3v4',
            # Not as the profile says.
            s3={'addressing_style': 'path', 'use_accelerate_endpoint': False},
            defaults_mode='legacy',
            retries={'total_max_attempts': 1},
            connect_timeout=seconds,
            read_timeout=seconds,
            max_pool_connections=MOST_CONNECTIONS,
        )
        server = endpoint or f'https://s3.{region}.amazonaws.com'
        self._client: Any = session.create_client('s3', endpoint_url=server, config=config)

    def _request(self, operation: str, **arguments: Any) -> Mapping[str, Any]:
        """Sends a request of botocore's client, in a thread: an exception from a signal handler could leave its locks taken."""
        pool = Pool(1)
        reply = pool.submit(self._send, operation, arguments)
        pool.shutdown(wait=False)
        return reply.result()

    def _send(self, operation: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return getattr(self._client, operation)(Bucket=self._bucket, **arguments)
        except Exception as error:
            reply = getattr(error, 'response', None)
            if reply is not None:
                text = '{Code}: {Message}'.format(**{'Message': '', **reply['Error']})
                raise RefusedError.of(reply['ResponseMetadata']['HTTPStatusCode'], text) from error
            # Of the connection to S3 or to a server of credentials, or the answer is not one of S3.
            status = 200 if type(error).__name__ == 'ResponseParserError' else 0
            raise RefusedError.of(status, f'{type(error).__name__}: {error}') from error

    def _copy(self, source: str, target: str, version: bytes) -> bytes | None:
        origin = {'Bucket': self._bucket, 'Key': source}
        reply = self._request('copy_object', Key=target, CopySource=origin, CopySourceIfMatch=_etag(version))
        etag = reply.get('CopyObjectResult', {}).get('ETag')
        return _ETAG_FOLLOWS + etag.encode() if etag else None

    def _page(self, prefix: str, token: Any) -> tuple[list[str], Any]:
        query = {'ContinuationToken': token} if token else {}
        page = self._request('list_objects_v2', Delimiter='/', Prefix=prefix, **query)
        if 'IsTruncated' not in page:
            raise RefusedError.of(200, 'the answer is not a listing of S3')
        token = page.get('NextContinuationToken')
        if page['IsTruncated'] and not token:
            raise RefusedError.of(200, 'the answer has no token of the next page')
        keys = [item['Key'] for item in page.get('Contents', ())]
        return [*keys, *(item['Prefix'] for item in page.get('CommonPrefixes', ()))], token

    def delete_unchanged(self, key: str, version: bytes) -> bool | None:
        """Deletes an object if it has this version; returns False if it has another or is gone, None if unsupported."""
        if not self._compares:
            return None
        try:
            retried(lambda: self._request('delete_object', Key=key, IfMatch=_etag(version)), self._patience)
        except RefusedError as error:
            if error.is_transient or error.is_of_credentials:
                raise
            if error.status in OF_OBJECT:
                return False
            # The server does not support the condition.
            self._compares = False
            return None
        return True

    def _delete_batch(self, keys: Sequence[str]) -> bool:
        # XML has no control characters.
        if not all(map(str.isprintable, keys)):
            return False
        reply = self._request('delete_objects', Delete={'Objects': [{'Key': key} for key in keys]})
        return len(reply.get('Deleted', ())) == len(keys)


@functools.cache
def _data_loader() -> Any:
    """The description of S3 that sessions of botocore share: each would read it again, in a tenth of a second."""
    return importlib.import_module('botocore.loaders').create_loader()


def _etag(version: bytes) -> str:
    return version.removeprefix(_ETAG_FOLLOWS).decode()
