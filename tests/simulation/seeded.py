"""Plants a bug of bugs.toml into a copy of the package, and lets the simulator look for it.

`python tests/simulation/seeded.py` prints each bug, the scenario that finds it, and after how many schedules.
"""

import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

from simulation.campaign import simulate

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / 't5ckpt'
_LISTED = tomllib.loads((HERE / 'bugs.toml').read_text(encoding='utf-8'))
BUGS, RACES = _LISTED['bug'], _LISTED['race']
SCHEDULES = 6000


def changes(bug):
    """The text of each module that a bug changes, with the bug."""
    planted = {}
    for number in ('', '2'):
        if f'old{number}' not in bug:
            continue
        module = bug.get(f'file{number}', bug['file'])
        text = planted.get(module) or (PACKAGE / module).read_text(encoding='utf-8')
        old, new = bug[f'old{number}'].strip('\n'), bug[f'new{number}'].strip('\n')
        assert text.count(old) == 1, f'{module} has changed; change bugs.toml, too: {old}'
        planted[module] = text.replace(old, new)
    return planted


def plant(bug, root):
    """Copies the package below `root`, with its compiled modules and the bug."""
    shutil.copytree(PACKAGE, root / 't5ckpt')
    for module, text in changes(bug).items():
        (root / 't5ckpt' / module).write_text(text, encoding='utf-8')


def find(bug, root, first):
    """The failure, or None, and how many schedules it took from a first seed on."""
    plant(bug, root)
    total = 0
    for scenario in bug['scenarios']:
        found = simulate([scenario], range(first, first + SCHEDULES), workers=1, path=root)
        if found.failures:
            return found.failures[0], total + found.failures[0].schedules
        total += found.schedules
    return None, total


def main():
    wanted = sys.argv[1:]
    for bug in BUGS:
        if wanted and not any(each in bug['name'] for each in wanted):
            continue
        with tempfile.TemporaryDirectory() as root:
            failure, schedules = find(bug, Path(root), 0)
        where = 'NOT FOUND' if failure is None else failure.scenario
        sys.stdout.write(f'| {bug["name"]} | {where} | {schedules:,} |\n')
        sys.stdout.flush()


if __name__ == '__main__':
    main()
