"""Reads stored arrays by index: whole, or the chunks that a slice overlaps.

Each array is read in the first of five ways that it supports: through a cache of chunks (``reading/cached_chunks.py``),
memory-mapped (``reading/local/mmap_reader.py``, with ``mmap``), directly from its files into the buffers
(``reading/local/direct_reader.py``, in a restore), as ranges of bytes of an object (``reading/byte_ranges.py``, for tensor files
in a bucket), or through TensorStore, which reads every zarr array.

The driver, bucket and path in a spec are ignored: every array is opened in the storage in which the checkpoint was found.
A missing chunk is an error (``fill_missing_data_reads`` is off). A missing ``.zarray`` is replaced by the manifest's metadata.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, Self

import numpy as np
import tensorstore as ts

from t5ckpt.catalog.locate import Located
from t5ckpt.core.keys import join
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box, ChunkGrid
from t5ckpt.format.dtypes import from_stored, zarr_typestr
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.names import DATASET_REMOVED
from t5ckpt.format.stored_leaf import StoredLeaf
from t5ckpt.planning.device_boxes import boxes_wanted, is_on_cpu
from t5ckpt.planning.restore_plan import StoredRead
from t5ckpt.reading.aligned_memory import aligned_empty
from t5ckpt.reading.basic_index import basic_index, steps_of
from t5ckpt.reading.byte_ranges import RangeReader
from t5ckpt.reading.cached_chunks import CachedChunks
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.checksum_verifier import ChecksumVerifier
from t5ckpt.reading.identity import Identity
from t5ckpt.reading.local.direct_reader import DirectReader
from t5ckpt.reading.local.mmap_reader import ArrayMapper
from t5ckpt.reading.local.regions import ReadRequest
from t5ckpt.reading.local.uncompressed import chunk_of_file
from t5ckpt.reading.size_limits import check_chunk, check_count, check_memory
from t5ckpt.storage import TENSORSTORE_ERRORS, foreign_errors

__all__ = ['ArrayReader', 'start_read']

# Of a database's compressed index; far above any real one.
_CHUNKS_PER_BYTE = 64
# The size of a file if its storage does not report sizes; no check uses it.
_UNKNOWN = 2**62


class ArrayReader:
    """Reads arrays of one checkpoint. Safe from any thread."""

    def __init__(
        self,
        located: Located,
        mmap: bool = False,
        *,
        checksums: FileChecksums | None = None,
        only_whole_chunks: bool = False,
        identity: Identity | None = None,
        cache: CachedChunks | None = None,
    ):
        """Makes a reader.

        Args:
          located: the checkpoint.
          mmap: arrays are memory-mapped where possible, see ``reading/local/mmap_reader.py``.
          checksums: the checkpoint's file checksums; every file that is read is compared with them.
          only_whole_chunks: verifies an uncompressed chunk only if one request reads all of it.
          identity: each :meth:`read` checks that the checkpoint is still this one; None if the caller checks it once for
            many reads.
          cache: fetches the chunks of an object store.
        """
        self._storage = storage = located.storage
        self._directory = directory = located.directory
        self._identity = identity
        follow_links = located.follow_links
        root = storage.local_path(directory)
        self._files = CheckpointFiles(storage, directory, follow_links=follow_links)
        self.checks = (
            None if checksums is None else ChecksumVerifier(checksums, self._files, only_whole_chunks=only_whole_chunks)
        )
        self._mapper = None if root is None or not mmap else ArrayMapper(root, follow_links=follow_links)
        self.direct = None if root is None else DirectReader(root, checks=self.checks, follow_links=follow_links)
        self._ranges = RangeReader(storage, directory)
        self._cache = cache

    @property
    def is_cached(self) -> bool:
        """Whether chunks are fetched through a cache, by many threads for each array."""
        return self._cache is not None

    def url(self, array: StoredArray) -> str:
        """The location of an array, for messages."""
        return self._storage.url(join(self._directory, array.location))

    def range_tasks(self, array: StoredArray, buffers: dict[Box, np.ndarray]) -> list[Callable[[], None]]:
        """The tasks that fill buffers with boxes of an array in a ``'file'`` of a storage without local files."""
        return self._ranges.tasks(array, buffers)

    def wait(self, future: Any) -> Any:
        """See ``Storage.wait``."""
        return self._storage.wait(future)

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
            store = self.wait(future)
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

    def open(self, leaf: StoredLeaf, name: str) -> Any:
        """Opens an array and waits for it."""
        return self.finish_open(leaf.array, self.start_open(leaf.array), name)

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
            return self.wait(ts.open(spec, open=True, assume_metadata=True, context=self._storage.context()))

    def read(self, leaf: StoredLeaf, name: str, index: Any = ...) -> np.ndarray:
        """Reads a numpy basic index of an array; only the chunks that it overlaps are read.

        Args:
          leaf: the array.
          name: of the leaf, for errors.
          index: an integer, a slice with any step, Ellipsis or None, or a tuple of these.

        Returns:
          An array of the leaf's dtype: a new array or, for the index ``...`` of a mapped leaf, an array on a private map.

        Raises:
          CheckpointNotFoundError: the checkpoint was deleted or overwritten since it was opened.
          FormatError: the array is damaged.
          StorageError: a file cannot be read.
        """
        if self._identity is None:
            return self._read(leaf, name, index)
        # A read that verifies checksums needs no check of the checkpoint's identity.
        file = leaf.array.location if leaf.array.is_byte_range else None
        with self._identity.told() if self._compares_all() else self._identity.reading(file=file):
            return self._read(leaf, name, index)

    def _compares_all(self) -> bool:
        if self._cache is not None:
            return self._cache.has_checksums
        return self.checks is not None and not self.checks.only_whole_chunks

    def in_one(self) -> Self:
        """This reader for many reads, after which the caller checks the checkpoint's identity once."""
        reader = copy.copy(self)
        reader._identity = None  # noqa: SLF001 - a copy of itself
        return reader

    def _read(self, leaf: StoredLeaf, name: str, index: Any) -> np.ndarray:
        basic = basic_index(index, leaf.shape)
        if basic is None:
            return self._read(leaf, name, ...)[index]
        slices, after = basic
        cached = None if self._cache is None else self._cache.read(leaf, name, slices)
        if cached is not None:
            return from_stored(cached, leaf.dtype)[after]
        for task in self.check_tasks(leaf.array, name, [Box.from_slices(slices, leaf.shape)]):
            task()
        if leaf.array.is_byte_range:
            return self._read_range(leaf, name, slices)[after]
        mapped = self._read_mapped(leaf, name, slices, index is Ellipsis)
        if mapped is not None:
            return from_stored(mapped, leaf.dtype)[after]
        store = self.open(leaf, name)
        view = store[slices] if slices else store
        check_memory(math.prod(view.shape) * leaf.array.dtype.itemsize, f'{name} ({self.url(leaf.array)})')
        out = aligned_empty(tuple(view.shape), leaf.array.dtype)
        with foreign_errors(f'{name} ({self.url(leaf.array)})'):
            self.wait(start_read(view, out))
        return from_stored(out, leaf.dtype)[after]

    def _read_range(self, leaf: StoredLeaf, name: str, slices: tuple[slice, ...]) -> np.ndarray:
        box = Box.from_slices(slices, leaf.shape)
        check_memory(box.size * leaf.array.dtype.itemsize, f'{name} ({self.url(leaf.array)})')
        out = aligned_empty(box.shape, leaf.array.dtype)
        if self.direct is None:
            tasks = self.range_tasks(leaf.array, {box: out})
        else:
            request = ReadRequest(leaf.array, name, leaf.dtype, {box: out})
            tasks = self.direct.tasks(request, chunk_of_file(leaf.array)) or ()
        for task in tasks:
            task()
        return out[steps_of(slices)]

    def check_tasks(self, array: StoredArray, name: str, boxes: Iterable[Box]) -> list[Callable[[], None]]:
        """The checks to run before boxes are read by a reader that does not verify checksums."""
        return [] if self.checks is None else self.checks.tasks(array, name, boxes)

    def check_beside(self, prefix: str) -> None:
        """Verifies the files with a prefix that are not arrays, before another library opens them.

        Raises:
          FormatError: a file is damaged, missing, or a link out of the checkpoint.
        """
        names = [entry.name for entry in self._storage.entries(self._directory) if entry.name.startswith(prefix)]
        for name in names:
            self._files.check(name, name)
        removed = not names and self._storage.kind(join(self._directory, DATASET_REMOVED)) == 'file'
        if self.checks is not None and not removed:
            for file in self.checks.listed(prefix):
                self.checks.check(file, 'data iterator')

    def _read_mapped(self, leaf: StoredLeaf, name: str, slices: tuple[slice, ...], whole: bool) -> np.ndarray | None:
        if self._mapper is None:
            return None
        box = Box.from_slices(slices, leaf.shape)
        views = self._mapper.map_boxes(leaf.array, name, [box], strided=not whole)
        if views is None:
            return None
        if whole:
            return views[box]
        # A copy of the slice, since a view would keep the whole map alive.
        return views[box][steps_of(slices)].copy()

    def map_leaf(self, read: StoredRead) -> dict[Box, np.ndarray] | None:
        """The mapped buffers of a leaf, if they have the right dtype and can be used without a copy."""
        array = read.leaf.array
        if self._mapper is None or read.resizes or read.converts or not is_on_cpu(read.target):
            return None
        boxes = boxes_wanted(read.target, read.leaf.shape)
        views = self._mapper.map_boxes(array, read.name, boxes)
        for task in self.check_tasks(array, read.name, boxes) if views is not None else ():
            task()
        return None if views is None else {box: from_stored(view, read.dtype) for box, view in views.items()}


def start_read(view: Any, out: np.ndarray) -> Any:
    """Starts to read a TensorStore array into a numpy array of its shape and dtype."""
    if view.rank:
        view = view[ts.d[:].translate_to[0]]
    return ts.array(out).write(view)
