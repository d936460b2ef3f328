"""The requests to S3 that TensorStore does not send, with Amazon's signature (version 4).

- ``ListObjectsV2`` with a delimiter.
- ``CopyObject`` with ``x-amz-copy-source-if-match``.
- ``DeleteObject`` with ``If-Match``: a late deletion of a manifest does not hide the step that was saved again.
- ``DeleteObjects``: 1000 keys a request.

The keys are those of the environment or of a profile's file. Those of a role are found by botocore, if it is installed.
"""

from __future__ import annotations

import base64
import configparser
import dataclasses
import datetime
import hashlib
import hmac
import html
import importlib
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from t5ckpt.storage.options import S3Options, s3_credentials, s3_endpoint, s3_region
from t5ckpt.storage.server_requests import RefusedError, ServerRequests, needs_no_proxy

_BULK_KEYS = 1000
_ETAG = re.compile(rb'<CopyObjectResult.*?<ETag>(.+?)</ETag>', re.DOTALL)
_CHILD = re.compile(rb'<(?:Contents|CommonPrefixes)>.*?<(?:Key|Prefix)>(.+?)</', re.DOTALL)
_NEXT_PAGE = re.compile(rb'<NextContinuationToken>(.+?)</')
# TensorStore's version of an object is this byte and its ETag.
_ETAG_FOLLOWS = b'\0'


_NAMESPACE = b'http://s3.amazonaws.com/doc/2006-03-01/'


@dataclasses.dataclass(frozen=True)
class AccessKeys:
    """The keys of a user or a role."""

    access: str
    secret: str = dataclasses.field(repr=False)
    token: str | None = dataclasses.field(default=None, repr=False)


class S3Requests(ServerRequests):
    """The requests to one bucket of S3, addressed by path.

    Attributes:
      extra: headers of each request.
      clock: returns the time in signatures.
    """

    def __init__(self, bucket: str, endpoint: str, region: str, patience: float, find: Callable[[], AccessKeys | None]):
        """Takes the bucket, the server, the region, the seconds for retries, and a function that returns the keys."""
        super().__init__(endpoint, f's3://{bucket}', patience)
        self._bucket, self._region, self._find = bucket, region, find
        self._compares = self._deletes_many = True
        self.extra: dict[str, str] = {}
        self.clock = lambda: datetime.datetime.now(datetime.UTC)

    def _target(self, key: str) -> str:
        return f'/{self._bucket}/{urllib.parse.quote(key, safe="/-._~")}'

    def _copy(self, source: str, target: str, version: bytes) -> bytes | None:
        headers = {
            'x-amz-copy-source': self._target(source),
            'x-amz-copy-source-if-match': version.removeprefix(_ETAG_FOLLOWS).decode(),
        }
        # S3 answers 200 before it copies, and may report an error in the body.
        return _version(_ETAG.search(self._send('COPY', 'PUT', self._target(target), headers)))

    def children(self, prefix: str) -> list[str]:
        """See the base class."""
        query = {'delimiter': '/', 'encoding-type': 'url', 'list-type': '2', 'prefix': prefix}
        children: list[str] = []
        while True:
            # The signature needs the names in order.
            encoded = urllib.parse.urlencode(sorted(query.items()), quote_via=urllib.parse.quote, safe='-._~')
            reply = self._list(f'/{self._bucket}?{encoded}')
            if b'</ListBucketResult>' not in reply:
                raise RefusedError.of(200, 'the answer is not a listing of S3')
            decode = urllib.parse.unquote_plus if b'<EncodingType>url<' in reply else html.unescape
            children += [decode(child.decode()) for child in _CHILD.findall(reply)]
            page = _NEXT_PAGE.search(reply)
            if page is None and b'<IsTruncated>true<' in reply:
                raise RefusedError.of(200, 'the answer has no token of the next page')
            if page is None:
                return children
            query['continuation-token'] = html.unescape(page[1].decode())

    def delete_unchanged(self, key: str, version: bytes) -> bool | None:
        """Sends the version as ``If-Match``."""
        if not self._compares:
            return None
        headers = {'If-Match': version.removeprefix(_ETAG_FOLLOWS).decode()}
        try:
            self._send('DELETE', 'DELETE', self._target(key), headers)
        except RefusedError as error:
            if error.is_transient or error.is_of_credentials:
                raise
            if error.is_of_object:
                return False
            # The server does not support the condition.
            self._compares = False
            return None
        return True

    def delete_many(self, keys: Sequence[str]) -> bool:
        """Sends a request for each thousand keys."""
        # XML has no control characters.
        if not self._deletes_many or not all(map(str.isprintable, keys)):
            return False
        return all(self._delete_batch(keys[start : start + _BULK_KEYS]) for start in range(0, len(keys), _BULK_KEYS))

    def _delete_batch(self, keys: Sequence[str]) -> bool:
        objects = ''.join(f'<Object><Key>{escape(key)}</Key></Object>' for key in keys)
        body = f'<Delete xmlns="{_NAMESPACE.decode()}"><Quiet>true</Quiet>{objects}</Delete>'.encode()
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        headers = {'Content-MD5': digest, 'Content-Type': 'application/xml'}
        try:
            reply = self._send('DELETE', 'POST', f'/{self._bucket}?delete=', headers, body)
        except RefusedError as error:
            if error.is_transient:
                raise
            # The server has no such request. If it refuses the deletion itself, that of each key is refused, too.
            self._deletes_many = error.is_of_credentials
            return False
        return b'<DeleteResult' in reply and b'<Error>' not in reply

    def signed(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> dict[str, str]:
        """The headers with a signature of all of them; without keys, with none."""
        keys, hashed = self._find(), hashlib.sha256(body).hexdigest()
        given = {**headers, **self.extra, 'Host': self._endpoint.netloc}
        if keys is None:
            return given
        now = self.clock().strftime('%Y%m%dT%H%M%SZ')
        given |= {'x-amz-date': now, 'x-amz-content-sha256': hashed}
        given |= {} if keys.token is None else {'x-amz-security-token': keys.token}
        path, _, query = f'{self._endpoint.path}{target}'.partition('?')
        lowered = {name.lower(): value.strip() for name, value in given.items()}
        names = sorted(lowered)
        lines = [method, path, query, *(f'{name}:{lowered[name]}' for name in names), '', ';'.join(names), hashed]
        scope = f'{now[:8]}/{self._region}/s3/aws4_request'
        canonical = hashlib.sha256('\n'.join(lines).encode()).hexdigest()
        text = f'AWS4-HMAC-SHA256\n{now}\n{scope}\n{canonical}'
        key = f'AWS4{keys.secret}'.encode()
        for part in (*scope.split('/'), text):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        named = f'Credential={keys.access}/{scope}, SignedHeaders={";".join(names)}, Signature={key.hex()}'
        return given | {'Authorization': f'AWS4-HMAC-SHA256 {named}'}


def _version(match: re.Match[bytes] | None) -> bytes | None:
    return None if match is None else _ETAG_FOLLOWS + match[1].replace(b'&quot;', b'"').replace(b'&#34;', b'"')


def s3_requests(bucket: str, options: S3Options, environ: Mapping[str, str]) -> S3Requests | None:
    """The requests of a bucket with the options of its storage; None if they cannot be sent or signed."""
    endpoint, region = s3_endpoint(options, environ), s3_region(options, environ)
    find = _keys(s3_credentials(options, environ), environ)
    if region is None or find is None:
        return None
    server = f'https://s3.{region}.amazonaws.com' if endpoint is None else endpoint
    if not needs_no_proxy(server):
        return None
    requests = S3Requests(bucket, server, region, options.retry_seconds, find)
    requests.extra = {'x-amz-request-payer': 'requester'} if options.requester_pays else {}
    return requests


def _keys(credentials: Mapping[str, Any], environ: Mapping[str, str]) -> Callable[[], AccessKeys | None] | None:
    """A function that returns the keys of TensorStore's spec of credentials, None for anonymous; None if they are not found."""
    match credentials['type']:
        case 'anonymous':
            return lambda: None
        case 'environment':
            token = environ.get('AWS_SESSION_TOKEN') or None
            keys = AccessKeys(environ['AWS_ACCESS_KEY_ID'], environ['AWS_SECRET_ACCESS_KEY'], token)
            return lambda: keys
        case _:
            profile = credentials.get('profile')
            keys = _of_profile(profile or 'default', environ)
            return _of_botocore(profile) if keys is None else lambda: keys


def _of_profile(profile: str, environ: Mapping[str, str]) -> AccessKeys | None:
    path = environ.get('AWS_SHARED_CREDENTIALS_FILE') or os.path.join(environ.get('HOME', ''), '.aws', 'credentials')
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding='utf-8')
        keys = parser[profile]
        return AccessKeys(keys['aws_access_key_id'], keys['aws_secret_access_key'], keys.get('aws_session_token'))
    except (configparser.Error, KeyError, OSError, UnicodeDecodeError):
        return None


def _of_botocore(profile: str | None) -> Callable[[], AccessKeys | None] | None:
    try:
        session: Any = importlib.import_module('botocore.session').Session(profile=profile)
        credentials = session.get_credentials()
    except Exception:  # noqa: BLE001 - an optional library: not installed, or without a profile of this name
        return None

    def find() -> AccessKeys:
        # Renews the keys of a role before they expire.
        try:
            frozen = credentials.get_frozen_credentials()
        except Exception as error:
            raise OSError(f'botocore has no credentials: {error}') from error
        return AccessKeys(frozen.access_key, frozen.secret_key, frozen.token)

    return None if credentials is None else find
