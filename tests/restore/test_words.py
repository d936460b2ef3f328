"""The words rename, missing, take, leave, strict and resize mean the same wherever a checkpoint is restored."""

import jax
import numpy as np
import pytest

from t5ckpt import Checkpointer, WarmStart, restore_or_init
from t5ckpt.errors import MissingLeaves, TreeMismatchError, UnmatchedPattern, UnsupportedLeafError

OLD = {
    'params': {'a': np.full((2, 3), 1.0, np.float32), 'b': np.full(3, 2.0, np.float32)},
    'ema': {'a': np.full((2, 3), 3.0, np.float32)},
}
NEW = {
    'new': {**OLD, 'params': {**OLD['params'], 'c': np.full(4, 9.0, np.float32)}},
    'renamed': {**OLD, 'params': {'a': OLD['params']['a'], 'head': np.full(3, 9.0, np.float32)}},
    'larger': {**OLD, 'params': {'a': np.full((4, 3), 9.0, np.float32), 'b': OLD['params']['b']}},
    'fewer': {'params': OLD['params']},
}
WORDS = {
    'new': {'missing': 'init'},
    'renamed': {'rename': [('params/head', 'params/b')]},
    'larger': {'resize': 'params/a'},
    'fewer': {'strict': 'contains'},
}


def in_restore(run, template, init, words):
    """The template's values in place of those of ``init``."""
    with Checkpointer(init, checkpoints_dir=run) as checkpointer:
        return checkpointer.restore(**words)


def in_place(run, template, init, words):
    with Checkpointer(template, checkpoints_dir=run) as checkpointer:
        return restore_or_init(checkpointer, lambda: init, **words)


def from_elsewhere(run, template, init, words):
    with Checkpointer(template, checkpoints_dir=run.parent / 'empty') as checkpointer:
        return restore_or_init(checkpointer, lambda: init, initial_checkpoint=WarmStart(run, **words))


@pytest.fixture
def run(tmp_path):
    with Checkpointer(OLD, checkpoints_dir=tmp_path / 'run') as checkpointer:
        checkpointer.save(OLD, step=1)
    return tmp_path / 'run'


@pytest.mark.parametrize('how', [in_restore, in_place, from_elsewhere])
@pytest.mark.parametrize('kind', WORDS)
def test_a_word_does_the_same_everywhere(run, kind, how):
    init = NEW[kind]
    template = jax.tree.map(np.zeros_like, init)
    restored = how(run, template, init, WORDS[kind])
    expected = init | {'params': dict(init['params'])}
    if kind == 'renamed':
        expected['params']['head'] = OLD['params']['b']
    if kind == 'larger':
        expected['params']['a'] = np.pad(OLD['params']['a'], ((0, 2), (0, 0)))
    jax.tree.map(np.testing.assert_array_equal, restored, expected)


@pytest.mark.parametrize('how', [in_restore, from_elsewhere])
@pytest.mark.parametrize(
    ('words', 'from_init'),
    [
        ({'take': 'params/.*'}, ['ema']),
        ({'take': ['params/a', 'ema/.*']}, ['b']),
        ({'leave': 'params/b'}, ['b']),
        ({'take': 'params/.*', 'leave': '.*/a'}, ['a', 'ema']),
    ],
)
def test_what_is_not_taken_is_initial(run, how, words, from_init):
    init = jax.tree.map(lambda leaf: np.full_like(leaf, 7.0), OLD)
    restored = how(run, jax.tree.map(np.zeros_like, OLD), init, words)
    for name, restored_leaf in (
        ('a', restored['params']['a']),
        ('b', restored['params']['b']),
        ('ema', restored['ema']['a']),
    ):
        assert (restored_leaf == 7.0).all() == (name in from_init), name


def test_a_rule_for_averages_holds_in_restore(run):
    rename = [(r'params/a', r'ema/a')]
    with Checkpointer(OLD, checkpoints_dir=run) as checkpointer:
        restored = checkpointer.restore(rename=rename, missing='init')
    assert (restored['params']['a'] == 3.0).all()


def test_a_rule_that_each_restart_would_repeat_is_an_error_in_place(run):
    """Trained parameters would be replaced by the averages, or by new ones, at each restart."""
    with Checkpointer(OLD, checkpoints_dir=run) as checkpointer:
        for replacement, source in (('ema/a', 'ema/a'), (None, 'the new state')):
            with pytest.raises(
                TreeMismatchError, match=f'params/a: rename= takes it from {source}, and .* has it, too'
            ):
                restore_or_init(checkpointer, lambda: OLD, rename=[('params/a', replacement)], missing='init')
        # What it says works.
        assert (checkpointer.restore(rename=[('params/a', 'ema/a')])['params']['a'] == 3.0).all()
    with Checkpointer(OLD, checkpoints_dir=run.parent / 'new') as checkpointer:
        warm = WarmStart(run, rename=[('params/a', 'ema/a')])
        assert (restore_or_init(checkpointer, None, initial_checkpoint=warm)['params']['a'] == 3.0).all()


def test_a_replacement_is_text_or_none():
    with pytest.raises(TypeError, match='rename: the name in the checkpoint must be text or None, got 3'):
        WarmStart('run', rename=[('params/a', 3)])


def test_an_abstract_template_has_no_initial_values(run):
    template = jax.eval_shape(lambda: NEW['new'])
    with Checkpointer(template, checkpoints_dir=run) as checkpointer:
        with pytest.raises(UnsupportedLeafError, match='params/c: a ShapeDtypeStruct has no values'):
            checkpointer.restore(missing='init')
        given = {'params': {'c': np.ones(4, np.float32)}}
        restored = checkpointer.restore(missing='init', fallback_state=given)
    np.testing.assert_array_equal(restored['params']['c'], 1)


def test_in_place_a_missing_leaf_is_an_error_unless_it_is_asked_for(run):
    with Checkpointer(NEW['new'], checkpoints_dir=run) as checkpointer:
        with pytest.raises(MissingLeaves, match=r"params/c.*\n.*missing='init'.* init_fn"):
            restore_or_init(checkpointer, lambda: NEW['new'])
        state = restore_or_init(checkpointer, lambda: NEW['new'], missing='init')
        assert checkpointer.restored_step == 1
        checkpointer.save(state, step=2)

        def must_not_run():
            raise AssertionError

        restore_or_init(checkpointer, must_not_run, missing='init')
        assert checkpointer.restored_step == 2


@pytest.mark.parametrize(
    ('pattern', 'meant'),
    [
        ('params/*', 'params/[^/]*'),
        ('*/a', '[^/]*/a'),
        ('**/a', '(.*/)?a'),
        ('params', 'params/.*'),
        ('a', '.*/a'),
        ('parms/.*', 'params/.*'),
    ],
)
def test_the_error_of_a_pattern_says_the_one_that_works(run, pattern, meant):
    with Checkpointer(OLD, checkpoints_dir=run) as checkpointer:
        with pytest.raises(ValueError, match='take') as caught:
            checkpointer.restore(take=pattern)
        assert repr(meant) in str(caught.value)
        checkpointer.restore(take=meant)


def test_a_pattern_without_a_leaf_is_an_error_in_each_option(run):
    with Checkpointer(OLD, checkpoints_dir=run) as checkpointer:
        for option in ('take', 'leave', 'resize'):
            with pytest.raises(UnmatchedPattern, match=f"{option}='nowhere' matches no leaf"):
                checkpointer.restore(**{option: 'nowhere'})
        with pytest.raises(TreeMismatchError, match='of rename= match no leaf'):
            checkpointer.restore(rename=[('nowhere', 'params/a')])
