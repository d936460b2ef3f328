"""Statistics and differences of checkpoints, against numpy on the whole arrays."""

import math
import re
import tracemalloc

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

import t5ckpt
from t5ckpt.inspection.block_iteration import BLOCK_BYTES, blocks_of
from t5ckpt.inspection.stats import moments_of_piece


def saved(directory, step=1, **leaves):
    with t5ckpt.Checkpointer(
        leaves, checkpoints_dir=directory, options=t5ckpt.CheckpointerOptions(inline_bytes=64, chunk_bytes=512)
    ) as checkpointer:
        checkpointer.save(leaves, step=step)
    return t5ckpt.open_checkpoint(directory, step)


@hypothesis.given(
    shape=st.lists(st.integers(0, 40), max_size=4),
    itemsize=st.sampled_from([1, 4, 2**18, 2**24]),
    data=st.data(),
)
def test_blocks_cover_every_element_once(shape, itemsize, data):
    chunks = data.draw(st.none() | st.tuples(*[st.integers(1, max(1, size)) for size in shape]))
    seen = np.zeros(shape, np.int32)
    for index in blocks_of(shape, itemsize, chunks):
        seen[index] += 1
    assert (seen == 1).all()


def test_blocks_are_whole_chunks_and_bounded():
    blocks = list(blocks_of((1000, 1000, 100), 4, (100, 100, 100)))
    sizes = [math.prod(part.stop - part.start for part in block) * 4 for block in blocks]
    assert max(sizes) <= BLOCK_BYTES
    assert all(part.start % 100 == 0 for block in blocks for part in block)
    assert len(blocks) < 1000 * 1000 // 2, 'small chunks go together'


values = hnp.arrays(
    st.sampled_from([np.float32, np.float64, np.int8, np.int64, np.bool_, np.complex64]),
    hnp.array_shapes(max_dims=3, min_side=0, max_side=8),
)


@hypothesis.given(array=values, cut=st.integers(0, 8))
def test_parts_merge_to_what_numpy_says_of_the_whole(array, cut):
    flat = array.ravel()
    stats = moments_of_piece(flat[:cut]).merged(moments_of_piece(flat[cut:])).finished()
    with np.errstate(all='ignore'):
        wide = (np.abs(flat) if flat.dtype.kind == 'c' else flat).astype(np.float64)
        finite = wide[np.isfinite(wide)]
        assert (stats.size, stats.nan, stats.inf) == (flat.size, np.isnan(wide).sum(), np.isinf(wide).sum())
        assert stats.zeros == (wide == 0).sum()
        if finite.size and np.isfinite(finite.std()) and np.isfinite(np.linalg.norm(finite)):
            scale = np.abs(finite).max()
            np.testing.assert_allclose(stats.mean, finite.mean(), rtol=1e-12, atol=scale * 1e-12)
            np.testing.assert_allclose(stats.std, finite.std(), rtol=1e-9, atol=scale * 1e-9)
            np.testing.assert_allclose(stats.norm, np.linalg.norm(finite), rtol=1e-9, atol=scale * 1e-9)
        if finite.size:
            assert (stats.min, stats.max) == (finite.min(), finite.max())
        else:
            assert math.isnan(stats.mean)


def test_stats_of_a_checkpoint(tmp_path):
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(300, 70)).astype(np.float32)
    holes = kernel.copy()
    holes[3, 4], holes[5, 6], holes[7] = np.nan, np.inf, 0
    view = saved(
        tmp_path, kernel=kernel, holes=holes, low=kernel.astype(ml_dtypes.bfloat16), step_count=np.int32(7), text='x'
    )
    stats = view.stats(bins=16)
    assert list(stats) == list(view)
    np.testing.assert_allclose(stats['kernel'].mean, kernel.mean(dtype=np.float64), rtol=1e-9)
    np.testing.assert_allclose(stats['kernel'].std, kernel.std(dtype=np.float64), rtol=1e-9)
    counts, edges = np.histogram(kernel.astype(np.float64), bins=16)
    np.testing.assert_array_equal(stats['kernel'].counts, counts)
    np.testing.assert_allclose(stats['kernel'].edges, edges)
    assert (stats['holes'].nan, stats['holes'].inf, stats['holes'].zeros) == (1, 1, 70)
    assert stats['holes'].sparsity == 70 / 21000
    np.testing.assert_allclose(stats['low'].max, kernel.astype(ml_dtypes.bfloat16).max())
    assert stats['step_count'].mean == 7.0
    frame = stats.to_pandas()
    assert frame.loc['holes', 'zeros'] == 70
    assert 'kernel' in repr(stats)
    assert '21,000' in stats._repr_html_()


@pytest.mark.parametrize(
    'values', [[2.0**63], [0.0], [1.0, 1.0 + 2**-52], [-1.7e308, 1.7e308], [3.0, 3.0], [5e-324, 0]]
)
def test_a_histogram_counts_every_finite_value_whatever_their_range(values, tmp_path):
    view = saved(tmp_path, w=np.array(values))
    leaf = view.stats(bins=8)['w']
    assert leaf.counts.sum() == len(values)
    assert (np.diff(leaf.edges) > 0).all()


@pytest.mark.slow
def test_memory_is_bounded_by_blocks_and_not_by_the_array(tmp_path):
    state = {'big': np.ones((64, 2**20), np.float32)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as checkpointer:
        checkpointer.save(state, step=1)
    view = t5ckpt.open_checkpoint(tmp_path)
    tracemalloc.start()
    stats = view.stats()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert stats['big'].norm == 2**13
    assert peak < state['big'].nbytes


# --- differences -----------------------------------------------------------------------------------------------------


def test_every_kind_of_difference(tmp_path):
    kernel = np.linspace(-1, 1, 5000, dtype=np.float32).reshape(50, 100)
    moved = kernel.copy()
    moved[49, 99] += 0.5
    nan = kernel.copy()
    nan[0, 0] = np.nan
    a = saved(
        tmp_path / 'a',
        same=kernel,
        nan=nan,
        moved=kernel,
        cast=kernel,
        shape=kernel,
        gone=kernel,
        kind=kernel,
        text='x',
        zero=np.zeros(40, np.float32),
    )
    b = saved(
        tmp_path / 'b',
        same=kernel,
        nan=nan,
        moved=moved,
        cast=kernel.astype(ml_dtypes.bfloat16),
        shape=kernel[:3],
        new=kernel,
        kind='text',
        text='y',
        zero=np.ones(40, np.float32),
    )
    found = t5ckpt.diff(a, b)
    what = {leaf.name: leaf.what for leaf in found.leaves}
    assert what == {
        'moved': 'values',
        'cast': 'dtype',
        'shape': 'shape',
        'gone': 'removed',
        'new': 'added',
        'kind': 'kind',
        'text': 'kind',
        'zero': 'values',
    }
    assert found.same == 2
    by_name = {leaf.name: leaf for leaf in found.leaves}
    np.testing.assert_allclose(by_name['moved'].largest, 0.5, rtol=1e-6)
    np.testing.assert_allclose(by_name['moved'].relative, 0.5 / np.linalg.norm(kernel.astype(np.float64)), rtol=1e-6)
    assert 0 < by_name['cast'].relative < 0.01
    assert by_name['zero'].relative == math.inf
    assert [leaf.name for leaf in found.top(2)] == ['moved', 'zero']
    assert by_name['shape'].a == 'float32 (50, 100)'
    assert {row[0]: row[3] for row in found.rows()}['moved'] == 'same', 'dtype and shape are repeated'
    assert {row[0]: row[3] for row in found.rows()}['new'] == by_name['new'].b
    assert found
    assert len(found.to_pandas()) == 8
    assert 'moved' in repr(found)
    assert 'moved' in found._repr_html_()


def test_texts_that_begin_alike_differ(tmp_path):
    a = saved(tmp_path / 'a', text='a' * 100 + 'x', same='b' * 100)
    b = saved(tmp_path / 'b', text='a' * 100 + 'y', same='b' * 100)
    assert [(leaf.name, leaf.what) for leaf in t5ckpt.diff(a, b).leaves] == [('text', 'kind')]
    (tree,) = [info for info in a.infos() if info.name == 'text']
    assert len(tree.value) == 40


def test_a_new_nan_is_the_largest_change(tmp_path):
    kernel = np.ones((50, 100), np.float32)
    nan = kernel.copy()
    nan[9, 9] = np.nan
    found = t5ckpt.diff(saved(tmp_path / 'a', k=kernel, m=kernel), saved(tmp_path / 'b', k=nan, m=kernel * 2))
    assert [leaf.name for leaf in found.top()] == ['k', 'm']
    assert math.isnan(found.top()[0].largest)


def test_equal_checkpoints_in_other_chunks_and_formats(tmp_path, golden):
    kernel = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    a = saved(tmp_path / 'a', k=kernel)
    state = {'k': kernel}
    with t5ckpt.Checkpointer(
        state, checkpoints_dir=tmp_path / 'b', options=t5ckpt.CheckpointerOptions(compression='zstd', inline_bytes=0)
    ) as checkpointer:
        checkpointer.save(state, step=1)
    found = t5ckpt.diff(a, tmp_path / 'b')
    assert not found
    assert found.same == 1


def test_an_orbax_directory_against_the_same_state_in_our_format(tmp_path, golden):
    orbax = t5ckpt.open_checkpoint(golden / 'case10_orbax')
    state = t5ckpt.load_t5x_checkpoint(golden / 'case10_orbax')
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as checkpointer:
        checkpointer.save(state)
    found = t5ckpt.diff(orbax, tmp_path)
    assert [leaf for leaf in found.leaves if leaf.what not in ('added', 'kind')] == []
    assert found.same == len(orbax)


def test_without_values_nothing_is_read(tmp_path):
    kernel = np.ones((64, 64), np.float32)
    a, b = saved(tmp_path / 'a', k=kernel), saved(tmp_path / 'b', k=kernel * 2)
    for file in (tmp_path / 'b' / 'checkpoint_1' / 'k').iterdir():
        file.unlink()
    assert not t5ckpt.diff(a, b, values=False)


def test_a_sample_of_two_checkpoints_is_compared(tmp_path):
    big = np.ones((2048, 1024), np.float32)
    asked = []
    for name, scale in (('a', 1), ('b', 2)):
        with t5ckpt.Checkpointer(None, checkpoints_dir=tmp_path / name) as checkpointer:
            checkpointer.save({'big': big * scale, 'small': np.ones(3)}, step=1)
    (found,) = t5ckpt.diff(
        tmp_path / 'a', tmp_path / 'b', sample_bytes=2**20, progress=lambda done, total: asked.append((done, total))
    ).leaves
    assert (found.name, found.relative, found.largest) == ('big', 1.0, 1.0)
    assert asked[-1][0] == asked[-1][1] <= 2**20 + 24


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_is_its_steps(tmp_path):
    for step in (0, 5, 10):
        state = {'w': np.full(3, step, np.float32), **({'v': np.ones(2)} if step else {})}
        with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path) as checkpointer:
            checkpointer.save(state, step=step)
    run = t5ckpt.open_run(tmp_path)
    assert list(run) == run.steps == [0, 5, 10]
    np.testing.assert_array_equal(run[5]['w'], 5)

    def norm(leaf):
        return float(np.linalg.norm(leaf))

    series = run.series('w', norm)
    assert series == pytest.approx({0: 0.0, 5: 75**0.5, 10: 300**0.5})
    assert run.series('w', norm, since=5) == pytest.approx({5: 75**0.5, 10: 300**0.5})
    assert list(run.series('v', norm)) == [5, 10]
    with pytest.raises(KeyError, match='no such leaf'):
        run.series('u', norm)
    with pytest.raises(KeyError, match='step 7'):
        run[7]
    assert list(run.to_pandas().index) == [0, 5, 10]
    assert 'latest' in repr(run)
    assert '<table>' in run._repr_html_()


def test_a_run_that_is_not_there(tmp_path):
    with pytest.raises(t5ckpt.errors.CheckpointNotFoundError, match='no such file or directory'):
        t5ckpt.open_run(tmp_path / 'nope')


def test_the_table_of_a_notebook_scrolls_and_has_a_histogram_for_each_row(tmp_path):
    ramp = np.arange(64, dtype=np.float32)
    leaves = {f'leaf_{at:03}': ramp * at for at in range(1, 301)}
    leaves |= {'<b>': ramp, 'nan': np.full(3, np.nan, np.float32)}
    view = saved(tmp_path, **leaves)
    page = view.stats()._repr_html_()
    assert page.count('<tr>') == 1 + 302, 'every leaf'
    assert page.count('class="hist"') == 301
    assert 'overflow:auto' in page
    assert '<b>' not in page.replace('<div class="t5ckpt"><b>', '')
    row = next(row for row in page.split('<tr>') if 'leaf_007' in row)
    counts = view.stats()['leaf_007'].counts
    assert [int(height) for height in re.findall(r'% (\d+)%', row)][:-1] == [
        100 - 50 * count for count in counts.repeat(2)
    ]
    assert 'class="hist"' not in view.stats(bins=0)._repr_html_()


def test_the_best_step_and_the_metrics_of_a_run_are_those_of_the_checkpointer(tmp_path):
    keep = t5ckpt.KeepLatest(5) | t5ckpt.KeepBest(1, 'loss', 'min')
    state = {'w': np.ones(3, np.float32)}
    with t5ckpt.Checkpointer(state, checkpoints_dir=tmp_path, keep_policy=keep) as checkpointer:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            checkpointer.save(state, step=step, metrics={'loss': loss, 'step/s': -loss})
        run = t5ckpt.open_run(tmp_path)
        for chosen in ((), ('loss', 'max'), ('step/s', 'max')):
            assert run.best_step(*chosen) == checkpointer.best_step(*chosen)
        assert [run.metrics(step) for step in (1, None)] == [checkpointer.metrics(step) for step in (1, None)]
    assert run.best_step() == 2
    assert run[run.best_step()].metrics == {'loss': 1.0, 'step/s': -1.0}
    with pytest.raises(ValueError, match="no step has the metric 'acc'; there are: loss, step/s"):
        run.best_step('acc', 'max')
    with pytest.raises(t5ckpt.errors.CheckpointNotFoundError, match='step 9 does not exist'):
        run.metrics(9)


def test_the_weights_that_moved_come_first_and_layers_are_summed(tmp_path):
    """Not counters and biases, whose relative change is the largest."""

    def state(step):
        layers = {
            f'layers_{i}': {'kernel': np.full((40, 50), 1 + 0.1 * step * i), 'bias': np.full(50, 1.0 * step)}
            for i in range(3)
        }
        return {'params': layers, 'opt': {'count': np.int32(1 + step)}, 'step': np.int32(1 + step)}

    with t5ckpt.Checkpointer(state(0), checkpoints_dir=tmp_path) as checkpointer:
        for step in (0, 1):
            checkpointer.save(state(step))
    found = t5ckpt.diff(tmp_path / 'checkpoint_1', tmp_path / 'checkpoint_2')
    ranked = [leaf.name for leaf in found.top()]
    assert ranked[:2] == ['params/layers_2/kernel', 'params/layers_1/kernel']
    assert sorted(ranked[-2:]) == ['opt/count', 'step']
    by_layer = {layer.name: layer for layer in found.by_layer()}
    assert by_layer.keys() == {'params/layers_0', 'params/layers_1', 'params/layers_2', 'opt', '(top)'}
    second = by_layer['params/layers_2']
    np.testing.assert_allclose(second.delta, math.sqrt(2000 * 0.2**2 + 50))
    np.testing.assert_allclose(second.relative, second.delta / math.sqrt(2000))
    assert (second.what, second.a, second.size, second.largest) == ('layer', '2 leaves', 2050, 1.0)
