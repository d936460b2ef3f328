"""The protocol of docs/decisions.md for a step in a bucket holds in every interleaving, and each of its rules is needed."""

import os

import pytest

from simulation.step_model import BROKEN_BY, RULES, SCENARIOS, Model, explore

BOUNDS = {'units': 5, 'crashes': 1, 'lates': 1}
# Seconds.
SMALL = ('W', 'WG', 'WD', 'Jj', '+D', '+OG', '+DR', '+DG', '+DW', '+DGG')
LONG = {'age', 'leave', 'monotone'}
# Minutes: only ``make soak`` explores them, with T5CKPT_MODEL=whole.
LARGE = set() if os.environ.get('T5CKPT_MODEL') == 'whole' else {'monotone', 'WDW', '+DDR', 'WDR'}


def marked(names, slow):
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names if name not in LARGE]


def test_every_rule_is_broken_somewhere():
    assert set(BROKEN_BY) == set(RULES)
    assert set(SMALL) <= set(SCENARIOS)


@pytest.mark.parametrize('kinds', marked(SCENARIOS, set(SCENARIOS).difference(SMALL)))
def test_the_invariants_hold_in_every_state(kinds):
    states, broken, trace = explore(Model(), kinds, **BOUNDS)
    assert (broken, trace) == ('', [])
    assert states > 100


@pytest.mark.parametrize('rule', marked(RULES, LONG))
def test_each_rule_is_needed(rule):
    _, broken, trace = explore(Model(rule), BROKEN_BY[rule], **BOUNDS)
    assert broken
    assert trace
