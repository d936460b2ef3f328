"""Reads an open chunk file into the regions that overlap it, cast to their dtype, in one of three ways.

:func:`chunk_reader` chooses among them:

- ``_VerifyingReader`` reads a whole chunk block by block, hashes each block while it is in the processor's cache, and copies it
  to the regions that it was not read into.
- ``_ScatteringReader`` reads many rows with one system call, each into its buffer (``reading/local/chunk_file.py``).
- ``_CopyingReader`` reads block by block into a scratch of 1 MiB that fits the processor's cache, from which each region copies
  its elements.

The last two read a region that is contiguous both in the file and in its buffer directly into the buffer.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import xxhash

from t5ckpt.format.chunk_grid import Box, ChunkIndex, strides_of
from t5ckpt.format.dtypes import from_stored
from t5ckpt.reading.checksum_verifier import ChecksumVerifier
from t5ckpt.reading.local.chunk_file import Blocks, ChunkFile, Limits, can_scatter, runs_in
from t5ckpt.reading.local.regions import ReadRequest, Region, shortest_run, takes_whole_chunks
from t5ckpt.reading.local.uncompressed import PlainChunks

# Elements are copied as integers of the same size, since NumPy copies those faster than extension dtypes.
_WORDS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}

# A buffer of the calling thread, which its next read overwrites.
Scratch = Callable[[], np.ndarray]


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
    chunks: PlainChunks,
    regions: Mapping[ChunkIndex, Sequence[Region]],
    checks: ChecksumVerifier | None,
    limits: Limits,
    scratch: Scratch,
) -> ChunkReader:
    """The reader of the chunks of one array: verifies if it can, else scatters if the runs are long enough, else copies."""
    if checks is not None and (not checks.only_whole_chunks or takes_whole_chunks(regions, chunks)):
        return _VerifyingReader(request, chunks, limits, scratch, checks)
    if can_scatter() and not request.converts and shortest_run(regions, chunks.itemsize) >= limits.min_run:
        return _ScatteringReader(request, chunks, Blocks(chunks, limits.scatter), limits)
    return _CopyingReader(request, chunks, limits, scratch)


class ChunkReader(abc.ABC):
    """Reads chunk files of one array into its regions. Safe from any thread."""

    reads_whole_chunks: ClassVar[bool] = False

    def __init__(self, request: ReadRequest, chunks: PlainChunks, blocks: Blocks, limits: Limits):
        self._array = request.array
        self._leaf = request.leaf
        self._chunks = chunks
        self._limits = limits
        self._converts_from = request.dtype if request.converts else None
        self.blocks = blocks

    def ranges(self, regions: Sequence[Region]) -> Iterable[tuple[int, int]]:
        """The ranges of blocks of a chunk that are read together, for the regions that overlap the chunk."""
        if self.reads_whole_chunks:
            return [(0, self.blocks.count)]
        first, last = min(region.first for region in regions), max(region.last for region in regions)
        return self.blocks.ranges(self._limits.task, first, last)

    @abc.abstractmethod
    def read(self, file: ChunkFile, part: ChunkPart) -> None:
        """Reads a part of a chunk into its regions."""

    def _block(self, index: int, regions: Sequence[Region]) -> _Block:
        if not regions:
            return _Block(index, [])
        box = self.blocks.box(index)
        return _Block(index, [(region, both) for region in regions if not (both := region.box.intersect(box)).is_empty])

    def _copy(self, data: memoryview, block: _Block) -> None:
        """Copies the elements of a block to the regions that overlap it."""
        if not block.overlaps:
            return
        dtype, box = self._array.dtype, self.blocks.box(block.index)
        values = np.frombuffer(data, dtype).reshape(box.shape)
        if self._converts_from is not None:
            values = from_stored(values, self._converts_from)
        word = _WORDS.get(dtype.itemsize, dtype)
        for region, both in block.overlaps:
            source, target = values[(..., *both.relative_to(box).slices)], region.part(both)
            if self._converts_from is not None:
                np.copyto(target, source, casting='unsafe')
            else:
                np.copyto(target.view(word), source.view(word))


class _VerifyingReader(ChunkReader):
    """Compares the checksum of each chunk."""

    reads_whole_chunks = True

    def __init__(
        self, request: ReadRequest, chunks: PlainChunks, limits: Limits, scratch: Scratch, checks: ChecksumVerifier
    ):
        super().__init__(request, chunks, Blocks(chunks, limits.scratch), limits)
        self._scratch = scratch
        self._checks = checks

    def read(self, file: ChunkFile, part: ChunkPart) -> None:
        """See ``ChunkReader``."""
        state = xxhash.xxh3_64()
        for index in range(part.start, part.stop):
            start, stop = self.blocks.offset(index), self.blocks.offset(index + 1)
            straight = ((region, region.straight_bytes(start, stop)) for region in part.regions)
            filled, into = next(((region, into) for region, into in straight if into is not None), (None, None))
            if into is None:
                into = self._scratch()[: stop - start].data
            file.read(into, start)
            state.update(into)
            others = [region for region in part.regions if region is not filled]
            self._copy(into, self._block(index, others))
        name = f'{self._array.location}/{part.name}'
        self._checks.compare(name, self._leaf, (self._chunks.chunk_bytes, state.hexdigest()))


class _PartReader(ChunkReader):
    """Reads the parts of a chunk that regions overlap: straight regions directly, the others block by block."""

    def read(self, file: ChunkFile, part: ChunkPart) -> None:
        """See ``ChunkReader``."""
        start, stop = self.blocks.offset(part.start), self.blocks.offset(part.stop)
        others: list[Region] = []
        for region in part.regions:
            first, last = max(start, region.first), min(stop, region.last)
            into = region.straight_bytes(first, last)
            if into is None:
                others.append(region)
            else:
                file.read(into, first)
        for index in range(part.start, part.stop) if others else ():
            block = self._block(index, others)
            if block.overlaps:
                self._read_block(file, block)

    @abc.abstractmethod
    def _read_block(self, file: ChunkFile, block: _Block) -> None:
        """Reads one block into the regions that overlap it."""


class _CopyingReader(_PartReader):
    def __init__(self, request: ReadRequest, chunks: PlainChunks, limits: Limits, scratch: Scratch):
        super().__init__(request, chunks, Blocks(chunks, limits.scratch), limits)
        self._scratch = scratch

    def _read_block(self, file: ChunkFile, block: _Block) -> None:
        start, stop = self.blocks.offset(block.index), self.blocks.offset(block.index + 1)
        scratch = self._scratch()[: stop - start].data
        file.read(scratch, start)
        self._copy(scratch, block)


class _ScatteringReader(_PartReader):
    def _read_block(self, file: ChunkFile, block: _Block) -> None:
        """Reads runs directly into their buffers; runs that are adjacent in the file are read in one call."""
        itemsize = self._chunks.itemsize
        strides = strides_of(self._chunks.grid.chunk_shape, itemsize)
        offsets, places, lengths = [], [], []
        for region, both in block.overlaps:
            target = region.part(both)
            first = sum(start * stride for (start, _), stride in zip(both, strides, strict=True))
            in_file, file_run = runs_in(target.shape, strides, itemsize, first)
            in_memory, memory_run = runs_in(target.shape, target.strides, itemsize, target.ctypes.data)
            shorter = min(file_run, memory_run)
            offsets.append(_split(in_file, file_run, shorter))
            places.append(_split(in_memory, memory_run, shorter))
            lengths.append(np.full(len(offsets[-1]), shorter))
        order = np.argsort(np.concatenate(offsets), kind='stable')
        offset, place, length = (np.concatenate(each)[order] for each in (offsets, places, lengths))
        breaks = np.flatnonzero(offset[1:] != offset[:-1] + length[:-1]) + 1
        for first, last in itertools.pairwise((0, *breaks.tolist(), len(offset))):
            file.read_runs(int(offset[first]), place[first:last], length[first:last])


def _split(starts: np.ndarray, length: int, shorter: int) -> np.ndarray:
    """The starts of the runs when each is divided into shorter ones."""
    return starts if length == shorter else (starts[:, None] + np.arange(0, length, shorter)).reshape(-1)
