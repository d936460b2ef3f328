"""An HTTP proxy in front of a server that counts what passes, and does to a request what a network can do.

TensorStore talks to the proxy as to the server itself. A fault is decided by a function that sees each request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import http.server
import json
import re
import socket
import struct
import threading
import time
import urllib.parse
import xml.sax.saxutils
from collections.abc import Callable
from typing import Any

# Faults that the server never sees, by the answer that is given in its place: status, content type, body.
_JSON, _XML, _HTML = 'application/json', 'application/xml', 'text/html'
# As Google says it; nothing in it is a listing.
_REPLY = b'{"error": {"message": "injected"}}'
# What stands between a machine and the network in hotels and on trains.
_PORTAL = b'<html><body>Sign in to the network</body></html>'


def _xml(code: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>injected</Message></Error>'.encode()


ANSWERS = {
    **{status: (int(status), _JSON, _REPLY) for status in ('400', '403', '429', '500', '501', '503')},
    **{status: (int(status), _JSON, _REPLY) for status in ('401', '404', '408', '409', '412', '416', '502', '504')},
    **{status: (int(status), _JSON, b'') for status in ('204', '304')},
    'empty': (200, _JSON, b''),
    'html': (200, _HTML, _PORTAL),
    'html 500': (500, _HTML, _PORTAL),
    'html 502': (502, _HTML, _PORTAL),
    'SlowDown': (503, _XML, _xml('SlowDown')),
    'ConditionalRequestConflict': (409, _XML, _xml('ConditionalRequestConflict')),
    'ExpiredToken': (400, _XML, _xml('ExpiredToken')),
    'RequestTimeTooSkewed': (403, _XML, _xml('RequestTimeTooSkewed')),
    'PermanentRedirect': (301, _XML, _xml('PermanentRedirect')),
    'TemporaryRedirect': (307, _XML, _xml('TemporaryRedirect')),
    'NoSuchBucket': (404, _XML, _xml('NoSuchBucket')),
    # Of S3, whose copies and whose deletions of many keys begin to answer before they are done.
    'InternalError': (200, _XML, _xml('InternalError')),
}
# 'lost' is applied by the server, and its reply never comes.
FAULTS = ('500', '503', '429', '403', 'dropped', 'lost', 'truncated', 'slow')
# What is done to the bytes on their way: 'cut' resets while the request is being sent; 'truncated' and 'closed' end the
# connection in the middle of the reply, by a reset or in order; 'stalled' ends it never; 'short' sends half of the reply as
# if it were all; 'twice' hands the request to the server once more after its reply. 'late' resets the connection, and the server
# gets the request when the test releases it. 'pending' says of a copy of Azure's that the server has not made it yet.
ON_THE_WAY = ('dropped', 'cut', 'lost', 'truncated', 'closed', 'stalled', 'short', 'twice')
_KEYS = re.compile('<Key>(.*?)</Key>')
# The requests in a request of Azure's for many deletions.
_PARTS = re.compile(r'^DELETE (/[^ ?]*)', re.MULTILINE)
_AZURE = '/devstoreaccount1/'
_SLOW_SECONDS = 0.2
_STALL_SECONDS = 30
_HOP = {'connection', 'content-length', 'host', 'keep-alive', 'transfer-encoding'}


@dataclasses.dataclass(frozen=True)
class Request:
    """What passed: ``kind`` is 'read', 'head', 'write', 'copy', 'delete', 'list' or 'bucket'.

    ``sent`` and ``received`` are bytes. A request that deletes several keys has them all in ``key``, one a line.
    """

    kind: str
    key: str
    status: int
    sent: int
    received: int
    headers: dict[str, str]
    fault: str | None = None


class Proxy:
    """Listens on a port of its own. ``requests`` holds what has passed; ``choose`` may name a fault for a request,
    ``watch`` sees its body."""

    def __init__(self, target: str):
        """Starts; ``target`` is the server's address."""
        self._target = urllib.parse.urlsplit(target).netloc
        self.requests: list[Request] = []
        self.choose: Callable[[str, str], str | None] = lambda kind, key: None
        self.watch: Callable[[str, str, bytes], None] = lambda kind, key, body: None
        # What is done to a condition, 'create' (that there is no object) or 'change': '501', 'strip' or nothing.
        self.conditions: Callable[[str], str | None] = lambda condition: None
        self.held: list[tuple[str, str, bytes, dict[str, str]]] = []
        self.connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        # One conditional request at a time: the comparison and the write are two requests to the server.
        self.comparing = threading.Lock()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(('127.0.0.1', 0), Handler)
        self.url = f'http://127.0.0.1:{self._server.server_address[1]}'
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def target(self) -> str:
        return self._target

    def record(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    def clear(self) -> list[Request]:
        """What has passed since the last call."""
        with self._lock:
            passed, self.requests = self.requests, []
        return passed

    def release(self) -> None:
        """Has the requests arrive that are late; they pass through here, where conditions are checked. None may be late again."""
        held, self.held = self.held, []
        for method, path, body, headers in held:
            connection = http.client.HTTPConnection(urllib.parse.urlsplit(self.url).netloc, timeout=60)
            connection.request(method, path, body, headers)
            connection.getresponse().read()
            connection.close()
        assert not self.held

    def hang_up(self) -> None:
        """Closes the connections of all clients, as a server does with those that are idle."""
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Forgets what has passed, and lets everything pass."""
        self.held.clear()
        self.choose = lambda kind, key: None
        self.watch = lambda kind, key, body: None
        self.conditions = lambda condition: None
        self.clear()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is what this proxy is for."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True
    owner: Proxy

    def setup(self) -> None:
        super().setup()
        self.owner.connections.add(self.connection)
        self._upstream = http.client.HTTPConnection(self.owner.target, timeout=60)

    def finish(self) -> None:
        self.owner.connections.discard(self.connection)
        self._upstream.close()
        super().finish()

    def log_message(self, *_: Any) -> None:
        """Nothing on standard error."""

    def _do(self) -> None:
        length = int(self.headers.get('Content-Length') or 0)
        # As a client sends it that takes this for its HTTP proxy.
        self.path = re.sub('^http://[^/]*', '', self.path)
        is_copy = 'x-amz-copy-source' in self.headers or 'x-ms-copy-source' in self.headers
        kind, key = describe(self.command, self.path, is_copy=is_copy)
        body = b''
        if kind == 'delete' and not key:
            body, length = self.rfile.read(length), 0
            key = '\n'.join(xml.sax.saxutils.unescape(name) for name in _KEYS.findall(body.decode()))
            if self.path.startswith(_AZURE):
                key = '\n'.join(describe('DELETE', path)[1] for path in _PARTS.findall(body.decode()))
        fault = next(filter(None, (self.owner.choose(kind, each) for each in key.split('\n'))), None)
        fault = self._meet_condition() or fault
        body += self.rfile.read(length // 2 if fault == 'cut' else length)
        self.owner.watch(kind, key, body)
        if fault == 'late':
            self.owner.held.append((self.command, self.path, body, self._forwarded(body)))
        if fault in ('dropped', 'cut', 'late'):
            self._note(kind, key, 0, len(body), 0, fault)
            return self._reset()
        if fault in ANSWERS:
            status, content_type, data = ANSWERS[fault]
            self._note(kind, key, status, len(body), len(data), fault)
            return self._reply(status, [('Content-Type', content_type)], data)
        if fault == 'slow':
            time.sleep(_SLOW_SECONDS)
        with self.owner.comparing if 'GenerationMatch' in self.path else contextlib.nullcontext():
            if self._is_outdated():
                self._note(kind, key, 412, len(body), 0, fault)
                return self._reply(412, [('Content-Type', 'application/json')], b'{}')
            reply, data = self._ask_server(body)
        if fault == 'twice':
            self._ask_server(body)
        self._note(kind, key, reply.status, len(body), len(data), fault)
        if fault == 'lost':
            return self._reset()
        length = reply.getheader('Content-Length') if self.command == 'HEAD' else None
        if fault == 'short':
            data = data[: len(data) // 2]
        self._reply(reply.status, reply.getheaders(), data, fault, length)
        return None

    def _meet_condition(self) -> str | None:
        """The fault of a request with a condition; strips the condition if the test wants this."""
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        [generation] = query.get('ifGenerationMatch', [None])
        if not (
            self.command in ('PUT', 'POST', 'DELETE')
            and (generation or 'If-Match' in self.headers or 'If-None-Match' in self.headers)
        ):
            return None
        action = self.owner.conditions('create' if generation == '0' or 'If-None-Match' in self.headers else 'change')
        if action != 'strip':
            return action
        del self.headers['If-Match'], self.headers['If-None-Match']
        self.path = re.sub('&?ifGenerationMatch=[0-9]+', '', self.path)
        return None

    def _ask_server(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        self._upstream.request(self.command, self.path, body, self._forwarded(body))
        reply = self._upstream.getresponse()
        return reply, reply.read()

    def _forwarded(self, body: bytes) -> dict[str, str]:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
        return headers | {'Content-Length': str(len(body)), 'Host': self.owner.target}

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _do  # noqa: N815

    def _is_outdated(self) -> bool:
        """Google's precondition of an upload, a deletion or a copy, which fake-gcs-server does not check."""
        parts = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(parts.query)
        [expected] = query.get('ifGenerationMatch') or query.get('ifSourceGenerationMatch') or ['']
        if not expected:
            return False
        path = parts.path.partition('/rewriteTo/')[0]
        if 'name' in query:
            path = f'{path.removeprefix("/upload")}/{urllib.parse.quote(query["name"][0], safe="")}'
        self._upstream.request('GET', path, headers=self._credentials())
        reply = self._upstream.getresponse()
        data = reply.read()
        found = json.loads(data)['generation'] if reply.status == 200 else '0'
        return found != expected

    def _credentials(self) -> dict[str, str]:
        return {name: value for name, value in self.headers.items() if name.lower() == 'authorization'}

    def _note(self, kind: str, key: str, status: int, sent: int, received: int, fault: str | None) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.owner.record(Request(kind, key, status, sent, received, headers, fault))

    def _reply(
        self,
        status: int,
        headers: list[tuple[str, str]],
        data: bytes,
        fault: str | None = None,
        length: str | None = None,
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _HOP:
                is_pending = fault == 'pending' and name.lower() == 'x-ms-copy-status'
                self.send_header(name, 'pending' if is_pending else value)
        self.send_header('Content-Length', str(len(data)) if length is None else length)
        self.end_headers()
        if fault in ('truncated', 'closed', 'stalled'):
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            if fault == 'stalled':
                # Until the client has had enough.
                self.connection.settimeout(_STALL_SECONDS)
                self.connection.recv(1)
            self.close_connection = True
            return None if fault == 'closed' else self._reset()
        if self.command != 'HEAD':
            self.wfile.write(data)
        return None

    def _reset(self) -> None:
        """Closes the connection at once, with a reset."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        self.connection.close()
        self.close_connection = True


def describe(command: str, path: str, *, is_copy: bool = False) -> tuple[str, str]:
    """What a request asks for, on each protocol, and of which key (or prefix); no key if its body names them."""
    parts = urllib.parse.urlsplit(path)
    query = urllib.parse.parse_qs(parts.query)
    names = urllib.parse.unquote(parts.path)
    if names.startswith(_AZURE):
        names = f'/{names.removeprefix(_AZURE)}'
        if query.get('comp') == ['list']:
            return 'list', query.get('prefix', [''])[0]
        if query.get('comp') == ['batch']:
            return 'delete', ''
    if 'list-type' in query:
        return 'list', query.get('prefix', [''])[0]
    if names.startswith('/upload/storage/'):
        return 'write', query.get('name', [''])[0]
    if names.startswith('/storage/v1/b/'):
        bucket, slash, key = names.removeprefix('/storage/v1/b/').partition('/o/')
        if '/' not in f'{bucket}{slash}':
            return 'bucket', ''
        if not slash:
            return 'list', query.get('startOffset', [''])[0]
        if '/rewriteTo/' in key:
            return 'copy', key.partition('/rewriteTo/')[2].partition('/o/')[2]
        return {'GET': 'read', 'DELETE': 'delete'}.get(command, command), key
    key = names.lstrip('/').partition('/')[2]
    if is_copy:
        return 'copy', key
    if command == 'POST' and 'delete' in parts.query:
        return 'delete', ''
    return {'GET': 'read', 'HEAD': 'head', 'PUT': 'write', 'DELETE': 'delete'}.get(command, command), key
