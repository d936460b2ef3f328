"""Stages the arrays of a save: after staging, the caller may donate, overwrite or delete every array of the state.

Another thread may write to NumPy memory at any time, also through a jax.Array that shares it, so every value is copied before
its checksum is computed: the bytes that are hashed are the bytes that are written. A save in the background copies its arrays
here, and every save the arrays of accelerators, to pinned host memory. These copies take at most half of the save's byte budget;
a larger state is staged in waves. The writer pulls the waves: each is staged when the previous one is written, and the caller
waits until the last one is staged. All other arrays are copied chunk by chunk when they are written, while the caller waits.

A LazyArray is read when it is written, chunk by chunk if it can be sliced.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np

from t5ckpt.core.thread_pool import InterruptSafeEvent
from t5ckpt.errors import UnsupportedLeafError
from t5ckpt.format.dtypes import cast, to_stored
from t5ckpt.lazy import LazyArray
from t5ckpt.planning.save_plan import ArrayWrite, ChunkWrite, SavePlan
from t5ckpt.tree.leaf_table import LeafTable
from t5ckpt.tree.leaves import LeafToSave, explicit_transfers, is_jax_array


class StagedLeaf:
    """The values of one stored leaf. Safe from any thread.

    Attributes:
      write: its chunks and its metadata; ``write.value`` is None.
      sources: the arrays of the shards that this process writes, by their index; a host array or a LazyArray under None.
      is_copy: whether no other code can write to the memory of the sources.
    """

    def __init__(self, write: ArrayWrite, reading: threading.Lock):
        """Takes the caller's leaf; ``reading`` is held while values are read or fetched."""
        value = write.value
        self.sources: dict[int | None, Any] = {None: value}
        if is_jax_array(value):
            shards = {chunk.shard: None for chunk in write.chunks}
            self.sources = {index: value.addressable_shards[index].data for index in shards if index is not None}
        self.write = dataclasses.replace(write, value=None)
        self.is_copy = False
        self._reading = reading

    @property
    def held_bytes(self) -> int:
        """The bytes of the sources."""
        return sum(int(getattr(source, 'nbytes', 0)) for source in self.sources.values())

    def as_stored(self, chunk: ChunkWrite, *, is_fixed: bool) -> np.ndarray:
        """The values of one chunk as stored on disk: complete, in C order and the stored dtype.

        With ``is_fixed``, no other code can change them.
        """
        write = self.write
        with self._reading:
            values = self._values(chunk)
        result = cast(values, write.dtype, write.name)
        result = result.astype(write.dtype, order='C', copy=is_fixed and result is values and not self.is_copy)
        if write.array.disk_dtype != write.dtype:
            result = to_stored(result)
        shape = tuple(write.array.metadata['chunks'])
        if result.shape == shape:
            return result
        # A chunk at the end of an axis is stored in full.
        full = np.zeros(shape, result.dtype)
        full[tuple(map(slice, result.shape))] = result
        return full

    def _values(self, chunk: ChunkWrite) -> np.ndarray:
        """The values of a chunk; may wait for a transfer or a read."""
        source, box = self.sources[chunk.shard], chunk.box_in_shard
        if isinstance(source, LazyArray) and source.is_sliceable:
            values = np.asarray(source[box.slices])
            if values.shape != box.shape:
                raise UnsupportedLeafError(
                    f'{self.write.name}: a LazyArray returned values of shape {values.shape} for the slice {box}.'
                )
            return values
        if is_jax_array(source) and not (self.is_copy or is_on_cpu(source)):
            return on_host(source, box.slices)
        # Read or fetched once.
        whole = on_host(source) if is_jax_array(source) else values_of(source, self.write.name)
        self.sources[chunk.shard] = whole
        return whole[box.slices]


StagedWave = collections.deque[StagedLeaf]
"""Leaves that are staged together, in the order in which they are written. A leaf is freed once its last chunk is written."""


class Staging:
    """Stages a plan, wave after wave.

    The constructor stages the inline leaves and the first wave. The writer iterates over :meth:`waves`, which stages each further
    wave in the writer's thread when the previous one is written. The caller must not change its arrays before ``is_staged`` is
    set.

    Attributes:
      writes_metadata: whether this process writes the metadata of every array, also of those whose chunks others write.
      total_bytes, chunk_count: of all leaves to write.
      in_background: whether the caller continues after staging, so that its host arrays are copied.
      is_interrupted: set by the caller to make the writer fail at the next chunk.
      limit: the bytes that staged copies may take, half of the save's budget; the other half is for the writer.
    """

    def __init__(
        self,
        plan: SavePlan,
        budget_bytes: int,
        *,
        in_background: bool = False,
        writes_metadata: bool = True,
    ):
        """Splits the plan into waves, and stages the inline leaves and the first wave."""
        self.total_bytes = sum(write.chunk_bytes * len(write.chunks) for write in plan.writes)
        self.chunk_count = sum(len(write.chunks) for write in plan.writes)
        self.writes_metadata = writes_metadata
        self.is_staged = InterruptSafeEvent()
        self.in_background = in_background
        self.limit = max(1, budget_bytes // 2)
        # Leaves are read and fetched one after another.
        self._reading = threading.Lock()
        self._waves = _split(map(self._leaf, plan.writes), self.limit)
        self._next: StagedWave | None = None
        self.is_interrupted = False
        values = [write.value for write in plan.inline]
        copies = _copies(
            [whole_value(leaf) if is_jax_array(leaf) and not self._is_copied(leaf) else leaf for leaf in values]
        )
        # Without the caller's arrays, which are not kept alive.
        self._inline = [write._replace(value=copy) for write, copy in zip(plan.inline, copies, strict=True)]
        self._stage_next()

    def _is_copied(self, value: Any) -> bool:
        if is_jax_array(value):
            return self.in_background or not is_on_cpu(value)
        return self.in_background and isinstance(value, np.ndarray)

    def _leaf(self, write: ArrayWrite) -> StagedLeaf:
        leaf = StagedLeaf(write, self._reading)
        leaf.is_copy = self._is_copied(write.value) and leaf.held_bytes <= self.limit
        return leaf

    def inline_leaves(self) -> LeafTable:
        """The inline leaves as T5X expects them in the manifest, cast; waits for their transfer."""
        return {write.path: _as_inline(write) for write in self._inline}

    def _stage_next(self) -> None:
        reads_caller = False
        if self._waves:
            self._next = wave = self._waves.popleft()
            copied = [leaf for leaf in wave if leaf.is_copy]
            # Of a replicated array, only the shard that is written is copied.
            copies = iter(_copies([array for leaf in copied for array in leaf.sources.values()]))
            for leaf in copied:
                leaf.sources = dict(zip(leaf.sources, copies, strict=False))
            reads_caller = any(not leaf.is_copy and any(map(_is_array, leaf.sources.values())) for leaf in wave)
        if not self._waves and not reads_caller:
            self.is_staged.set()

    def waves(self) -> Generator[StagedWave]:
        """Yields the waves to the writer. When the writer asks for the next one, it has written the previous one."""
        try:
            while (wave := self._next) is not None:
                self._next = None
                yield wave
                del wave
                self._stage_next()
        finally:
            # A writer that failed no longer needs the caller's arrays.
            self.is_staged.set()


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) or is_jax_array(leaf)


def _split(leaves: Iterable[StagedLeaf], limit: int) -> collections.deque[StagedWave]:
    """Groups leaves so that the copies of each group fit the limit."""
    waves: collections.deque[StagedWave] = collections.deque()
    room = 0
    for leaf in leaves:
        size = leaf.held_bytes if leaf.is_copy else 0
        if not waves or size > room:
            waves.append(collections.deque())
            room = limit
        waves[-1].append(leaf)
        room -= size
    return waves


def _copies(values: Sequence[Any]) -> list[Any]:
    """Copies of arrays; numbers, LazyArrays and None are returned as they are."""
    on_device = iter(_device_copies([value for value in values if is_jax_array(value)]))
    return [
        next(on_device) if is_jax_array(value) else np.array(value) if isinstance(value, np.ndarray) else value
        for value in values
    ]


def _device_copies(arrays: Sequence[Any]) -> Sequence[Any]:
    """Dispatches copies, which are ordered before a later step that donates the originals."""
    # One transfer for all arrays. One computation per array (jnp.copy) would wait for the running step, since the CPU
    # client queues at most 32: 85 leaves took 0.9 s to dispatch behind a step, instead of 0.02 s.
    if not arrays:
        return []
    import jax

    # The owner of NumPy memory may write to it as soon as the caller continues. An array that is being computed has no owner.
    waits = [is_on_cpu(array) and array.is_ready() for array in arrays]
    shardings = [
        array.sharding if is_on_cpu(array) else array.sharding.with_memory_kind('pinned_host') for array in arrays
    ]
    with explicit_transfers():
        copies = jax.device_put(list(arrays), shardings, may_alias=False)
    jax.block_until_ready([copy for copy, is_ready in zip(copies, waits, strict=True) if is_ready])
    return copies


def _as_inline(write: LeafToSave) -> Any:
    """The value as T5X expects it in the manifest: a numpy array or scalar, never a Python number."""
    value = write.value
    if value is None:
        return None
    if type(value) is np.ndarray and value.dtype == write.dtype and value.flags.c_contiguous:
        # First, because most leaves are arrays that are not cast.
        return value
    array = whole_value(value) if is_jax_array(value) else values_of(value, write.name)
    if write.dtype is not None:
        array = cast(array, write.dtype, write.name)
    was_scalar = isinstance(value, (bool, int, float, complex, np.generic))
    return array[()] if was_scalar else np.ascontiguousarray(array).reshape(array.shape)


def values_of(leaf: Any, name: str) -> np.ndarray:
    """The values of a host leaf. A LazyArray is read, and its values must have the declared shape."""
    if not isinstance(leaf, LazyArray):
        return np.asarray(leaf)
    values = np.asarray(leaf.get())
    if values.shape != leaf.shape:
        raise UnsupportedLeafError(
            f'{name}: a LazyArray of shape {leaf.shape} returned values of shape {values.shape}. Correct its shape.'
        )
    return values


def is_on_cpu(leaf: Any) -> bool:
    """Whether a jax.Array is on the CPU backend."""
    return next(iter(leaf.sharding.device_set)).platform == 'cpu'


def on_host(array: Any, index: Any = None) -> np.ndarray:
    """The values of a jax.Array, or of a slice of it; on the CPU, a view of its memory for most dtypes."""
    with explicit_transfers():
        return np.asarray(array if index is None else array[index])


def whole_value(leaf: Any) -> np.ndarray:
    """The values of an inline jax.Array. One of size 0 may have no shard of its shape."""
    if leaf.size == 0:
        return np.empty(leaf.shape, leaf.dtype)
    if leaf.is_fully_replicated or not leaf.is_fully_addressable:
        if is_on_cpu(leaf):
            # numpy.asarray(leaf) of a replicated array on the CPU is a view of its memory, in a third of the time of the
            # branch below. JAX caches the result only if it is a copy.
            values = on_host(leaf)
            if not values.flags.owndata:
                return values
        return on_host(leaf.addressable_data(0))
    # Not numpy.asarray(leaf): JAX caches its result, but memory that the array shares with its source may change.
    values = np.empty(leaf.shape, leaf.dtype)
    for shard in leaf.addressable_shards:
        values[shard.index] = on_host(shard.data)
    return values
