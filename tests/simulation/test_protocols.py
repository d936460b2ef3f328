"""Savers, deleters, readers and pins on one run, under many schedules with faults. docs/fault-injection.md has what was tried."""

import os

import pytest

from simulation.campaign import simulate
from simulation.scenarios import SCENARIOS

# 10,000 in all; `make soak` sets a million.
SCHEDULES = int(os.environ.get('T5CKPT_SCHEDULES', '20000'))

ONE_SWITCH = (
    *('save', 'prune', 'remove', 'remove-twice', 'keep', 'overwrite', 'again', 'strip', 'far-clocks'),
    *('disk-remove', 'disk-overwrite', 'disk-strip', 'disk-aside', 'disk-far-clocks'),
)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_invariant_holds_under_every_schedule():
    first = int(os.environ.get('T5CKPT_FIRST_SEED', '0'))
    names = sorted(SCENARIOS)
    found = simulate(names, range(first, first + -(-SCHEDULES // len(names))))
    assert not found.failures, '\n\n'.join(map(str, found.failures))
    assert found.schedules >= SCHEDULES


@pytest.mark.slow
@pytest.mark.parametrize('scenario', ONE_SWITCH)
def test_all_schedules_with_one_switch(scenario):
    found = simulate([scenario], range(100_000), switches=1, workers=1)
    assert not found.failures, '\n\n'.join(map(str, found.failures))
    assert 20 < found.schedules < 100_000
