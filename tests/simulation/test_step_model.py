"""The protocol of docs/decisions.md for a step in a bucket holds in every interleaving, and each of its rules is needed."""

import pytest

from simulation.step_model import BROKEN_BY, RULES, SCENARIOS, Model, explore

BOUNDS = {'units': 5, 'crashes': 1, 'lates': 1}
# Seconds, not minutes.
SMALL = ('W', 'WG', 'WD', 'Jj', '+D', '+OG', '+DR', '+DG', '+DW', '+DGG')
LONG = {'age', 'monotone'}


def test_every_rule_is_broken_somewhere():
    assert set(BROKEN_BY) == set(RULES)
    assert set(SMALL) <= set(SCENARIOS)


@pytest.mark.parametrize(
    'kinds', [kinds if kinds in SMALL else pytest.param(kinds, marks=pytest.mark.slow) for kinds in SCENARIOS]
)
def test_the_invariants_hold_in_every_state(kinds):
    states, broken, trace = explore(Model(), kinds, **BOUNDS)
    assert (broken, trace) == ('', [])
    assert states > 100


@pytest.mark.parametrize(
    'rule', [pytest.param(rule, marks=pytest.mark.slow) if rule in LONG else rule for rule in RULES]
)
def test_each_rule_is_needed(rule):
    _, broken, trace = explore(Model(rule), BROKEN_BY[rule], **BOUNDS)
    assert broken
    assert trace
