"""The memory that four processes with local directories take above their state stays within the byte budget."""

import shutil

import pytest
from tier_disks import COUNT

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

MB = 10**6
BUDGET = 32 * MB
#: The threads of a save.
SLACK = 4 * MB


def test_restores_and_saves_take_no_more_than_the_budget(four, place):
    """The first exchange of a process, too."""

    def taken(action):
        return four.run('tiers_peak', place.run, action, BUDGET / 1e9, each=[str(disk) for disk in place.disks])

    saves, intact = taken('save'), taken('restore')
    shutil.rmtree(place.disks[3])
    lost = taken('restore')
    assert len(saves) == len(lost) == COUNT
    assert max(saves) < BUDGET + SLACK, saves
    assert max(*intact, *lost) < BUDGET, (intact, lost)
