"""The values of staged leaves, cast: by chunk for the writer (``save/write.py``), or complete for the manifest.

``save/stage.py`` chooses the class by the leaf's memory.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import numpy as np

from t5ckpt.errors import UnsupportedLeafError
from t5ckpt.format.dtypes import cast, to_stored
from t5ckpt.lazy import LazyArray
from t5ckpt.planning.save_plan import ArrayWrite, ChunkWrite
from t5ckpt.tree.transfers import explicit_transfers


class StagedLeaf(abc.ABC):
    """The values of one stored leaf.

    Attributes:
      is_copy: whether no other code can write to the memory of ``values``.
    """

    is_copy = False

    @abc.abstractmethod
    def values(self, chunk: ChunkWrite) -> np.ndarray:
        """The values of one chunk; may wait for a transfer or a read."""

    @abc.abstractmethod
    def release(self) -> None:
        """Releases the values, after all their writes were started."""

    def as_stored(self, chunk: ChunkWrite, write: ArrayWrite) -> np.ndarray:
        """The values of one chunk as stored on disk, which never change: C order, little endian, in the stored dtype."""
        values = np.asarray(self.values(chunk))
        result = cast(values, write.dtype, write.name)
        return to_stored(result.astype(write.dtype, order='C', copy=result is values and not self.is_copy))


class DeviceLeaf(StagedLeaf):
    """Copies of shards. Each is fetched when its first chunk is written."""

    is_copy = True

    def __init__(self, shards: Mapping[int, Any]):
        """Takes the copies that this process writes, by the index of their shard."""
        self._shards = dict(shards)

    def values(self, chunk: ChunkWrite) -> np.ndarray:
        index = _shard_of(chunk)
        self._shards[index] = on_host(self._shards[index])
        return self._shards[index][chunk.box_in_shard.slices]

    def release(self) -> None:
        self._shards.clear()


class CallerLeaf(StagedLeaf):
    """The caller's jax.Array, while the caller waits: viewed on the CPU backend, otherwise fetched chunk by chunk."""

    def __init__(self, array: Any):
        """Takes the array."""
        self._array: Any = array

    def values(self, chunk: ChunkWrite) -> np.ndarray:
        shard, slices = self._array.addressable_shards[_shard_of(chunk)].data, chunk.box_in_shard.slices
        with explicit_transfers():
            return np.asarray(shard)[slices] if is_on_cpu(shard) else np.asarray(shard[slices])

    def release(self) -> None:
        self._array = None


class HostLeaf(StagedLeaf):
    """A numpy array, or a LazyArray, which is read when it is written: chunk by chunk if it can be sliced."""

    def __init__(self, name: str, leaf: Any, *, is_copy: bool = False):
        """Takes the leaf, and its name for errors."""
        self.is_copy = is_copy
        self._name = name
        self._leaf = leaf
        self._whole: np.ndarray | None = None

    def values(self, chunk: ChunkWrite) -> np.ndarray:
        box = chunk.box_in_shard
        if isinstance(self._leaf, LazyArray) and self._leaf.is_sliceable:
            values = np.asarray(self._leaf[box.slices])
            if values.shape != box.shape:
                raise UnsupportedLeafError(
                    f'{self._name}: a LazyArray returned values of shape {values.shape} for the slice {box}.'
                )
            return values
        if self._whole is None:
            self._whole = values_of(self._leaf, self._name)
        return self._whole[box.slices]

    def release(self) -> None:
        self._leaf = self._whole = None


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


def on_host(array: Any) -> np.ndarray:
    """The values of a jax.Array; on the CPU, a view of its memory for most dtypes."""
    with explicit_transfers():
        return np.asarray(array)


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


def _shard_of(chunk: ChunkWrite) -> int:
    if chunk.shard is None:
        raise TypeError('the chunk of a host array is in no shard')
    return chunk.shard
