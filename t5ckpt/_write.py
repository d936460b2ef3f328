"""Writing the staged arrays: every chunk of this process, all in flight, within one byte budget.

Each chunk is one write of exactly one cell of the chunk grid, so TensorStore never merges and, without a codec,
writes from the source buffer without a copy (``can_reference_source_data_indefinitely``). ``.zarray`` files are
written by us and arrays are opened with ``assume_metadata``, so opening costs no I/O and two processes never race for
one metadata file. Chunks equal to the fill value are written too: a missing chunk is an error on read, never zeros.

Every chunk file gets an xxh3-64 digest. Without a codec it is taken from memory, 28 GB/s on one core; with one, the
file is read back once after the write, which sees the page cache.

Notes: blocks until everything is durable; raises the first error after every started write has ended.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorstore as ts
import xxhash

from t5ckpt._budget import ByteBudget
from t5ckpt._dtypes import to_stored, zarr_typestr
from t5ckpt._layout import join
from t5ckpt._plan import ArrayWrite, Piece
from t5ckpt._specs import StoredArray
from t5ckpt._stage import Source, StagedSave
from t5ckpt._types import Progress, leaf_name
from t5ckpt.errors import T5CkptError
from t5ckpt.storage import Storage, foreign_errors

__all__ = ['WriteReport', 'digest', 'integrity_bytes', 'write_arrays', 'zarray_bytes']

_SUB_BYTE = {'float4_e2m1fn', 'int2', 'int4'}


@dataclasses.dataclass(frozen=True)
class WriteReport:
    """What was written.

    Attributes:
      digests: file, relative to the checkpoint's directory, to (bytes, xxh3-64 hex).
      array_bytes: bytes of array values, uncompressed.
    """

    digests: dict[str, tuple[int, str]]
    array_bytes: int

    @property
    def file_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.digests.values())


def digest(data: bytes | np.ndarray) -> str:
    """The xxh3-64 of a buffer, as 16 hex digits."""
    buffer: Any = data.reshape(-1).view(np.uint8) if isinstance(data, np.ndarray) else data
    return xxhash.xxh3_64_hexdigest(buffer)


def integrity_bytes(report: WriteReport) -> bytes:
    """The checksum sidecar of one process: ``{'algorithm': 'xxh3_64', 'files': {file: [bytes, hex]}}``."""
    files = {name: list(entry) for name, entry in sorted(report.digests.items())}
    return json.dumps({'algorithm': 'xxh3_64', 'files': files}, separators=(',', ':')).encode()


def zarray_bytes(array: StoredArray) -> bytes:
    """The ``.zarray`` of an array (zarr v2 storage specification)."""
    contents = {
        'chunks': list(array.metadata['chunks']),
        'compressor': array.metadata['compressor'],
        'dimension_separator': '.',
        'dtype': zarr_typestr(array.dtype),
        'fill_value': None,
        'filters': None,
        'order': 'C',
        'shape': list(array.shape),
        'zarr_format': 2,
    }
    return json.dumps(contents, separators=(',', ':'), sort_keys=True).encode()


def write_arrays(
    storage: Storage, directory: str, staged: StagedSave, budget: ByteBudget, progress: Progress | None = None
) -> WriteReport:
    """Writes every stored leaf of a staged save.

    Args:
      storage: where.
      directory: the checkpoint's (temporary) directory.
      staged: what.
      budget: bounds the bytes in flight; a chunk larger than it is written alone.
      progress: called with (bytes done, bytes in all).
    """
    writer = _Writer(storage, directory, budget, progress, sum(_bytes_of(write) for write in staged.plan.writes))
    try:
        writer.write_metadata(staged.plan.writes)
        for write in staged.plan.writes:
            writer.write_array(write, staged.sources[write.path])
        writer.drain()
        writer.read_back()
    except BaseException:
        writer.abandon()
        raise
    return WriteReport(writer.digests, writer.total)


def _bytes_of(write: ArrayWrite) -> int:
    return write.piece_bytes * len(write.pieces)


@dataclasses.dataclass
class _InFlight:
    leaf: str
    future: Any
    size: int


class _Writer:
    def __init__(self, storage: Storage, directory: str, budget: ByteBudget, progress: Progress | None, total: int):
        self._storage = storage
        self._directory = directory
        self._budget = budget
        self._progress = progress
        self._kvstore = storage.open_kvstore(directory)
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self._unread: list[str] = []
        self._done = 0
        self.total = total
        self.digests: dict[str, tuple[int, str]] = {}

    def write_metadata(self, writes: Iterable[ArrayWrite]) -> None:
        for write in writes:
            data = zarray_bytes(write.array)
            key = join(write.array.location, '.zarray')
            self._in_flight.append(_InFlight(leaf_name(write.path), self._kvstore.write(key, data), 0))
            self.digests[key] = (len(data), digest(data))

    def write_array(self, write: ArrayWrite, source: Source) -> None:
        store = self._open(write)
        shard_index, shard = None, np.empty(0)
        for piece in write.pieces:
            self._admit(write.piece_bytes)
            if piece.shard != shard_index:
                shard_index, shard = piece.shard, source.shard(piece.shard)
            try:
                data = _piece_values(shard, piece, write)
                future = store[_slices(piece)].write(data, can_reference_source_data_indefinitely=True)
            except BaseException:
                self._budget.release(write.piece_bytes)
                raise
            self._in_flight.append(_InFlight(leaf_name(write.path), future, write.piece_bytes))
            self._note_digest(write, piece, data)

    def _open(self, write: ArrayWrite) -> Any:
        spec = {
            'driver': 'zarr',
            'kvstore': self._storage.array_kvstore(join(self._directory, write.array.location)),
            'metadata': json.loads(zarray_bytes(write.array)),
            'store_data_equal_to_fill_value': True,
        }
        with foreign_errors(leaf_name(write.path)):
            return ts.open(spec, open=True, create=True, assume_metadata=True, context=self._storage.context()).result()

    def _note_digest(self, write: ArrayWrite, piece: Piece, data: np.ndarray) -> None:
        chunks = write.array.metadata['chunks']
        cell = '.'.join(str(start // size) for (start, _), size in zip(piece.box, chunks, strict=True))
        key = join(write.array.location, cell)
        if write.array.metadata['compressor'] is None and write.array.dtype.name not in _SUB_BYTE:
            self.digests[key] = (data.nbytes, digest(data))
        else:
            self._unread.append(key)

    def _admit(self, size: int) -> None:
        while not self._budget.try_acquire(size):
            if self._in_flight:
                self._finish(self._in_flight.popleft())
            else:
                self._budget.acquire(size)
                return

    def _finish(self, item: _InFlight) -> None:
        try:
            with foreign_errors(f'{item.leaf} in {self._storage.url(self._directory)}'):
                item.future.result()
        finally:
            if item.size:
                self._budget.release(item.size)
        self._done += item.size
        if self._progress is not None and item.size:
            self._progress(self._done, self.total)

    def drain(self) -> None:
        while self._in_flight:
            self._finish(self._in_flight.popleft())

    def read_back(self) -> None:
        """Digests of files whose bytes only the codec knew."""
        for key in self._unread:
            with foreign_errors(self._storage.url(join(self._directory, key))):
                data = bytes(self._kvstore.read(key).result().value)
            self.digests[key] = (len(data), digest(data))

    def abandon(self) -> None:
        """Waits for what was started, so that nothing is written after the caller has cleaned up."""
        while self._in_flight:
            try:
                self._finish(self._in_flight.popleft())
            except T5CkptError:
                continue


def _slices(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in piece.box)


def _piece_values(shard: np.ndarray, piece: Piece, write: ArrayWrite) -> np.ndarray:
    """One chunk's values as they lie on disk: C order, little endian, in the stored dtype."""
    values = shard[tuple(slice(start, stop) for start, stop in piece.within)]
    if values.dtype != write.dtype:
        values = values.astype(write.dtype)
    return np.ascontiguousarray(to_stored(values))
