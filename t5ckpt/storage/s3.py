"""Amazon S3 and compatible stores (MinIO, Ceph, R2, ...), through TensorStore.

A bucket is addressed by path (``<endpoint>/<bucket>/<key>``) where an endpoint is given. TensorStore signs with keys from
the environment, a profile or a role. A manifest is the same as on a disk, so T5X reads a copy of the checkpoint there.

t5ckpt itself sends the requests that TensorStore does not send. botocore finds the credentials and signs:

- ``ListObjectsV2`` with a delimiter.
- ``CopyObject`` with ``x-amz-copy-source-if-match``.
- ``DeleteObject`` with ``If-Match``: a late deletion of a manifest does not hide the step that was saved again. Without these
  requests, no manifest is deleted.
- ``DeleteObjects``: 1000 keys a request.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import html
import importlib
import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from t5ckpt.errors import AccessDeniedError, InvalidPathError
from t5ckpt.storage.bucket import BucketStorage
from t5ckpt.storage.error_mapping import bucket_errors
from t5ckpt.storage.options import S3Options
from t5ckpt.storage.server_requests import HttpRequests, RefusedError, Sign, log_lack, retried

# docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
_NAME = re.compile('[a-z0-9.-]+')
_OF_CONTAINERS = (
    'AWS_CONTAINER_CREDENTIALS_RELATIVE_URI',
    'AWS_CONTAINER_CREDENTIALS_FULL_URI',
    'AWS_WEB_IDENTITY_TOKEN_FILE',
)
_ETAG = re.compile(rb'<CopyObjectResult.*?<ETag>(.+?)</ETag>', re.DOTALL)
_CHILD = re.compile(rb'<(?:Contents|CommonPrefixes)>.*?<(?:Key|Prefix)>(.+?)</', re.DOTALL)
_NEXT_PAGE = re.compile(rb'<NextContinuationToken>(.+?)</')
# TensorStore's version of an object is this byte and its ETag.
_ETAG_FOLLOWS = b'\0'
_NAMESPACE = 'http://s3.amazonaws.com/doc/2006-03-01/'


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
                "2018, pass storage_options={'endpoint': 'https://s3.us-east-1.amazonaws.com'}."
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
            requests = s3_requests(bucket, endpoint, region, options.retry_seconds, credentials)
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


class S3Requests(HttpRequests):
    """The requests to one bucket of S3, addressed by path."""

    def __init__(self, bucket: str, endpoint: str, patience: float, sign: Sign = lambda headers, *_: headers):
        """Takes the bucket, the server, the seconds for retries, and a function that signs; by default none."""
        super().__init__(endpoint, f's3://{bucket}', patience, sign)
        self._bucket = bucket
        self._compares = True

    def _target(self, key: str) -> str:
        return f'/{self._bucket}/{urllib.parse.quote(key, safe="/-._~")}'

    def _copy(self, source: str, target: str, version: bytes) -> bytes | None:
        headers = {
            'x-amz-copy-source': self._target(source),
            'x-amz-copy-source-if-match': version.removeprefix(_ETAG_FOLLOWS).decode(),
        }
        # S3 answers 200 before it copies, and may report an error in the body.
        copied = _ETAG.search(self._request('PUT', self._target(target), headers))
        return None if copied is None else _ETAG_FOLLOWS + html.unescape(copied[1].decode()).encode()

    def _page(self, prefix: str, token: Any) -> tuple[list[str], Any]:
        # Sorted, as the signature requires.
        query = {'continuation-token': token} if token else {}
        query |= {'delimiter': '/', 'encoding-type': 'url', 'list-type': '2', 'prefix': prefix}
        encoded = urllib.parse.urlencode(query, quote_via=urllib.parse.quote, safe='-._~')
        reply = self._request('GET', f'/{self._bucket}?{encoded}', {})
        if b'</ListBucketResult>' not in reply:
            raise RefusedError.of(200, 'the answer is not a listing of S3')
        decode = urllib.parse.unquote_plus if b'<EncodingType>url<' in reply else html.unescape
        names = [decode(child.decode()) for child in _CHILD.findall(reply)]
        page = _NEXT_PAGE.search(reply)
        if page is None and b'<IsTruncated>true<' in reply:
            raise RefusedError.of(200, 'the answer has no token of the next page')
        return names, page and html.unescape(page[1].decode())

    def delete_unchanged(self, key: str, version: bytes) -> bool | None:
        """Deletes an object if it has this version; returns False if it has another or is gone, None if unsupported."""
        if not self._compares:
            return None
        headers = {'If-Match': version.removeprefix(_ETAG_FOLLOWS).decode()}
        try:
            retried(lambda: self._request('DELETE', self._target(key), headers), self._patience)
        except RefusedError as error:
            if error.is_transient or error.is_of_credentials:
                raise
            if error.is_of_object:
                return False
            # The server does not support the condition.
            self._compares = False
            return None
        return True

    def _delete_batch(self, keys: Sequence[str]) -> bool:
        # XML has no control characters.
        if not all(map(str.isprintable, keys)):
            return False
        objects = ''.join(f'<Object><Key>{escape(key)}</Key></Object>' for key in keys)
        body = f'<Delete xmlns="{_NAMESPACE}"><Quiet>true</Quiet>{objects}</Delete>'.encode()
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        headers = {'Content-MD5': digest, 'Content-Type': 'application/xml'}
        reply = self._request('POST', f'/{self._bucket}?delete=', headers, body)
        return b'<DeleteResult' in reply and b'<Error>' not in reply


def s3_requests(
    bucket: str, endpoint: str | None, region: str | None, patience: float, provider: Mapping[str, Any]
) -> S3Requests:
    """The requests of a bucket, which are signed with the credentials of TensorStore's ``provider``.

    Raises:
      ImportError: botocore is not installed.
      ValueError: there are no credentials, or no region; or urllib3 does not support the kind of HTTP proxy.
    """
    if region is None:
        session: Any = importlib.import_module('botocore.session').Session(profile=provider.get('profile'))
        region = session.get_config_variable('region')
    if region is None:
        raise ValueError("the region is not known: pass storage_options={'region': ...}, or set AWS_REGION")
    server = endpoint or f'https://s3.{region}.amazonaws.com'
    if provider['type'] == 'anonymous':
        return S3Requests(bucket, server, patience)
    auth: Any = importlib.import_module('botocore.auth')
    make: Any = importlib.import_module('botocore.awsrequest').AWSRequest
    if provider['type'] == 'environment':
        # Whatever profile the variables name.
        names = ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY', 'AWS_SESSION_TOKEN')
        keys = [os.environ.get(name) or None for name in names]
        credentials: Any = importlib.import_module('botocore.credentials').Credentials(*keys)
    else:
        session = importlib.import_module('botocore.session').Session(profile=provider.get('profile'))
        credentials = session.get_credentials()
    if credentials is None:
        raise ValueError(
            'botocore finds no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE'
        )

    def sign(headers: Mapping[str, str], method: str, url: str, body: bytes) -> Mapping[str, str]:
        request = make(method, url, dict(headers), body)
        # Renews the keys of a role before they expire.
        auth.S3SigV4Auth(credentials.get_frozen_credentials(), 's3', region).add_auth(request)
        return dict(request.headers)

    return S3Requests(bucket, server, patience, sign)
