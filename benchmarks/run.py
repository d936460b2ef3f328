"""Compares t5ckpt with other checkpointers.

    python benchmarks/run.py                       everything, two hours and a half on two cores
    python benchmarks/run.py --cases s1 stall      some of it
    python benchmarks/run.py --scale 4             10 GB instead of 0.74 GB in S1, for a GPU

Peers take turns within a round (A B C, A B C, ...), so that a machine that slows down slows all of them. Every turn is a
process of its own, see measure.py. What was restored is compared bit by bit with what was saved, every time; a peer that
fails is reported and takes part in the case no further. Wants a disk with 20 GB free, 24 GB of memory for the case
`big`, and a machine that does nothing else: the report states the load before and after.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

import cases
import peers
import probe
import report

_HERE = pathlib.Path(__file__).parent
_FLAG = '--xla_force_host_platform_device_count'
_TIMEOUT_SECONDS = 1800
_SHORT_DEVICES = 8


class Children:
    """Runs measure.py, and tells it how many CPU devices to make."""

    def __init__(self, scratch: pathlib.Path, *, short: bool, scale: int):
        self.scratch = scratch
        self._options = {'short': short, 'scale': scale}

    def run(self, turns: list[dict[str, Any]], devices: int) -> dict[str, Any]:
        """The answer of one process; an answer full of errors if the process died."""
        request, answer = self.scratch / 'request.json', self.scratch / 'answer.json'
        request.write_text(json.dumps(self._options | {'turns': turns}))
        answer.unlink(missing_ok=True)
        command = [sys.executable, os.fspath(_HERE / 'measure.py'), os.fspath(request), os.fspath(answer)]
        try:
            subprocess.run(command, check=True, env=self._environment(devices), timeout=_TIMEOUT_SECONDS)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            reason = 'took too long' if isinstance(error, subprocess.TimeoutExpired) else f'died: {error.returncode}'
            return {'turns': [turn | {'error': f'the process {reason}'} for turn in turns]}
        return json.loads(answer.read_text())

    def _environment(self, devices: int) -> dict[str, str]:
        flags = [flag for flag in os.environ.get('XLA_FLAGS', '').split() if not flag.startswith(_FLAG)]
        paths = [os.fspath(_HERE.parent), *filter(None, [os.environ.get('PYTHONPATH')])]
        return os.environ | {
            'XLA_FLAGS': ' '.join([*flags, f'{_FLAG}={devices}']),
            'PYTHONPATH': os.pathsep.join(paths),
            'JAX_COMPILATION_CACHE_DIR': os.fspath(self.scratch / 'compiled'),
        }


class Results:
    """What the turns answered."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, str, str], list[float]] = collections.defaultdict(list)
        self.failed: dict[tuple[str, str], str] = {}
        self.left_out: dict[tuple[str, str], str] = {}
        self.bytes: dict[str, int] = {}

    def add(self, answer: dict[str, Any]) -> None:
        """Adds the samples of one turn, or takes the peer out of the case."""
        case, peer = answer['case'], answer['peer']
        if 'error' in answer:
            self.failed[case, peer] = answer['error']
            return
        self.bytes[case] = answer['bytes']
        for metric, value in answer['samples'].items():
            self.samples[case, peer, metric].append(value)

    def to_json(self) -> dict[str, Any]:
        """Plain lists of records."""
        return {
            'bytes': self.bytes,
            'series': [
                {'case': case, 'peer': peer, 'metric': metric, 'samples': samples}
                for (case, peer, metric), samples in self.samples.items()
            ],
            'failed': [{'case': case, 'peer': peer, 'error': why} for (case, peer), why in self.failed.items()],
            'left_out': [{'case': case, 'peer': peer, 'reason': why} for (case, peer), why in self.left_out.items()],
        }


def _leave_out(case: cases.Case, facts: dict[str, Any], names: list[str], results: Results) -> list[str]:
    """The peers that take part in a case; why the others do not becomes part of the results."""
    available = case.devices if facts['platform'] == 'cpu' else facts['devices']
    taking_part = []
    for name in (name for name in names if case.name in (peers.PEERS[name].only or [case.name])):
        missing = [package for package in peers.PEERS[name].packages if facts['versions'][package] is None]
        if available < case.needs:
            reason = f'needs {case.needs} devices'
        elif missing:
            reason = f'{", ".join(missing)} not installed'
        elif 'stall' in case.actions and not peers.PEERS[name].asynchronous:
            reason = 'cannot save while the state is donated'
        else:
            reason = case.without.get(name)
        if reason is None:
            taking_part.append(name)
        else:
            results.left_out[case.name, name] = reason
    return taking_part


def _turn(case: cases.Case, peer: str, action: str, seed: int, scratch: pathlib.Path) -> dict[str, Any]:
    root = scratch / f'{case.name}_{peer}'
    return {'case': case.name, 'peer': peer, 'action': action, 'seed': seed, 'root': os.fspath(root)}


def _clean(scratch: pathlib.Path, case: cases.Case, peer: str) -> None:
    for path in scratch.glob(f'{case.name}_{peer}*'):
        shutil.rmtree(path)


def _measure_case(case: cases.Case, names: list[str], rounds: int, children: Children, results: Results) -> None:
    """All rounds of a case: A B C, A B C, ... Every turn in a process of its own."""
    for seed in range(1, rounds + 1):
        for name in names:
            if (case.name, name) in results.failed:
                continue
            for action in case.actions:
                turn = _turn(case, name, action, seed, children.scratch)
                (answer,) = children.run([turn], case.devices)['turns']
                results.add(answer)
                _say(f'{case.name} {seed}/{rounds} {name:15} {action:8}', answer)
                if 'error' in answer:
                    break
            _clean(children.scratch, case, name)


def _measure_short(chosen: list[tuple[cases.Case, list[str]]], children: Children, results: Results) -> None:
    """Everything once, in one process."""
    turns = [
        _turn(case, name, action, 1, children.scratch)
        for case, names in chosen
        for name in names
        for action in case.actions
    ]
    for answer in children.run(turns, _SHORT_DEVICES)['turns']:
        results.add(answer)
        if 'error' in answer:
            _say(f'{answer["case"]} {answer["peer"]} {answer["action"]}', answer)


def _say(what: str, answer: dict[str, Any]) -> None:
    """One line of progress on standard error."""
    numbers = answer.get('samples', {})
    shown = [f'{name} {value:.3f} s' for name, value in numbers.items() if name in report.PROGRESS]
    print(what, answer.get('error', ', '.join(shown)), file=sys.stderr, flush=True)


def _machine(scratch: pathlib.Path) -> dict[str, Any]:
    """What the numbers depend on, and nothing that names the machine."""
    cpuinfo, meminfo = pathlib.Path('/proc/cpuinfo'), pathlib.Path('/proc/meminfo')
    models = [line.split(':')[1].strip() for line in _lines(cpuinfo) if line.startswith('model name')]
    memory = [int(line.split()[1]) * 1024 for line in _lines(meminfo) if line.startswith('MemTotal')]
    return {
        'cpu': models[0] if models else platform.processor(),
        'cores': len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
        'memory': memory[0] if memory else None,
        'file_system': _file_system(scratch),
        'system': f'{platform.system()} {platform.release()}',
        'python': platform.python_version(),
        'load_before': round(os.getloadavg()[0], 2),
        'cold_cache': probe.empty_page_cache() or 'posix_fadvise',
    }


def _lines(path: pathlib.Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _file_system(directory: pathlib.Path) -> str | None:
    """The type of the file system that `directory` is on."""
    mounts = [line.split()[1:3] for line in _lines(pathlib.Path('/proc/mounts'))]
    holding = [(len(point), kind) for point, kind in mounts if directory.resolve().is_relative_to(point)]
    return max(holding)[1] if holding else None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--short', action='store_true', help='tiny states, once: only shows that everything works')
    parser.add_argument('--cases', nargs='+', choices=cases.CASES, default=list(cases.CASES), metavar='CASE')
    parser.add_argument('--peers', nargs='+', choices=peers.PEERS, default=list(peers.PEERS), metavar='PEER')
    parser.add_argument('--rounds', type=int, help='instead of the number each case has')
    parser.add_argument('--scale', type=int, default=1, help='multiplies the width of S1')
    parser.add_argument('--out', type=pathlib.Path, default=_HERE / 'results', help='where the report is written')
    parser.add_argument('--scratch', type=pathlib.Path, help='on the disk to measure; by default --out')
    parser.epilog = f'cases: {", ".join(cases.CASES)}; peers: {", ".join(peers.PEERS)}'
    return parser.parse_args()


def main() -> int:
    """Measures, writes the report, and fails if any peer did."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('terminated'))  # so that the scratch directory is removed
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = Results()
    with tempfile.TemporaryDirectory(prefix='.scratch-', dir=arguments.scratch or arguments.out) as name:
        scratch = pathlib.Path(name).resolve()
        machine = _machine(scratch)
        children = Children(scratch, short=arguments.short, scale=arguments.scale)
        facts = children.run([], _SHORT_DEVICES)['facts']
        chosen = [cases.CASES[case] for case in arguments.cases]
        taking_part = [(case, _leave_out(case, facts, arguments.peers, results)) for case in chosen]
        about = {
            'date': datetime.datetime.now(datetime.UTC).date().isoformat(),
            'short': arguments.short,
            'scale': arguments.scale,
            'machine': machine | facts,
        }
        if arguments.short:
            _measure_short(taking_part, children, results)
        for case, names in [] if arguments.short else taking_part:
            _measure_case(case, names, arguments.rounds or case.rounds, children, results)
            _report(arguments.out, about, results)  # a run takes long: what there is survives if the rest does not
    print(_report(arguments.out, about, results))
    return 1 if results.failed else 0


def _report(out: pathlib.Path, about: dict[str, Any], results: Results) -> str:
    about['machine']['load_after'] = round(os.getloadavg()[0], 2)
    return report.write(out, about | results.to_json())


if __name__ == '__main__':
    sys.exit(main())
