"""Assigns each chunk of a replicated shard to one of the processes that hold it.

A shard that a single process holds is written by that process, and a host array by process 0. A shard that is replicated over
processes is cut into chunks. Each chunk is assigned to the holder with the fewest bytes so far,
so that all holders write about the same number of bytes. The holders of a shard compute the same assignment without
communication, because they see the same shards of the same leaves in the same order. A process needs to know only the shards
that it holds, so the work does not grow with the job.

The chunk grid is the same for the whole array. It is a function of the array's shape, the shape of its shards and the number
of replicas, which all processes know. No chunk overlaps two shards that different processes may write.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from t5ckpt.format.chunk_grid import Box, ChunkGrid
from t5ckpt.planning.chunk_shape import chunk_shape_for
from t5ckpt.tree.leaves import LeafToSave, is_jax_array


@dataclasses.dataclass(frozen=True)
class ChunkWrite:
    """One chunk that this process writes.

    Attributes:
      box: in the array's coordinates; exactly one chunk of the grid.
      shard: index into the leaf's addressable shards, or None for a host array.
      box_in_shard: the same box in the shard's coordinates.
    """

    box: Box
    shard: int | None
    box_in_shard: Box


@dataclasses.dataclass(frozen=True)
class HeldShard:
    """A shard that this process holds.

    Attributes:
      index: into the array's addressable shards; None for a host array.
      box: in the array's coordinates.
      holders: the processes that hold it, ascending.
    """

    index: int | None
    box: Box
    holders: tuple[int, ...]


class MeshLayout:
    """The process of each device of a mesh.

    Attributes:
      processes: integers of the mesh's shape.
      names: of its axes.
    """

    def __init__(self, processes: np.ndarray, names: Sequence[str]):
        """Takes the processes of the devices, and the axes' names."""
        self.processes = processes
        self.names = tuple(names)
        self._holders: dict[Any, tuple[int, ...]] = {}

    def holders(self, position: Sequence[int], used: frozenset[str]) -> tuple[int, ...]:
        """The processes that hold the shard of the device at ``position``, if the axes ``used`` divide the array."""
        where = tuple(
            int(index) if name in used else slice(None) for name, index in zip(self.names, position, strict=True)
        )
        key = tuple(index if isinstance(index, int) else None for index in where)
        if key not in self._holders:
            self._holders[key] = tuple(np.unique(self.processes[where]).tolist())
        return self._holders[key]


class WriteAssignment:
    """Assigns chunks to processes; one per plan, since each assignment depends on the previous ones.

    Most leaves of a model share their shape and sharding with others, so results are cached by these two.
    """

    def __init__(self, index: int = 0, count: int = 1, *, with_copies: bool = False):
        """Takes the index of this process and the number of processes.

        ``with_copies`` also writes the chunks that are assigned to other processes, of the shards and the host arrays that this
        one holds.
        """
        self.with_copies = with_copies
        self.index = index
        self.count = count
        self._loads: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self._meshes: dict[Any, tuple[MeshLayout, dict[Any, tuple[int, ...]]]] = {}
        self._chunks: dict[Any, list[Box]] = {}
        self._grids: dict[Any, tuple[ChunkGrid, list[HeldShard]]] = {}
        self._assigned: dict[Any, tuple[tuple[int, ...], tuple[ChunkWrite, ...], frozenset[Box]]] = {}

    def chunks_of_this_process(self, shard: HeldShard, grid: ChunkGrid, itemsize: int) -> list[Box]:
        """The chunks of a shard that this process writes; to be called for each shard that it holds, in order."""
        key = shard.box, grid.chunk_shape
        if key not in self._chunks:
            self._chunks[key] = grid.split(shard.box)
        chunks, holders = self._chunks[key], shard.holders
        if len(holders) == 1:
            return chunks if holders[0] == self.index else []
        loads = self._loads.setdefault(holders, [(0, process) for process in holders])
        size = math.prod(grid.chunk_shape) * itemsize
        assigned: list[Box] = []
        for chunk in chunks:
            load, process = loads[0]
            heapq.heapreplace(loads, (load + size, process))
            if process == self.index:
                assigned.append(chunk)
        return assigned

    def chunks_of(
        self, leaf: LeafToSave, itemsize: int, limit: int
    ) -> tuple[tuple[int, ...], tuple[ChunkWrite, ...], frozenset[Box]]:
        """The chunk shape of an array, the chunks that this process writes, and the boxes of those that are assigned to others.

        To be called for each array, in order.
        """
        shape, value = leaf.shape, leaf.value
        sharding = value.sharding if is_jax_array(value) and 0 not in shape else None
        key = sharding, shape, itemsize, limit
        if key in self._assigned:
            return self._assigned[key]
        if key not in self._grids:
            self._grids[key] = self._grid_of(value, *key)
        grid, shards = self._grids[key]
        assigned = grid.chunk_shape, *self._assign(shards, grid, itemsize)
        if self.count == 1:
            # Of several processes, each assignment depends on the loads of those before it.
            self._assigned[key] = assigned
        return assigned

    def _grid_of(
        self, value: Any, sharding: Any, shape: tuple[int, ...], itemsize: int, limit: int
    ) -> tuple[ChunkGrid, list[HeldShard]]:
        """The chunk grid of an array, and its distinct shards that this process holds, by box."""
        if sharding is None:
            # Host arrays are written by process 0.
            chunk_shape = chunk_shape_for(shape, shape, itemsize, limit, 1)
            return ChunkGrid(shape, chunk_shape), [HeldShard(None, Box.whole(shape), (0,))]
        part = tuple(sharding.shard_shape(shape))
        # An upper bound on the holders of a shard that all processes compute alike.
        replicas = min(self.count, max(1, sharding.num_devices // ChunkGrid(shape, part).num_chunks))
        return ChunkGrid(shape, chunk_shape_for(shape, part, itemsize, limit, replicas)), _held_shards(value, self)

    def _assign(
        self, shards: Sequence[HeldShard], grid: ChunkGrid, itemsize: int
    ) -> tuple[tuple[ChunkWrite, ...], frozenset[Box]]:
        """The chunks of an array that this process writes, and the boxes of those that are assigned to others."""
        chunks: list[ChunkWrite] = []
        of_others: set[Box] = set()
        for shard in shards:
            boxes = self.chunks_of_this_process(shard, grid, itemsize)
            # Every process has a host array.
            if self.with_copies and (shard.index is None or self.index in shard.holders):
                own_boxes, boxes = frozenset(boxes), grid.split(shard.box)
                of_others.update(box for box in boxes if box not in own_boxes)
            # For a shard at the array's origin both boxes are one object, which halves memory and time.
            is_shifted = any(shard.box.start)
            chunks += [ChunkWrite(box, shard.index, box.relative_to(shard.box) if is_shifted else box) for box in boxes]
        return tuple(chunks), frozenset(of_others)

    def layout(self, mesh: Any) -> tuple[MeshLayout, dict[Any, tuple[int, ...]]]:
        """The layout of a mesh, and the positions of this process's devices in it."""
        if mesh not in self._meshes:
            devices = mesh.devices
            processes = np.array([device.process_index for device in devices.flat]).reshape(devices.shape)
            positions = {devices[tuple(index)]: tuple(index.tolist()) for index in np.argwhere(processes == self.index)}
            self._meshes[mesh] = MeshLayout(processes, mesh.axis_names), positions
        return self._meshes[mesh]


def _held_shards(array: Any, assignment: WriteAssignment) -> list[HeldShard]:
    sharding, shape = array.sharding, array.shape
    shards: dict[Box, HeldShard] = {}
    for index, shard in enumerate(array.addressable_shards):
        box = Box.from_slices(shard.index, shape)
        if box not in shards:
            holders = (assignment.index,) if assignment.count == 1 else _holders(sharding, shape, shard, assignment)
            shards[box] = HeldShard(index, box, holders)
    return [shards[box] for box in sorted(shards)]


def _holders(sharding: Any, shape: tuple[int, ...], shard: Any, assignment: WriteAssignment) -> tuple[int, ...]:
    mesh, spec = getattr(sharding, 'mesh', None), getattr(sharding, 'spec', None)
    if mesh is not None and spec is not None:
        layout, positions = assignment.layout(mesh)
        names = [
            name for entry in spec if entry is not None for name in (entry if isinstance(entry, tuple) else (entry,))
        ]
        return layout.holders(positions[shard.device], frozenset(names))
    # Any other sharding: computes the device map of the whole job.
    indices = sharding.devices_indices_map(shape)
    return tuple(sorted({device.process_index for device, index in indices.items() if index == shard.index}))
