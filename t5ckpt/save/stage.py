"""Stages the arrays of a save: after staging, the caller may donate, overwrite or delete every array of the state.

How a leaf is staged (``_Method``) depends on its memory and on the caller's :class:`StagingMode`. Copies take at most half of
the save's byte budget; a larger state is staged in waves, and the other half is the writer's. The writer pulls the waves: each
is staged when the previous one is written, and the caller waits until the last one is staged. A leaf larger than a wave is
fetched chunk by chunk while the caller waits.

Host arrays, and jax.Arrays on the CPU whose memory may have another owner (``core/private_memory.py``), are copied before an
asynchronous save returns, since their owner may write to them; a blocking save reads them in place. A LazyArray is read
when it is written, chunk by chunk if it can be sliced.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Collection, Generator, Iterable, Sequence
from typing import Any

import numpy as np

from t5ckpt.core.arguments import check_word
from t5ckpt.core.interrupt_safe_event import InterruptSafeEvent
from t5ckpt.core.leaf_path import Path
from t5ckpt.core.private_memory import is_private
from t5ckpt.lazy import LazyArray
from t5ckpt.planning.save_plan import ArrayWrite, InlineWrite, SavePlan
from t5ckpt.save.staged_leaf import ChunkwiseLeaf, DeviceLeaf, HostLeaf, StagedLeaf, ViewedLeaf, is_on_cpu, whole_value
from t5ckpt.tree.leaves import is_jax_array


class StagingMode(enum.StrEnum):
    """The caller's choice of the staging of jax.Arrays.

    Attributes:
      VIEW: arrays on the CPU backend are viewed as numpy without a copy. A buffer with an outside reference cannot be donated in
        place, so XLA allocates a new buffer for the step's output and the view does not change. Taking the view waits for the
        array to be computed.
      COPY: a copy on the device is dispatched without waiting; it is ordered before any later step that donates the original.
        Takes the size of the state in device memory until the state is written.
      PINNED_HOST: the same, with the copy in pinned host memory, from which GPU and TPU data is written without another copy.
      AUTO: a view of an array on the CPU that is ready, a dispatched copy of one that is still being computed, and pinned host
        memory on other platforms.
    """

    AUTO = 'auto'
    COPY = 'copy'
    PINNED_HOST = 'pinned_host'
    VIEW = 'view'

    @classmethod
    def parse(cls, mode: Any) -> StagingMode:
        """The mode of an argument.

        Raises:
          ValueError: there is no such mode.
        """
        check_word('staging', mode, [member.value for member in cls])
        return cls(mode)


class _Method(enum.Enum):
    """The staging of one leaf."""

    UNCOPIED = enum.auto()  # a LazyArray, a number, or host memory of a blocked caller
    HOST_COPY = enum.auto()  # host memory of a caller who continues
    VIEW = enum.auto()  # views of shards on the CPU
    SHARD_COPIES = enum.auto()  # copies of shards on the CPU whose memory may have another owner
    DEVICE_COPY = enum.auto()
    PINNED_COPY = enum.auto()
    CHUNKWISE = enum.auto()  # the caller's array, larger than a wave

    @classmethod
    def of(cls, leaf: Any, mode: StagingMode, in_background: bool) -> _Method:
        if not is_jax_array(leaf):
            return cls.HOST_COPY if in_background and isinstance(leaf, np.ndarray) else cls.UNCOPIED
        if in_background and is_on_cpu(leaf) and leaf.is_ready() and not is_private(leaf):
            return cls.SHARD_COPIES
        if mode is StagingMode.AUTO:
            if not is_on_cpu(leaf):
                return cls.PINNED_COPY
            return cls.VIEW if leaf.is_ready() else cls.DEVICE_COPY
        return {
            StagingMode.COPY: cls.DEVICE_COPY,
            StagingMode.PINNED_HOST: cls.PINNED_COPY,
            StagingMode.VIEW: cls.VIEW,
        }[mode]


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A stored leaf before it is staged; ``copied_bytes`` is what staging it copies on this process."""

    write: ArrayWrite
    method: _Method
    copied_bytes: int

    @classmethod
    def of(cls, write: ArrayWrite, mode: StagingMode, in_background: bool, limit: int) -> _Leaf:
        method = _Method.of(write.value, mode, in_background)
        if method in (_Method.UNCOPIED, _Method.VIEW):
            return cls(write, method, 0)
        size = _bytes_here(write)
        return cls(write, _Method.CHUNKWISE if size > limit and method is not _Method.HOST_COPY else method, size)


StagedWave = list[tuple[ArrayWrite, StagedLeaf]]
"""Staged leaves, in the order in which they are written."""


class Staging:
    """Stages a plan, wave after wave.

    The caller stages the inline leaves and the first wave with :meth:`start`. The writer iterates over :meth:`waves`, which
    stages each further wave in the writer's thread when the previous one is written. The caller must not change its arrays before
    ``is_staged`` is set.

    Attributes:
      inline: the inline leaves, staged, for ``save/manifest_and_sidecar.py``.
      unchanged: the leaves that are not staged, because the previous checkpoint holds them.
      writes_metadata: whether this process writes the metadata of every array, also of those whose chunks others write.
      total_bytes, file_count: of all leaves to write.
      in_background: whether the caller continues after staging, so that its host arrays are copied.
      limit: the bytes that staged copies may take, half of the save's budget; the other half is for the writer.
    """

    def __init__(
        self,
        plan: SavePlan,
        mode: StagingMode,
        budget_bytes: int,
        *,
        in_background: bool = False,
        writes_metadata: bool = True,
        unchanged: Collection[Path] = (),
    ):
        """Splits the plan into waves; nothing is copied yet."""
        linked = frozenset(unchanged)
        self.unchanged = [write for write in plan.writes if write.path in linked]
        self.total_bytes = sum(write.chunk_bytes * len(write.chunks) for write in plan.writes)
        chunk_count = sum(len(write.chunks) for write in plan.writes)
        self.file_count = chunk_count + (len(plan.writes) if writes_metadata else 0)
        self.writes_metadata = writes_metadata
        self.is_staged = InterruptSafeEvent()
        self.in_background = in_background
        self.limit = max(1, budget_bytes // 2)
        self._mode = mode
        writes = (write for write in plan.writes if write.path not in linked)
        self._waves = _split((_Leaf.of(write, mode, in_background, self.limit) for write in writes), self.limit)
        self._next: StagedWave | None = None
        self._interrupted = False
        self._inline_writes = plan.inline
        self.inline: list[tuple[InlineWrite, Any]] = []

    def start(self) -> None:
        """Stages the inline leaves and the first wave."""
        writes, self._inline_writes = self._inline_writes, ()
        copies = _dispatch_copies(
            [(write.value, _Method.of(write.value, self._mode, self.in_background)) for write in writes]
        )
        self.inline = [
            (_without_inline_array(write), _inline_source(write.value, self.in_background) if copy is None else copy)
            for write, copy in zip(writes, copies, strict=True)
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
            reads_caller = any(leaf.method is _Method.CHUNKWISE for leaf in wave)
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


def _bytes_here(write: ArrayWrite) -> int:
    """Bytes of the shards that this process writes."""
    shards = {chunk.shard for chunk in write.chunks if chunk.shard is not None}
    if not shards:
        return write.array.nbytes
    return sum(int(write.value.addressable_shards[index].data.nbytes) for index in shards)


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
    copies = _dispatch_copies([(leaf.write.value, leaf.method) for leaf in wave])
    staged = [_staged_leaf(leaf, copy) for leaf, copy in zip(wave, copies, strict=True)]
    writes = [
        # The array of the caller is not kept alive.
        dataclasses.replace(leaf.write, value=None) if _is_array(leaf.write.value) else leaf.write
        for leaf in wave
    ]
    return list(zip(writes, staged, strict=True))


def _staged_leaf(leaf: _Leaf, copy: Any) -> StagedLeaf:
    array = leaf.write.value
    match leaf.method:
        case _Method.DEVICE_COPY | _Method.PINNED_COPY:
            return DeviceLeaf(copy)
        case _Method.CHUNKWISE:
            return ChunkwiseLeaf(array)
        case _Method.VIEW:
            return ViewedLeaf(_views(leaf.write))
        case _Method.SHARD_COPIES:
            return ViewedLeaf({index: np.array(view) for index, view in _views(leaf.write).items()})
        case _Method.HOST_COPY:
            return HostLeaf(leaf.write.name, np.array(array))
        case _Method.UNCOPIED:
            return HostLeaf(leaf.write.name, array)


def _views(write: ArrayWrite) -> dict[int, np.ndarray]:
    shards = write.value.addressable_shards
    wanted = {chunk.shard for chunk in write.chunks if chunk.shard is not None}
    return {index: np.asarray(shards[index].data) for index in sorted(wanted)}


def _dispatch_copies(leaves: Sequence[tuple[Any, _Method]]) -> list[Any]:
    """Dispatches the copies of leaves that are copied on devices; None for each other leaf."""
    copies: list[Any] = [None] * len(leaves)
    for method, copied in ((_Method.DEVICE_COPY, _device_copies), (_Method.PINNED_COPY, _pinned_copies)):
        chosen = [index for index, (_, its) in enumerate(leaves) if its is method]
        if chosen:
            for index, copy in zip(chosen, copied([leaves[index][0] for index in chosen]), strict=True):
                copies[index] = copy
    return copies


def _device_copies(arrays: list[Any]) -> list[Any]:
    # One transfer for all arrays. One computation per array (jnp.copy) would wait for the running step, since the CPU
    # client queues at most 32: 85 leaves took 0.9 s to dispatch behind a step, instead of 0.02 s.
    import jax

    return jax.device_put(arrays, [array.sharding for array in arrays], may_alias=False)


def _pinned_copies(arrays: list[Any]) -> list[Any]:
    import jax

    return jax.device_put(arrays, [array.sharding.with_memory_kind('pinned_host') for array in arrays])


# --- inline leaves ---------------------------------------------------------------------------------------------------


def _without_inline_array(write: InlineWrite) -> InlineWrite:
    """The write without the caller's array, which is not kept alive."""
    return InlineWrite(write.path, write.name, None, write.dtype) if _is_array(write.value) else write


def _inline_source(value: Any, in_background: bool) -> Any:
    if value is None or not is_jax_array(value):
        return np.array(value) if in_background and value is not None and not isinstance(value, LazyArray) else value
    return np.array(whole_value(value)) if in_background else whole_value(value)
