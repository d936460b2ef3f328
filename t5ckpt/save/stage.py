"""Stages the arrays of a save: after staging, the caller may donate, overwrite or delete every array of the state.

Another thread may write to NumPy memory at any time, also through a jax.Array that shares it, so every value is copied before
its checksum is computed: the bytes that are hashed are the bytes that are written. ``_Method`` is how a leaf is copied. Copies
take at most half of the save's byte budget; a larger state is staged in waves, and the other half is the writer's. The writer
pulls the waves: each is staged when the previous one is written, and the caller waits until the last one is staged.

A LazyArray is read when it is written, chunk by chunk if it can be sliced.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np

from t5ckpt.core.interrupt_safe_event import InterruptSafeEvent
from t5ckpt.lazy import LazyArray
from t5ckpt.planning.save_plan import ArrayWrite, InlineWrite, SavePlan
from t5ckpt.save.staged_leaf import CallerLeaf, DeviceLeaf, HostLeaf, StagedLeaf, is_on_cpu, whole_value
from t5ckpt.tree.leaves import is_jax_array
from t5ckpt.tree.transfers import explicit_transfers


class _Method(enum.Enum):
    """The staging of one leaf."""

    CHUNKWISE = (
        enum.auto()
    )  # Each chunk is copied when it is written, while the caller waits. LazyArrays and numbers, too.
    HOST_COPY = enum.auto()  # A copy of a numpy array.
    DEVICE_COPY = (
        enum.auto()
    )  # A dispatched copy: on the CPU backend beside the original, otherwise in pinned host memory.

    @classmethod
    def of(cls, leaf: Any, in_background: bool) -> _Method:
        if is_jax_array(leaf):
            return cls.DEVICE_COPY if in_background or not is_on_cpu(leaf) else cls.CHUNKWISE
        return cls.HOST_COPY if in_background and isinstance(leaf, np.ndarray) else cls.CHUNKWISE


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A stored leaf before it is staged.

    Attributes:
      shards: the shards of a jax.Array that this process writes.
      copied_bytes: what staging it copies on this process.
    """

    write: ArrayWrite
    method: _Method
    shards: Sequence[int]
    copied_bytes: int

    @classmethod
    def of(cls, write: ArrayWrite, in_background: bool, limit: int) -> _Leaf:
        method = _Method.of(write.value, in_background)
        if method is _Method.CHUNKWISE:
            return cls(write, method, (), 0)
        shards = sorted({chunk.shard for chunk in write.chunks if chunk.shard is not None})
        size = sum(int(write.value.addressable_shards[index].data.nbytes) for index in shards) or write.array.nbytes
        return cls(write, method if size <= limit else _Method.CHUNKWISE, shards, size)


StagedWave = list[tuple[ArrayWrite, StagedLeaf]]
"""Staged leaves, in the order in which they are written."""


class Staging:
    """Stages a plan, wave after wave.

    The caller stages the inline leaves and the first wave with :meth:`start`. The writer iterates over :meth:`waves`, which
    stages each further wave in the writer's thread when the previous one is written. The caller must not change its arrays before
    ``is_staged`` is set.

    Attributes:
      inline: the inline leaves, staged, for ``save/manifest_and_facts.py``.
      writes_metadata: whether this process writes the metadata of every array, also of those whose chunks others write.
      total_bytes, file_count: of all leaves to write.
      in_background: whether the caller continues after staging, so that its host arrays are copied.
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
        """Splits the plan into waves; nothing is copied yet."""
        self.total_bytes = sum(write.chunk_bytes * len(write.chunks) for write in plan.writes)
        chunk_count = sum(len(write.chunks) for write in plan.writes)
        self.file_count = chunk_count + (len(plan.writes) if writes_metadata else 0)
        self.writes_metadata = writes_metadata
        self.is_staged = InterruptSafeEvent()
        self.in_background = in_background
        self.limit = max(1, budget_bytes // 2)
        self._waves = _split((_Leaf.of(write, in_background, self.limit) for write in plan.writes), self.limit)
        self._next: StagedWave | None = None
        self._interrupted = False
        self._inline_writes = plan.inline
        self.inline: list[tuple[InlineWrite, Any]] = []

    def start(self) -> None:
        """Stages the inline leaves and the first wave."""
        writes, self._inline_writes = self._inline_writes, ()
        copied = [_Method.of(write.value, self.in_background) is _Method.DEVICE_COPY for write in writes]
        copies = iter(
            _device_copies([write.value for write, is_copied in zip(writes, copied, strict=True) if is_copied])
        )
        self.inline = [
            (_without_inline_array(write), next(copies) if is_copied else _inline_copy(write.value))
            for write, is_copied in zip(writes, copied, strict=True)
        ]
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
            wave = self._waves.popleft()
            reads_caller = any(leaf.method is _Method.CHUNKWISE and _is_array(leaf.write.value) for leaf in wave)
            self._next = _staged(wave)
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


# --- stored leaves ---------------------------------------------------------------------------------------------------


def _split(leaves: Iterable[_Leaf], limit: int) -> collections.deque[list[_Leaf]]:
    """Groups leaves so that the copies of each group fit the limit; a larger leaf forms a group alone."""
    waves: collections.deque[list[_Leaf]] = collections.deque()
    room = 0
    for leaf in leaves:
        if not waves or leaf.copied_bytes > room:
            waves.append([])
            room = limit
        waves[-1].append(leaf)
        room -= leaf.copied_bytes
    return waves


def _staged(wave: Sequence[_Leaf]) -> StagedWave:
    # Of a replicated array, only the shard that is written is copied.
    shards = [
        [leaf.write.value.addressable_shards[index].data for index in leaf.shards]
        for leaf in wave
        if leaf.method is _Method.DEVICE_COPY
    ]
    copies = iter(_device_copies([shard for of_leaf in shards for shard in of_leaf]))
    writes = [
        # The array of the caller is not kept alive.
        dataclasses.replace(leaf.write, value=None) if _is_array(leaf.write.value) else leaf.write
        for leaf in wave
    ]
    return [(write, _staged_leaf(leaf, copies)) for write, leaf in zip(writes, wave, strict=True)]


def _staged_leaf(leaf: _Leaf, copies: Iterable[Any]) -> StagedLeaf:
    """The staged leaf; takes its shards from the copies of the wave."""
    value = leaf.write.value
    match leaf.method:
        case _Method.DEVICE_COPY:
            return DeviceLeaf(dict(zip(leaf.shards, copies, strict=False)))
        case _Method.HOST_COPY:
            return HostLeaf(leaf.write.name, np.array(value), is_copy=True)
        case _Method.CHUNKWISE:
            return CallerLeaf(value) if is_jax_array(value) else HostLeaf(leaf.write.name, value)


def _device_copies(arrays: Sequence[Any]) -> Sequence[Any]:
    """Dispatches copies, which are ordered before a later step that donates the originals."""
    # One transfer for all arrays. One computation per array (jnp.copy) would wait for the running step, since the CPU
    # client queues at most 32: 85 leaves took 0.9 s to dispatch behind a step, instead of 0.02 s.
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


# --- inline leaves ---------------------------------------------------------------------------------------------------


def _without_inline_array(write: InlineWrite) -> InlineWrite:
    """The write without the caller's array, which is not kept alive."""
    return InlineWrite(write.path, write.name, None, write.dtype) if _is_array(write.value) else write


def _inline_copy(value: Any) -> Any:
    if value is None or isinstance(value, LazyArray):
        return value
    return np.array(whole_value(value) if is_jax_array(value) else value)
