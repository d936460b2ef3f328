"""Boxes and chunk grids, compared with numpy's own slicing."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from t5ckpt.format.chunk_grid import Box, ChunkGrid, ceil_div

SIZES = st.integers(0, 7)


@st.composite
def boxes(draw, shape):
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return Box(map(tuple, ends))


@st.composite
def grids(draw):
    shape = tuple(draw(st.lists(SIZES, max_size=3)))
    chunk_shape = tuple(draw(st.integers(1, 8)) for _ in shape)
    return ChunkGrid(shape, chunk_shape, draw(st.sampled_from('./')), draw(st.sampled_from(['', 'c'])))


def numbered(shape) -> np.ndarray:
    """Every element has a value of its own, so equal values are the same elements."""
    return np.arange(math.prod(shape)).reshape(shape)


@given(st.data(), st.lists(SIZES, max_size=3).map(tuple))
def test_a_box_is_what_its_slices_select(data, shape):
    values, box = numbered(shape), data.draw(boxes(shape))
    selected = values[box.slices]
    assert (box.shape, box.size, box.is_empty) == (selected.shape, selected.size, selected.size == 0)
    assert box == Box(zip(box.start, box.stop, strict=True))
    assert hash(box) == hash(Box(tuple(box)))
    np.testing.assert_array_equal(values[Box.whole(shape).slices], values)


@given(st.data(), st.lists(SIZES, max_size=3).map(tuple))
def test_the_intersection_has_the_elements_of_both(data, shape):
    values, a, b = numbered(shape), data.draw(boxes(shape)), data.draw(boxes(shape))
    both = a.intersect(b)
    common = np.intersect1d(values[a.slices], values[b.slices])
    np.testing.assert_array_equal(np.ravel(values[both.slices]), common)
    assert both.shape == values[both.slices].shape
    if not both.is_empty:
        np.testing.assert_array_equal(values[a.slices][both.relative_to(a).slices], values[both.slices])


@given(st.data(), st.lists(SIZES, max_size=3).map(tuple))
def test_slices_are_read_as_numpy_reads_them(data, shape):
    ends = st.none() | st.integers(-9, 9)
    index = tuple(slice(data.draw(ends), data.draw(ends)) for _ in shape)
    box = Box.from_slices(index, shape)
    assert box.is_empty or Box.whole(shape).intersect(box) == box
    np.testing.assert_array_equal(numbered(shape)[box.slices], numbered(shape)[index])


@given(grids())
def test_the_chunks_divide_the_array(grid):
    values, seen = numbered(grid.shape), []
    for position, index in enumerate(grid):
        assert grid.index_at(position) == index
        chunk, full = grid.box(index), grid.full_box(index)
        assert full.shape == grid.chunk_shape
        assert chunk == full.intersect(Box.whole(grid.shape))
        assert grid.index_of(chunk) == index
        seen += np.ravel(values[chunk.slices]).tolist()
    assert sorted(seen) == list(range(values.size))
    assert list(grid) == list(np.ndindex(grid.grid_shape))
    assert grid.num_chunks == math.prod(grid.grid_shape)
    assert grid.split(Box.whole(grid.shape)) == [grid.box(index) for index in grid]


@given(st.data(), grids())
def test_the_chunks_of_a_box(data, grid):
    box = data.draw(boxes(grid.shape))
    expected = [index for index in grid if not grid.box(index).intersect(box).is_empty]
    assert list(grid.chunks_of(box)) == expected
    assert grid.count(box) == len(expected)
    assert grid.split(box) == [grid.box(index).intersect(box) for index in expected]
    assert [grid.index_of(part) for part in grid.split(box)] == expected


@given(grids())
def test_every_key_is_read_back(grid):
    keys = [grid.key(index) for index in grid]
    assert [grid.index(key) for key in keys] == list(grid)
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ('metadata', 'shape', 'keys'),
    [
        ({}, (2, 3), ['0.0', '0.1']),
        ({'dimension_separator': '/'}, (2, 3), ['0/0', '0/1']),
        ({'dimension_separator': '/'}, (), ['0']),
        ({'chunk_key_encoding': {'name': 'default'}}, (2, 3), ['c/0/0', 'c/0/1']),
        ({'chunk_key_encoding': {'name': 'default', 'configuration': {'separator': '.'}}}, (), ['c']),
        ({'chunk_key_encoding': {'name': 'v2'}}, (2, 3), ['0.0', '0.1']),
        ({'chunk_key_encoding': {'name': 'v2', 'configuration': {'separator': '/'}}}, (), ['0']),
    ],
)
def test_keys_of_zarr(metadata, shape, keys):
    grid = ChunkGrid.from_metadata(metadata, shape, (2, 2)[: len(shape)])
    assert [grid.key(index) for index in grid] == keys


@pytest.mark.parametrize(
    'name', ['.zarray', '0', '0.0.0', '0/0', '01.0', '-1.0', '0.', '٣.0', f'0.{"9" * 5000}', 'c.0.0']
)
def test_other_names_are_no_keys(name):
    assert ChunkGrid((4, 4), (2, 2)).index(name) is None


def test_a_grid_of_any_size_is_walked_from_its_start():
    grid = ChunkGrid((2**61, 2**61), (1, 1))
    assert list(itertools.islice(grid, 2)) == [(0, 0), (0, 1)]
    assert grid.count(Box.whole(grid.shape)) == grid.num_chunks == 2**122


@given(st.integers(0, 2**62), st.integers(1, 2**62))
def test_ceil_div(dividend, divisor):
    quotient = ceil_div(dividend, divisor)
    assert quotient * divisor >= dividend > (quotient - 1) * divisor
