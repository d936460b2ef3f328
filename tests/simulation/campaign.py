"""Explores many schedules in processes of their own, which load t5ckpt in the simulated world."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from support.nursery import Nursery, Process

OWN_SCENARIOS = 'simulation.scenarios'
_TESTS = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Failure:
    """A schedule that violates an invariant.

    Attributes:
      module: of the scenario.
      scenario: its name.
      seed: runs the schedule again, unless ``switches`` is set.
      switches: the bound of the exhaustive search that found it; None for a seed.
      schedules: the number of schedules of the scenario until this one.
      violation: the invariant that does not hold.
      decisions: the shortest schedule that still fails.
      trace: its operations, one a line.
    """

    module: str
    scenario: str
    seed: int
    switches: int | None
    schedules: int
    violation: str
    decisions: tuple[Mapping[str, Any], ...]
    trace: tuple[str, ...]

    def __str__(self) -> str:
        module = '' if self.module == OWN_SCENARIOS else f' --module {self.module}'
        which = f'--first {self.seed} --schedules 1'
        if self.switches is not None:
            which = f'--switches {self.switches} --schedules {self.schedules}'
        again = f'PYTHONPATH=tests python -m simulation{module} {self.scenario} {which}'
        return '\n'.join(
            [f'{self.scenario}: {self.violation}', f'after {self.schedules} schedules; again: {again}', *self.trace]
        )


@dataclasses.dataclass
class Campaign:
    """The results of an exploration.

    Attributes:
      schedules, points, states: their numbers; the states are the different sets of keys that a storage had.
      faults: the number of each, and 'run' for switches.
      failures: at most one for each scenario and worker.
    """

    schedules: int = 0
    points: int = 0
    states: int = 0
    faults: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: list[Failure] = dataclasses.field(default_factory=list)

    def merge(self, other: Campaign) -> None:
        """Adds the results of another scenario."""
        self.schedules += other.schedules
        self.points += other.points
        self.states += other.states
        self.faults.update(other.faults)
        self.failures += other.failures

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds one line of a worker."""
        self.schedules += line['schedules']
        self.points += line['points']
        self.states += line['states']
        self.faults.update(line['faults'])
        if line['failure'] is not None:
            fields = dict(line['failure'])
            fields['decisions'], fields['trace'] = tuple(fields['decisions']), tuple(fields['trace'])
            self.failures.append(Failure(**fields))


def simulate(
    scenarios: Sequence[str],
    seeds: range,
    *,
    switches: int | None = None,
    module: str = OWN_SCENARIOS,
    workers: int = 2,
    path: str | os.PathLike[str] | None = None,
) -> Campaign:
    """Explores schedules of some scenarios, each until one fails.

    Args:
      scenarios: their names in ``module.SCENARIOS``.
      seeds: of the schedules of each.
      switches: explores all schedules with at most this number of decisions instead, at most ``len(seeds)`` of them.
      module: the module of the scenarios.
      workers: the number of processes; each takes a part of the seeds, or of the scenarios with ``switches``.
      path: the directory of the package to test; that of this module by default.

    Raises:
      RuntimeError: a worker could not run.
    """
    campaign = Campaign()
    for _, results in explore(scenarios, seeds, switches=switches, module=module, workers=workers, path=path):
        campaign.merge(results)
    return campaign


def explore(
    scenarios: Sequence[str],
    seeds: range,
    *,
    switches: int | None = None,
    module: str = OWN_SCENARIOS,
    workers: int = 2,
    path: str | os.PathLike[str] | None = None,
) -> Iterator[tuple[str, Campaign]]:
    """As :func:`simulate`; yields the name and the results of each scenario as soon as they are known."""
    names = [*dict.fromkeys(scenarios)]
    return _run(_jobs(names, seeds, switches, workers, by_scenario=switches is not None), names, module, '', path)


def continue_report(
    report: str | os.PathLike[str],
    scenarios: Sequence[str],
    seeds: range,
    *,
    module: str = OWN_SCENARIOS,
    workers: int = 2,
) -> Campaign:
    """Explores schedules of some scenarios, and adds them to a directory of counts, see ``report.py``.

    Args:
      report: the directory.
      scenarios: as for :func:`simulate`; each worker takes some of them.
      seeds: as many of each scenario, which follow those that the directory has; it begins with the first one.
      module: as for :func:`simulate`.
      workers: the number of processes.
    """
    campaign, names = Campaign(), [*dict.fromkeys(scenarios)]
    jobs = _jobs(names, seeds, None, workers, by_scenario=True)
    for _, results in _run(jobs, names, module, os.fspath(report), None):
        campaign.merge(results)
    return campaign


def _run(
    jobs: Sequence[dict[str, Any]],
    scenarios: Sequence[str],
    module: str,
    report: str,
    path: str | os.PathLike[str] | None,
) -> Iterator[tuple[str, Campaign]]:
    """Starts a worker for each job; yields each scenario when all of its workers have explored it."""
    with contextlib.ExitStack() as stack:
        running: list[tuple[Sequence[str], Process, IO[str]]] = []
        for job in jobs:
            if job['scenarios'] and job['count']:
                order = job | {'module': module, 'report': report, 'path': os.fspath(path or _TESTS.parent)}
                errors = stack.enter_context(tempfile.TemporaryFile('w+', encoding='utf-8', errors='replace'))
                worker = _nursery().start(order, stdout=subprocess.PIPE, stderr=errors)
                stack.enter_context(worker)
                stack.callback(worker.kill)
                running.append((job['scenarios'], worker, errors))
        for name in scenarios:
            campaign = Campaign()
            for names, worker, errors in running:
                if name in names:
                    campaign.add(_line(worker, errors))
            yield name, campaign


def _line(worker: Process, errors: IO[str]) -> Mapping[str, Any]:
    """The line that a worker prints about the next of its scenarios."""
    line = '' if worker.stdout is None else worker.stdout.readline()
    if not line:
        code = worker.wait()
        errors.seek(0)
        raise RuntimeError(f'a worker of the simulation ended with {code}:\n{errors.read()[-4000:]}')
    return json.loads(line)


def _jobs(
    scenarios: Sequence[str], seeds: range, switches: int | None, workers: int, *, by_scenario: bool
) -> list[dict[str, Any]]:
    if by_scenario:
        return [
            {'scenarios': [*scenarios[index::workers]], 'first': seeds.start, 'count': len(seeds), 'switches': switches}
            for index in range(workers)
        ]
    parts = [seeds[len(seeds) * index // workers : len(seeds) * (index + 1) // workers] for index in range(workers)]
    return [{'scenarios': [*scenarios], 'first': part.start, 'count': len(part), 'switches': None} for part in parts]


@functools.cache
def _nursery() -> Nursery:
    below = os.pathsep.join([str(_TESTS), *filter(None, [os.environ.get('PYTHONPATH')])])
    nursery = Nursery('simulation.worker', {'PYTHONPATH': below, 'PYTHONHASHSEED': '0', 'JAX_PLATFORMS': 'cpu'})
    atexit.register(nursery.close)
    return nursery
