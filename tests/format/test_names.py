"""Every leaf has a name of its own, whatever its keys are, and the same one everywhere."""

import re

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings, strategies as st

import t5ckpt
from t5ckpt.cli.app import app
from t5ckpt.core.leaf_path import leaf_name, path_of
from t5ckpt.core.leaf_patterns import leaf_pattern
from t5ckpt.tree.leaf_table import unflatten

KEYS = st.text(st.sampled_from('ab/\\*?[]{}.:\n '), min_size=0, max_size=5)
PATHS = st.lists(KEYS, min_size=1, max_size=4).map(tuple)
ODD = {
    'a\\': {'b': np.float32([1, 2])},
    'a/b': np.float32([3]),
    'a': {'b': np.float32([4])},
    'a\\/b': np.float32([5]),
    'x::y': {'*': np.float32([6]), '**': np.float32([7]), '[z]': np.float32([8])},
    'new\nline': np.float32([9]),
}


@settings(max_examples=500)
@given(path=PATHS, other=PATHS)
@example(path=('a\\', 'b'), other=('a/b',))
@example(path=('\\',), other=('\\\\',))
def test_names_and_paths_are_one_to_one(path, other):
    assert path_of(leaf_name(path)) == path
    assert (leaf_name(path) == leaf_name(other)) is (path == other)
    if not any(letter in key for key in path for letter in '/\\'):
        assert leaf_name(path) == '/'.join(path), 'ordinary names stay what they were'


@settings(max_examples=300)
@given(path=PATHS)
def test_a_pattern_matches_any_name(path):
    name = leaf_name(path)
    assert leaf_pattern('.*').fullmatch(name)
    assert leaf_pattern(re.escape(name)).fullmatch(name)
    assert leaf_pattern(f'(.*/)?{re.escape(leaf_name(path[-1:]))}').fullmatch(name)


@pytest.fixture(scope='module')
def odd(tmp_path_factory):
    run = tmp_path_factory.mktemp('odd') / 'run'
    with t5ckpt.Checkpointer(ODD, checkpoints_dir=run, options=t5ckpt.CheckpointerOptions(inline_bytes=0)) as ck:
        ck.save(ODD, step=1)
    return run


def leaves(tree, prefix=()):
    for key, value in tree.items():
        yield from leaves(value, (*prefix, key)) if isinstance(value, dict) else [((*prefix, key), value)]


def test_a_view_shows_all_of_them(odd):
    view = t5ckpt.open_checkpoint(odd)
    assert len(view) == len(dict(leaves(ODD))) == len(view.stats())
    for path, value in leaves(ODD):
        np.testing.assert_array_equal(view[leaf_name(path)], value)
        group = view
        for key in path[:-1]:
            group = group[leaf_name((key,))]
        np.testing.assert_array_equal(group[leaf_name(path[-1:])], value)
    assert not t5ckpt.diff(odd, odd)
    np.testing.assert_array_equal(view['a\\/b'], [3])
    for absent in ('a\\', 'a\\\\b', '', '/', 'a//b', 3, None):
        if absent != 'a\\':
            assert absent not in view


def test_exports_and_imports_keep_all_of_them(odd, tmp_path):
    report = t5ckpt.convert_checkpoint('to-safetensors', odd, tmp_path / 'x.safetensors', t5ckpt.ConvertOptions())
    assert len(report.mapped) == len(dict(leaves(ODD)))
    t5ckpt.convert_checkpoint('safetensors', tmp_path / 'x.safetensors', tmp_path / 'run')
    assert not t5ckpt.diff(odd, tmp_path / 'run')


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    paths=st.lists(st.lists(KEYS.filter(bool), min_size=1, max_size=3).map(tuple), min_size=1, unique=True, max_size=6)
)
def test_a_state_comes_back_through_an_export(tmp_path_factory, paths):
    tree, used = {}, set()
    for path in paths:
        if not any(path[: len(other)] == other or other[: len(path)] == path for other in used):
            used.add(path)
    tree = unflatten({path: np.float32([number]) for number, path in enumerate(used)})
    place = tmp_path_factory.mktemp('any')
    with t5ckpt.Checkpointer(tree, checkpoints_dir=place / 'run') as ck:
        ck.save(tree, step=0)
    view = t5ckpt.open_checkpoint(place / 'run')
    assert {path_of(name) for name in view} == used
    t5ckpt.convert_checkpoint('to-safetensors', place / 'run', place / 'x.safetensors')
    t5ckpt.convert_checkpoint('safetensors', place / 'x.safetensors', place / 'again')
    assert not t5ckpt.diff(place / 'run', place / 'again')


def test_assignment_maps_and_renaming(odd, tmp_path):
    state = {'a\\': {'b': 1}, 'a/b': 2, 'a': {'b': 3}}
    assert t5ckpt.apply_assignment_map(state, state, []) == state
    moved = t5ckpt.apply_assignment_map(state, {'new': 0, 'a': {'b': 0}}, [('new', r'a\\/b')], False)
    assert moved['new'] == 2
    assert t5ckpt.intersect_state(state, {'a/b': 0}) == {'a/b': 2}


def test_the_command_line_knows_them(odd):
    for path, value in leaves(ODD):
        done = CliRunner().invoke(app, ['cat', str(odd), leaf_name(path)])
        assert done.output == f'{value}\n'
