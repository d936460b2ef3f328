"""Opened arrays, which fill buffers with their boxes: by TensorStore, from files, or as ranges of bytes of an object.

``ArrayReader.start_open`` chooses among them. The arrays of local files are in ``reading/local/direct_reader.py``.

The driver, bucket and path in a spec are ignored: every array is opened in the storage in which the checkpoint was found.
An absent chunk is the fill value of its array, by the rule of zarr. It is an error if the array has none, as those that t5ckpt
and T5X write, or if its writer stores every chunk. A missing ``.zarray`` is replaced by the manifest's metadata.
numcodecs decodes chunks of filters and codecs that TensorStore lacks (``format/zarray.other_zarray``).

An array that is a range of bytes of an object, as in a tensor file, is read as ranges. Boxes that cover at least half of their
bounding region are read as that region, each byte once; other boxes are read one by one. Within a region, rows with few bytes
between them are read in one request, since a request takes as long as the transfer of a few hundred kilobytes.

Notes: each thread holds one block of 16 MiB of ranges.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import json
import math
import re
import urllib.parse
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from t5ckpt.core.keys import join
from t5ckpt.core.text import CURE_OF_DAMAGE, some_of
from t5ckpt.core.thread_pool import Future, Pool
from t5ckpt.errors import CorruptCheckpointError, FormatError, StorageError, T5CkptError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box, ChunkGrid, strides_of
from t5ckpt.format.codecs import decoded
from t5ckpt.format.dtypes import zarr_typestr
from t5ckpt.format.file_checksums import entry_of
from t5ckpt.format.orbax import OCDBT_MANIFEST
from t5ckpt.format.zarray import ZARRAY, OtherZarray, other_zarray
from t5ckpt.reading.aligned_memory import aligned_empty
from t5ckpt.reading.basic_index import relative_to_box
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.reading.checksum_verifier import ChecksumVerifier
from t5ckpt.reading.size_limits import check_chunk, check_count, check_memory
from t5ckpt.storage import TENSORSTORE_ERRORS, Storage, foreign_errors

# The most chunks per byte of a database's compressed index; far above any real one.
_CHUNKS_PER_BYTE = 64
# The size of a file if its storage does not report sizes; no check uses it.
_UNKNOWN = 2**62
# A file in the dump of a node of a database, with a range of its bytes: kind:base path:relative path:offset:length.
_PLACE = re.compile(r'"((btreenode|versionnode|value):([^":]*):([^":]*):[0-9]+:[0-9]+)"')
Task = Callable[[], None]
_Errors = Callable[[], contextlib.AbstractContextManager[None]]
_BLOCK_BYTES = 16 * 2**20
# About the bytes that an object store transfers in the time to its first byte, a few milliseconds.
_GAP_BYTES = 256 * 2**10


class TensorStoreArrays:
    """Opens zarr arrays of one checkpoint with TensorStore. Safe from any thread."""

    def __init__(self, files: CheckpointFiles, checks: ChecksumVerifier | None = None):
        """Takes the checkpoint's files; with ``checks`` the files of a box are verified when the box is read."""
        self._files = files
        self._checks = checks
        self._storage = files.storage
        self._directory = files.directory
        # The ``.zarray`` of each array that numcodecs decodes, by location.
        self.decoded: dict[str, Mapping[str, Any]] = {}

    def url(self, array: StoredArray) -> str:
        """The location of an array, for messages."""
        return self._storage.url(join(self._directory, array.location))

    def open(self, array: StoredArray, name: str) -> Any:
        """The TensorStore of an array; raises as :meth:`start_open` and the function that it returns."""
        return self._finish_open(array, self._start_open(array), name)

    def start_open(self, leaf: StoredArray, name: str, where: str) -> Callable[[], OpenArray]:
        """Starts to open an array.

        Returns:
          A function that waits for the opened array. It raises CorruptCheckpointError if the array is missing, or its metadata
          contradicts the manifest or the size of its files; NotEnoughMemoryError if a chunk is larger than this machine's memory.

        Raises:
          FormatError: a file of the array is a link out of the checkpoint.
        """
        opening = self._start_open(leaf)

        def finish() -> OpenArray:
            store = self._finish_open(leaf, opening, name)
            errors = functools.partial(self.errors, leaf, where)
            return _TensorStoreArray(leaf, name, where, store, self._storage, self._checks, errors)

        return finish

    def errors(self, array: StoredArray, where: str) -> contextlib.AbstractContextManager[None]:
        """Maps the errors of TensorStore for an array; those of a database name the files that it lacks."""
        if not array.is_in_database:
            return foreign_errors(where)
        return database_errors(self._storage, join(self._directory, array.root), where)

    def _start_open(self, array: StoredArray) -> Any:
        # TensorStore follows every link and waits for every FIFO.
        self._files.check(array.root, self.url(array))
        with self.errors(array, self.url(array)):
            return ts.open(self._spec(array), open=True, context=self._storage.context())

    def _finish_open(self, array: StoredArray, future: Any, name: str) -> Any:
        where = f'{name} ({self.url(array)})'
        try:
            with self.errors(array, where):
                store = self._storage.wait(future)
        except FormatError:
            # Not of the disk, where another read may find other bytes.
            with self.errors(array, where):
                store = self._reopened(array, name)
            if store is None:
                raise
            self._check_sizes(array, store, where)
            return store
        self._check_sizes(array, store, where)
        if not is_filled(array, store):
            return store
        with self.errors(array, where):
            spec = self._spec(array) | {'fill_missing_data_reads': True}
            return self._storage.wait(ts.open(spec, open=True, context=self._storage.context()))

    def _reopened(self, array: StoredArray, name: str) -> Any:
        """Opens an array whose ``.zarray`` is missing, or refused by TensorStore; returns None if that is damaged."""
        if not array.is_zarr_directory:
            return None
        file = f'{array.location}/{ZARRAY}'
        try:
            read = self._files.read_if_there(file)
        except StorageError:
            return None  # As TensorStore's error, which names the array.
        if read is None:
            return self._open_with(array, dict(array.metadata), name) if 'chunks' in array.metadata else None
        if self._checks is not None:
            # A damaged file is not one of an unknown format.
            self._checks.compare(file, name, entry_of(read[0]))
        other = other_zarray(read[0], array, f'{name} ({self.url(array)})')
        return None if other is None else self._decoding(array, other, name)

    def _decoding(self, array: StoredArray, zarray: OtherZarray, name: str) -> Any:
        """A TensorStore of an array that numcodecs decodes, chunk by chunk."""
        chunks = tuple(zarray.metadata['chunks'])
        grid = ChunkGrid.from_metadata(zarray.metadata, array.shape, chunks)
        self.decoded[array.location] = zarray.metadata

        def read(domain: Any, out: np.ndarray, _: Any) -> None:
            box = Box(zip(domain.origin, domain.exclusive_max, strict=True))
            key = f'{array.location}/{grid.key(grid.index_of(box))}'
            found, where = self._files.read_if_there(key), f'{name} ({self.url(array)}): {key}'
            if found is None and not self.is_filled(array, None):
                raise CorruptCheckpointError(f'{where} is missing. {CURE_OF_DAMAGE}')
            try:
                if found is None:
                    # JSON has texts for NaN and infinities.
                    fill = zarray.metadata['fill_value']
                    out[...] = float(fill) if isinstance(fill, str) else fill
                    return
                values = np.frombuffer(decoded(found[0], zarray.codecs), zarray.value_dtype)
                whole = values.reshape(chunks, order=zarray.metadata['order'])
            except (TypeError, ValueError) as error:
                raise CorruptCheckpointError(f'{where} cannot be decoded: {error}. {CURE_OF_DAMAGE}') from error
            out[...] = whole[box.relative_to(grid.full_box(grid.index_of(box))).slices]

        layout = ts.ChunkLayout(chunk_shape=chunks)
        return ts.virtual_chunked(read, dtype=ts.dtype(array.disk_dtype.name), shape=array.shape, chunk_layout=layout)

    def is_filled(self, array: StoredArray, store: Any) -> bool:
        """As :func:`is_filled`, also for an array that numcodecs decodes."""
        zarray = self.decoded.get(array.location)
        return is_filled(array, store) if zarray is None else zarray['fill_value'] is not None and not array.stores_all

    def metadata(self, array: StoredArray, store: Any) -> Mapping[str, Any]:
        """The metadata of zarr of an opened array."""
        return self.decoded.get(array.location) or store.spec().to_json()['metadata']

    def _check_sizes(self, array: StoredArray, store: Any, where: str) -> None:
        """Checks sizes, before TensorStore allocates memory for a chunk or a list of all chunks."""
        # A shard of zarr3 is one file of many chunks. The chunks of an empty array are empty, too.
        shard = store.chunk_layout.write_chunk.shape or ()
        chunks = ChunkGrid(array.shape, tuple(size or 1 for size in shard)).num_chunks
        chunk_bytes = math.prod(store.chunk_layout.read_chunk.shape or ()) * array.disk_dtype.itemsize
        if array.is_in_database:
            # A database keeps all values in a few files.
            check_count(chunks, lambda: _CHUNKS_PER_BYTE * sum(self._sizes(array.root)), where)
            check_chunk(chunk_bytes, lambda: sum(self._sizes(array.root)), where)
        elif is_filled(array, store):
            check_memory(chunk_bytes, where)
        else:
            check_count(chunks, lambda: len(self._sizes(array.location)), where)
            check_chunk(chunk_bytes, lambda: max(self._sizes(array.location), default=0), where)

    def _sizes(self, location: str) -> list[int]:
        files = self._storage.walk(join(self._directory, location))
        return [_UNKNOWN if size is None else size for _, size in files]

    def _spec(self, array: StoredArray) -> dict[str, Any]:
        kvstore = self._storage.array_kvstore(join(self._directory, array.root))
        if array.is_in_database:
            kvstore = {'driver': 'ocdbt', 'base': kvstore, 'path': array.key_prefix}
        return {
            'driver': array.driver,
            'kvstore': kvstore,
            'schema': {'dtype': array.disk_dtype.name, 'domain': {'shape': list(array.shape)}},
            'fill_missing_data_reads': False,
            'recheck_cached_data': False,
            'recheck_cached_metadata': False,
        }

    def _open_with(self, array: StoredArray, fields: Mapping[str, Any], name: str) -> Any:
        metadata = {key: value for key, value in fields.items() if value is not None or key == 'compressor'}
        metadata |= {'shape': list(array.shape), 'zarr_format': 2}
        metadata.setdefault('dtype', zarr_typestr(array.disk_dtype))
        filled = metadata.get('fill_value') is not None and not array.stores_all
        spec = self._spec(array) | {'metadata': metadata, 'fill_missing_data_reads': filled}
        with foreign_errors(f'{name} ({self.url(array)}, not by its .zarray)'):
            return self._storage.wait(ts.open(spec, open=True, assume_metadata=True, context=self._storage.context()))


@contextlib.contextmanager
def database_errors(storage: Storage, directory: str, where: str) -> Generator[None]:
    """Maps errors as ``foreign_errors``; that of a damaged OCDBT database in a directory names the files that are missing."""
    try:
        with foreign_errors(where):
            yield
    except CorruptCheckpointError as error:
        lost = some_of([storage.url(join(directory, file)) for file in _lost_files(storage, directory)], 3)
        if not lost:
            raise
        raise CorruptCheckpointError(f'{where}: {lost} is missing. {CURE_OF_DAMAGE}') from error


def _lost_files(storage: Storage, directory: str) -> list[str]:
    """The files that a database refers to and lacks; [] also if its structure is not understood."""
    there = {key.removeprefix(f'{directory}/') for key, _ in storage.walk(directory)}
    if OCDBT_MANIFEST not in there:
        return [OCDBT_MANIFEST]
    lost: set[str] = set()
    with contextlib.suppress(*TENSORSTORE_ERRORS, T5CkptError, LookupError):
        base = ts.KvStore.open(storage.array_kvstore(directory), context=storage.context()).result()
        nodes = [ts.ocdbt.dump(base).result()['versions'][-1]]
        while nodes:
            for place in set(_PLACE.findall(json.dumps(nodes.pop(), default=str))):
                file = urllib.parse.unquote(f'{place[2]}{place[3]}')
                if file not in there:
                    lost.add(file)
                elif place[1] != 'value':
                    nodes.append(ts.ocdbt.dump(base, place[0]).result())
    return sorted(lost)


def is_filled(array: StoredArray, store: Any) -> bool:
    """Whether a chunk that is absent from an array, opened as this TensorStore, has the fill value of the array."""
    return store.fill_value is not None and not array.stores_all


class Filling:
    """Reads in flight, of threads and of TensorStore. Their buffers must outlive them."""

    def __init__(self, errors: _Errors, reads: Sequence[Future[None] | _StoreRead]):
        """Takes the reads, and the context that maps their errors."""
        self._errors = errors
        self._reads = reads

    def wait(self) -> None:
        """Waits until all buffers are filled; raises the first error."""
        with self._errors():
            for read in self._reads:
                read.result()

    def abandon(self) -> None:
        """Cancels the reads of threads, and waits for those of TensorStore, which cannot be cancelled."""
        for read in self._reads:
            read.cancel()


class _StoreRead:
    """A read of TensorStore, with the methods that :class:`Filling` calls of a future of a thread."""

    def __init__(self, storage: Storage, view: Any, out: np.ndarray):
        """Starts to read a TensorStore into a numpy array of its shape and dtype."""
        self._storage = storage
        # Only the Python object keeps the function alive that reads a chunk (:meth:`TensorStoreArrays._decoding`).
        self._view = view
        self._future = ts.array(out).write(view[ts.d[:].translate_to[0]] if view.rank else view)

    def result(self) -> None:
        self._storage.wait(self._future)

    def cancel(self) -> None:
        with contextlib.suppress(*TENSORSTORE_ERRORS, T5CkptError):
            self.result()


class OpenArray(abc.ABC):
    """An opened array.

    Attributes:
      can_convert: whether buffers may have the dtype to convert to instead of the dtype on disk.
    """

    def __init__(self, leaf: StoredArray, where: str, *, can_convert: bool = False):
        """Takes the array; ``where`` has the names of the leaf and of the array, for errors."""
        self.can_convert = can_convert
        self._leaf = leaf
        self._where = where

    @abc.abstractmethod
    def fill(self, buffers: Mapping[Box, np.ndarray], pool: Pool | None = None) -> Filling:
        """Starts to fill C-order buffers with their boxes of the array, in threads of the pool or in the caller's."""

    @abc.abstractmethod
    def read(self, slices: tuple[slice, ...]) -> np.ndarray:
        """Reads forward slices, in the dtype on disk. A caller who wants checksums compared does that before."""

    def _new_buffer(self, shape: tuple[int, ...]) -> np.ndarray:
        check_memory(math.prod(shape) * self._leaf.disk_dtype.itemsize, self._where)
        return aligned_empty(shape, self._leaf.disk_dtype)


class FileArray(OpenArray):
    """An array that tasks for threads read."""

    @abc.abstractmethod
    def tasks(self, buffers: Mapping[Box, np.ndarray]) -> list[Task]:
        """The tasks that fill the buffers with their boxes of the array."""

    def fill(self, buffers: Mapping[Box, np.ndarray], pool: Pool | None = None) -> Filling:
        """Starts the tasks."""
        return Filling(functools.partial(foreign_errors, self._where), _started(self.tasks(buffers), pool))

    def read(self, slices: tuple[slice, ...]) -> np.ndarray:
        """Reads the box around the slices."""
        box = Box.from_slices(slices, self._leaf.shape)
        out = self._new_buffer(box.shape)
        self.fill({box: out})
        return out[relative_to_box(slices)]


class _TensorStoreArray(OpenArray):
    """An array that TensorStore reads, in threads of its own."""

    def __init__(
        self,
        leaf: StoredArray,
        name: str,
        where: str,
        store: Any,
        storage: Storage,
        checks: ChecksumVerifier | None,
        errors: _Errors,
    ):
        super().__init__(leaf, where)
        self._errors = errors
        self._name = name
        self._store = store
        self._storage = storage
        self._checks = checks

    def fill(self, buffers: Mapping[Box, np.ndarray], pool: Pool | None = None) -> Filling:
        views = {box: self._store[box.slices] for box in buffers}
        checks = () if self._checks is None else self._checks.tasks(self._leaf, self._name, buffers)
        verifying = _started(checks, pool)
        reads = [_StoreRead(self._storage, views[box], buffer) for box, buffer in buffers.items()]
        return Filling(self._errors, [*verifying, *reads])

    def read(self, slices: tuple[slice, ...]) -> np.ndarray:
        view = self._store[slices] if slices else self._store
        out = self._new_buffer(tuple(view.shape))
        with self._errors():
            _StoreRead(self._storage, view, out).result()
        return out


def _started(tasks: Iterable[Task], pool: Pool | None) -> list[Future[None]]:
    """The futures of tasks in a pool; without one, the tasks run now."""
    if pool is not None:
        return [pool.submit(task) for task in tasks]
    for task in tasks:
        task()
    return []


def read_range(storage: Storage, key: str, start: int, stop: int) -> bytes:
    """Reads a range of bytes of a file.

    Raises:
      CorruptCheckpointError: the file ends before the end of the range.
      CheckpointNotFoundError: there is no such file.
    """
    data = storage.read(key, start, stop)
    if len(data) != stop - start:
        raise CorruptCheckpointError(f'{storage.url(key)} ends before byte {stop:,}. Copy it again.')
    return data


class RangeArray(FileArray):
    """An array that is a range of bytes of an object."""

    def __init__(self, leaf: StoredArray, where: str, storage: Storage, directory: str):
        """Takes the array, and the checkpoint's directory."""
        super().__init__(leaf, where)
        self._storage = storage
        self._key = join(directory, leaf.location)

    def tasks(self, buffers: Mapping[Box, np.ndarray]) -> list[Task]:
        """One task for each request."""
        array = self._leaf
        boxes = [box for box in buffers if not box.is_empty]
        if not boxes:
            return []
        around = Box([(min(a for a, _ in axis), max(b for _, b in axis)) for axis in zip(*boxes, strict=True)])
        regions = [around] if sum(box.size for box in boxes) * 2 >= around.size else boxes
        return [
            functools.partial(self._read_block, block, {box: buffers[box] for box in boxes})
            for region in regions
            for block in _blocks(array.shape, region, array.disk_dtype.itemsize)
        ]

    def _read_block(self, block: Box, buffers: Mapping[Box, np.ndarray]) -> None:
        array = self._leaf
        steps = strides_of(array.shape, array.disk_dtype.itemsize)
        first = sum(start * step for (start, _), step in zip(block, steps, strict=True))
        last = sum((stop - 1) * step for (_, stop), step in zip(block, steps, strict=True)) + array.disk_dtype.itemsize
        offset = array.metadata['offset']
        data = read_range(self._storage, self._key, offset + first, offset + last)
        values = np.ndarray(block.shape, array.disk_dtype, data, strides=steps)
        for box, buffer in buffers.items():
            shared = box.intersect(block)
            if not shared.is_empty:
                buffer[shared.relative_to(box).slices] = values[shared.relative_to(block).slices]


def _blocks(shape: Sequence[int], region: Box, itemsize: int) -> Iterator[Box]:
    """Cuts a region into boxes that are each read with one request."""
    axis = next((axis for axis, (start, stop) in enumerate(region) if stop - start > 1), None)
    if axis is None:
        yield region
        return
    start, stop = region[axis]
    step, *steps = strides_of(shape, itemsize)[axis:]
    inner = region[axis + 1 :]
    span = sum((b - a - 1) * stride for (a, b), stride in zip(inner, steps, strict=True)) + itemsize
    rows = 1 if step - span > _GAP_BYTES else max(1, _BLOCK_BYTES // step)
    for row in range(start, stop, rows):
        part = Box([*region[:axis], (row, min(stop, row + rows)), *inner])
        if (rows == 1 and span > _BLOCK_BYTES) or step - span > _GAP_BYTES:
            yield from _blocks(shape, part, itemsize)
        else:
            yield part
