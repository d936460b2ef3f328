"""The simulator finds each bug that is planted into a copy of the package."""

import pytest
from simulation import seeded


def test_there_are_bugs_of_each_kind():
    assert len(seeded.BUGS) >= 15
    assert {'disk', 'save'} <= {bug['scenarios'][0].partition('-')[0] for bug in seeded.BUGS}
    assert sum('mended' in bug for bug in seeded.BUGS) >= 5


@pytest.mark.slow
@pytest.mark.parametrize('bug', seeded.BUGS, ids=lambda bug: bug['name'])
def test_a_seeded_bug_is_found(bug, tmp_path):
    if 'open' in bug:
        pytest.skip(bug['open'])
    failure, schedules = seeded.find(bug, tmp_path)
    assert failure is not None, f'not found in {schedules} schedules'
