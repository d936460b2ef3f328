"""Restarts of a job of four processes: with its local disks, without one of them, and from a plain directory.

A part of ``benchmarks/tiers.py``.

Every shard is on the devices, and the local disks, of two processes. The step is in a shared directory, in the local directories,
and in a bucket: a server on the loopback, behind a proxy that counts the bytes. Each restore is the first of four new processes,
which are killed afterwards. A round restores once in each of these ways, with the files in the page cache:

    plain           from the shared directory, without ``local``
    plain again     the same: how much two equal restores differ in this run
    intact disks    with ``local``
    a lost disk     with ``local``, and the directory of one process is empty
    no disks        once, with the bucket alone: what the proxy counts then

The seconds are those of the slowest process, from the constructor of the checkpointer to the arrays on the devices. The peak is
that of the resident memory above the arrays of the process, in further restarts with a small ``restore_concurrent_gb``. The
collective of a lost disk takes about 12 MB whatever the budget is, so there are two budgets.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / 'tests'))

import probe
from listing import BUCKET, store
from support.nursery import Nursery
from tier_loop import ratio

COUNT, DEVICES = 4, 2
KINDS = ('plain', 'plain again', 'intact disks', 'a lost disk')
_HERE = pathlib.Path(__file__).resolve().parent
_LEAF_BYTES = 4 * 2**20
_CHUNK = re.compile(r'/[0-9]+(\.[0-9]+)*$')
_DEFAULT_GB, SMALL_GB = 4.0, (0.032, 0.128)


class _Job:
    """Four new processes."""

    def __init__(self, nursery: Nursery):
        with socket.socket() as free:
            free.bind(('127.0.0.1', 0))
            port = free.getsockname()[1]
        environment = os.environ | {'XLA_FLAGS': f'--xla_force_host_platform_device_count={DEVICES}'}
        pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}
        self._nursery = nursery
        self._processes = [
            nursery.start([port, COUNT, index], environment=environment, **pipes) for index in range(COUNT)
        ]
        self._answers()

    def run(self, action: str, options: dict[str, Any], each: list[dict[str, Any]]) -> list[Any]:
        """What each process answers to an order, which has options of its own for each."""
        for process, own in zip(self._processes, each, strict=True):
            process.stdin.write(json.dumps([action, options | own]) + '\n')
            process.stdin.flush()
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for process in self._processes:
            line = next((line for line in process.stdout if line.startswith('ANSWER ')), None)
            answer = {'error': self._nursery.log()} if line is None else json.loads(line.removeprefix('ANSWER '))
            if isinstance(answer, dict) and 'error' in answer:
                self.kill()
                raise RuntimeError(answer['error'])
            answers.append(answer)
        return answers

    def kill(self) -> None:
        """Ends the processes with SIGKILL, as a machine that fails."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            process.stdin.close()
            process.stdout.close()


class Bench:
    """The step in all places, and the processes that restore it."""

    def __init__(self, nursery: Nursery, front: Any, home: pathlib.Path, megabytes: int):
        self._nursery, self._front = nursery, front
        self._leaves = max(1, round(megabytes * 1e6 / _LEAF_BYTES))
        self.state_bytes = self._leaves * _LEAF_BYTES
        self._plain, self._run = home / 'plain', f'gs://{BUCKET}/run'
        self._disks = [home / f'disk{index}' for index in range(COUNT)]

    def save(self) -> dict[str, Any]:
        """Saves everywhere; the peaks of memory."""
        job = _Job(self._nursery)
        options = {'leaves': self._leaves, 'plain': str(self._plain), 'run': self._run, 'concurrent_gb': SMALL_GB[0]}
        answers = job.run('save', options, [{'local': str(disk)} for disk in self._disks])
        job.kill()
        peaks = {kind: max(answer['peaks'][kind] for answer in answers) for kind in answers[0]['peaks']}
        return {'peaks': peaks, 'own_bytes': answers[0]['own_bytes']}

    def restore(self, kind: str, concurrent_gb: float = _DEFAULT_GB) -> dict[str, Any]:
        """Restores in four new processes."""
        lost = {'a lost disk': self._disks[-1:], 'no disks': self._disks}.get(kind, [])
        # Nothing of it is written back.
        for disk in lost:
            disk.rename(disk.with_suffix('.lost'))
        for directory in (self._plain, *self._disks):
            if directory.exists():
                probe.warm_cache(directory)
        job = _Job(self._nursery)
        is_plain = kind.startswith('plain')
        options = {
            'leaves': self._leaves,
            'run': str(self._plain) if is_plain else self._run,
            'concurrent_gb': concurrent_gb,
        }
        self._front.clear()
        answers = job.run('restore', options, [{'local': None if is_plain else str(disk)} for disk in self._disks])
        job.kill()
        for disk in lost:
            shutil.rmtree(disk)
            disk.with_suffix('.lost').rename(disk)
        read = [request for request in self._front.clear() if request.kind == 'read']
        return {
            'seconds': max(answer['seconds'] for answer in answers),
            'peak': max(answer['peak'] for answer in answers),
            'reads': len(read),
            'bucket_bytes': sum(request.received for request in read),
            'chunk_bytes': sum(request.received for request in read if _CHUNK.search(request.key)),
            'lines': [answer['line'] for answer in answers],
        }


@contextlib.contextmanager
def _bench(directory: pathlib.Path, megabytes: int) -> Generator[Bench]:
    path = os.pathsep.join(map(str, (_HERE, _HERE.parent, _HERE.parent / 'tests')))
    nursery = Nursery('tier_job', {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': path})
    with contextlib.closing(nursery), tempfile.TemporaryDirectory(dir=directory) as name:
        home = pathlib.Path(name)
        with store('gs', home) as front:
            yield Bench(nursery, front, home, megabytes)


def measure(megabytes: int, rounds: int, directory: pathlib.Path) -> dict[str, Any]:
    """The numbers of all restarts and of the saves before them."""
    restarts: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with _bench(directory, megabytes) as bench:
        saved = bench.save()
        for number in range(rounds):
            first = number % len(KINDS)
            for kind in (*KINDS[first:], *KINDS[:first]):
                restarts[kind].append(bench.restore(kind))
        small = {
            kind: [bench.restore(kind, budget)['peak'] for budget in SMALL_GB]
            for kind in KINDS
            if kind != 'plain again'
        }
        restarts['no disks'] = [bench.restore('no disks')]
    plain = [each['seconds'] for kind in KINDS[:2] for each in restarts[kind]]
    found: dict[str, Any] = {}
    for kind, each in restarts.items():
        seconds = [one['seconds'] for one in each]
        # The row of the null comparison is compared with the other plain restarts alone.
        base = seconds if kind == 'plain' else [one['seconds'] for one in restarts['plain']]
        found[kind] = {
            'restarts': len(each),
            'seconds': round(statistics.median(seconds), 3),
            'above_plain_ms': round(1e3 * (statistics.median(seconds) - statistics.median(plain))),
            'reads': max(one['reads'] for one in each),
            'bucket_bytes': max(one['bucket_bytes'] for one in each),
            'chunk_bytes': max(one['chunk_bytes'] for one in each),
        }
        found[kind]['ratio'], found[kind]['interval'] = ratio(seconds, base if kind in KINDS[:2] else plain)
        if kind in small:
            found[kind]['peaks_mb'] = [round(peak / 1e6) for peak in small[kind]]
    own_mb, peaks = round(saved['own_bytes'] / 1e6), {kind: round(peak / 1e6) for kind, peak in saved['peaks'].items()}
    return {
        'megabytes': megabytes,
        'own_mb': own_mb,
        'budgets_mb': [round(1e3 * budget) for budget in SMALL_GB],
        'save_peak_mb': peaks,
        **found,
    }


def table(found: dict[str, Any]) -> list[str]:
    """The lines of a table in Markdown."""
    peaks = found['save_peak_mb']
    made = [
        (
            f'Restarts of four processes of {found["own_mb"]} MB each, medians, ratios with their 90 % intervals; peaks above '
            f'the arrays with budgets of {found["budgets_mb"][0]} and {found["budgets_mb"][1]} MB:'
        ),
        '',
        '| restart | restarts | seconds | / plain | above plain | bytes of arrays of the bucket | other bytes | reads | peaks |',
        '|---|---:|---:|---:|---:|---:|---:|---:|---:|',
    ]
    for kind in (*KINDS, 'no disks'):
        row = found[kind]
        times = f'{row["seconds"]:.2f} s | {row["ratio"]} ({row["interval"][0]} to {row["interval"][1]})'
        times = (
            f'{row["seconds"]:.2f} s | |' if kind in ('plain', 'no disks') else f'{times} | {row["above_plain_ms"]} ms'
        )
        times = times if not times.endswith('|') else f'{row["seconds"]:.2f} s |  | '
        peak = '{} and {} MB'.format(*row['peaks_mb']) if 'peaks_mb' in row else ''
        made.append(
            f'| {kind} | {row["restarts"]} | {times} | {row["chunk_bytes"]:,} | {row["bucket_bytes"] - row["chunk_bytes"]:,} '
            f'| {row["reads"]} | {peak} |'
        )
    made += [
        '',
        (
            f'Peaks of the saves above the state, with the smaller budget: plain {peaks["plain"]} MB, local {peaks["local"]} MB, '
            f'with the upload {peaks["upload"]} MB.'
        ),
    ]
    return made


def run(megabytes: int, rounds: int, directory: pathlib.Path) -> tuple[list[str], dict[str, Any]]:
    """Measures; the lines of the table, and the numbers."""
    found = measure(megabytes, rounds, directory)
    return table(found), found
