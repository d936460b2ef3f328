"""Breaks every scenario at every file-system call, and says what came of it.

    python tests/crash/campaign.py                                      what CI does
    python tests/crash/campaign.py --scenario save --fault EIO --call 17    one fault again
    python tests/crash/campaign.py --minutes 30 --seed 7                faults at random
    python tests/crash/campaign.py --power                              power cuts, on every disk that may be left
    python tests/crash/campaign.py --file-system ext4 --every 5         power cuts of a real file system

Exit code 1 where a promise was broken.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(_HERE.parent), str(_HERE), str(_HERE.parent.parent)]

from support import faultshim, loopfs
from support.faultshim import ANY, CLOSE, CREATE, GETS, LINK, LOCK, PUTS, READ, REMOVE, RENAME, SYNC, WRITE

_PLANNED = 5
_CHANGES = CREATE | WRITE | SYNC | RENAME | LINK | REMOVE


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens at a call.

    Attributes:
      mode: of faultshim.py.
      classes: at which calls it can happen.
      error: the errno.
      sticky: the classes that fail from then on.
    """

    mode: int
    classes: int
    error: int = 0
    sticky: int = 0


FAULTS = {
    'SIGKILL': Fault(faultshim.KILL, _CHANGES | LOCK),
    'SIGKILL in a write': Fault(faultshim.TORN, PUTS),
    'EIO': Fault(faultshim.FAIL, ANY, errno.EIO),
    'EIO from then on': Fault(faultshim.FAIL, _CHANGES, errno.EIO, ANY & ~CLOSE),
    'ENOSPC': Fault(faultshim.FAIL, CREATE | WRITE | SYNC | RENAME | LINK, errno.ENOSPC),
    'ENOSPC from then on': Fault(faultshim.FAIL, CREATE | WRITE | LINK, errno.ENOSPC, CREATE | WRITE | LINK),
    'EACCES': Fault(faultshim.FAIL, READ | CREATE | RENAME | LINK | REMOVE, errno.EACCES),
    'short write or read': Fault(faultshim.SHORT, GETS | PUTS),
    'rename lost': Fault(faultshim.LOSE, RENAME),
    'rename done, but an error': Fault(faultshim.DO_AND_FAIL, RENAME, errno.EIO),
}


def applies(fault: str, kind: int) -> bool:
    """Whether a fault can happen at a call."""
    return bool(FAULTS[fault].classes & kind)


class Driver:
    """A process of crash_driver.py."""

    def __init__(self, library: pathlib.Path, mount: pathlib.Path | None = None) -> None:
        """Starts it; ``mount`` is where a file system lies whose power it cuts."""
        environment = os.environ | {
            'LD_PRELOAD': str(library),
            'JAX_PLATFORMS': 'cpu',
            # No pool of threads before a fork.
            'OPENBLAS_NUM_THREADS': '1',
            'OMP_NUM_THREADS': '1',
            'PYTHONPATH': os.pathsep.join([str(_HERE.parent.parent), os.environ.get('PYTHONPATH', '')]),
        }
        if mount is not None:
            environment['T5CKPT_CRASH_MOUNT'] = str(mount)
        self._process = subprocess.Popen(
            [sys.executable, str(_HERE / 'crash_driver.py')],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *order: Any) -> Any:
        """An order and its answer."""
        self._process.stdin.write(json.dumps(order) + '\n')
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f'the driver ended with {self._process.wait()} at {order}')
        return json.loads(line)

    def inject(self, scenario: str, fault: str, at: int) -> dict[str, Any]:
        """One fault."""
        kind = FAULTS[fault]
        if kind.mode in (faultshim.KILL, faultshim.TORN):
            return self.ask('kill', scenario, at, kind.mode, kind.classes)
        return self.ask('run', scenario, at, kind.mode, kind.error, kind.classes, kind.sticky)

    def close(self) -> None:
        """Ends it."""
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


@dataclasses.dataclass
class Report:
    """Counts of outcomes, and what was broken."""

    outcomes: dict[tuple[str, str], collections.Counter[str]]
    broken: list[dict[str, Any]]
    seconds: float = 0.0

    @property
    def injected(self) -> int:
        """Faults that happened."""
        return sum(sum(counter.values()) - counter['not reached'] for counter in self.outcomes.values())

    def lines(self) -> Iterator[str]:
        """A table by fault, then what was broken."""
        yield f'{self.injected} faults in {self.seconds:.0f} s, {len(self.broken)} broken promises'
        for fault in FAULTS:
            counter: collections.Counter[str] = collections.Counter()
            for (_, name), counts in self.outcomes.items():
                if name == fault:
                    counter += counts
            shown = ', '.join(f'{key} {count}' for key, count in counter.most_common())
            yield f'  {fault:28} {sum(counter.values()) - counter["not reached"]:6}  {shown}'
        for item in self.broken[:20]:
            yield (
                f'BROKEN: --scenario {item["scenario"]!r} --fault {item["fault"]!r} --call {item["at"]}  '
                f'({item.get("call")} {item.get("path")})\n{item["error"]}'
            )


def plan(calls: Iterable[tuple[int, str, str]], every: int = 1) -> list[tuple[str, int]]:
    """The faults for a scenario's calls: every call gets at least one, and a call that changes the disk several.

    With `every` = n, of the faults that a call could have in addition to the first, each n-th is taken.
    """
    chosen: list[tuple[str, int]] = []
    turn, last, times = 0, None, 0
    for at, (kind, name, path) in enumerate(calls):
        times = times + 1 if (name, path) == last else 1
        last = (name, path)
        if every > 1 and times > 2:
            # The third of equal calls in a row, such as for each entry of a directory.
            continue
        possible = [fault for fault in FAULTS if applies(fault, kind)]
        must = 'SIGKILL' if 'SIGKILL' in possible else possible[turn % len(possible)]
        chosen.append((must, at))
        for fault in possible:
            turn += 1
            if fault != must and turn % every == 0:
                chosen.append((fault, at))
    return chosen


def run(work: Iterable[tuple[str, str, int]], report: Report, workers: int) -> None:
    """Carries a list of (scenario, fault, call) out with several drivers."""
    started = time.monotonic()
    todo: queue.SimpleQueue[tuple[str, str, int] | None] = queue.SimpleQueue()
    for item in work:
        todo.put(item)
    for _ in range(workers):
        todo.put(None)
    guard = threading.Lock()

    def go(driver: Driver) -> None:
        while (item := todo.get()) is not None:
            scenario, fault, at = item
            answer = driver.inject(scenario, fault, at)
            with guard:
                counts = report.outcomes.setdefault((scenario, fault), collections.Counter())
                counts[answer['outcome']] += 1
                if answer['outcome'] == 'BROKEN':
                    report.broken.append({'scenario': scenario, 'fault': fault, 'at': at, **answer})

    _with_drivers(go, workers)
    report.seconds += time.monotonic() - started


def _with_drivers(go: Callable[[Driver], None], workers: int) -> None:
    """Runs a function in threads, each with a driver of its own, and raises what the first that failed raised."""
    failures: list[BaseException] = []

    def work(library: pathlib.Path) -> None:
        driver = Driver(library)
        try:
            go(driver)
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            failures.append(error)
        finally:
            driver.close()

    with tempfile.TemporaryDirectory(prefix='t5ckpt-shim-') as directory:
        library = faultshim.build(pathlib.Path(directory))
        threads = [threading.Thread(target=work, args=(library,)) for _ in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def refuse(name: str, calls: Iterable[int]) -> list[dict[str, Any]]:
    """What comes of a scenario in which the file system refuses one of these calls (EINVAL)."""
    with tempfile.TemporaryDirectory(prefix='t5ckpt-shim-') as directory:
        driver = Driver(faultshim.build(pathlib.Path(directory)))
        try:
            return [
                driver.ask('run', name, at, faultshim.FAIL, errno.EINVAL, faultshim.CREATE | faultshim.WRITE, 0)
                for at in calls
            ]
        finally:
            driver.close()


def cut_power(
    names: Iterable[str], randoms: int, seed: int, workers: int, *, fsync: bool = True
) -> dict[str, dict[str, Any]]:
    """By scenario, how many disks were judged, and what was wrong with which; without `fsync` as if it had not been called."""
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        todo.put(name)
    answers: dict[str, dict[str, Any]] = {}

    def go(driver: Driver) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                name = todo.get_nowait()
                answers[name] = driver.ask('cut_power', name, randoms, seed, fsync)

    _with_drivers(go, workers)
    return answers


def cut_file_system(names: Iterable[str], kind: str, every: int) -> tuple[int, list[dict[str, Any]]]:
    """Cuts the power of a real file system at each n-th call of each scenario, and when all is done.

    Returns:
      How often, and what was broken.
    """
    count, broken = 0, []
    with tempfile.TemporaryDirectory(prefix='t5ckpt-shim-') as directory, loopfs.mounted(kind) as mount:
        driver = Driver(faultshim.build(pathlib.Path(directory)), mount)
        try:
            for name in names:
                for at in [*range(0, len(driver.ask('calls', name)), every), -1]:
                    answer = driver.ask('power', name, at)
                    count += answer['outcome'] == 'power cut'
                    if answer['outcome'] == 'BROKEN':
                        broken.append({'scenario': name, 'at': at, **answer})
        finally:
            driver.close()
    return count, broken


def calls_of(names: Iterable[str]) -> dict[str, list[tuple[int, str, str]]]:
    """The calls that each scenario makes when nothing is broken.

    Threads take turns, and some look once more for what another one has just made: of several runs the shortest counts,
    since what is planned beyond the end of a run is never reached.
    """
    with tempfile.TemporaryDirectory(prefix='t5ckpt-shim-') as directory:
        driver = Driver(faultshim.build(pathlib.Path(directory)))
        try:
            answers = {name: min((driver.ask('calls', name) for _ in range(_PLANNED)), key=len) for name in names}
        finally:
            driver.close()
    for name, answer in answers.items():
        assert isinstance(answer, list), f'{name}: {answer}'
    return {name: [(kind, call, path) for kind, call, path in answer] for name, answer in answers.items()}


def scenario_names() -> list[str]:
    """All scenarios."""
    from crash_scenarios import SCENARIOS

    return list(SCENARIOS)


def has_tiers(name: str) -> bool:
    """Whether the trainer of a scenario has a local directory and a bucket."""
    from crash_scenarios import SCENARIOS

    return SCENARIOS[name].has_tiers


def _main_power(names: list[str], arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    answers = cut_power(names, arguments.randoms, arguments.seed, arguments.workers)
    for name, answer in answers.items():
        print(f'{name:40} {answer}')
    disks = sum(answer.get('disks', 0) for answer in answers.values())
    broken = sum(answer.get('number', 1) for answer in answers.values())
    print(f'{disks} disks in {time.monotonic() - started:.0f} s, {broken} with a broken promise')
    return 1 if broken else 0


def _main_file_system(names: list[str], arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    count, broken = cut_file_system(names, arguments.file_system, arguments.every)
    for item in broken[:20]:
        print(f'BROKEN: {item["scenario"]!r}, power cut at call {item["at"]}\n{item["error"]}')
    print(f'{count} power cuts of {arguments.file_system} in {time.monotonic() - started:.0f} s, {len(broken)} broken')
    return 1 if broken else 0


def main() -> int:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--scenario', choices=scenario_names(), help='only this one')
    parser.add_argument('--fault', choices=list(FAULTS), help='only this one')
    parser.add_argument('--call', type=int, help='only at this call; 0 is the first')
    parser.add_argument('--every', type=int, default=1, help='of the possible faults take each n-th')
    parser.add_argument('--minutes', type=float, help='faults at random for so long')
    parser.add_argument('--power', action='store_true', help='cut the power instead')
    parser.add_argument(
        '--file-system', choices=['ext4', 'xfs'], help='cut the power of one on a loop device; needs root'
    )
    parser.add_argument('--randoms', type=int, default=2, help='random disks for each moment of a power cut')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--workers', type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    names = [arguments.scenario] if arguments.scenario else scenario_names()
    if arguments.power:
        return _main_power(names, arguments)
    if arguments.file_system:
        return _main_file_system(names, arguments)
    calls = calls_of(names)
    report = Report({}, [])
    if arguments.minutes is not None:
        source, end = random.Random(arguments.seed), time.monotonic() + 60 * arguments.minutes
        every = [(name, fault, at) for name in names for fault, at in plan(calls[name])]
        while time.monotonic() < end and not report.broken:
            run(source.sample(every, min(len(every), 2000)), report, arguments.workers)
    else:
        work = [(name, fault, at) for name in names for fault, at in plan(calls[name], arguments.every)]
        work = [item for item in work if arguments.fault in (None, item[1]) and arguments.call in (None, item[2])]
        run(work, report, arguments.workers)
    print('\n'.join(report.lines()))
    return 1 if report.broken else 0


if __name__ == '__main__':
    sys.exit(main())
