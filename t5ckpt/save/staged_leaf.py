"""The values of staged leaves, cast: by chunk for the writer (``save/write.py``), or complete for the manifest.

``save/stage.py`` chooses the class by the leaf's memory.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import numpy as np

from t5ckpt.errors import UnsupportedLeafError
from t5ckpt.format.dtypes import to_stored
from t5ckpt.lazy import LazyArray
from t5ckpt.planning.save_plan import ArrayWrite, ChunkWrite


class StagedLeaf(abc.ABC):
    """The values of one stored leaf."""

    @abc.abstractmethod
    def values(self, chunk: ChunkWrite) -> np.ndarray:
        """The values of one chunk; may wait for a transfer or a read."""

    @abc.abstractmethod
    def release(self) -> None:
        """Releases the values, after all their writes were started."""

    def as_stored(self, chunk: ChunkWrite, write: ArrayWrite) -> np.ndarray:
        """The values of one chunk as stored on disk: C order, little endian, in the stored dtype."""
        values = self.values(chunk)
        if values.dtype != write.dtype:
            values = values.astype(write.dtype)
        stored = to_stored(np.asarray(values))
        # numpy.ascontiguousarray returns an array of one dimension for a scalar.
        return np.ascontiguousarray(stored) if stored.ndim else stored


class ViewedLeaf(StagedLeaf):
    """Shards in host memory: views of the caller's, or copies."""

    def __init__(self, shards: Mapping[int, np.ndarray]):
        """Takes the shards that this process writes, by their index."""
        self._shards = shards

    def values(self, chunk: ChunkWrite) -> np.ndarray:
        return self._shards[_shard_of(chunk)][chunk.box_in_shard.slices]

    def release(self) -> None:
        self._shards = {}


class DeviceLeaf(StagedLeaf):
    """A jax.Array that has one owner, such as a staged copy. Each shard is fetched when its first chunk is written."""

    def __init__(self, array: Any):
        """Takes the array."""
        self._array: Any = array
        self._fetched: dict[int, np.ndarray] = {}

    def values(self, chunk: ChunkWrite) -> np.ndarray:
        index = _shard_of(chunk)
        if index not in self._fetched:
            self._fetched[index] = np.asarray(self._array.addressable_shards[index].data)
        return self._fetched[index][chunk.box_in_shard.slices]

    def release(self) -> None:
        self._array = None
        self._fetched.clear()


class ChunkwiseLeaf(StagedLeaf):
    """The caller's array, too large for a copy: each chunk is fetched alone, while the caller waits."""

    def __init__(self, array: Any):
        """Takes the array."""
        self._array: Any = array

    def values(self, chunk: ChunkWrite) -> np.ndarray:
        return np.asarray(self._array.addressable_shards[_shard_of(chunk)].data[chunk.box_in_shard.slices])

    def release(self) -> None:
        self._array = None


class HostLeaf(StagedLeaf):
    """A numpy array, or a LazyArray, which is read when it is written: chunk by chunk if it can be sliced."""

    def __init__(self, name: str, leaf: Any):
        """Takes the leaf, and its name for errors."""
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


def whole_value(leaf: Any) -> np.ndarray:
    """The values of an inline jax.Array. One of size 0 may have no shard of its shape."""
    if leaf.size == 0:
        return np.empty(leaf.shape, leaf.dtype)
    if leaf.is_fully_replicated or not leaf.is_fully_addressable:
        if is_on_cpu(leaf):
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


def _shard_of(chunk: ChunkWrite) -> int:
    if chunk.shard is None:
        raise TypeError('the chunk of a host array is in no shard')
    return chunk.shard
