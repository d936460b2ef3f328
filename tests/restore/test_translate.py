"""Renaming through an assignment map: T5X's rules."""

import functools
import re

import pytest
from support.golden import flatten, nest

from t5ckpt import apply_assignment_map, errors, intersect_state


def mapped(checkpoint, model, rules, **options):
    """Leaf names of the result -> leaf names of the checkpoint they were taken from."""
    state = nest({name: f'from {name}' for name in checkpoint.split()})
    target = nest(dict.fromkeys(model.split(), 'model'))
    result = apply_assignment_map(state, target, rules, **options)
    return {name: value.removeprefix('from ') for name, value in flatten(result).items()}


@pytest.mark.parametrize(
    ('checkpoint', 'model', 'rules', 'expected'),
    [
        ('a b', 'a b', [], {'a': 'a', 'b': 'b'}),
        # An old name that is taken from is gone; one that is not stays.
        ('old b', 'new b', [('new', 'old')], {'new': 'old', 'b': 'b'}),
        ('old b extra', 'new b', [('new', 'old')], {'new': 'old', 'b': 'b', 'extra': 'extra'}),
        # Two new names may be taken from one old name.
        ('a', 'x y', [('x', 'a'), ('y', 'a')], {'x': 'a', 'y': 'a'}),
        ('a', 'a x', [('x', 'a')], {'x': 'a', 'a': 'a'}),
        # None leaves a leaf of the model out.
        ('a b', 'a b', [('b', None)], {'a': 'a'}),
        # Groups.
        ('l0/w l1/w', 'b0/w b1/w', [(r'b(\d)/(.*)', r'l\1/\2')], {'b0/w': 'l0/w', 'b1/w': 'l1/w'}),
        # A chain that goes round.
        ('a b c', 'a b c', [('a', 'b'), ('b', 'c'), ('c', 'a')], {'a': 'b', 'b': 'c', 'c': 'a'}),
        # The first rule that matches decides, and it must match the whole name.
        ('a b x', 'x', [('x', 'a'), ('.*', 'b')], {'x': 'a', 'b': 'b'}),
        ('a xx', 'xx', [('x', 'a'), ('.*', 'xx')], {'xx': 'xx', 'a': 'a'}),
        # What is in neither is left for fallback_state.
        ('a', 'a new', [], {'a': 'a'}),
    ],
)  # fmt: skip
def test_rules(checkpoint, model, rules, expected):
    assert mapped(checkpoint, model, rules, require_all_rules_match=False) == expected


def test_a_rule_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match='typo'):
        mapped('a', 'a', [('typo.*', 'a'), ('a', 'a')])
    assert mapped('a', 'a', [('typo.*', 'a')], require_all_rules_match=False) == {'a': 'a'}


def test_a_source_that_is_not_there_is_an_error():
    with pytest.raises(errors.MissingLeaves) as error:
        mapped('enc/kernel', 'enc/w', [('enc/w', 'enc/kernels')])
    for word in ('enc/w', 'enc/kernels', 'enc/kernel.'):
        assert word in str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize('held', ['opt/0/count opt/0/mu', 'opt/0/mu opt/0/count'])
def test_a_leaf_within_a_leaf_is_an_error(held):
    """An optimizer without a state where the checkpoint's has one, for instance."""
    with pytest.raises(errors.MissingLeaves, match='another leaf has this name'):
        mapped(held, 'opt/0', [('opt/0', 'opt/0/count')])


def test_patterns_may_be_compiled():
    rules = [(re.compile(r'b(\d)/(.*)'), r'l\1/\2'), (re.compile('B', re.IGNORECASE), 'a')]
    assert mapped('l0/w a', 'b0/w b', rules) == {'b0/w': 'l0/w', 'b': 'a'}
    with pytest.raises(ValueError, match=r"\['typo'\]"):
        mapped('a', 'a', [(re.compile('typo'), 'a'), (re.compile('a'), 'a')])
    # The same text with other flags is another rule.
    with pytest.raises(ValueError, match=r"\['A'\]"):
        mapped('a', 'a', [(re.compile('A'), 'a'), (re.compile('A', re.IGNORECASE), 'a')])


def test_nothing_is_renamed_when_a_run_resumes():
    assert mapped('old', 'new', [('new', 'old')], is_resuming=True) == {'old': 'old'}


def test_arrays_on_disk_are_leaves_and_the_input_is_untouched():
    spec = {'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': 'w/'}, 'metadata': {'shape': [1]}}
    state = {'target': {'old': spec}}
    fn = functools.partial(apply_assignment_map, assignment_map=[('target/new', 'target/old')])
    result = fn(state, {'target': {'new': 0}})
    assert result == {'target': {'new': spec}}
    assert state == {'target': {'old': spec}}


def test_intersection(caplog):
    """At any depth, specs whole; what is dropped is named."""
    spec = {'driver': 'zarr', 'kvstore': {}, 'metadata': {}}
    held = {'a': {'b': {'c': 1, 'd': 2}}, 'e': spec, 'f': spec, 'gone': {'x': 3}}
    model = {'a': {'b': {'c': 0}}, 'e': 0, 'new': 0, 'gone': {}}
    assert intersect_state(held, model) == {'a': {'b': {'c': 1}}, 'e': spec}
    assert 'a/b/d, f, gone/x' in caplog.text
    caplog.clear()
    assert intersect_state(held, held) == held
    assert caplog.text == ''


def test_the_same_pattern_twice_is_an_error():
    """As in T5X: the second rule would have no effect."""
    with pytest.raises(errors.TreeMismatchError, match=r"patterns \['a'\] of the assignment map match no leaf"):
        apply_assignment_map({'a': 1, 'b': 2}, {'a': 0}, [('a', 'b'), ('a', 'a')])
