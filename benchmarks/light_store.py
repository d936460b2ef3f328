"""A server with the protocol of Google's storage that costs little, and lets bytes pass at a rate.

    python benchmarks/light_store.py PORT

Objects are in memory. The servers of the tests take 100 to 500 MB/s of a core; this one copies each body once, from the socket
into memory, so that a limit of 1 GB/s is that of the line. A rate is in bytes a second for each direction, whatever the number of
connections; 0 is none. It has what TensorStore and t5ckpt send: uploads, reads of ranges, deletions, listings, copies, and the
conditions of each on generations. ``GET /line?rate=RATE&forget=0`` returns the requests by kind and the bytes of bodies since the
last such call, and sets another rate: TensorStore reads the address of Google's storage once in a process.
"""

from __future__ import annotations

import collections
import contextlib
import http.server
import itertools
import json
import os
import pathlib
import re
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Generator
from typing import Any

_RANGE = re.compile('bytes=([0-9]+)-([0-9]*)')
_PAGE = 1000


class _Line:
    """Lets bytes pass at a rate."""

    def __init__(self, rate: float = 0):
        self._rate = rate
        self._lock = threading.Lock()
        self._free = 0.0

    def take(self, nbytes: int) -> None:
        """Waits until the line has carried the bytes."""
        if not self._rate:
            return
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + nbytes / self._rate
            end = self._free
        time.sleep(max(0.0, end - time.perf_counter()))


class _Objects:
    """What is stored: bytes and a generation by key."""

    def __init__(self) -> None:
        self.up, self.down = _Line(), _Line()
        self.lock = threading.Lock()
        self.stored: dict[str, tuple[bytearray, int]] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self._generations = itertools.count(1)

    def count(self, kind: str, sent: int = 0, received: int = 0) -> None:
        with self.lock:
            self.counts.update({kind: 1, 'sent': sent, 'received': received})

    def put(self, key: str, data: bytearray | None, expected: str | None) -> int | None:
        """Writes, or deletes with None; the generation, or None if it is not the expected one."""
        with self.lock:
            found = self.stored.get(key)
            if expected is not None and int(expected) != (found[1] if found else 0):
                return None
            if data is None:
                self.stored.pop(key, None)
                return 0
            self.stored[key] = data, next(self._generations)
            return self.stored[key][1]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True
    objects: _Objects

    def log_message(self, *_: Any) -> None:
        """Nothing on standard error."""

    def _reply(self, status: int, data: Any = b'', headers: dict[str, str] | None = None) -> None:
        if isinstance(data, dict):
            data = json.dumps(data).encode()
        self.send_response_only(status)
        for name, value in ({'Content-Type': 'application/json'} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(data)

    def _do(self) -> None:
        body = bytearray(int(self.headers.get('Content-Length') or 0))
        view, got = memoryview(body), 0
        while got < len(body):
            got += self.rfile.readinto(view[got:])
        parts = urllib.parse.urlsplit(self.path)
        query = {name: values[0] for name, values in urllib.parse.parse_qs(parts.query).items()}
        place = parts.path.removeprefix('/upload').removeprefix('/storage/v1/b/')
        _, _, key = place.partition('/o/')
        expected = query.get('ifGenerationMatch')
        if parts.path == '/line':
            rate = float(query['rate'])
            with self.objects.lock:
                counts, self.objects.counts = self.objects.counts, collections.Counter()
                self.objects.up, self.objects.down = _Line(rate), _Line(rate)
                if query['forget'] == '1':
                    self.objects.stored.clear()
            self._reply(200, dict(counts))
        elif parts.path.startswith('/upload'):
            self.objects.up.take(len(body))
            self.objects.count('PUT', sent=len(body))
            self._written(query['name'], self.objects.put(query['name'], body, expected))
        elif '/rewriteTo/' in key:
            self._copy(key, query.get('ifSourceGenerationMatch'))
        elif self.command == 'DELETE':
            self.objects.count('DELETE')
            done = self.objects.put(urllib.parse.unquote(key), None, expected)
            self._reply(412 if done is None else 204, b'' if done is not None else {})
        elif key:
            self._read(urllib.parse.unquote(key), query)
        elif place.endswith('/o'):
            self._list(query)
        else:
            self._reply(200, {'name': place})

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _do  # noqa: N815

    def _written(self, key: str, generation: int | None) -> None:
        if generation is None:
            self._reply(412, {})
            return
        self._reply(200, self._resource(key, generation))

    def _resource(self, key: str, generation: int) -> dict[str, str]:
        found = self.objects.stored.get(key)
        when = '2026-01-01T00:00:00.000Z'
        known = {'name': key, 'bucket': 'b', 'generation': str(generation), 'metageneration': '1'}
        return known | {'size': str(len(found[0]) if found else 0), 'timeCreated': when, 'updated': when}

    def _copy(self, key: str, expected: str | None) -> None:
        self.objects.count('COPY')
        source, _, rest = key.partition('/rewriteTo/b/')
        target = urllib.parse.unquote(rest.partition('/o/')[2])
        found = self.objects.stored.get(urllib.parse.unquote(source))
        if found is None or expected not in (None, str(found[1])):
            self._reply(404 if found is None else 412, {})
            return
        generation = self.objects.put(target, found[0], None) or 0
        self._reply(200, {'done': True, 'resource': self._resource(target, generation)})

    def _read(self, key: str, query: dict[str, str]) -> None:
        found = self.objects.stored.get(key)
        if found is None:
            self.objects.count('GET')
            self._reply(404, {})
            return
        data, generation = found
        if query.get('ifGenerationNotMatch') == str(generation):
            self.objects.count('GET')
            self._reply(304)
            return
        if query.get('alt') != 'media':
            self.objects.count('GET')
            self._reply(200, self._resource(key, generation))
            return
        status, headers, part = 200, {'x-goog-generation': str(generation)}, memoryview(data)
        asked = _RANGE.fullmatch(self.headers.get('Range') or '')
        if asked is not None:
            first, last = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
            if first >= len(data):
                self._reply(416, {})
                return
            status, part = 206, part[first : last + 1]
            headers['Content-Range'] = f'bytes {first}-{last}/{len(data)}'
        self.objects.count('GET', received=len(part))
        self.objects.down.take(len(part))
        self._reply(status, part, headers | {'Content-Type': 'application/octet-stream'})

    def _list(self, query: dict[str, str]) -> None:
        self.objects.count('LIST')
        first, end = query.get('pageToken') or query.get('startOffset', ''), query.get('endOffset')
        prefix = query.get('prefix', '')
        with self.objects.lock:
            known = sorted(self.objects.stored)
        keys = [key for key in known if key >= first and (end is None or key < end) and key.startswith(prefix)]
        found: dict[str, Any] = {'items': [self._resource(key, self.objects.stored[key][1]) for key in keys[:_PAGE]]}
        self._reply(200, found | ({'nextPageToken': keys[_PAGE]} if len(keys) > _PAGE else {}))


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


@contextlib.contextmanager
def light_store(directory: pathlib.Path) -> Generator[str]:
    """Runs it in a process of its own, and has this one's ``gs://`` sent to it; its address."""
    from support import servers

    port = servers.free_port()
    command = [sys.executable, os.fspath(pathlib.Path(__file__)), str(port)]
    with servers.running(command, port, directory / 'store.log', os.environ) as url:
        os.environ |= {'TENSORSTORE_GCS_HTTP_URL': url, 'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'token'}
        yield url


def counts(url: str, rate: float, *, forget: bool = False) -> dict[str, int]:
    """Requests by kind, and the bytes that were ``sent`` and ``received``, since the last call; sets the rate.

    Args:
      url: of the server.
      rate: bytes a second from now on; 0 for no limit.
      forget: removes all objects.
    """
    with urllib.request.urlopen(f'{url}/line?rate={rate}&forget={int(forget)}') as reply:  # noqa: S310 - on loopback
        return {'sent': 0, 'received': 0} | json.loads(reply.read())


def main() -> None:
    """See the top."""
    _Handler.objects = _Objects()
    _Server(('127.0.0.1', int(sys.argv[1])), _Handler).serve_forever()


if __name__ == '__main__':
    main()
