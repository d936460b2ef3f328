"""Reads an open chunk file into the regions that overlap it, cast to their dtype, in one of four ways.

:func:`chunk_reader` chooses among them:

- ``_DecodingReader`` reads and decodes a whole chunk of blosc, into a buffer in which it is contiguous, or into memory from which
  each region copies its elements.
- ``_VerifyingReader`` reads a whole chunk block by block, hashes each block while it is in the processor's cache, and copies it
  to the regions that it was not read into.
- ``_ScatteringReader`` reads many rows with one system call, each into its buffer (``reading/local/chunk_file.py``).
- ``_CopyingReader`` reads block by block into a scratch of 1 MiB that fits the processor's cache, from which each region copies
  its elements.

The last two read a region that is contiguous both in the file and in its buffer directly into the buffer. No memory except the
buffers, the scratch and, for blosc, one chunk per core is used.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
import os
import queue
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import xxhash

from t5ckpt.core.text import CURE_OF_DAMAGE
from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.format.chunk_grid import Box, ChunkIndex, strides_of
from t5ckpt.format.codecs import WORDS, decode
from t5ckpt.format.dtypes import cast, from_stored
from t5ckpt.format.file_checksums import entry_of
from t5ckpt.reading.checksum_verifier import ChecksumVerifier
from t5ckpt.reading.local.chunk_file import Blocks, ChunkFile, Limits, can_scatter, runs_in
from t5ckpt.reading.local.native_chunks import NativeChunks
from t5ckpt.reading.local.regions import ReadRequest, Region, shortest_run, takes_whole_chunks
from t5ckpt.reading.size_limits import check_chunk

# Blosc adds 16 bytes to values that it cannot compress.
_OVERHEAD = 4096
_LONGEST_WAIT_SECONDS = 10.0


class ChunkMemory:
    """A scratch for each thread, and memory for as many chunks as there are cores.

    Both are used again and again, because the first access to memory is slow.
    """

    def __init__(self, scratch_bytes: int) -> None:
        self._spare: queue.SimpleQueue[tuple[_Memory, _Memory]] = queue.SimpleQueue()
        for _ in range(os.cpu_count() or 1):
            self._spare.put((_Memory(), _Memory()))
        self._scratch_bytes = scratch_bytes
        self._local = threading.local()

    def scratch(self, size: int) -> memoryview:
        """The first ``size`` bytes of a buffer of this thread, which its next read overwrites."""
        if not hasattr(self._local, 'scratch'):
            self._local.scratch = np.empty(self._scratch_bytes, np.uint8)
        return self._local.scratch[:size].data

    @contextlib.contextmanager
    def reserved(self) -> Generator[tuple[_Memory, _Memory]]:
        """Memory for the encoded and the decoded bytes of a chunk; waits for another thread if all is in use."""
        try:
            pair = self._spare.get(timeout=_LONGEST_WAIT_SECONDS)
        except queue.Empty:
            # An exception from a signal handler between two lines here loses memory.
            pair = _Memory(), _Memory()
        try:
            yield pair
        finally:
            self._spare.put(pair)


class _Memory:
    """Memory of the largest size that was requested."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def first(self, size: int) -> memoryview:
        """The first ``size`` bytes."""
        if self._bytes.size < size:
            self._bytes = np.empty(size, np.uint8)
        return self._bytes[:size].data


@dataclasses.dataclass(frozen=True)
class ChunkPart:
    """The blocks ``start`` to ``stop`` of one chunk file, and the regions that overlap them."""

    name: str
    start: int
    stop: int
    regions: list[Region]


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block of a chunk, and the regions that overlap it, each with the overlap in the chunk's coordinates."""

    index: int
    overlaps: list[tuple[Region, Box]]


def chunk_reader(
    request: ReadRequest,
    chunks: NativeChunks,
    regions: Mapping[ChunkIndex, Sequence[Region]],
    checks: ChecksumVerifier | None,
    limits: Limits,
    memory: ChunkMemory,
) -> ChunkReader:
    """The reader of the chunks of one array.

    Decodes encoded chunks. Otherwise verifies if it can, else scatters if the runs are long enough, else copies.
    """
    if chunks.file_bytes is None:
        return _DecodingReader(request, chunks, limits, memory, checks)
    if checks is not None and (not checks.only_whole_chunks or takes_whole_chunks(regions, chunks)):
        return _VerifyingReader(request, chunks, limits, memory, checks)
    if can_scatter() and not request.converts and shortest_run(regions, chunks.itemsize) >= limits.min_run:
        return _ScatteringReader(request, chunks, Blocks(chunks, limits.scatter), limits)
    return _CopyingReader(request, chunks, limits, memory)


class ChunkReader(abc.ABC):
    """Reads chunk files of one array into its regions. Safe from any thread."""

    reads_whole_chunks: ClassVar[bool] = False

    def __init__(self, request: ReadRequest, chunks: NativeChunks, blocks: Blocks, limits: Limits):
        self._array = request.array
        self._name = request.name
        self._chunks = chunks
        self._limits = limits
        self._converts_from = request.array.dtype if request.converts else None
        self.blocks = blocks

    def ranges(self, regions: Sequence[Region]) -> Iterable[tuple[int, int]]:
        """The ranges of blocks of a chunk that are read together, for the regions that overlap the chunk."""
        if self.reads_whole_chunks:
            return [(0, self.blocks.count)]
        first, last = min(region.start_byte for region in regions), max(region.stop_byte for region in regions)
        return self.blocks.ranges(self._limits.task, first, last)

    @abc.abstractmethod
    def read(self, file: ChunkFile, part: ChunkPart) -> None:
        """Reads a part of a chunk into its regions."""

    def _block(self, index: int, regions: Sequence[Region]) -> _Block:
        if not regions:
            return _Block(index, [])
        box = self.blocks.box(index)
        return _Block(
            index, [(region, overlap) for region in regions if not (overlap := region.box.intersect(box)).is_empty]
        )

    def _copy(self, data: memoryview, block: _Block) -> None:
        """Copies the elements of a block to the regions that overlap it."""
        if not block.overlaps:
            return
        dtype, box = self._array.disk_dtype, self.blocks.box(block.index)
        values = np.frombuffer(data, dtype).reshape(box.shape)
        if self._converts_from is not None:
            values = from_stored(values, self._converts_from)
        # NumPy copies integers of the same size faster than extension dtypes.
        word = WORDS.get(dtype.itemsize, dtype)
        for region, overlap in block.overlaps:
            source, into = values[(..., *overlap.relative_to(box).slices)], region.view_of(overlap)
            if self._converts_from is not None:
                into[...] = cast(source, into.dtype, self._name)
            else:
                np.copyto(into.view(word), source.view(word))


class _VerifyingReader(ChunkReader):
    """Compares the checksum of each chunk."""

    reads_whole_chunks = True

    def __init__(
        self, request: ReadRequest, chunks: NativeChunks, limits: Limits, memory: ChunkMemory, checks: ChecksumVerifier
    ):
        super().__init__(request, chunks, Blocks(chunks, limits.scratch), limits)
        self._memory = memory
        self._checks = checks

    def read(self, file: ChunkFile, part: ChunkPart) -> None:
        state = xxhash.xxh3_64()
        for index in range(part.start, part.stop):
            start, stop = self.blocks.offset(index), self.blocks.offset(index + 1)
            into, other_regions = _first_straight(part.regions, start, stop)
            if into is None:
                into = self._memory.scratch(stop - start)
            file.read(into, start)
            state.update(into)
            self._copy(into, self._block(index, other_regions))
        entry = (self._chunks.chunk_bytes, state.hexdigest())
        self._checks.compare(f'{self._array.location}/{part.name}', self._name, entry)


class _DecodingReader(ChunkReader):
    """Reads and decodes whole chunks."""

    reads_whole_chunks = True

    def __init__(
        self,
        request: ReadRequest,
        chunks: NativeChunks,
        limits: Limits,
        memory: ChunkMemory,
        checks: ChecksumVerifier | None,
    ):
        super().__init__(request, chunks, Blocks(chunks, max(1, chunks.chunk_bytes)), limits)
        self._memory = memory
        self._checks = checks

    def read(self, file: ChunkFile, part: ChunkPart) -> None:
        size, chunk_bytes = file.size(), self._chunks.chunk_bytes
        if size > chunk_bytes + _OVERHEAD:
            raise CorruptCheckpointError(
                f'{self._name}: {file.path} has {size:,} bytes, its chunk {chunk_bytes:,}. It is damaged. '
                f'{CURE_OF_DAMAGE}'
            )
        check_chunk(chunk_bytes, lambda: size, f'{self._name} ({file.path})')
        with self._memory.reserved() as (memory, decoded):
            encoded = memory.first(size)
            file.read(encoded, 0)
            if self._checks is not None:
                self._checks.compare(f'{self._array.location}/{part.name}', self._name, entry_of(encoded))
            into, other_regions = _first_straight(part.regions, 0, chunk_bytes)
            if into is None:
                into = decoded.first(chunk_bytes)
            try:
                decode(encoded, into)
            except ValueError as error:
                raise CorruptCheckpointError(
                    f'{self._name}: {file.path} cannot be decoded: {error}. It is damaged. {CURE_OF_DAMAGE}'
                ) from error
            self._copy(into, self._block(0, other_regions))


class _PartReader(ChunkReader):
    """Reads the parts of a chunk that regions overlap: straight regions directly, the others block by block."""

    def read(self, file: ChunkFile, part: ChunkPart) -> None:
        start, stop = self.blocks.offset(part.start), self.blocks.offset(part.stop)
        other_regions: list[Region] = []
        for region in part.regions:
            first, last = max(start, region.start_byte), min(stop, region.stop_byte)
            into = region.straight_bytes(first, last)
            if into is None:
                other_regions.append(region)
            else:
                file.read(into, first)
        for index in range(part.start, part.stop) if other_regions else ():
            block = self._block(index, other_regions)
            if block.overlaps:
                self._read_block(file, block)

    @abc.abstractmethod
    def _read_block(self, file: ChunkFile, block: _Block) -> None:
        """Reads one block into the regions that overlap it."""


class _CopyingReader(_PartReader):
    def __init__(self, request: ReadRequest, chunks: NativeChunks, limits: Limits, memory: ChunkMemory):
        super().__init__(request, chunks, Blocks(chunks, limits.scratch), limits)
        self._memory = memory

    def _read_block(self, file: ChunkFile, block: _Block) -> None:
        start, stop = self.blocks.offset(block.index), self.blocks.offset(block.index + 1)
        scratch = self._memory.scratch(stop - start)
        file.read(scratch, start)
        self._copy(scratch, block)


class _ScatteringReader(_PartReader):
    def _read_block(self, file: ChunkFile, block: _Block) -> None:
        """Reads runs directly into their buffers; runs that are adjacent in the file are read in one call."""
        itemsize = self._chunks.itemsize
        strides = strides_of(self._chunks.grid.chunk_shape, itemsize)
        offsets, addresses, lengths = [], [], []
        for region, overlap in block.overlaps:
            view = region.view_of(overlap)
            first = sum(start * stride for (start, _), stride in zip(overlap, strides, strict=True))
            in_file, file_run = runs_in(view.shape, strides, itemsize, first)
            in_memory, memory_run = runs_in(view.shape, view.strides, itemsize, view.ctypes.data)
            shorter = min(file_run, memory_run)
            offsets.append(_split(in_file, file_run, shorter))
            addresses.append(_split(in_memory, memory_run, shorter))
            lengths.append(np.full(len(offsets[-1]), shorter))
        order = np.argsort(np.concatenate(offsets), kind='stable')
        offset, address, length = (np.concatenate(parts)[order] for parts in (offsets, addresses, lengths))
        breaks = np.flatnonzero(offset[1:] != offset[:-1] + length[:-1]) + 1
        for first, last in itertools.pairwise((0, *breaks.tolist(), len(offset))):
            file.read_runs(int(offset[first]), address[first:last], length[first:last])


def _split(starts: np.ndarray, length: int, shorter: int) -> np.ndarray:
    """The starts of the runs when each is divided into shorter ones."""
    return starts if length == shorter else (starts[:, None] + np.arange(0, length, shorter)).reshape(-1)


def _first_straight(regions: Sequence[Region], start: int, stop: int) -> tuple[memoryview | None, Sequence[Region]]:
    """The buffer of the first region that these bytes of the chunk can be read into, and the other regions."""
    for position, region in enumerate(regions):
        into = region.straight_bytes(start, stop)
        if into is not None:
            return into, [*regions[:position], *regions[position + 1 :]]
    return None, regions
