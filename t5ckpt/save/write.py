"""Writes the chunks of this process from the staged arrays, with many writes in flight within one byte budget.

Each write covers one chunk of the grid. So TensorStore merges no chunks and, without a codec, writes from the source buffer
without a copy (``can_reference_source_data_indefinitely``). t5ckpt writes the ``.zarray`` files itself and opens arrays with
``assume_metadata``, so opening costs no I/O and no processes race for one metadata file. Chunks equal to the fill value are
written, too: a missing chunk is an error when it is read, never zeros.

The checksum of each file is computed here, from memory, before the file is written. Chunks with a codec, or at the end of an
axis, are encoded before (``save/encoding.py``), in one thread per core.

A save in the background writes large chunks with O_DIRECT (``storage/direct_io.py``). Chunks that the previous checkpoint holds
already are linked or copied (``save/chunk_reuse.py``).

Notes: blocks until everything is durable; raises the first error after all started writes have ended.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import math
import os
import time
from typing import Any

import numpy as np
import tensorstore as ts

from t5ckpt.core.byte_budget import ByteBudget
from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import Path
from t5ckpt.core.protocols import Progress
from t5ckpt.core.thread_pool import Future, Pool
from t5ckpt.errors import SaveFailedError, StorageError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.checksum import digest
from t5ckpt.format.codecs import AUTO, takes
from t5ckpt.format.file_checksums import FileEntry, entry_of
from t5ckpt.format.zarray import zarray_bytes, zarray_of
from t5ckpt.planning.save_plan import ArrayWrite
from t5ckpt.save.chunk_reuse import PreviousCheckpoint, ReusedChunks
from t5ckpt.save.encoding import CodecSelection, encode_chunk, is_encoded
from t5ckpt.save.stage import StagedWave, Staging
from t5ckpt.save.staged_leaf import StagedLeaf
from t5ckpt.storage import Storage, foreign_errors

# A chunk is copied before it is written, unless it is contiguous in a staged copy. Four of 64 MiB keep a disk busy, and one of
# each core the encoders.
_COPIED_BYTES = max(4, os.cpu_count() or 1) * 64 * 2**20
_DIRECT_WRITERS = 4  # Two keep a disk busy.
_COPIERS = 32  # Requests for copies inside an object store, in flight at once.


@dataclasses.dataclass(frozen=True)
class WriteReport:
    """The files that were written or linked.

    Attributes:
      arrays: the stored arrays by leaf, with the codec that was used.
      checksums: file, relative to the checkpoint's directory, to (bytes, xxh3-64 hex).
      array_bytes: bytes of array values, uncompressed.
      linked_bytes: how many of them were linked from the previous checkpoint.
      file_versions: of the files as they were written, see ``PreviousCheckpoint``.
      values: for chunks with a codec, see ``PreviousCheckpoint.values``.
    """

    arrays: dict[Path, StoredArray]
    checksums: dict[str, FileEntry]
    array_bytes: int
    linked_bytes: int
    file_versions: dict[str, Any]
    values: dict[str, str] = dataclasses.field(default_factory=dict[str, str])

    @property
    def file_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.checksums.values())

    def below(self, directory: str) -> WriteReport:
        """The report with the names that arrays and files have from the parent of the directory; '' changes nothing."""
        if not directory:
            return self
        arrays = {
            path: dataclasses.replace(array, location=join(directory, array.location))
            for path, array in self.arrays.items()
        }
        checksums = {join(directory, name): entry for name, entry in self.checksums.items()}
        return dataclasses.replace(self, arrays=arrays, checksums=checksums)


def write_arrays(
    storage: Storage,
    directory: str,
    staging: Staging,
    previous: PreviousCheckpoint | None = None,
    progress: Progress | None = None,
    codec_selection: CodecSelection | None = None,
) -> WriteReport:
    """Writes every stored leaf: first those that can be linked, then wave by wave as they are staged.

    Args:
      storage: the run's.
      directory: the checkpoint's (temporary) directory.
      staging: the leaves.
      previous: a checkpoint whose equal chunks are linked instead of written, or None.
      progress: called with (bytes done, bytes in all).
      codec_selection: has the codecs that depend on the data, and measures the rate of the storage.
    """
    selection = CodecSelection(storage) if codec_selection is None else codec_selection
    writer = _Writer(staging, ReusedChunks(storage, directory, previous), progress, selection)
    try:
        with contextlib.closing(staging.waves()) as waves:
            for wave in waves:
                writer.write_wave(wave)
                # The next wave is staged into the memory of this one, so no reference to it may remain.
                del wave
        writer.drain()
        writer.check_interrupt()
        writer.measure()
    except BaseException:
        writer.cancel()
        raise
    finally:
        writer.close()
    if len(writer.checksums) != staging.file_count:
        raise SaveFailedError(
            f'{len(writer.checksums)} files were written, {staging.file_count} planned; nothing is committed.'
        )
    return WriteReport(
        writer.arrays, writer.checksums, writer.total, writer.linked, writer.file_versions(), writer.reused.values
    )


@dataclasses.dataclass
class _InFlight:
    name: str
    future: Any
    size: int
    key: str = ''
    copied: int = 0
    is_encoded: bool = False


class _Writer:
    """Writes the chunks of one process: starts each write, bounds the bytes in flight, and records the checksums."""

    def __init__(
        self, staging: Staging, reused: ReusedChunks, progress: Progress | None, codec_selection: CodecSelection
    ):
        self._staging = staging
        self.reused = reused
        self._progress = progress
        self._codec_selection = codec_selection
        self._storage, self._directory = storage, directory = reused.storage, reused.directory
        self._where = storage.url(directory)
        direct_bytes = storage.direct_bytes(in_background=staging.in_background)
        self._direct_bytes = math.inf if direct_bytes is None else direct_bytes
        self._direct_writers = Pool(_DIRECT_WRITERS)
        self._copies_inside = storage.copies
        copiers = _COPIERS if self._copies_inside and reused.previous is not None else 0
        self._encoders = Pool(max(os.cpu_count() or 1, copiers))
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self._budget = ByteBudget(staging.limit)  # Of bytes in flight; a larger chunk is written alone.
        self._copy_budget = ByteBudget(_COPIED_BYTES)
        self._done = 0
        self._started = time.monotonic()
        self.total = staging.total_bytes
        self.linked = 0
        self.arrays: dict[Path, StoredArray] = {}
        self._written: dict[str, FileEntry] = {}

    @property
    def checksums(self) -> dict[str, FileEntry]:
        """Size and checksum of each file, written or linked."""
        return self.reused.files | self._written

    def write_wave(self, wave: StagedWave) -> None:
        """Writes a wave and waits for it."""
        for write, source in wave:
            self.write_array(write, source)
            source.release()
        self.drain()

    def write_array(self, write: ArrayWrite, source: StagedLeaf) -> None:
        """Starts the writes of all chunks of a leaf."""
        store: Any = None
        files = write.chunk_files
        for number, (chunk, key) in enumerate(zip(write.chunks, files, strict=True)):
            self.check_interrupt()
            self._admit(write.chunk_bytes)
            try:
                data = source.as_stored(chunk, write)
                if number == 0:
                    self._begin_array(write, data)
                # To be copied by a later save, a chunk needs a version, which TensorStore's arrays do not return.
                is_plain = not self._copies_inside and not is_encoded(self.arrays[write.path], data)
                entry = (data.nbytes, digest(data)) if is_plain else None
                if self._link_if_equal(write, key, data, entry):
                    self._budget.release(write.chunk_bytes)
                    self._count(write.chunk_bytes, linked=True)
                    continue
                copied = self._admit_copy(data, source)
                if entry is None:
                    future = self._encoders.submit(self._encode, write, key, data)
                elif data.nbytes >= self._direct_bytes:
                    future = self._write_direct(key, data)
                else:
                    if store is None:
                        store = self._open(self.arrays[write.path], write.name)
                    future = store[chunk.box.slices].write(data, can_reference_source_data_indefinitely=True)
            except BaseException:
                self._budget.release(write.chunk_bytes)
                raise
            self._in_flight.append(_InFlight(write.name, future, write.chunk_bytes, key, copied, entry is None))
            if entry is not None:
                self._written[key] = entry
        if not write.chunks:
            # All of its chunks are written by other processes.
            self._begin_array(write, np.empty(0, write.array.disk_dtype))

    def _encode(self, write: ArrayWrite, key: str, data: np.ndarray) -> Any:
        """Encodes a chunk and starts to write it, in a thread; returns the future of the write, None if it was linked."""
        array = self.arrays[write.path]
        if self._copies_inside and self.reused.link_values(
            write.array.location, key, data, array.metadata['compressor']
        ):
            return None
        encoded = encode_chunk(array, data)
        entry = entry_of(encoded)
        if self.reused.link_equal(key, entry):
            return None
        self._written[key] = entry
        if len(encoded) >= self._direct_bytes:
            return self._write_direct(key, np.frombuffer(encoded, np.uint8))
        return self._storage.start_write(join(self._directory, key), encoded)

    def _link_if_equal(self, write: ArrayWrite, key: str, data: np.ndarray, entry: FileEntry | None) -> bool:
        """Links or copies a chunk that the previous checkpoint has; returns whether it did."""
        if entry is not None:
            return self.reused.link_equal(key, entry)
        codec = self.arrays[write.path].metadata['compressor']
        return self._storage.links and self.reused.link_values(write.array.location, key, data, codec)

    def _write_direct(self, key: str, data: np.ndarray) -> Future[None]:
        words = data.reshape(-1).view(np.uint8)
        return self._direct_writers.submit(self._storage.write_direct, join(self._directory, key), words)

    def _begin_array(self, write: ArrayWrite, sample: np.ndarray) -> None:
        """Chooses the codec, if the plan leaves the choice to the data, and writes the metadata."""
        array = write.array
        if array.metadata['compressor'] == AUTO:
            codec = self._codec_selection.codec(array.location, sample, self.reused.last_codec(array.location))
            array = _with_codec(array, codec if takes(codec, write.chunk_bytes) else None)
        if self._staging.writes_metadata:
            self._write_metadata(array, write.name)
        self.arrays[write.path] = array

    def _write_metadata(self, array: StoredArray, name: str) -> None:
        data = zarray_bytes(array)
        key = join(array.location, '.zarray')
        self._in_flight.append(_InFlight(name, self._storage.start_write(join(self._directory, key), data), 0, key))
        self._written[key] = entry_of(data)

    def _open(self, array: StoredArray, name: str) -> Any:
        spec = {
            'driver': 'zarr',
            'kvstore': self._storage.array_kvstore(join(self._directory, array.location)),
            'metadata': zarray_of(array),
            'store_data_equal_to_fill_value': True,
        }
        with foreign_errors(name, writing=True):
            opening = ts.open(spec, open=True, create=True, assume_metadata=True, context=self._storage.context())
            return self._storage.wait(opening)

    def _admit(self, size: int) -> None:
        while not self._budget.try_acquire(size):
            if self._in_flight:
                self._finish_next()
            else:
                self._budget.acquire(size)
                return

    def _admit_copy(self, data: np.ndarray, source: StagedLeaf) -> int:
        """Waits until the copy of a chunk fits; returns its bytes, or 0 if the chunk is a part of a staged copy."""
        copied = 0 if source.is_copy and data.base is not None else data.nbytes
        while copied and not self._copy_budget.try_acquire(copied):
            self._finish_next()
        return copied

    def _finish_next(self) -> None:
        """Waits for the oldest write."""
        key = self._in_flight[0].key
        self._count(self._settle_next(), linked=key in self.reused.files)

    def _settle_next(self) -> int:
        """Waits for the oldest write without reporting progress; returns its bytes. An interrupt leaves it in flight."""
        item = self._in_flight[0]
        try:
            with foreign_errors(f'{item.name} in {self._where}', writing=True):
                future = item.future.result() if item.is_encoded else item.future
                written = None if future is None else self._storage.wait(future)
        except Exception:
            self._release(self._in_flight.popleft())
            raise
        self._release(self._in_flight.popleft())
        if isinstance(written, ts.KvStore.TimestampedStorageGeneration):
            self.reused.versions[item.key] = written.generation
        return item.size

    def _release(self, item: _InFlight) -> None:
        if item.size:
            self._budget.release(item.size)
        self._copy_budget.release(item.copied)

    def _count(self, size: int, *, linked: bool = False) -> None:
        self._done += size
        self.linked += size if linked else 0
        if self._progress is not None and size:
            self._progress(self._done, self.total)

    def check_interrupt(self) -> None:
        """Raises if the save was cancelled."""
        if self._staging.is_interrupted:
            raise SaveFailedError('the save was interrupted; no checkpoint was written.')

    def drain(self) -> None:
        """Waits for everything in flight."""
        while self._in_flight:
            self._finish_next()

    def measure(self) -> None:
        """Adds the bytes and the seconds of this save to the measured rate of the storage, by which codecs are chosen."""
        written = sum(size for size, _ in self._written.values())
        self._codec_selection.measured(written, time.monotonic() - self._started)

    def file_versions(self) -> dict[str, Any]:
        """The versions of all files. Detects a file whose rename was lost without an error."""
        if self._copies_inside:
            return self.reused.versions
        versions = {key: self._storage.stamp(join(self._directory, key)) for key in self.checksums}
        for key in [key for key, version in versions.items() if version is None]:
            if self._storage.size(join(self._directory, key)) is None:
                where = self._storage.url(join(self._directory, key))
                raise StorageError(errno.EIO, f'{where}: was written without an error, but does not exist. Save again.')
        return versions

    def cancel(self) -> None:
        """Waits for all started writes, so that none ends after the caller has removed the files."""
        self._encoders.shutdown(cancel_futures=True)
        self._direct_writers.shutdown(wait=False, cancel_futures=True)
        while self._in_flight:
            with contextlib.suppress(Exception):
                self._settle_next()

    def close(self) -> None:
        """Ends the threads."""
        self._encoders.shutdown(wait=False)
        self._direct_writers.shutdown(wait=False)


def _with_codec(array: StoredArray, codec: Any) -> StoredArray:
    return dataclasses.replace(array, metadata={**array.metadata, 'compressor': codec})
