"""Writes the chunks of this process from the staged arrays, one task of a thread pool each.

A task takes the values of a chunk as they are stored, encodes them if the array has a codec, and computes the checksum of the
bytes. It links or copies the file of the previous checkpoint if that is equal (``save/chunk_reuse.py``), and otherwise writes
them (``Storage.write_chunk``). Another task writes the ``.zarray`` file of the array. The files of an array of another checkpoint
are linked or copied by one task (``save/linked_arrays.py``). Chunks equal to the fill value are
written, too: a missing chunk is an error when it is read, never zeros.

Notes: blocks until everything is durable; raises the first error after all started writes have ended.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import time
from typing import Any

import numpy as np

from t5ckpt.core.byte_budget import ByteBudget
from t5ckpt.core.keys import join
from t5ckpt.core.thread_pool import Future, Pool
from t5ckpt.errors import SaveFailedError, StorageError
from t5ckpt.format.checksum import digest
from t5ckpt.format.codecs import AUTO, encode, takes
from t5ckpt.format.file_checksums import FileEntry, entry_of
from t5ckpt.format.zarray import zarray_bytes, zarray_file
from t5ckpt.planning.save_plan import ArrayWrite, ChunkWrite
from t5ckpt.save.chunk_reuse import WrittenArrays
from t5ckpt.save.linked_arrays import ArraySource
from t5ckpt.save.request import SaveContext
from t5ckpt.save.stage import StagedLeaf, Staging
from t5ckpt.storage import foreign_errors

_CHUNK_BYTES = 64 * 2**20
# Enough for the latency of a bucket's requests, and for a disk to synchronize many small files at once.
_WRITERS = 32
# The values of chunks in work at once: four chunks keep a disk busy, and one of each core the encoders.
_BYTES_TO_DISK = max(4, os.cpu_count() or 1) * _CHUNK_BYTES
_BYTES_TO_BUCKET = _WRITERS * _CHUNK_BYTES
# Of a chunk, compared with the previous one before the rest.
_BEGINNING = 2**16


def write_arrays(
    context: SaveContext, directory: str, staging: Staging, previous: WrittenArrays | None = None
) -> WrittenArrays:
    """Writes every stored leaf, wave by wave as they are staged.

    Args:
      context: has the storage and the codecs that depend on the data, and is told the rate of the storage.
      directory: the checkpoint's (temporary) directory.
      staging: the leaves.
      previous: a checkpoint whose equal chunks are linked instead of written, or None.
    """
    storage, selection = context.storage, context.codec_selection
    previous = previous or WrittenArrays('')
    started = time.monotonic()
    limit = min(staging.limit, _BYTES_TO_DISK if storage.is_file_system else _BYTES_TO_BUCKET)
    # As many as have work at once: the allocator keeps memory of a chunk, and of its encoded bytes, for each.
    threads = max(2, min(_WRITERS, limit * staging.chunk_count // max(1, staging.total_bytes)))
    with Pool(threads) as pool, contextlib.closing(staging.waves()) as waves:
        writer = _Writer(context, directory, staging, previous, pool, limit)
        try:
            for wave in waves:
                while wave:
                    writer.write_leaf(wave.popleft())
                # The next wave is staged into the memory of this one.
                writer.drain()
        except SaveFailedError:
            writer.raise_of_storage()
            raise
    writer.check_interrupt()
    selection.measured(writer.written_bytes, time.monotonic() - started)
    return writer.report


class _Writer:
    """Writes the chunks of one process: starts the task of each, bounds the bytes in flight, and reports the files."""

    def __init__(
        self,
        context: SaveContext,
        directory: str,
        staging: Staging,
        previous: WrittenArrays,
        pool: Pool,
        limit: int,
    ):
        self._context, self._storage, self._directory = context, context.storage, directory
        self._staging, self._previous, self._pool = staging, previous, pool
        # A larger chunk is written alone.
        self._budget = ByteBudget(limit)
        self._started: collections.deque[tuple[Future[int], int]] = collections.deque()
        self._done_bytes = self.written_bytes = 0
        self.report = WrittenArrays(directory)

    def write_leaf(self, leaf: StagedLeaf) -> None:
        """Starts the writes of all files of a leaf."""
        write, array, values = leaf.write, leaf.write.array, None
        source = leaf.sources.get(None)
        files = list(zip(write.chunks, write.chunk_files, strict=True))
        if array.metadata['compressor'] == AUTO and not isinstance(source, ArraySource):
            codec, selection = None, self._context.codec_selection
            if selection.agreed is not None:
                codec = selection.agreed.get(array.location)
            elif files:
                values = leaf.as_stored(files[0][0], is_fixed=True)
                codec = selection.choose(values, self._previous.codec(self._storage, array.location))
            codec = codec if takes(codec, write.chunk_bytes) else None
            array = dataclasses.replace(array, metadata={**array.metadata, 'compressor': codec})
        self.report.arrays[write.path] = array
        self.report.codecs[array.location] = array.metadata['compressor']
        if self._staging.writes_metadata:
            self._start(0, self._write_file, zarray_file(array), zarray_bytes(array), write.name)
        for chunk, key in files:
            if isinstance(source, ArraySource):
                self._start(write.chunk_bytes, self._link_of, source, write, key)
                continue
            self._start(write.chunk_bytes, self._write_chunk, leaf, chunk, key, array.metadata['compressor'], values)
            values = None

    def _start(self, size: int, task: Any, *args: Any) -> None:
        self.check_interrupt()
        self._budget.acquire(size)
        self._started.append((self._pool.submit(self._run, size, task, *args), size))
        while self._started and self._started[0][0].done():
            self._finish_next()

    def _run(self, size: int, task: Any, *args: Any) -> int:
        try:
            self.check_interrupt()
            return task(*args)
        finally:
            self._budget.release(size)

    def _write_chunk(self, leaf: StagedLeaf, chunk: ChunkWrite, key: str, codec: Any, values: np.ndarray | None) -> int:
        """Writes or links one chunk; returns the bytes that were written, 0 if it was linked.

        ``values`` are those of the chunk if they are known already.
        """
        # An encoder reads them twice.
        values = leaf.as_stored(chunk, is_fixed=codec is not None) if values is None else values
        if not self._context.reuses:
            return self._write_file(key, encode(values, codec), leaf.write.name)
        # Of a chunk without a codec the beginning: if it differs, as in training, the rest is not hashed twice.
        seen = values if codec is not None else encode(values, None)[:_BEGINNING]
        self.report.values[key] = known = (digest(seen), codec)
        recorded, before = self._previous.checksums.get(key), self._previous.values.get(key)
        if codec is not None and before == known and self._link(key, recorded):
            # Without encoding it.
            return 0
        data = encode(values, codec)
        del values
        is_new = before not in (None, known)
        if recorded is not None and not is_new and recorded == entry_of(data) and self._link(key, recorded):
            return 0
        return self._write_file(key, data, leaf.write.name)

    def _link_of(self, source: ArraySource, write: ArrayWrite, key: str) -> int:
        """Links or copies a chunk of an array of another checkpoint."""
        with foreign_errors(f'{write.name} in {self._storage.url(self._directory)}', writing=True):
            self.report.checksums[key] = source.link(write, key, self._storage, self._directory)
        return 0

    def _write_file(self, key: str, data: Any, name: str) -> int:
        """Writes one file; returns its bytes."""
        with foreign_errors(f'{name} in {self._storage.url(self._directory)}', writing=True):
            entry, version = self._storage.write_chunk(join(self._directory, key), data)
        self._report(key, entry, version)
        return len(data)

    def _link(self, key: str, entry: FileEntry | None) -> bool:
        """Links or copies a file of the previous checkpoint; returns False if it has to be written."""
        target = join(self._directory, key)
        version = None if entry is None else self._previous.link(self._storage, key, entry, target)
        if entry is None or version is None:
            return False
        self._report(key, entry, version)
        return True

    def _report(self, key: str, entry: FileEntry, version: Any) -> None:
        self.report.checksums[key], self.report.file_versions[key] = entry, version

    def _finish_next(self) -> None:
        """Waits for the oldest task."""
        future, size = self._started.popleft()
        written = future.result()
        self.written_bytes += written
        self.report.linked_bytes += 0 if written else size
        self._done_bytes += size
        if self._context.progress is not None and size:
            self._context.progress(self._done_bytes, self._staging.total_bytes)

    def check_interrupt(self) -> None:
        """Raises if the save was cancelled."""
        if self._staging.is_interrupted:
            raise SaveFailedError('the save was interrupted; no checkpoint was written.')

    def raise_of_storage(self) -> None:
        """Raises the error of a request, which may arrive later, if one has failed."""
        for future, _ in self._started:
            error = future.exception()
            if isinstance(error, StorageError):
                raise error

    def drain(self) -> None:
        """Waits for everything that was started."""
        while self._started:
            self._finish_next()
