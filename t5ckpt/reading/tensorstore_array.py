"""Arrays that TensorStore reads: those of an OCDBT database, and zarr v3.

The driver, bucket and path in a spec are ignored: every array is opened in the storage in which the checkpoint was found. An
absent chunk is the fill value of its array, unless its writer stores every chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box, ChunkGrid
from t5ckpt.format.dtypes import cast, from_stored
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.chunks import OpenArray, Task
from t5ckpt.reading.size_limits import check_chunk, check_count, check_memory
from t5ckpt.storage import foreign_errors

# The most chunks per byte of a database's compressed index; far above any real one.
_CHUNKS_PER_BYTE = 64
# The size of a file if its storage does not report sizes; no check uses it.
_UNKNOWN = 2**62


class TensorStoreArray(OpenArray):
    """An array of a database, or of zarr v3."""

    file_bytes = None

    def __init__(self, leaf: StoredArray, name: str, files: CheckpointFiles):
        """Opens the array.

        Raises:
          CorruptCheckpointError: it is missing, or its metadata contradicts the manifest or the size of its files.
          NotEnoughMemoryError: a chunk is larger than this machine's memory.
          FormatError: a file of the array is a link out of the checkpoint.
        """
        super().__init__(leaf, name, files)
        # TensorStore follows every link and waits for every FIFO.
        files.check(leaf.root, self._where())
        self.is_filled = not leaf.stores_all
        self._store = store = self._open()
        metadata = store.spec().to_json()['metadata']
        # A shard of zarr3 is one file of many chunks. The chunks of an empty array are empty, too.
        shard = tuple(size or 1 for size in store.chunk_layout.write_chunk.shape or ())
        self.grid = ChunkGrid.from_metadata(metadata, leaf.shape, shard)
        self._check_sizes()

    def _open(self) -> Any:
        leaf, storage = self.leaf, self._files.storage
        kvstore = storage.array_kvstore(self._files.key(leaf.root))
        if leaf.is_in_database:
            kvstore = {'driver': 'ocdbt', 'base': kvstore, 'path': leaf.key_prefix}
        spec = {
            'driver': leaf.driver,
            'kvstore': kvstore,
            'schema': {'dtype': leaf.disk_dtype.name, 'domain': {'shape': list(leaf.shape)}},
            'fill_missing_data_reads': self.is_filled,
            'recheck_cached_data': False,
            'recheck_cached_metadata': False,
        }
        with foreign_errors(self._where()):
            return storage.wait(ts.open(spec, open=True, context=storage.context()))

    def _check_sizes(self) -> None:
        """Checks sizes, before TensorStore allocates memory for a chunk or a list of all chunks."""
        chunk_bytes = math.prod(self._store.chunk_layout.read_chunk.shape or ()) * self.leaf.disk_dtype.itemsize
        if self.leaf.is_in_database:
            # A database keeps all values in a few files.
            check_count(self.grid.num_chunks, lambda: _CHUNKS_PER_BYTE * sum(self._sizes()), self._where())
            check_chunk(chunk_bytes, lambda: sum(self._sizes()), self._where())
        elif self.is_filled:
            check_memory(chunk_bytes, self._where())
        else:
            check_count(self.grid.num_chunks, lambda: len(self._sizes()), self._where())
            check_chunk(chunk_bytes, lambda: max(self._sizes(), default=0), self._where())

    def _sizes(self) -> list[int]:
        files = self._files.storage.walk(self._files.key(self.leaf.root))
        return [_UNKNOWN if size is None else size for _, size in files]

    def keys(self) -> list[str]:
        """The keys of the chunks and the metadata of an array in a database."""
        with foreign_errors(self._where()):
            return [key.decode() for key in self._files.storage.wait(self._store.kvstore.list())]

    def tasks(self, buffers: Mapping[Box, np.ndarray]) -> list[Task]:
        """The tasks: one for each box, whose chunks TensorStore reads in threads of its own."""
        return [functools.partial(self._fill, box, buffer) for box, buffer in buffers.items()]

    def _fill(self, box: Box, buffer: np.ndarray) -> None:
        view, leaf = self._store[box.slices], self.leaf
        is_same = buffer.dtype == leaf.dtype == leaf.disk_dtype
        out = buffer if is_same else np.empty(box.shape, leaf.disk_dtype)
        with foreign_errors(self._where()):
            self._files.storage.wait(ts.array(out).write(view[ts.d[:].translate_to[0]] if view.rank else view))
        if not is_same:
            buffer[...] = cast(from_stored(out, leaf.dtype), buffer.dtype, self._name)
