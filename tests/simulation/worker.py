"""A process of a campaign: takes a job of ``campaign.simulate``, and prints one line of JSON for each scenario.

Forks of one process, which has loaded the libraries and not the package.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import itertools
import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import flax.serialization  # noqa: F401 - loaded once
import jax  # noqa: F401
import tensorstore  # noqa: F401

from simulation import virtual
from simulation.report import Explored

_COLLECTED_EVERY = 200


def explore(job: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Explores one scenario; call it after ``virtual.enter``."""
    from simulation.explore import Explorer

    explorer = Explorer(importlib.import_module(job['module']).SCENARIOS[name])
    switches = job['switches']
    explored = Explored.read(job['report'], name, job['first']) if job['report'] else None
    outcomes = (
        explorer.seeds(explored.following if explored else job['first'], job['count'])
        if switches is None
        else itertools.islice(explorer.exhaustive(switches), job['count'])
    )
    # The preparation, which takes no decision.
    explorer.report.schedules = 0
    failure = None
    for seed, outcome in outcomes:
        if explorer.report.schedules % _COLLECTED_EVERY == 0:
            gc.collect()
        if outcome.failure is not None:
            schedules = explorer.report.schedules
            shortest = explorer.shortest(outcome, seed if switches is None else 0)
            failure = {
                'module': job['module'],
                'scenario': name,
                'seed': seed,
                'switches': switches,
                'schedules': schedules,
                'violation': shortest.failure or outcome.failure,
                'decisions': [dataclasses.asdict(decision) for decision in shortest.decisions],
                'trace': shortest.trace,
            }
    report = explorer.report
    if explored is not None and failure is None:
        explored.following += report.schedules
        explored.points += report.points
        explored.faults = dict(report.faults + Counter(explored.faults))
        explored.write(job['report'], name, report.states)
    return {
        'scenario': name,
        'schedules': report.schedules,
        'points': report.points,
        'states': len(report.states),
        'faults': dict(report.faults),
        'failure': failure,
    }


def main(job: dict[str, Any]) -> None:
    """Runs one job, with the package below ``job['path']``."""
    sys.path.insert(0, job['path'])
    virtual.enter()
    logging.disable(logging.CRITICAL)
    importlib.import_module(job['module'])
    # Collecting while a schedule runs would take a sixth of the time.
    gc.collect()
    gc.freeze()
    gc.disable()
    # The tasks hand over to each other; no other thread of Python should take a turn.
    sys.setswitchinterval(1.0)
    for name in job['scenarios']:
        print(json.dumps(explore(job, name)), flush=True)
