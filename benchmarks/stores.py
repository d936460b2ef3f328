"""Object stores, counted in requests and, with a latency like that of a network, in seconds.

    python benchmarks/stores.py listing [STEPS] [CHUNKS] [SECONDS] [SCHEME]
        100 steps of 10,000 chunks: what a listing asks for; a walk over every key is stopped after SECONDS
    python benchmarks/stores.py transfer [MB] [MS]
        a save and a restore by chunk size
    python benchmarks/stores.py unchanged [MB] [RATE]
        a second save of the same arrays, at RATE MB/s

Against the servers of the tests on loopback (ministack for S3, fake-gcs-server for Google's), behind a proxy that counts
and that waits MS milliseconds before it passes a request on. The servers are far slower than the services, and the proxy is
Python: seconds say which setting is better, not how fast a service is. Requests are the same everywhere.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
import threading
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / 'tests'))

from listing import BUCKET, counted, listing, store

import t5ckpt


def transfer(megabytes: int, milliseconds: int) -> None:
    """Saves and restores four arrays."""
    rows = megabytes * 2**20 // 4 // 4 // 4096
    state = {name: np.random.default_rng(0).standard_normal((rows, 4096), dtype=np.float32) for name in 'abcd'}
    for scheme in ('s3', 'gs'):
        for chunk in (4, 16, 64):
            with tempfile.TemporaryDirectory() as directory, store(scheme, pathlib.Path(directory)) as front:
                front.choose = lambda *_: time.sleep(milliseconds / 1000)
                url = f'{scheme}://{BUCKET}/run'
                with t5ckpt.Checkpointer(
                    state, checkpoints_dir=url, options=t5ckpt.CheckpointerOptions(chunk_bytes=chunk * 2**20)
                ) as checkpointer:
                    saved, save_seconds, _ = counted(front, lambda ck=checkpointer: ck.save(state, step=1))
                read, read_seconds, found = counted(front, lambda url=url: t5ckpt.load_t5x_checkpoint(url))
                assert np.array_equal(found['a'], state['a'])
                print(
                    f'{scheme} chunks of {chunk:2} MiB: save {save_seconds:6.2f} s ({saved}), '
                    f'restore {read_seconds:6.2f} s ({read})',
                    flush=True,
                )


def unchanged(megabytes: int, rate: int) -> None:
    """Saves an array of normal float32 three times, and deletes a step."""
    rows = megabytes * 2**20 // 4 // 4096
    state = {'w': np.random.default_rng(0).standard_normal((rows, 4096), dtype=np.float32), 'step': 0}
    wire, sizes = threading.Lock(), []

    def watch(_kind: str, _key: str, body: bytes) -> None:
        with wire:
            sizes.append(len(body))
            time.sleep(len(body) / rate / 1e6)

    for scheme in ('s3', 'gs'):
        with tempfile.TemporaryDirectory() as directory, store(scheme, pathlib.Path(directory)) as front:
            front.watch = watch
            with t5ckpt.Checkpointer(
                state, checkpoints_dir=f'{scheme}://{BUCKET}/run', options=t5ckpt.CheckpointerOptions(chunk_bytes=2**22)
            ) as checkpointer:
                for step in (1, 2, 3):
                    act = lambda: checkpointer.save({**state, 'step': np.int32(step)})  # noqa: B023, E731 - called at once
                    saved, seconds, _ = counted(front, act)
                    sent = sum(sizes)
                    sizes.clear()
                    print(f'{scheme} save {step}: {sent / 1e6:8.2f} MB in {seconds:5.2f} s ({saved})', flush=True)
                deleted, seconds, _ = counted(front, lambda: checkpointer.delete(1))
                print(f'{scheme} deletion: {seconds:5.2f} s ({deleted})', flush=True)


def main() -> None:
    """See the top."""
    what, *numbers = sys.argv[1:] or ['listing']
    if what == 'listing':
        steps, chunks, seconds, *schemes = (*numbers, *('100', '10000', '180')[len(numbers) :])
        for scheme in schemes or ('s3', 'gs'):
            listing(scheme, int(steps), int(chunks), float(seconds))
    elif what == 'unchanged':
        unchanged(*(int(number) for number in numbers or (64, 100)))
    else:
        transfer(*(int(number) for number in numbers or (512, 20)))


if __name__ == '__main__':
    main()
