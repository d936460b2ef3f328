"""Opens the zarr arrays of one checkpoint with TensorStore; ``reading/open_array.py`` reads them.

The driver, bucket and path in a spec are ignored: every array is opened in the storage in which the checkpoint was found.
A missing chunk is an error (``fill_missing_data_reads`` is off). A missing ``.zarray`` is replaced by the manifest's metadata.
"""

from __future__ import annotations

import math
from typing import Any

import tensorstore as ts

from t5ckpt.core.keys import join
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import ChunkGrid
from t5ckpt.format.dtypes import zarr_typestr
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.size_limits import check_chunk, check_count
from t5ckpt.storage import TENSORSTORE_ERRORS, foreign_errors

# Of a database's compressed index; far above any real one.
_CHUNKS_PER_BYTE = 64
# The size of a file if its storage does not report sizes; no check uses it.
_UNKNOWN = 2**62


class TensorStoreArrays:
    """The zarr arrays of one checkpoint. Safe from any thread."""

    def __init__(self, files: CheckpointFiles):
        """Takes the checkpoint's files."""
        self._files = files
        self._storage = files.storage
        self._directory = files.directory

    def url(self, array: StoredArray) -> str:
        """The location of an array, for messages."""
        return self._storage.url(join(self._directory, array.location))

    def open(self, array: StoredArray, leaf: str) -> Any:
        """Opens an array and waits for it; raises as :meth:`start_open` and :meth:`finish_open`."""
        return self.finish_open(array, self.start_open(array), leaf)

    def start_open(self, array: StoredArray) -> Any:
        """Starts to open an array; pass the future to :meth:`finish_open`.

        Raises:
          FormatError: a file of the array is a link out of the checkpoint.
        """
        # TensorStore follows every link and waits for every FIFO.
        self._files.check(array.root, self.url(array))
        with foreign_errors(self.url(array)):
            return ts.open(self._spec(array), open=True, context=self._storage.context())

    def finish_open(self, array: StoredArray, future: Any, leaf: str) -> Any:
        """The opened array.

        Raises:
          CorruptCheckpointError: the array is missing, or its metadata contradicts the manifest or the size of its files.
          NotEnoughMemoryError: a chunk is larger than this machine's memory.
        """
        try:
            store = self._storage.wait(future)
        except TENSORSTORE_ERRORS as error:
            if 'NOT_FOUND' not in str(error) or not array.layout.has_chunk_files or 'chunks' not in array.metadata:
                with foreign_errors(f'{leaf} ({self.url(array)})'):
                    raise
            store = self._open_without_metadata(array, leaf)
        self._check_sizes(array, store, f'{leaf} ({self.url(array)})')
        return store

    def _check_sizes(self, array: StoredArray, store: Any, where: str) -> None:
        """Checks sizes, before TensorStore allocates memory for a chunk or a list of all chunks."""
        chunk = store.chunk_layout.read_chunk.shape or ()
        # The chunks of an empty array are empty, too.
        chunks = ChunkGrid(array.shape, tuple(size or 1 for size in chunk)).num_chunks
        chunk_bytes = math.prod(chunk) * array.dtype.itemsize
        if array.layout.is_in_database:
            # A database keeps all values in a few files.
            check_count(chunks, lambda: _CHUNKS_PER_BYTE * sum(self._sizes(array.root)), where)
            check_chunk(chunk_bytes, lambda: sum(self._sizes(array.root)), where)
        else:
            check_count(chunks, lambda: len(self._sizes(array.location)), where)
            check_chunk(chunk_bytes, lambda: max(self._sizes(array.location), default=0), where)

    def _sizes(self, location: str) -> list[int]:
        found = self._storage.walk(join(self._directory, location))
        return [_UNKNOWN if size is None else size for _, size in found]

    def _spec(self, array: StoredArray) -> dict[str, Any]:
        kvstore = self._storage.array_kvstore(join(self._directory, array.root))
        if array.layout.is_in_database:
            kvstore = {'driver': 'ocdbt', 'base': kvstore, 'path': array.key_prefix}
        return {
            'driver': array.layout.driver,
            'kvstore': kvstore,
            'schema': {'dtype': array.dtype.name, 'domain': {'shape': list(array.shape)}},
            'fill_missing_data_reads': False,
            'recheck_cached_data': False,
            'recheck_cached_metadata': False,
        }

    def _open_without_metadata(self, array: StoredArray, leaf: str) -> Any:
        metadata = {key: value for key, value in array.metadata.items() if value is not None or key == 'compressor'}
        metadata |= {'shape': list(array.shape), 'zarr_format': 2}
        metadata.setdefault('dtype', zarr_typestr(array.dtype))
        spec = self._spec(array) | {'metadata': metadata}
        with foreign_errors(f'{leaf} ({self.url(array)}, without .zarray)'):
            return self._storage.wait(ts.open(spec, open=True, assume_metadata=True, context=self._storage.context()))
