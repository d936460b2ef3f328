"""Reads chunk files directly into the buffers of a restore, without TensorStore: uncompressed ones, and those of blosc.

TensorStore would read a chunk into its own memory first, which halves the speed on machines with expensive page faults. An
array is read in three stages:

1. ``reading/local/regions.py`` says which elements of which chunk each buffer takes.
2. ``DirectReader.tasks`` divides the chunks into tasks of at least 8 MiB, each for one thread, which opens the files.
3. ``reading/local/chunk_reader.py`` reads an open file into the regions: verified, scattered, or through a scratch.
   A chunk of blosc is decoded into a buffer in which it is contiguous, or into memory from which each region copies its elements.

Each byte is read once, even if several devices need parts of its chunk, and no memory except the buffers and the scratch is
used; for blosc, also that of one chunk per core. The kernel is asked to read a few files ahead (``posix_fadvise``), which keeps
the disk busy when nothing is cached.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

import numpy as np

from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.format.array_spec import StoredArray, StoredLeaf
from t5ckpt.format.chunk_grid import Box, ChunkIndex
from t5ckpt.format.codecs import decode
from t5ckpt.format.file_checksums import entry_of
from t5ckpt.reading.checksum_verifier import ChecksumVerifier
from t5ckpt.reading.local.chunk_file import Blocks, ChunkFile, Limits
from t5ckpt.reading.local.chunk_reader import ChunkPart, ChunkReader, chunk_reader
from t5ckpt.reading.local.regions import ReadRequest, Region, regions_by_chunk
from t5ckpt.reading.local.uncompressed import (
    ChunkFiles,
    PlainChunks,
    chunk_of_file,
    chunks_to_decode,
    has_chunks_to_decode,
)
from t5ckpt.reading.size_limits import check_chunk
from t5ckpt.storage import foreign_errors

# Blosc adds 16 bytes to values that it cannot compress.
_OVERHEAD = 4096
# For more chunks the list of reads would be large; TensorStore iterates over such a grid.
_MAX_CHUNKS = 2**14
# The files of a task that are open at once; the kernel reads all but the first ahead.
_AHEAD = 4
Task = Callable[[], None]


class ChunkMemory:
    """Memory for as many chunks as there are cores, used again and again, because the first access to memory is slow."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(os.cpu_count() or 1)
        self._spare: list[_Pair] = []

    @contextlib.contextmanager
    def reserved(self) -> Generator[_Pair]:
        """Memory for one chunk; waits for another thread if all is in use."""
        with self._free:
            pair = self._spare.pop() if self._spare else _Pair()
            try:
                yield pair
            finally:
                self._spare.append(pair)


class _Pair:
    """Memory for the encoded and the decoded bytes of a chunk."""

    def __init__(self) -> None:
        self._encoded = self._decoded = np.empty(0, np.uint8)

    def encoded(self, size: int) -> memoryview:
        """The first ``size`` bytes of the memory for encoded bytes."""
        if self._encoded.size < size:
            self._encoded = np.empty(size, np.uint8)
        return self._encoded[:size].data

    def decoded(self, size: int) -> memoryview:
        """The first ``size`` bytes of the memory for decoded bytes."""
        if self._decoded.size < size:
            self._decoded = np.empty(size, np.uint8)
        return self._decoded[:size].data


class DecodingReader(ChunkReader):
    """Reads and decodes whole chunks."""

    reads_whole_chunks = True

    def __init__(
        self,
        request: ReadRequest,
        chunks: PlainChunks,
        limits: Limits,
        memory: ChunkMemory,
        checks: ChecksumVerifier | None,
    ):
        super().__init__(request, chunks, Blocks(chunks, max(1, chunks.chunk_bytes)), limits)
        self._memory = memory
        self._checks = checks

    def read(self, file: ChunkFile, part: ChunkPart) -> None:
        """See ``ChunkReader``."""
        size, chunk_bytes = file.size(), self._chunks.chunk_bytes
        if size > chunk_bytes + _OVERHEAD:
            raise CorruptCheckpointError(
                f'{self._leaf}: {file.path} has {size:,} bytes, its chunk {chunk_bytes:,}. It is damaged; restore an older '
                'step, or copy the checkpoint again.'
            )
        check_chunk(chunk_bytes, lambda: size, f'{self._leaf} ({file.path})')
        with self._memory.reserved() as memory:
            encoded = memory.encoded(size)
            file.read(encoded, 0)
            if self._checks is not None:
                self._checks.compare(f'{self._array.location}/{part.name}', self._leaf, entry_of(encoded))
            straight = ((region, region.straight_bytes(0, chunk_bytes)) for region in part.regions)
            filled, into = next(((region, into) for region, into in straight if into is not None), (None, None))
            if into is None:
                into = memory.decoded(chunk_bytes)
            try:
                decode(encoded, into)
            except ValueError as error:
                raise CorruptCheckpointError(
                    f'{self._leaf}: {file.path} cannot be decoded: {error}. It is damaged; restore an older step, or copy the '
                    'checkpoint again.'
                ) from error
            self._copy(into, self._block(0, [region for region in part.regions if region is not filled]))


class DirectReader:
    """Reads arrays of one checkpoint in a local directory. Safe from any thread."""

    def __init__(
        self,
        root: str,
        limits: Limits | None = None,
        *,
        checks: ChecksumVerifier | None = None,
        follow_links: bool = False,
    ):
        """Takes the checkpoint's directory; with ``checks`` chunks are read whole and their checksums compared."""
        self._root = root
        self._limits = Limits() if limits is None else limits
        self._checks = checks
        self._follow_links = follow_links
        self._local = threading.local()
        self._memory = ChunkMemory()

    def plain_chunks(self, array: StoredArray, leaf: str) -> PlainChunks | None:
        """The chunks of an array that this reader can read; None for any other array.

        Raises:
          CorruptCheckpointError: its ``.zarray`` is not a regular file.
        """
        if array.is_byte_range:
            return chunk_of_file(array)
        if not has_chunks_to_decode(array):
            return None
        try:
            with ChunkFiles(self._root, array.location, leaf, follow_links=self._follow_links) as files:
                text = files.metadata()
        except OSError:
            # TensorStore reads the array instead, and reports the error.
            return None
        if self._checks is not None:
            self._checks.compare(f'{array.location}/.zarray', leaf, entry_of(text))
        return chunks_to_decode(text, array)

    def can_read(self, chunks: PlainChunks, boxes: Iterable[Box]) -> bool:
        """Whether the boxes overlap few enough chunks for this reader."""
        return sum(chunks.grid.count(box) for box in boxes) <= _MAX_CHUNKS

    def tasks(self, leaf: StoredLeaf, name: str, chunks: PlainChunks, buffers: Mapping[Box, np.ndarray]) -> list[Task]:
        """The tasks for threads that fill buffers, in the dtype on disk or the one to convert to, with boxes of an array."""
        request = ReadRequest(leaf.array, name, leaf.dtype, buffers)
        regions = regions_by_chunk(request, chunks)
        reader = self._reader(request, chunks, regions)
        tasks: list[Task] = []
        batch: list[ChunkPart] = []
        size = 0
        for chunk_index, found in regions.items():
            for start, stop in reader.ranges(found):
                first, last = reader.blocks.offset(start), reader.blocks.offset(stop)
                overlapping = [region for region in found if region.first < last and first < region.last]
                if not overlapping:
                    continue
                batch.append(ChunkPart(chunks.name(chunk_index), start, stop, overlapping))
                size += last - first
                if size >= self._limits.task:
                    tasks.append(functools.partial(self._run, request, chunks, reader, batch))
                    batch, size = [], 0
        if batch:
            tasks.append(functools.partial(self._run, request, chunks, reader, batch))
        return tasks

    def _reader(
        self, request: ReadRequest, chunks: PlainChunks, regions: Mapping[ChunkIndex, Sequence[Region]]
    ) -> ChunkReader:
        if chunks.file_bytes is None:
            return DecodingReader(request, chunks, self._limits, self._memory, self._checks)
        return chunk_reader(request, chunks, regions, self._checks, self._limits, self._scratch)

    def _run(self, request: ReadRequest, chunks: PlainChunks, reader: ChunkReader, parts: Sequence[ChunkPart]) -> None:
        array, leaf = request.array, request.leaf
        location = '' if chunks.file else array.location
        with (
            foreign_errors(f'{leaf} ({os.path.join(self._root, array.location)})'),
            ChunkFiles(self._root, location, leaf, follow_links=self._follow_links) as files,
        ):
            opened: collections.deque[tuple[ChunkFile, ChunkPart]] = collections.deque()
            try:
                for part in parts:
                    if len(opened) == _AHEAD:
                        _read_first(reader, opened)
                    fd = files.open_chunk(part.name, chunks.file_bytes)
                    opened.append((ChunkFile(fd, files.path(part.name), leaf, chunks.offset), part))
                    opened[-1][0].announce(reader.blocks.offset(part.start), reader.blocks.offset(part.stop))
                while opened:
                    _read_first(reader, opened)
            finally:
                for file, _ in opened:
                    file.close()

    def _scratch(self) -> np.ndarray:
        """A buffer of this thread, which the next read overwrites."""
        if not hasattr(self._local, 'scratch'):
            self._local.scratch = np.empty(self._limits.scratch, np.uint8)
        return self._local.scratch


def _read_first(reader: ChunkReader, opened: collections.deque[tuple[ChunkFile, ChunkPart]]) -> None:
    file, part = opened[0]
    reader.read(file, part)
    opened.popleft()
    file.close()
