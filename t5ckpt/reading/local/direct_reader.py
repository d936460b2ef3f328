"""Reads uncompressed chunk files directly into the buffers of a restore, without TensorStore.

A chunk of plain bytes (``reading/local/uncompressed.py``) needs no decoding. TensorStore would read it into its own memory
first, which halves the speed on machines with expensive page faults. Here a thread reads

- bytes that are contiguous both in the file and in the buffer: directly into the buffer;
- a chunk whose rows are divided among the devices of another sharding: with one system call for many rows, each into its
  buffer (``reading/local/scatter_read.py``);
- other chunks (runs of a few bytes, a dtype to convert): block by block into a scratch of 1 MiB that fits the processor's
  cache, from which each buffer copies its elements.

To verify checksums (``reading/checksum_verifier.py``), a thread reads a whole chunk file block by block, hashes each block
while it is in the cache, and copies it to the buffers that it was not read into.

So each byte is read once, even if several devices need parts of its chunk, and no memory except the buffers and the scratch is
used.

Notes: one thread per 8 MiB of a file. The kernel is asked to read a few files ahead (``posix_fadvise``), which keeps the disk
busy when nothing is cached.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import xxhash

from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box, ChunkIndex, strides_of
from t5ckpt.format.dtypes import from_stored
from t5ckpt.format.file_checksums import entry_of
from t5ckpt.reading.checksum_verifier import ChecksumVerifier
from t5ckpt.reading.local.blocks import Blocks, Limits
from t5ckpt.reading.local.chunk_file import ChunkFile
from t5ckpt.reading.local.scatter_read import can_scatter, runs_in
from t5ckpt.reading.local.uncompressed import (
    ChunkFiles,
    PlainChunks,
    chunk_of_file,
    has_plain_chunks,
    plain_chunks_of,
    range_of,
)
from t5ckpt.storage import foreign_errors

__all__ = ['DirectReader', 'Limits', 'ReadRequest']

# For more chunks the list of reads would be large; TensorStore iterates over such a grid.
_MAX_CHUNKS = 2**14
# The files of a task that are open at once; the kernel reads all but the first ahead.
_AHEAD = 4
# Elements are copied as integers of the same size, since NumPy copies those faster than extension dtypes.
_WORDS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}

Task = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class ReadRequest:
    """The boxes of one array to read.

    Attributes:
      array: the array as the manifest describes it.
      leaf: its name, for errors.
      dtype: of the leaf; ``array.dtype`` may be a stored form of it (``dtypes.from_stored``).
      buffers: C-order arrays of the boxes' shapes, all in ``array.dtype`` or all in the dtype to convert to.
    """

    array: StoredArray
    leaf: str
    dtype: np.dtype
    buffers: Mapping[Box, np.ndarray]


class DirectReader:
    """Reads the uncompressed arrays of one checkpoint in a local directory. Safe from any thread."""

    def __init__(
        self,
        root: str,
        limits: Limits | None = None,
        *,
        checks: ChecksumVerifier | None = None,
        follow_links: bool = False,
    ):
        """Takes the checkpoint's directory; with ``checks`` chunks are read whole and their checksums compared."""
        self.root = root
        self.limits = Limits() if limits is None else limits
        self.checks = checks
        self.follow_links = follow_links
        self._local = threading.local()

    def plain_chunks(self, array: StoredArray, leaf: str) -> PlainChunks | None:
        """The chunks of an array that this reader can read; None for any other array.

        Raises:
          CorruptCheckpointError: its ``.zarray`` is not a regular file.
        """
        if array.is_byte_range:
            return chunk_of_file(array)
        if not has_plain_chunks(array):
            return None
        try:
            with ChunkFiles(self.root, array.location, leaf, follow_links=self.follow_links) as files:
                text = files.metadata()
        except OSError:
            # TensorStore reads the array instead, and reports the error.
            return None
        if self.checks is not None:
            self.checks.compare(f'{array.location}/.zarray', leaf, entry_of(text))
        return plain_chunks_of(text, array)

    def tasks(self, request: ReadRequest, chunks: PlainChunks) -> list[Task] | None:
        """The tasks for threads that fill the buffers of a request; None if there are too many chunks."""
        if sum(chunks.grid.count(box) for box in request.buffers) > _MAX_CHUNKS:
            return None
        return _ArrayRead(self, request, chunks).tasks()

    def scratch(self) -> np.ndarray:
        """A buffer of this thread, which the next read overwrites."""
        if not hasattr(self._local, 'scratch'):
            self._local.scratch = np.empty(self.limits.scratch, np.uint8)
        return self._local.scratch


@dataclasses.dataclass(frozen=True)
class _CopyRegion:
    """The elements that one buffer takes from one chunk.

    Attributes:
      box: of these elements, in the chunk's coordinates.
      first, last: the byte range in the chunk from the first element to the end of the last.
      target: the view of the buffer for these elements.
      straight: the bytes of ``target``, if they equal the bytes from ``first`` to ``last``.
    """

    box: Box
    first: int
    last: int
    target: np.ndarray
    straight: memoryview | None

    def takes(self, start: int, stop: int) -> bool:
        """Whether these bytes of the chunk can be read directly into the buffer."""
        return self.straight is not None and self.first <= start and stop <= self.last


@dataclasses.dataclass(frozen=True)
class _ChunkRead:
    """The blocks ``start`` to ``stop`` of one chunk file, and the regions that overlap them."""

    name: str
    start: int
    stop: int
    regions: list[_CopyRegion]


class _ArrayRead:
    """The tasks of one array."""

    def __init__(self, reader: DirectReader, request: ReadRequest, chunks: PlainChunks):
        self._reader = reader
        self._request = request
        self._chunks = chunks
        array = request.array
        self._dtype = array.dtype
        self._converts = any(buffer.dtype != array.dtype for buffer in request.buffers.values())
        self._regions = self._regions_by_chunk()
        passing = reader.checks is None or not reader.checks.only_whole_chunks or self._takes_whole_chunks()
        self._checks = reader.checks if passing else None
        scatters = can_scatter() and self._checks is None and not self._converts
        self._scatters = scatters and self._shortest_run() >= reader.limits.min_run
        self._blocks = Blocks(chunks, reader.limits.scatter if self._scatters else reader.limits.scratch)

    def _takes_whole_chunks(self) -> bool:
        """Whether each chunk is read whole into one buffer, except for elements outside the array."""
        grid = self._chunks.grid
        for chunk_index, regions in self._regions.items():
            inside = Box.whole(grid.box(chunk_index).shape)
            if all(region.box != inside for region in regions):
                return False
        return True

    def _shortest_run(self) -> int:
        regions = (region for found in self._regions.values() for region in found if region.straight is None)
        return min((region.target.shape[-1] * self._chunks.itemsize for region in regions), default=0)

    def tasks(self) -> list[Task]:
        """See ``DirectReader.tasks``."""
        tasks: list[Task] = []
        batch: list[_ChunkRead] = []
        size = 0
        for chunk_index, regions in self._regions.items():
            for start, stop in self._ranges(regions):
                first, last = self._blocks.offset(start), self._blocks.offset(stop)
                touching = [region for region in regions if region.first < last and first < region.last]
                if not touching:
                    continue
                batch.append(_ChunkRead(self._chunks.name(chunk_index), start, stop, touching))
                size += last - first
                if size >= self._reader.limits.task:
                    tasks.append(functools.partial(self._run, batch))
                    batch, size = [], 0
        if batch:
            tasks.append(functools.partial(self._run, batch))
        return tasks

    def _ranges(self, regions: Sequence[_CopyRegion]) -> Iterable[tuple[int, int]]:
        """The ranges of blocks that are read together; a chunk whose checksum is verified is one range."""
        if self._checks is not None:
            return [(0, self._blocks.count)]
        span = min(region.first for region in regions), max(region.last for region in regions)
        return self._blocks.ranges(self._reader.limits.task, *span)

    def _regions_by_chunk(self) -> dict[ChunkIndex, list[_CopyRegion]]:
        """The regions to read, by chunk index."""
        regions: dict[ChunkIndex, list[_CopyRegion]] = {}
        for box, buffer in self._request.buffers.items():
            for chunk_index in self._chunks.grid.chunks_of(box):
                regions.setdefault(chunk_index, []).append(self._region(chunk_index, box, buffer))
        return regions

    def _region(self, chunk_index: ChunkIndex, box: Box, buffer: np.ndarray) -> _CopyRegion:
        grid, itemsize = self._chunks.grid, self._chunks.itemsize
        chunk = grid.full_box(chunk_index)
        if box == chunk:
            # A fast path: most leaves of a model have one chunk, which one device reads whole.
            box_in_chunk, target = Box.whole(box.shape), buffer
        else:
            both = box.intersect(chunk)
            box_in_chunk, target = both.relative_to(chunk), buffer[(..., *both.relative_to(box).slices)]
        first, contiguous = range_of(box_in_chunk, grid.chunk_shape)
        strides = strides_of(grid.chunk_shape)
        length = sum((size - 1) * stride for size, stride in zip(box_in_chunk.shape, strides, strict=True))
        straight = None
        if contiguous and target.flags.c_contiguous and not self._converts:
            straight = target.reshape(-1).view(np.uint8).data
        return _CopyRegion(box_in_chunk, first * itemsize, (first + length + 1) * itemsize, target, straight)

    def _run(self, reads: Sequence[_ChunkRead]) -> None:
        array, leaf, root = self._request.array, self._request.leaf, self._reader.root
        location = '' if self._chunks.file else array.location
        with (
            foreign_errors(f'{leaf} ({os.path.join(root, array.location)})'),
            ChunkFiles(root, location, leaf, follow_links=self._reader.follow_links) as files,
        ):
            opened: collections.deque[tuple[ChunkFile, _ChunkRead]] = collections.deque()
            try:
                for read in reads:
                    if len(opened) == _AHEAD:
                        self._read_first(opened)
                    fd = files.open_chunk(read.name, self._chunks.file_bytes)
                    opened.append((ChunkFile(fd, files.path(read.name), leaf, self._chunks.offset), read))
                    opened[-1][0].announce(self._blocks.offset(read.start), self._blocks.offset(read.stop))
                while opened:
                    self._read_first(opened)
            finally:
                for file, _ in opened:
                    file.close()

    def _read_first(self, opened: collections.deque[tuple[ChunkFile, _ChunkRead]]) -> None:
        file, read = opened[0]
        if self._checks is None:
            self._read(file, read)
        else:
            self._read_checked(file, read, self._checks)
        opened.popleft()
        file.close()

    def _read(self, file: ChunkFile, read: _ChunkRead) -> None:
        start, stop = self._blocks.offset(read.start), self._blocks.offset(read.stop)
        scattered: list[_CopyRegion] = []
        for region in read.regions:
            if region.straight is None:
                scattered.append(region)
                continue
            first, last = max(start, region.first), min(stop, region.last)
            file.read(region.straight[first - region.first : last - region.first], first)
        for index in range(read.start, read.stop) if scattered else ():
            self._read_block(file, index, scattered)

    def _read_checked(self, file: ChunkFile, read: _ChunkRead, checks: ChecksumVerifier) -> None:
        """Reads a whole chunk in blocks, each of which is hashed while it is in the processor's cache."""
        state = xxhash.xxh3_64()
        for index in range(read.start, read.stop):
            start, stop = self._blocks.offset(index), self._blocks.offset(index + 1)
            direct = next((region for region in read.regions if region.takes(start, stop)), None)
            if direct is None or direct.straight is None:
                into = self._reader.scratch()[: stop - start].data
            else:
                into = direct.straight[start - direct.first : stop - direct.first]
            file.read(into, start)
            state.update(into)
            others = [region for region in read.regions if region is not direct]
            self._hand_out(index, into, self._touching(index, others))
        name = f'{self._request.array.location}/{read.name}'
        checks.compare(name, self._request.leaf, (self._chunks.chunk_bytes, state.hexdigest()))

    def _read_block(self, file: ChunkFile, index: int, regions: Sequence[_CopyRegion]) -> None:
        found = self._touching(index, regions)
        if found and self._scatters:
            self._scatter(file, found)
        elif found:
            self._copy(file, index, found)

    def _touching(self, index: int, regions: Sequence[_CopyRegion]) -> list[tuple[_CopyRegion, Box]]:
        """The regions that overlap a block, each with the overlap in the chunk's coordinates."""
        if not regions:
            return []
        box = self._blocks.box(index)
        return [(region, both) for region in regions if not (both := region.box.intersect(box)).is_empty]

    def _scatter(self, file: ChunkFile, found: Sequence[tuple[_CopyRegion, Box]]) -> None:
        """Reads runs directly into their buffers; runs that are adjacent in the file are read in one call."""
        itemsize = self._chunks.itemsize
        strides = strides_of(self._chunks.grid.chunk_shape, itemsize)
        offsets, places, lengths = [], [], []
        for region, both in found:
            target = region.target[(..., *both.relative_to(region.box).slices)]
            first = sum(start * stride for (start, _), stride in zip(both, strides, strict=True))
            here, length = runs_in(target.shape, strides, itemsize, first)
            there, other = runs_in(target.shape, target.strides, itemsize, target.ctypes.data)
            shorter = min(length, other)
            offsets.append(_split(here, length, shorter))
            places.append(_split(there, other, shorter))
            lengths.append(np.full(len(offsets[-1]), shorter))
        order = np.argsort(np.concatenate(offsets), kind='stable')
        offset, place, length = (np.concatenate(each)[order] for each in (offsets, places, lengths))
        breaks = np.flatnonzero(offset[1:] != offset[:-1] + length[:-1]) + 1
        for first, last in itertools.pairwise((0, *breaks.tolist(), len(offset))):
            file.read_runs(int(offset[first]), place[first:last], length[first:last])

    def _copy(self, file: ChunkFile, index: int, found: Sequence[tuple[_CopyRegion, Box]]) -> None:
        """Reads a block into the scratch and copies it to the regions."""
        start, stop = self._blocks.offset(index), self._blocks.offset(index + 1)
        scratch = self._reader.scratch()[: stop - start].data
        file.read(scratch, start)
        self._hand_out(index, scratch, found)

    def _hand_out(self, index: int, data: memoryview, found: Sequence[tuple[_CopyRegion, Box]]) -> None:
        """Copies a block to the regions that overlap it."""
        if not found:
            return
        box = self._blocks.box(index)
        block = np.frombuffer(data, self._dtype).reshape(box.shape)
        if self._converts:
            block = from_stored(block, self._request.dtype)
        for region, both in found:
            source = block[(..., *both.relative_to(box).slices)]
            target = region.target[(..., *both.relative_to(region.box).slices)]
            if self._converts:
                np.copyto(target, source, casting='unsafe')
            else:
                word = _WORDS.get(self._dtype.itemsize, self._dtype)
                np.copyto(target.view(word), source.view(word))


def _split(starts: np.ndarray, length: int, shorter: int) -> np.ndarray:
    """The starts of the runs when each is divided into shorter ones."""
    return starts if length == shorter else (starts[:, None] + np.arange(0, length, shorter)).reshape(-1)
