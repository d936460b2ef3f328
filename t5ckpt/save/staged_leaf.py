"""The values of staged leaves, cast: by chunk for the writer (``save/write.py``), or complete for the manifest."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np

from t5ckpt.errors import UnsupportedLeafError
from t5ckpt.format.dtypes import cast, to_stored
from t5ckpt.lazy import LazyArray
from t5ckpt.planning.save_plan import ArrayWrite, ChunkWrite
from t5ckpt.tree.leaves import is_jax_array
from t5ckpt.tree.transfers import explicit_transfers


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
        result = to_stored(
            result.astype(write.dtype, order='C', copy=is_fixed and result is values and not self.is_copy)
        )
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
