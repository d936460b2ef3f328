"""Stages the arrays of a save: after staging, the caller may donate, overwrite or delete every array of the state.

How a leaf is staged depends on its memory:

- ``view``: arrays on the CPU backend are viewed as numpy without a copy. A buffer with an outside reference cannot be
  donated in place, so XLA allocates anew for the step's output and the view stays as it was. Taking the view waits for
  the array to be computed.
- ``copy``: a copy on the device is dispatched without waiting; it is ordered before any later step that donates the
  original. Takes the size of the state in device memory until the state is written.
- ``pinned_host``: the same, with the copy in pinned host memory, from which GPU and TPU data is written without another
  copy.

``auto`` takes a view of an array on the CPU that is ready, a dispatched copy of one that is still being computed, and
pinned host memory on other platforms.

Copies take at most half of the save's byte budget; a larger state is staged in waves, and the other half is the writer's.
The writer pulls the waves: each is staged when the previous one is written, and the caller waits until the last one is
staged. A leaf larger than a wave is fetched chunk by chunk while the caller waits.

Host arrays, and jax.Arrays on the CPU whose memory may have another owner (``core/private_memory.py``), are copied before an
asynchronous save returns, since their owner may write to them; a blocking save reads them in place. A LazyArray is read
when it is written, chunk by chunk if it can be sliced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Generator, Sequence
from typing import Any, TypeVar

import numpy as np

from t5ckpt.core.arguments import check_word
from t5ckpt.core.interrupt_safe_event import InterruptSafeEvent
from t5ckpt.core.leaf_path import Path
from t5ckpt.core.private_memory import is_private
from t5ckpt.errors import UnsupportedLeafError
from t5ckpt.format.chunk_grid import Box
from t5ckpt.format.dtypes import to_stored
from t5ckpt.lazy import LazyArray
from t5ckpt.planning.save_plan import ArrayWrite, ChunkWrite, InlineWrite, SavePlan
from t5ckpt.tree.leaf_values import is_jax_array

__all__ = ['Source', 'StagedWave', 'Staging', 'check_staging']

_Write = TypeVar('_Write', ArrayWrite, InlineWrite)
_MODES = ('auto', 'copy', 'pinned_host', 'view')


def check_staging(mode: Any) -> None:
    """Raises ValueError if ``mode`` is not a way to stage arrays."""
    check_word('staging', mode, _MODES)


@dataclasses.dataclass
class Source:
    """Where the values of one stored leaf come from.

    Attributes:
      name: the name of the leaf, for errors.
      leaf: a staged copy, a host array, a LazyArray, or with ``chunkwise`` the caller's array.
      views: host views of the addressable shards, if they were taken.
      chunkwise: fetch the caller's array chunk by chunk, while the caller waits.
    """

    name: str
    leaf: Any
    views: dict[int, np.ndarray] = dataclasses.field(default_factory=dict[int, np.ndarray])
    chunkwise: bool = False

    def values(self, chunk: ChunkWrite) -> np.ndarray:
        """The values of one chunk; may wait for a transfer or a read."""
        if self.chunkwise:
            return np.asarray(self.leaf.addressable_shards[chunk.shard].data[chunk.box_in_shard.slices])
        if isinstance(self.leaf, LazyArray) and self.leaf.is_sliceable:
            return _got_slice(self.leaf, chunk.box_in_shard, self.name)
        return self._shard(chunk.shard)[chunk.box_in_shard.slices]

    def as_stored(self, chunk: ChunkWrite, write: ArrayWrite) -> np.ndarray:
        """The values of one chunk as stored on disk: C order, little endian, in the stored dtype."""
        values = self.values(chunk)
        if values.dtype != write.dtype:
            values = values.astype(write.dtype)
        stored = to_stored(np.asarray(values))
        # numpy makes an array of one dimension of a contiguous scalar.
        return np.ascontiguousarray(stored) if stored.ndim else stored

    def release(self) -> None:
        """Releases the values, after all their writes were started."""
        self.leaf = None
        self.views.clear()

    def _shard(self, index: int) -> np.ndarray:
        if index not in self.views:
            if index >= 0:
                self.views[index] = np.asarray(self.leaf.addressable_shards[index].data)
            else:
                self.views[index] = _got(self.leaf, self.name)
        return self.views[index]


@dataclasses.dataclass(frozen=True)
class StagedWave:
    """Staged leaves, in the order in which they are written."""

    writes: tuple[tuple[ArrayWrite, Source], ...]


class Staging:
    """Stages a plan, wave after wave.

    The caller stages ``inline`` and the first wave with :meth:`start`. The writer iterates over :meth:`waves`, which stages
    each further wave in the writer's thread when the previous one is written. The caller must not change its arrays before
    ``is_staged`` is set.

    Attributes:
      unchanged: the leaves that are not staged, because the previous checkpoint holds them.
      total_bytes, chunk_count, array_count: of all leaves to write.
      private_host: whether the caller continues after staging, so that its host arrays are copied.
      limit: the bytes that staged copies may take, half of the save's budget; the other half is for the writer.
    """

    def __init__(
        self,
        plan: SavePlan,
        mode: str,
        budget_bytes: int,
        *,
        private_host: bool = False,
        unchanged: Collection[Path] = (),
    ):
        """Splits the plan into waves; nothing is copied yet."""
        linked = frozenset(unchanged)
        writes = [write for write in plan.writes if write.path not in linked]
        self.unchanged = [write for write in plan.writes if write.path in linked]
        self.total_bytes = sum(write.chunk_bytes * len(write.chunks) for write in plan.writes)
        self.chunk_count = sum(len(write.chunks) for write in plan.writes)
        self.array_count = len(plan.writes)
        self.is_staged = InterruptSafeEvent()
        self.private_host = private_host
        self.limit = max(1, budget_bytes // 2)
        self._inline_writes = plan.inline
        self._modes = {write.path: _mode_of(write.leaf, mode, private_host) for write in (*writes, *plan.inline)}
        self._waves = _split(writes, self._modes, self.limit)
        self._next: StagedWave | None = None
        self._interrupted = False
        self._inline: dict[Path, Any] = {}

    def start(self) -> None:
        """Stages the inline leaves and the first wave."""
        inline = self._inline_writes
        moved = _copied(inline, self._modes)
        self._inline = {
            w.path: moved[w.path] if w.path in moved else _inline_source(w.leaf, self.private_host) for w in inline
        }
        self._inline_writes = tuple(_without_array(write) for write in inline)
        self._stage_next()

    def stop(self) -> None:
        """Makes the writer fail at the next chunk."""
        self._interrupted = True

    @property
    def is_interrupted(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._interrupted

    def _stage_next(self) -> None:
        reads_caller = False
        if self._waves:
            wave = self._waves.pop(0)
            reads_caller = any(_is_chunkwise(write, self._modes, self.limit) for write in wave)
            sources = _sources(wave, self._modes, self.limit)
            self._next = StagedWave(tuple((_without_array(w), s) for w, s in zip(wave, sources, strict=True)))
        if not self._waves and not reads_caller:
            self.is_staged.set()

    def waves(self) -> Generator[StagedWave]:
        """Yields the waves to the writer. Asking for the next one tells that the previous one is written."""
        try:
            while (wave := self._next) is not None:
                self._next = None
                yield wave
                del wave
                self._stage_next()
        finally:
            # A writer that failed no longer needs the caller's arrays.
            self.is_staged.set()

    def inline_values(self) -> dict[Path, Any]:
        """The inline leaves as numpy, after their cast; waits for their transfer."""
        return {write.path: _as_inline(write, self._inline[write.path]) for write in self._inline_writes}


def _got(leaf: Any, name: str) -> np.ndarray:
    """The values of a host leaf. A LazyArray is read, and its values must have the declared shape."""
    if not isinstance(leaf, LazyArray):
        return np.asarray(leaf)
    values = np.asarray(leaf.get())
    if values.shape != leaf.shape:
        raise UnsupportedLeafError(
            f'{name}: a LazyArray of shape {leaf.shape} returned values of shape {values.shape}. Correct its shape.'
        )
    return values


def _got_slice(leaf: LazyArray, box: Box, name: str) -> np.ndarray:
    values = np.asarray(leaf[box.slices])
    if values.shape != box.shape:
        raise UnsupportedLeafError(f'{name}: a LazyArray returned values of shape {values.shape} for the slice {box}.')
    return values


def _without_array(write: _Write) -> _Write:
    """A write that no longer keeps the caller's array alive."""
    if not is_jax_array(write.leaf) and not isinstance(write.leaf, np.ndarray):
        return write
    if isinstance(write, InlineWrite):
        return InlineWrite(write.path, None, write.dtype)
    return dataclasses.replace(write, leaf=None)


# --- modes -----------------------------------------------------------------------------------------------------------


def _mode_of(leaf: Any, mode: str, private_host: bool) -> str:
    """How one leaf is staged: a mode, 'host' or 'shards' for host memory to be copied now, or 'as_is'."""
    if not is_jax_array(leaf):
        return 'host' if private_host and isinstance(leaf, np.ndarray) else 'as_is'
    if private_host and _is_on_cpu(leaf) and leaf.is_ready() and not is_private(leaf):
        return 'shards'
    if mode != 'auto':
        return mode
    if not _is_on_cpu(leaf):
        return 'pinned_host'
    return 'view' if leaf.is_ready() else 'copy'


def _is_on_cpu(leaf: Any) -> bool:
    return next(iter(leaf.sharding.device_set)).platform == 'cpu'


def _staged_bytes(write: ArrayWrite, modes: dict[Path, str]) -> int:
    """Bytes that staging this leaf copies on this process."""
    if modes[write.path] not in ('copy', 'host', 'pinned_host', 'shards'):
        return 0
    shards = {chunk.shard for chunk in write.chunks}
    if -1 in shards or not shards:
        return write.array.nbytes
    return sum(int(write.leaf.addressable_shards[index].data.nbytes) for index in shards)


def _is_chunkwise(write: ArrayWrite, modes: dict[Path, str], limit: int) -> bool:
    return modes[write.path] in ('copy', 'pinned_host', 'shards') and _staged_bytes(write, modes) > limit


def _split(writes: Sequence[ArrayWrite], modes: dict[Path, str], limit: int) -> list[list[ArrayWrite]]:
    """Groups leaves so that the copies of each group fit the limit; a larger leaf forms a group alone."""
    waves: list[list[ArrayWrite]] = []
    room = 0
    for write in writes:
        size = _staged_bytes(write, modes)
        if not waves or size > room:
            waves.append([])
            room = limit
        waves[-1].append(write)
        room -= size
    return waves


# --- copies ----------------------------------------------------------------------------------------------------------


def _sources(wave: Sequence[ArrayWrite], modes: dict[Path, str], limit: int) -> list[Source]:
    chunkwise = {write.path for write in wave if _is_chunkwise(write, modes, limit)}
    moved = _copied([write for write in wave if write.path not in chunkwise], modes)
    sources: list[Source] = []
    for write in wave:
        name = write.name
        if write.path in chunkwise:
            sources.append(Source(name, write.leaf, chunkwise=True))
        elif write.path in moved:
            sources.append(Source(name, moved[write.path]))
        elif modes[write.path] in ('shards', 'view'):
            views = _views(write)
            if modes[write.path] == 'shards':
                views = {index: np.array(view) for index, view in views.items()}
            sources.append(Source(name, None, views))
        else:
            sources.append(Source(name, _host(write.leaf, modes[write.path] == 'host')))
    return sources


def _views(write: ArrayWrite) -> dict[int, np.ndarray]:
    wanted = {chunk.shard for chunk in write.chunks}
    shards = write.leaf.addressable_shards
    return {index: np.asarray(shards[index].data) for index in sorted(wanted)}


def _host(leaf: Any, private: bool) -> Any:
    return np.array(leaf) if private and not isinstance(leaf, LazyArray) else leaf


def _inline_source(leaf: Any, private: bool) -> Any:
    if leaf is None or not is_jax_array(leaf):
        return None if leaf is None else _host(leaf, private)
    return np.array(_whole(leaf)) if private else _whole(leaf)


def _whole(leaf: Any) -> np.ndarray:
    """The values of an inline leaf, which is replicated, or empty without a shard of its shape."""
    if leaf.size == 0:
        return np.empty(leaf.shape, leaf.dtype)
    if leaf.is_fully_replicated or not leaf.is_fully_addressable:
        if _is_on_cpu(leaf):
            # numpy.asarray(leaf) of a replicated array on the CPU is a view of its memory, in a third of the time of the
            # branch below. JAX caches the result only if it is a copy.
            values = np.asarray(leaf)
            if not values.flags.owndata:
                return values
        return np.asarray(leaf.addressable_data(0))
    # Not numpy.asarray(leaf): JAX caches its result, but memory that the array shares with its source may change.
    values = np.empty(leaf.shape, leaf.dtype)
    for shard in leaf.addressable_shards:
        values[shard.index] = shard.data
    return values


def _copied(writes: Sequence[ArrayWrite | InlineWrite], modes: dict[Path, str]) -> dict[Path, Any]:
    """Dispatches the copies that the modes ask for; returns them by path."""
    moved: dict[Path, Any] = {}
    for mode, copy in (('copy', _device_copies), ('pinned_host', _pinned_copies)):
        paths = [write.path for write in writes if modes[write.path] == mode]
        if paths:
            leaves = {write.path: write.leaf for write in writes}
            moved |= dict(zip(paths, copy([leaves[path] for path in paths]), strict=True))
    return moved


def _device_copies(arrays: list[Any]) -> list[Any]:
    # One transfer for all arrays. One computation per array (jnp.copy) would wait for the running step, since the CPU
    # client queues at most 32: 85 leaves took 0.9 s to dispatch behind a step, instead of 0.02 s.
    import jax

    return jax.device_put(arrays, [array.sharding for array in arrays], may_alias=False)


def _pinned_copies(arrays: list[Any]) -> list[Any]:
    import jax

    return jax.device_put(arrays, [array.sharding.with_memory_kind('pinned_host') for array in arrays])


def _as_inline(write: InlineWrite, value: Any) -> Any:
    """The value as T5X expects it in the manifest: a numpy array or scalar, never a Python number."""
    if value is None:
        return None
    if isinstance(value, LazyArray):
        value = _got(value, write.name)
    elif is_jax_array(value):
        value = _whole(value)
    array = np.asarray(value)
    if write.dtype is not None and array.dtype != write.dtype:
        array = array.astype(write.dtype)
    was_scalar = isinstance(write.leaf, (bool, int, float, complex, np.generic))
    return array[()] if was_scalar else np.ascontiguousarray(array).reshape(array.shape)
