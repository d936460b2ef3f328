"""The simulator finds each bug that is planted into a copy of the package; each other race makes its test fail."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simulation import seeded

ROOT = Path(__file__).parents[2]


def test_there_are_bugs_of_each_kind():
    assert len(seeded.BUGS) >= 15
    assert {'disk', 'save'} <= {bug['scenarios'][0].partition('-')[0] for bug in seeded.BUGS}


def test_each_bug_fits():
    for bug in [*seeded.BUGS, *seeded.RACES]:
        seeded.changes(bug)


def test_the_page_has_their_numbers():
    text = ' '.join((ROOT / 'docs' / 'fault-injection.md').read_text(encoding='utf-8').split())
    assert f'has {len(seeded.BUGS)} bugs' in text
    assert f'{len(seeded.RACES)} more races' in text


@pytest.mark.slow
@pytest.mark.parametrize('race', seeded.RACES, ids=lambda race: race['name'])
def test_a_race_outside_of_the_simulator_makes_its_test_fail(race, tmp_path):
    seeded.plant(race, tmp_path)
    command = [sys.executable, '-P', '-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', race['test']]
    environment = {**os.environ, 'PYTHONPATH': str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert re.search(r'\n1 failed', done.stdout), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize('bug', seeded.BUGS, ids=lambda bug: bug['name'])
def test_a_seeded_bug_is_found(bug, tmp_path):
    # Where it was found before; a change of the code may move it.
    failure, schedules = seeded.find(bug, tmp_path, bug.get('seed', 0))
    assert failure is not None, f'not found in {schedules} schedules'
