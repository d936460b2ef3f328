"""Reads the chunks of arrays of an object store through a cache on the local disk (``storage_options={'cache_dir': ...}``).

A cached file is valid if it has the checksum that the checkpoint records, which needs no request. If the checkpoint records
none (T5X), the version of the object is compared, with one small request per chunk. A slice fetches whole chunks, since only
these can be cached.

Chunks are fetched in threads. TensorStore decodes each chunk from memory, and its part of the slice is copied.
"""

from __future__ import annotations

import itertools
import math
import uuid
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorstore as ts

from t5ckpt.core.keys import join
from t5ckpt.core.text import CURE_OF_DAMAGE
from t5ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, T5CkptError
from t5ckpt.format.array_spec import ArrayLayout, StoredArray, StoredLeaf
from t5ckpt.format.chunk_grid import ChunkGrid, ChunkIndex, ceil_div
from t5ckpt.format.file_checksums import FileChecksums, entry_of
from t5ckpt.reading.aligned_memory import aligned_empty
from t5ckpt.reading.checkpoint_files import in_threads
from t5ckpt.reading.contents import Contents
from t5ckpt.reading.open_array import is_filled
from t5ckpt.reading.size_limits import check_chunk, check_memory
from t5ckpt.storage import TENSORSTORE_ERRORS, foreign_errors
from t5ckpt.storage.forked import use_tensorstore

_THREADS = 16


class CachedChunks:
    """The chunk files of one checkpoint, fetched through the cache of its storage. Safe from any thread."""

    def __init__(self, contents: Contents):
        """Takes a checkpoint in a storage with a cache."""
        self._storage = contents.located.storage
        self._base = contents.located.directory
        self._checksums = contents.checksums or FileChecksums()
        self._memory = ts.Context({'cache_pool': {'total_bytes_limit': 0}})

    @property
    def has_checksums(self) -> bool:
        """Whether the files that are read are compared with recorded checksums."""
        return bool(self._checksums)

    def read(self, leaf: StoredLeaf, name: str, slices: Sequence[slice]) -> np.ndarray | None:
        """Reads forward slices of an array, in its dtype on disk; None for an array that is not cached.

        Raises:
          CorruptCheckpointError: a chunk is missing or damaged.
          StorageError: a file cannot be read.
        """
        if leaf.array.layout is not ArrayLayout.ZARR:
            return None
        try:
            zarray = self._file(f'{leaf.array.location}/.zarray')
        except CheckpointNotFoundError:
            return None
        where = f'{name} ({self._storage.url(join(self._base, leaf.array.location))})'
        try:
            array = _InMemory(leaf.array, zarray, self._memory)
        except TENSORSTORE_ERRORS:
            # It is read without the cache, or the error is raised there.
            return None
        if array.has_fill:
            return None
        shape = tuple(len(range(part.start, part.stop, part.step or 1)) for part in slices)
        check_memory(math.prod(shape) * leaf.array.dtype.itemsize, where)
        out = aligned_empty(shape, leaf.array.dtype)

        def take(parts: tuple[_AxisPart, ...]) -> None:
            chunk_index = tuple(part.chunk for part in parts)
            file = f'{leaf.array.location}/{array.grid.key(chunk_index)}'
            try:
                data = self._file(file)
            except CheckpointNotFoundError as error:
                raise CorruptCheckpointError(
                    f'{name}: the chunk {self._storage.url(join(self._base, file))} is missing. {CURE_OF_DAMAGE}'
                ) from error
            check_chunk(array.chunk_bytes, lambda: len(data), where)
            with foreign_errors(where):
                values = array.decode(chunk_index, data)
                out[tuple(part.in_result for part in parts)] = values[tuple(part.in_chunk for part in parts)]

        if out.size:
            per_axis = [list(_parts(part, chunk)) for part, chunk in zip(slices, array.grid.chunk_shape, strict=True)]
            for _, error in in_threads(itertools.product(*per_axis), take, _THREADS):
                if isinstance(error, T5CkptError):
                    raise error
        return out

    def _file(self, name: str) -> bytes:
        """The bytes of a file, from the cache if the cached copy is still valid."""
        is_listed = name in self._checksums
        key = join(self._base, name)
        data = self._storage.read_cached(
            key, (lambda data: self._checksums.matches(name, entry_of(data))) if is_listed else None
        )
        if is_listed:
            self._checksums.check(name, entry_of(data), self._storage.url(key))
        return data


class _InMemory:
    """An array whose chunks are decoded one by one from their bytes."""

    def __init__(self, array: StoredArray, zarray: bytes, context: ts.Context):
        """Parses the metadata; TensorStore raises ValueError if it contradicts the manifest."""
        self._base = {'driver': 'memory', 'path': f'{uuid.uuid4().hex}/'}
        use_tensorstore()
        self._kvstore = ts.KvStore.open(self._base, context=context).result()
        self._kvstore.write('.zarray', zarray).result()
        spec = {
            'driver': 'zarr',
            'kvstore': self._base,
            'schema': {'dtype': array.dtype.name, 'domain': {'shape': list(array.shape)}},
            'fill_missing_data_reads': False,
            'recheck_cached_data': 'open',
        }
        self._store = ts.open(spec, open=True, context=context).result()
        self._kvstore.write('.zarray', None).result()
        self.has_fill = is_filled(array, self._store)
        chunk_shape = [size or 1 for size in self._store.chunk_layout.write_chunk.shape or ()]
        self.grid = ChunkGrid.from_metadata(self._store.spec().to_json()['metadata'], array.shape, chunk_shape)
        self.chunk_bytes = math.prod(chunk_shape) * array.dtype.itemsize

    def decode(self, chunk_index: ChunkIndex, data: bytes) -> np.ndarray:
        """Decodes the elements of a chunk that are inside the array; one thread at a time may decode a chunk."""
        use_tensorstore()
        key, box = self.grid.key(chunk_index), self.grid.box(chunk_index)
        self._kvstore.write(key, data).result()
        try:
            return np.asarray((self._store[box.slices] if box else self._store).read().result())
        finally:
            self._kvstore.write(key, None).result()


class _AxisPart(NamedTuple):
    """The part of a slice in one chunk along an axis."""

    chunk: int
    in_chunk: slice
    in_result: slice


def _parts(part: slice, chunk: int) -> Iterator[_AxisPart]:
    """The parts of a forward slice, one for each chunk along the axis that it overlaps."""
    step = part.step or 1
    chosen = range(part.start, part.stop, step)
    taken = 0
    while taken < len(chosen):
        chunk_index = chosen[taken] // chunk
        first = chosen[taken] - chunk_index * chunk
        count = min(len(chosen) - taken, ceil_div(chunk - first, step))
        in_chunk = slice(first, first + (count - 1) * step + 1, step)
        yield _AxisPart(chunk_index, in_chunk, slice(taken, taken + count))
        taken += count
