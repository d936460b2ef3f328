"""The write assignment: every chunk has one writer, and the writers have about the same bytes, in jobs of any shape."""

import collections
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from t5ckpt.format.chunk_grid import Box, ChunkGrid
from t5ckpt.planning.chunk_shape import chunk_shape_for
from t5ckpt.planning.write_assignment import HeldShard, MeshLayout, WriteAssignment

BENCHMARKS = Path(__file__).parents[2] / 'benchmarks'
MB = 2**20


def plan_of_all(shape, axes, mesh, processes, itemsize=4):
    """By process, the chunks that it writes of one array sharded over ``mesh`` (axis lengths), and the chunk grid."""
    devices = np.arange(math.prod(mesh)).reshape(mesh) * processes // math.prod(mesh)
    names = [f'axis{i}' for i in range(len(mesh))]
    layout = MeshLayout(devices, names)
    parts = [1 if axis is None else mesh[axis] for axis in axes]
    shard = [size // part for size, part in zip(shape, parts, strict=True)]
    replicas = min(processes, max(1, math.prod(mesh) // math.prod(parts)))
    grid = ChunkGrid(shape, chunk_shape_for(shape, shard, itemsize, 64 * MB, replicas))
    used = frozenset(f'axis{axis}' for axis in axes if axis is not None)
    found = {}
    for process in range(processes):
        owners, held = WriteAssignment(process, processes), {}
        for position in np.argwhere(devices == process).tolist():
            at = [0 if axis is None else position[axis] for axis in axes]
            box = Box((place * part, place * part + part) for place, part in zip(at, shard, strict=True))
            held[box] = HeldShard(0, box, layout.holders(position, used))
        found[process] = [
            chunk for box in sorted(held) for chunk in owners.chunks_of_this_process(held[box], grid, itemsize)
        ]
    return found, grid


@st.composite
def jobs(draw):
    mesh = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    divisors = [n for n in range(1, math.prod(mesh) + 1) if math.prod(mesh) % n == 0]
    processes = draw(st.sampled_from(divisors))
    rank = draw(st.integers(1, 3))
    free = list(range(len(mesh)))
    axes, shape = [], []
    for _ in range(rank):
        axis = draw(st.sampled_from([None, *free]))
        if axis is not None:
            free.remove(axis)
        axes.append(axis)
        shape.append(draw(st.integers(1, 700)) * (1 if axis is None else mesh[axis]))
    return tuple(shape), tuple(axes), tuple(mesh), processes


@given(jobs())
def test_every_chunk_has_one_writer(job):
    shape, axes, mesh, processes = job
    found, grid = plan_of_all(shape, axes, mesh, processes)
    written = collections.Counter(chunk for chunks in found.values() for chunk in chunks)
    assert written == collections.Counter(map(grid.box, grid))


@given(jobs())
def test_no_chunk_reaches_into_two_shards(job):
    shape, axes, mesh, processes = job
    _, grid = plan_of_all(shape, axes, mesh, processes)
    for size, chunk, axis in zip(shape, grid.chunk_shape, axes, strict=True):
        if axis is not None and mesh[axis] > 1:
            assert size // mesh[axis] % chunk == 0


@pytest.mark.parametrize('processes', [2, 3, 4, 5, 7, 8, 13, 64])
@pytest.mark.parametrize('shape', [(7, 4_000_037), (8191, 8191), (2, 3, 11_000_027), (67_108_864,), (50_000_017,)])
def test_a_replicated_array_is_divided(shape, processes):
    """Also where the number of processes divides no axis: no process writes twice its share."""
    found, grid = plan_of_all(shape, (None,) * len(shape), (processes,), processes)
    own = [len(chunks) * math.prod(grid.chunk_shape) for chunks in found.values()]
    assert max(own) < 2 * math.prod(shape) / processes
    assert sum(own) < 1.1 * math.prod(shape)


@pytest.mark.parametrize('shape', [(600_000_007,), (3, 600_000_007), (2 * 300_000_007, 4)])
def test_no_file_has_more_than_a_gibibyte(shape):
    """Of arrays without useful divisors, such as flattened weights: blosc encodes 2 GiB, and S3 takes 5 GiB in one request."""
    grid = ChunkGrid(shape, chunk_shape_for(shape, shape, 4, 64 * MB, 1))
    assert math.prod(grid.chunk_shape) * 4 <= 1024 * MB
    assert grid.num_chunks * math.prod(grid.chunk_shape) < 1.01 * math.prod(shape)


def test_small_arrays_are_assigned_whole():
    """A hundred arrays of 100 KB over four processes: one chunk each, 25 for everybody."""
    shape = (160, 160)
    grid = ChunkGrid(shape, chunk_shape_for(shape, shape, 4, 64 * MB, 4))
    assert grid.chunk_shape == shape
    counts = []
    for process in range(4):
        owners = WriteAssignment(process, 4)
        shard = HeldShard(0, Box.whole(shape), (0, 1, 2, 3))
        counts.append(sum(len(owners.chunks_of_this_process(shard, grid, 4)) for _ in range(100)))
    assert counts == [25] * 4


@pytest.mark.slow
def test_the_simulation_of_many_hosts():
    """The real planner on 16 hosts, every host planned: no byte twice, none missing."""
    sizes = ['--hosts', '16', '--layers', '3', '--tensor', '8', '--width', '1024', '--hidden', '4096', '--all']
    command = [sys.executable, str(BENCHMARKS / 'scaling.py'), *sizes]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={'PYTHONPATH': str(BENCHMARKS.parent)}
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result['bytes_per_host_max'] <= 1.01 * result['bytes_per_host_min']
    inline = result['state_bytes'] - result['bytes_per_host_min'] * result['hosts']
    assert abs(inline) < 0.01 * result['state_bytes']
    assert result['barriers'] == 2
