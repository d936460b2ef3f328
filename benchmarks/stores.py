"""Object stores, counted in requests and, with a latency like that of a network, in seconds.

    python benchmarks/stores.py listing [STEPS] [CHUNKS]     100 steps of 10,000 chunks: what a listing asks for
    python benchmarks/stores.py transfer [MB] [MS]           a save and a restore by chunk size and concurrency

Against the servers of the tests on loopback (ministack for S3, fake-gcs-server for Google's), behind a proxy that counts
and that waits MS milliseconds before it passes a request on. The servers are far slower than the services, and the proxy is
Python: seconds say which setting is better, not how fast a service is. Requests are the same everywhere.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Generator
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / 'tests'))

from support import proxy, servers

import t5ckpt
from t5ckpt._index import mark_step
from t5ckpt.storage import open_storage

_BUCKET = 'bench'


@contextlib.contextmanager
def _store(scheme: str, directory: str) -> Generator[proxy.Proxy]:
    """A server behind a proxy, and the variables that name it."""
    start, make = {
        'gs': (servers.gcs_server, servers.make_gcs_bucket),
        's3': (servers.s3_server, servers.make_s3_bucket),
    }[scheme]
    with start(pathlib.Path(directory)) as address:
        make(address, _BUCKET)
        front = proxy.Proxy(address)
        os.environ |= {'TENSORSTORE_GCS_HTTP_URL': front.url, 'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'token'}
        os.environ |= {'AWS_ACCESS_KEY_ID': 'k', 'AWS_SECRET_ACCESS_KEY': 's', 'AWS_ENDPOINT_URL_S3': front.url}
        os.environ['AWS_REGION'] = 'us-east-1'
        yield front
        front.close()


def _counted(front: proxy.Proxy, act: Any) -> tuple[str, float, Any]:
    """Requests by kind, seconds and the result."""
    front.clear()
    started = time.perf_counter()
    result = act()
    seconds = time.perf_counter() - started
    kinds = collections.Counter(request.kind for request in front.clear())
    return ', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items())), seconds, result


def listing(steps: int, chunks: int) -> None:
    """Makes the steps, with one byte a chunk, and lists them."""
    for scheme in ('s3', 'gs'):
        with tempfile.TemporaryDirectory() as directory, _store(scheme, directory) as front:
            url = f'{scheme}://{_BUCKET}/run'
            state = {'w': np.zeros(4, np.float32)}
            with t5ckpt.Checkpointer(state, checkpoints_dir=url) as checkpointer:
                checkpointer.save(state, step=0)
            storage = open_storage(url)
            files = {key.removeprefix('checkpoint_0/'): storage.read(key) for key, _ in storage.walk('checkpoint_0')}
            put = {'s3': servers.put_s3_object, 'gs': servers.put_gcs_object}[scheme]

            def make(step: int, *, files: Any = files, put: Any = put, front: Any = front) -> None:
                for number in range(chunks):
                    put(f'http://{front.target}', _BUCKET, f'run/checkpoint_{step}/w/{number}', b'x')
                for name in sorted(files, key=lambda name: name == 'checkpoint'):
                    put(f'http://{front.target}', _BUCKET, f'run/checkpoint_{step}/{name}', files[name])

            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                list(pool.map(make, range(1, steps)))
            for step in range(1, steps):
                mark_step(storage, step)
            print(f'{scheme}: {steps} steps of {chunks:,} chunks')
            for name, act in [
                ('all_steps', lambda url=url: t5ckpt.all_steps(url)),
                ('latest_step', lambda url=url: t5ckpt.latest_step(url)),
                ('every key, as without markers', lambda url=url: sum(1 for _ in open_storage(url).walk(''))),
            ]:
                requests, seconds, result = _counted(front, act)
                shown = len(result) if isinstance(result, list) else result
                print(f'  {name:30} {requests:28} {seconds:7.2f} s  -> {shown}')


def transfer(megabytes: int, milliseconds: int) -> None:
    """Saves and restores four arrays."""
    rows = megabytes * 2**20 // 4 // 4 // 4096
    state = {name: np.random.default_rng(0).standard_normal((rows, 4096), dtype=np.float32) for name in 'abcd'}
    for scheme in ('s3', 'gs'):
        for chunk in (4, 16, 64):
            for concurrency in (8, 32, 128):
                with tempfile.TemporaryDirectory() as directory, _store(scheme, directory) as front:
                    front.choose = lambda *_: time.sleep(milliseconds / 1000)
                    url, options = f'{scheme}://{_BUCKET}/run', {'concurrency': concurrency}
                    with t5ckpt.Checkpointer(
                        state, checkpoints_dir=url, chunk_bytes=chunk * 2**20, storage_options=options
                    ) as checkpointer:
                        saved, save_seconds, _ = _counted(front, lambda ck=checkpointer: ck.save(state, step=1))
                    read, read_seconds, found = _counted(
                        front, lambda url=url, options=options: t5ckpt.load_t5x_checkpoint(url, storage_options=options)
                    )
                    assert np.array_equal(found['a'], state['a'])
                    print(
                        f'{scheme} chunks of {chunk:2} MiB, {concurrency:3} at once: save {save_seconds:6.2f} s ({saved}), '
                        f'restore {read_seconds:6.2f} s ({read})',
                        flush=True,
                    )


def main() -> None:
    """See the top."""
    what, *numbers = sys.argv[1:] or ['listing']
    if what == 'listing':
        listing(*(int(number) for number in numbers or (100, 10_000)))
    else:
        transfer(*(int(number) for number in numbers or (512, 20)))


if __name__ == '__main__':
    main()
