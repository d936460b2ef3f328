"""``PYTHONPATH=tests python -m simulation [SCENARIO ...]``: explores schedules, and prints the shortest one that fails."""

from __future__ import annotations

import argparse
import importlib
import sys

from simulation.campaign import OWN_SCENARIOS, continue_report, explore
from simulation.report import table


def main() -> int:
    """Returns 1 if a schedule fails."""
    parser = argparse.ArgumentParser(prog='PYTHONPATH=tests python -m simulation', description=__doc__)
    parser.add_argument('scenarios', nargs='*', help='all of the module by default')
    parser.add_argument('--module', default=OWN_SCENARIOS, help='the module with SCENARIOS')
    parser.add_argument('--schedules', type=int, help='of each scenario; default: 1000, with --switches all')
    parser.add_argument('--first', type=int, default=0, help='the first seed')
    parser.add_argument(
        '--switches', type=int, help='all schedules with at most this number of decisions, instead of seeds'
    )
    parser.add_argument('--workers', type=int, default=2, help='processes')
    parser.add_argument(
        '--report', default='', help='a directory with counts, which this run continues; prints its table'
    )
    given = parser.parse_args()
    names = given.scenarios or [*importlib.import_module(given.module).SCENARIOS]
    count = given.schedules
    if count is None:
        count = 1000 if given.switches is None else sys.maxsize - given.first
    seeds = range(given.first, given.first + count)
    options = {'module': given.module, 'workers': given.workers}
    if given.report:
        campaign = continue_report(given.report, names, seeds, **options)
        print(table(given.report), *map(str, campaign.failures), sep='\n\n')
        return int(bool(campaign.failures))
    failures = 0
    for name, results in explore(names, seeds, switches=given.switches, **options):
        faults = ', '.join(f'{count} {fault}' for fault, count in sorted(results.faults.items()) if fault != 'run')
        print(
            f'{name}: {results.schedules} schedules, {results.points} operations, {results.states} states; '
            f'{faults or "no faults"}',
            *results.failures[:1],
            sep='\n',
            flush=True,
        )
        failures += len(results.failures)
    return int(failures > 0)


if __name__ == '__main__':
    sys.exit(main())
