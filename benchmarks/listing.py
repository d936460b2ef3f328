"""What a listing of a long run asks an object store for.

No server here takes in a million keys by PUT in reasonable time: ministack does 110 a second, and fake-gcs-server in memory
looks through all its objects at each. But both can keep objects as files named after the keys. So a server is started,
t5ckpt saves step 0 through it, and the server is stopped. Its own files of that step are copied for the others, with what
it noted about each, and the further chunks of a step are links to one file. Started again, it serves them all.

fake-gcs-server looks at every file for each listing that it is asked for, so 100 steps of 10,000 chunks, 102 listings, take
a quarter of an hour. It is asked two at a time, as each takes a gigabyte or two. ``TMPDIR`` may name a file system in
memory, which is a fifth faster.
"""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from support import proxy, servers

import t5ckpt
from t5ckpt.storage import open_storage

BUCKET = 'bench'
# A server that is busy for minutes does not cause another request, which would be counted.
_OPTIONS = {'retry_seconds': 3600.0}
# Where fake-gcs-server keeps what it knows of an object.
_ATTRIBUTES = 'user.metadata'


@contextlib.contextmanager
def store(scheme: str, directory: pathlib.Path, root: pathlib.Path | None = None) -> Generator[proxy.Proxy]:
    """A server behind a proxy, and the variables that name it; with ``root``, over the files there."""
    start, make = {
        'gs': (servers.gcs_server, servers.make_gcs_bucket),
        's3': (servers.s3_server, servers.make_s3_bucket),
    }[scheme]
    with start(directory, root) as address:
        if root is None or not any(root.iterdir()):
            make(address, BUCKET)
        front = proxy.Proxy(address)
        os.environ |= {'TENSORSTORE_GCS_HTTP_URL': front.url, 'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'token'}
        os.environ |= {'AWS_ACCESS_KEY_ID': 'k', 'AWS_SECRET_ACCESS_KEY': 's', 'AWS_ENDPOINT_URL_S3': front.url}
        os.environ['AWS_REGION'] = 'us-east-1'
        yield front
        front.close()


def counted(front: proxy.Proxy, act: Callable[[], Any]) -> tuple[str, float, Any]:
    """Requests by kind, seconds and the result."""
    front.clear()
    started = time.perf_counter()
    result = act()
    seconds = time.perf_counter() - started
    kinds = collections.Counter(request.kind for request in front.clear())
    return ', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items())), seconds, result


def listing(scheme: str, steps: int, chunks: int, seconds: float) -> None:
    """Makes the steps and lists them; the walk over every key ends after ``seconds``."""
    url = f'{scheme}://{BUCKET}/run'
    # fake-gcs-server makes much garbage: it may let some lie, but not all that the machine has room for.
    os.environ |= {'GOGC': '400', 'GOMEMLIMIT': '6GiB'}
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        root = directory / 'objects'
        root.mkdir()
        with store(scheme, directory, root):
            # Large enough for an array of its own, outside the manifest.
            state = {'w': np.zeros(2**20, np.float32)}
            with t5ckpt.Checkpointer(state, checkpoints_dir=url, storage_options=_OPTIONS) as checkpointer:
                checkpointer.save(state, step=0)
        started = time.perf_counter()
        keys = _multiply(next(root.rglob('run')), steps, chunks)
        print(f'{scheme}: {steps} steps of {chunks:,} chunks, {keys:,} keys in {time.perf_counter() - started:.0f} s')
        with store(scheme, directory, root) as front:
            requests, took, found = counted(front, lambda: t5ckpt.all_steps(url, storage_options=_OPTIONS))
            _show('all_steps', requests, took, f'{len(found)} steps')
            requests, took, walked = counted(front, lambda: _walk_within(url, seconds))
            _show('every key', requests, took, 'stopped' if walked is None else f'{walked:,} keys')


def _show(name: str, requests: str, seconds: float, result: str) -> None:
    print(f'  {name:30} {requests:28} {seconds:7.2f} s  -> {result}', flush=True)


def _multiply(run: pathlib.Path, steps: int, chunks: int) -> int:
    """Copies step 0 and gives every step its chunks; how many keys these are."""
    first = run / 'checkpoint_0'
    (array,) = (path.parent.relative_to(first) for path in first.rglob('.zarray'))
    for step in range(1, steps):
        shutil.copytree(first, run / f'checkpoint_{step}')
    for step in range(steps):
        # A file has 65,000 names at most on ext4, so each step has one of its own.
        chunk = run / f'checkpoint_{step}' / array / '1'
        chunk.write_bytes(b'x')
        # Where it keeps attributes so, a chunk has none: they would be parsed again for each listing.
        if _ATTRIBUTES in os.listxattr(first / array / '.zarray'):
            os.setxattr(chunk, _ATTRIBUTES, b'{}')
        for number in range(2, chunks):
            os.link(chunk, chunk.with_name(str(number)))
    return sum(not name.endswith('.meta.json') for _, _, names in os.walk(run) for name in names)


def _walk_within(url: str, seconds: float) -> int | None:
    """How many keys there are, or None if the walk took longer: TensorStore cannot stop one, so a process does."""
    with multiprocessing.get_context('spawn').Pool(1) as pool:
        try:
            return pool.apply_async(_walk, (url,)).get(seconds)
        except multiprocessing.TimeoutError:
            return None


def _walk(url: str) -> int:
    return sum(1 for _ in open_storage(url, _OPTIONS).walk(''))
