"""The view of a checkpoint: names, globs, attributes, lazy arrays handed to others, and how it shows itself."""

import copy
import dataclasses
import operator
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from support.chromium import chromium, need_chromium
from support.cli import t5ckpt_cli
from support.programs import need

import t5ckpt
from t5ckpt.catalog.step_summaries import StepSummary
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.format.keep_policy import fields_of
from t5ckpt.inspection.kept import with_reasons
from t5ckpt.storage import open_storage

KERNEL = np.arange(48 * 64, dtype=np.float32).reshape(48, 64)


@pytest.fixture(scope='module')
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp('view') / 'run'
    layer = {'mlp': {'kernel': KERNEL, 'bias': np.zeros(3, np.float32)}}
    state = {
        'target': {
            'encoder': {'layers_0': layer, 'layers_1': layer},
            'a/b': {'kernel': np.ones((2, 3), np.float32).astype(jnp.bfloat16)},
            '<b>': {'scale': np.ones(4, np.float32)},
        },
        'state': {'step': 7, 'none': None, 'empty': {}, 'note': 'hello', 'items': np.int32(3)},
    }
    with t5ckpt.Checkpointer(
        state, checkpoints_dir=run, options=t5ckpt.CheckpointerOptions(inline_bytes=1024)
    ) as checkpointer:
        checkpointer.save(state, step=7)
    return run


@pytest.fixture
def view(run_dir):
    return t5ckpt.open_checkpoint(run_dir)


def test_a_leaf_a_group_and_a_pattern(view):
    np.testing.assert_array_equal(view['target/encoder/layers_0/mlp/kernel'], KERNEL)
    assert list(view['target/encoder/layers_1']) == ['mlp/bias', 'mlp/kernel']
    assert list(view['target/.*/kernel']) == [name for name in view if name.endswith('/kernel')]
    assert list(view['target/encoder/layers_[0-9]/mlp/bias']) == [f'target/encoder/layers_{i}/mlp/bias' for i in (0, 1)]
    assert list(view['target/encoder']['.*_0/.*']) == ['layers_0/mlp/bias', 'layers_0/mlp/kernel']


def test_attributes_reach_groups_and_leaves(view):
    np.testing.assert_array_equal(view.target.encoder.layers_0.mlp.kernel[0, :3], KERNEL[0, :3])
    assert {'target', 'state'} <= set(dir(view))
    assert 'target/encoder/layers_0/mlp/kernel' in view._ipython_key_completions_()
    with pytest.raises(AttributeError, match=r"no attribute 'nothing', .* There are '?<b>'?, a/b, encoder\.$"):
        _ = view.target.nothing
    with pytest.raises(AttributeError, match="Did you mean 'kernel'"):
        _ = view.target.encoder.layers_0.mlp.kernal
    assert callable(view.state.items), 'a method stays a method'
    assert view.state['items'].item() == 3


def test_other_leaves_than_arrays_are_given_by_name_and_shown(view):
    assert view['state/none'] is None
    assert view['state/empty'] == {}
    assert view['state/note'] == 'hello'
    assert 'state/note' not in list(view)
    assert 'state/note' in repr(view)
    assert "'hello'" in repr(view)


def test_a_name_that_is_not_there_says_what_is_near(view):
    with pytest.raises(KeyError, match=r'mlp/kernal: no such leaf .*Near: mlp/kernel'):
        view['target/encoder/layers_0']['mlp/kernal']
    with pytest.raises(KeyError, match=r'There are state, target'):
        view['params/.*']
    with pytest.raises(CheckpointNotFoundError, match='no such leaf'):
        view.select('nothing/.*')


@pytest.mark.parametrize(
    ('glob', 'pattern'),
    [
        ('target/**/kernel', 'target/(.*/)?kernel'),
        ('**/kernel', '(.*/)?kernel'),
        ('state/*', 'state/[^/]*'),
        ('target/encoder/*/mlp/bias', 'target/encoder/[^/]*/mlp/bias'),
        ('target/encoder/layers_?/mlp/bias', 'target/encoder/layers_[^/]/mlp/bias'),
    ],
)
def test_a_glob_is_told_its_regular_expression(view, glob, pattern):
    with pytest.raises(KeyError, match=re.escape(f'Did you mean {pattern!r}?')):
        view[glob]
    assert len(view[pattern]) > 0


def test_a_key_with_a_slash_keeps_its_name(view):
    assert view['target/a\\/b/kernel'].shape == (2, 3)
    assert list(view['target/a\\/b']) == ['kernel']


def test_lazy_arrays_go_to_numpy_jax_and_dlpack(view):
    leaf = view['target/encoder/layers_0/mlp/kernel']
    np.testing.assert_array_equal(np.from_dlpack(leaf), KERNEL)
    np.testing.assert_array_equal(jnp.asarray(leaf), KERNEL)
    np.testing.assert_array_equal(jnp.from_dlpack(leaf), KERNEL)
    assert int(view['state/step']) == 7
    assert float(view['state/step']) == 7.0


def test_operators_read_the_array(view):
    leaf = view['target/encoder/layers_0/mlp/kernel']
    low = view['target/a\\/b/kernel']
    np.testing.assert_array_equal(leaf * 2, KERNEL * 2)
    np.testing.assert_array_equal(2 - leaf, 2 - KERNEL)
    np.testing.assert_array_equal(leaf - leaf, 0 * KERNEL)
    np.testing.assert_array_equal(leaf @ np.eye(64), KERNEL)
    np.testing.assert_array_equal(KERNEL + leaf, KERNEL + KERNEL)
    np.testing.assert_array_equal(jnp.ones(64) * leaf, KERNEL)
    np.testing.assert_array_equal((leaf > 5) & (-leaf < 0), KERNEL > 5)
    np.testing.assert_array_equal(np.maximum(leaf, 7), np.maximum(KERNEL, 7))
    assert type(leaf * 2) is np.ndarray
    assert (low * 2).dtype == jnp.bfloat16
    assert np.add.reduce(leaf, axis=None) == KERNEL.sum()
    with pytest.raises(TypeError, match=r'cannot be changed in place.*x\[\.\.\.\]\.copy\(\)'):
        leaf += 1
    with pytest.raises(TypeError, match='cannot be changed in place'):
        np.add(KERNEL, 1, out=view['target/encoder/layers_0/mlp/kernel'])


def test_a_method_of_numpy_is_pointed_to(view):
    with pytest.raises(AttributeError, match=r'np\.asarray\(x\)\.mean'):
        view['target/encoder/layers_0/mlp/kernel'].mean()
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        _ = view['target/encoder/layers_0/mlp/kernel'].nonsense


def test_the_index_as_a_data_frame(view):
    frame = view.to_pandas().set_index('name')
    kernel = frame.loc['target/encoder/layers_0/mlp/kernel']
    assert (kernel['kind'], kernel['dtype'], kernel['shape'], kernel['nbytes']) == (
        'stored',
        'float32',
        (48, 64),
        12288,
    )
    assert frame.loc['state/none', 'kind'] == 'none'
    assert frame['nbytes'].sum() == view.nbytes


def test_a_long_repr_is_cut(tmp_path):
    state = {'target': {f'leaf_{i:03}': np.float32(i) for i in range(200)}}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as checkpointer:
        checkpointer.save(state, step=1)
    lines = repr(t5ckpt.open_checkpoint(tmp_path)).splitlines()
    assert len(lines) == 63
    assert '140 more' in lines[-1]


class _Tags(HTMLParser):
    """Checks that every element is closed, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ''

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_html_tree_is_well_formed_and_escaped(view):
    tags = _Tags()
    tags.feed(view._repr_html_())
    assert tags.open == []
    assert {'details', 'summary'} <= set(tags.seen)
    assert 'b' in tags.seen
    assert '<b>' in tags.text, 'a key that looks like an element is text'
    assert all(word in tags.text for word in ('layers_0', '(48, 64)', 'float32', 'step 7'))


def test_the_items_of_a_sequence_are_in_order_the_empty_ones_too(tmp_path):
    state = {'opt_state': [np.ones(2), (), *(np.ones(1) for _ in range(10))]}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as checkpointer:
        checkpointer.save(state, step=1)
    names = re.findall(r'<span class="row"><span>(\d+)', t5ckpt.open_checkpoint(tmp_path)._repr_html_())
    assert names == [str(item) for item in range(12)]


def test_a_huge_tree_shows_a_part(tmp_path):
    state = {f'group_{i}': {f'leaf_{j}': np.float32(j) for j in range(100)} for i in range(30)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as checkpointer:
        checkpointer.save(state, step=1)
    html = t5ckpt.open_checkpoint(tmp_path)._repr_html_()
    assert 'leaves more' in html
    assert len(html) < 2_000_000


# treescope looks at every public name of numpy, and numpy 2.5 warns of those it will remove.
@pytest.mark.filterwarnings('ignore:The chararray class is deprecated:DeprecationWarning')
def test_treescope_renders_the_tree(view):
    import treescope

    html = treescope.render_to_text(view)
    assert 'CheckpointView' in html
    assert 'target' in html


@pytest.mark.slow
def test_a_browser_shows_the_tree(view, tmp_path):
    """The page is drawn: its text is there, and so are the bars, in their colour."""
    program = need('chromium', 'chromium-browser', 'google-chrome')
    page = tmp_path / 'page.html'
    page.write_text(f'<!doctype html><meta charset="utf-8"><body>{view._repr_html_()}</body>')
    options = [
        '--headless',
        '--no-sandbox',
        '--disable-gpu',
        '--hide-scrollbars',
        f'--user-data-dir={tmp_path / "profile"}',
    ]
    picture = tmp_path / 'page.png'
    subprocess.run(
        [program, *options, '--window-size=1000,700', f'--screenshot={picture}', page.as_uri()],
        check=True,
        capture_output=True,
        timeout=120,
    )
    import matplotlib.image

    pixels = (matplotlib.image.imread(picture)[..., :3] * 255).round().astype(int)
    assert pixels.shape[:2] == (700, 1000)
    assert (pixels == (0x48, 0x78, 0xD0)).all(axis=-1).sum() > 100, 'no bar was drawn'
    assert (pixels.sum(axis=-1) < 200).sum() > 1000, 'no text was drawn'
    opened = subprocess.run(
        [program, *options, '--dump-dom', page.as_uri()], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    assert 'title="target/encoder/layers_0/mlp/kernel: stored in chunks of (48, 64)"' in opened


def test_in_a_narrow_notebook_columns_stay_aligned_and_names_are_legible(tmp_path):
    need_chromium()
    name = 'params/decoder/layers_0/encoder_decoder_attention/query/kernel'
    with t5ckpt.Checkpointer({name: KERNEL}, checkpoints_dir=tmp_path / 'flat') as checkpointer:
        checkpointer.save({name: KERNEL}, step=1)
    tree = {}
    for key in reversed(name.split('/')):
        tree = {key: tree or KERNEL}
    with t5ckpt.Checkpointer(tree, checkpoints_dir=tmp_path / 'nested') as checkpointer:
        checkpointer.save(tree, step=1)
    page = tmp_path / 'page.html'
    shown = [
        t5ckpt.open_checkpoint(tmp_path / 'nested')._repr_html_(),
        t5ckpt.open_checkpoint(tmp_path / 'flat').stats()._repr_html_(),
    ]
    page.write_text(f'<!doctype html><meta charset="utf-8"><body>{"".join(shown)}</body>')
    with chromium(tmp_path) as browser:
        browser.size(750, 700)
        browser.open(page, 'document.readyState === "complete"')
        right = '[...document.querySelectorAll(".bar")].map((bar) => Math.round(bar.getBoundingClientRect().right))'
        assert len({*browser.run(right)}) == 1, 'the deepest row is wider than the page'
        assert browser.run('document.querySelector("td").getBoundingClientRect().width') > 200
        browser.size(480, 700)
        browser.open(page, 'document.readyState === "complete"')
        assert browser.run('[...document.querySelectorAll(".bar")].every((bar) => !bar.offsetWidth)')
        cut = '[...document.querySelectorAll(".row > span")].filter((cell) => cell.scrollWidth > cell.clientWidth + 1).length'
        assert browser.run(cut) == 0, 'a narrow window cuts a cell'


def test_a_lazy_array_iterates_and_contains_as_numpy_does(tmp_path):
    tree = {'s': np.float32(3), 'w': np.arange(6.0).reshape(3, 2), 'e': np.zeros((0, 2))}
    with t5ckpt.Checkpointer(tree, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(inline_bytes=0)) as ck:
        ck.save(tree, step=1)
    view = t5ckpt.open_checkpoint(tmp_path)
    for name in ('w', 'e'):
        np.testing.assert_array_equal([*view[name]], [*tree[name]])
        assert (5.0 in view[name]) == (5.0 in tree[name])
    assert 7.0 not in view['w']
    assert 3 in view['s']
    with pytest.raises(TypeError, match='without dimensions'):
        iter(view['s'])


def test_a_lazy_array_is_a_number_a_truth_and_equal_where_numpys_array_is(tmp_path):
    """Each operator gives what it gives for the values, or the same kind of error."""
    tree = {
        'zero': np.float32(0),
        'int': np.int32(3),
        'flag': np.array(True),
        'complex': np.complex64(1 + 2j),
        'one': np.array([[0.0]]),
        'row': np.arange(3.0),
        'none': np.zeros((0, 2)),
    }
    with t5ckpt.Checkpointer(tree, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(inline_bytes=0)) as ck:
        ck.save(tree, step=1)
    view = t5ckpt.open_checkpoint(tmp_path)
    operators = (bool, int, float, complex, len, hash, operator.index, lambda x: 2.0 in x, list, reversed)
    for name, given in tree.items():
        lazy, values = view[name], np.asarray(given)
        for call in operators:
            if call in (int, float, complex) and values.ndim and values.size == 1:
                # NumPy has begun to refuse it.
                assert call(lazy) == 0
                continue
            try:
                wanted = call(values)
            except (TypeError, ValueError, Warning):
                with pytest.raises((TypeError, ValueError)):
                    call(lazy)
            else:
                found = call(lazy)
                np.testing.assert_array_equal(*[[*each] if call is reversed else each for each in (found, wanted)])
        for other in (values, lazy, view[name], 3, 0.0):
            plain = values if isinstance(other, t5ckpt.LazyArray) else other
            np.testing.assert_array_equal(lazy == other, values == plain)
            np.testing.assert_array_equal(other != lazy, values != plain)
        assert copy.copy(lazy) is copy.deepcopy(lazy) is lazy
    with pytest.raises(
        ValueError, match=r"LazyThreadPoolArray\('row', shape=\(3,\), dtype=float64\) has 3 elements, .* a truth value"
    ):
        bool(view['row'])
    with pytest.raises(ValueError, match='without a copy'):
        np.asarray(view['row'], dtype=np.float32, copy=False)


@pytest.mark.parametrize('keep', [None, 3])
def test_the_work_of_a_listing_grows_with_the_steps_and_not_with_their_square(tmp_path, keep):
    """Counted in calls, for the steps of a run with and without a keep policy that says why each stays."""

    def calls(count):
        entries = [
            StepSummary(
                **{each.name: None for each in dataclasses.fields(StepSummary)}
                | {
                    'step': step,
                    'path': '',
                    'complete': True,
                    'layout': 't5x',
                    'metrics': {},
                    'kept': '',
                    'pinned': False,
                }
                | {'policy': None if keep is None else fields_of(t5ckpt.KeepLatest(keep)), 'reason': ''}
            )
            for step in range(count)
        ]
        counted = 0

        def count_one(*_):
            nonlocal counted
            counted += 1

        sys.setprofile(count_one)
        try:
            found = with_reasons(open_storage(tmp_path), entries)
        finally:
            sys.setprofile(None)
        assert len(found) == count
        return counted

    calls(10)
    assert calls(800) < 3 * calls(400)


def test_a_leaf_shows_its_name_and_none_is_not_counted(tmp_path):
    state = {'a': {'w': np.zeros((3, 2), np.float32), 'none': None}, 'n': 1, 'x/y\n': np.ones(2)}
    with t5ckpt.Checkpointer(
        state, checkpoints_dir=tmp_path, options=t5ckpt.CheckpointerOptions(inline_bytes=0)
    ) as checkpointer:
        checkpointer.save(state, step=1)
    view = t5ckpt.open_checkpoint(tmp_path)
    assert repr(view['a/w']) == "LazyThreadPoolArray('a/w', shape=(3, 2), dtype=float32)"
    assert repr(view['a']['w']) == repr(view['a/w'])
    assert "'n'" in repr(view['n'])
    assert '\n' not in repr(view['x\\/y\n'])
    loaded = t5ckpt.load_t5x_checkpoint(tmp_path, lazy_parameters=True)
    assert repr(loaded['a']['w']) == repr(view['a/w'])
    assert '3 leaves' in repr(view)
    assert '3 leaves' in view._repr_html_()
    assert '1 leaf,' in repr(view['a'])
    assert '3 leaves' in t5ckpt_cli('show', tmp_path)
