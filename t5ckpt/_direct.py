"""Reading chunk files straight into the buffers that wait for them, without TensorStore.

A chunk of plain bytes (``_local.py``) needs no decoding. TensorStore still reads it into memory of its own first, and
on a machine whose memory is dear to touch for the first time that alone halves the speed. Here a thread reads

- bytes that lie one after another both in the file and in the buffer: directly to where they belong;
- a chunk whose rows are cut up among the devices of another sharding: with one system call for many rows, each to the
  buffer that it belongs to (``_scatter.py``);
- the rest (runs of a few bytes, a dtype to convert): block by block into a scratch of 1 MiB that stays in the processor's
  cache, and from there to every buffer that wants some of it.

With checksums to compare (``_checks.py``) a thread reads a whole chunk file, block by block, hashes each block while it is in
the cache, and copies it to whoever wants some of it and did not get it directly.

So each byte is read once however many devices want parts of its chunk, and the only memory that is touched besides the
buffers is the scratch.

Notes: one thread per 8 MiB of a file. The kernel is told of a few files ahead of the one that is read (``posix_fadvise``),
which keeps a disk busy when nothing is cached.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import xxhash

from t5ckpt._bands import Blocks, Limits
from t5ckpt._checks import Checks
from t5ckpt._chunk_file import ChunkFile
from t5ckpt._chunks import Box
from t5ckpt._digest import digest
from t5ckpt._dtypes import from_stored
from t5ckpt._local import ChunkFiles, Grid, RangeGrid, grid_of, has_plain_chunks, range_grid, range_of
from t5ckpt._scatter import can_scatter, runs_in
from t5ckpt._specs import StoredArray
from t5ckpt.storage import foreign_errors

__all__ = ['DirectReader', 'Limits', 'Wanted']

# Beyond it the list of chunks would itself be large; TensorStore works through such a grid piece by piece.
_MAX_CELLS = 2**14
# Files of a task that are open at once, of which the kernel reads those behind the first.
_AHEAD = 4
# Elements are moved as words, which numpy copies faster than the dtypes that it does not know itself.
_WORDS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}

Task = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is read of one array.

    Attributes:
      array: what the manifest says of it.
      leaf: its name, for errors.
      dtype: the leaf's, which ``array.dtype`` may only stand for (``_dtypes.from_stored``).
      buffers: C-order arrays of the boxes' shapes, all in ``array.dtype`` or all in the dtype to convert to.
    """

    array: StoredArray
    leaf: str
    dtype: np.dtype
    buffers: Mapping[Box, np.ndarray]


class DirectReader:
    """Reads the plain arrays of one checkpoint that lies in a local directory. Safe from any thread."""

    def __init__(
        self, root: str, limits: Limits | None = None, *, checks: Checks | None = None, follow_links: bool = False
    ):
        """Takes the checkpoint's directory; with ``checks`` chunks are read whole and their checksums compared."""
        self.root = root
        self.limits = Limits() if limits is None else limits
        self.checks = checks
        self.follow_links = follow_links
        self._local = threading.local()

    def grid(self, array: StoredArray, leaf: str) -> Grid | None:
        """The chunk grid of an array that can be read here; None for any other.

        Raises:
          CorruptCheckpointError: its ``.zarray`` is no regular file.
        """
        if array.container == 'file':
            return range_grid(array)
        if not has_plain_chunks(array):
            return None
        try:
            with ChunkFiles(self.root, array.location, leaf, follow_links=self.follow_links) as files:
                text = files.metadata()
        except OSError:
            # TensorStore finds the words for what is wrong.
            return None
        if self.checks is not None:
            self.checks.compare(f'{array.location}/.zarray', leaf, (len(text), digest(text)))
        return grid_of(text, array)

    def tasks(self, wanted: Wanted, grid: Grid) -> list[Task] | None:
        """Cuts a read into tasks for threads; the buffers are filled when all are done. None: too many chunks."""
        if sum(math.prod(map(len, _cells(grid, box))) for box in wanted.buffers) > _MAX_CELLS:
            return None
        return _ArrayRead(self, wanted, grid).tasks()

    def scratch(self) -> np.ndarray:
        """Memory of this thread, which the next read overwrites."""
        if not hasattr(self._local, 'scratch'):
            self._local.scratch = np.empty(self.limits.scratch, np.uint8)
        return self._local.scratch


@dataclasses.dataclass(frozen=True)
class _Part:
    """What one buffer takes from one chunk.

    Attributes:
      within: where, in the chunk's coordinates.
      first, last: bytes of the chunk from the first element to the end of the last.
      target: the view of the buffer that takes it.
      straight: the bytes of ``target``, if they are the bytes from ``first`` to ``last``.
    """

    within: Box
    first: int
    last: int
    target: np.ndarray
    straight: memoryview | None

    def takes(self, start: int, stop: int) -> bool:
        """Whether these bytes of the chunk can be read to where they belong."""
        return self.straight is not None and self.first <= start and stop <= self.last


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Blocks ``start`` to ``stop`` of one chunk file, and the parts that lie there."""

    name: str
    start: int
    stop: int
    parts: list[_Part]


class _ArrayRead:
    """The tasks of one array."""

    def __init__(self, reader: DirectReader, wanted: Wanted, grid: Grid):
        self._reader = reader
        self._wanted = wanted
        self._grid = grid
        array = wanted.array
        self._dtype = array.dtype
        self._converts = any(buffer.dtype != array.dtype for buffer in wanted.buffers.values())
        self._cells = self._parts()
        passing = reader.checks is None or not reader.checks.in_passing or self._takes_whole_chunks()
        self._checks = reader.checks if passing else None
        scatters = can_scatter() and self._checks is None and not self._converts
        self._scatters = scatters and self._shortest_run() >= reader.limits.min_run
        self._blocks = Blocks(grid, reader.limits.scatter if self._scatters else reader.limits.scratch)

    def _takes_whole_chunks(self) -> bool:
        """Whether each chunk that is touched goes to one buffer, all of it that lies inside the array."""
        for cell, parts in self._cells.items():
            ends = zip(cell, self._grid.chunks, self._wanted.array.shape, strict=True)
            inside = tuple((0, min(size, end - index * size)) for index, size, end in ends)
            if all(part.within != inside for part in parts):
                return False
        return True

    def _shortest_run(self) -> int:
        parts = (part for parts in self._cells.values() for part in parts if part.straight is None)
        return min((part.target.shape[-1] * self._grid.itemsize for part in parts), default=0)

    def tasks(self) -> list[Task]:
        """All of them; see ``DirectReader.tasks``."""
        tasks: list[Task] = []
        batch: list[_Piece] = []
        size = 0
        for cell, parts in self._cells.items():
            for start, stop in self._ranges(parts):
                first, last = self._blocks.offset(start), self._blocks.offset(stop)
                touching = [part for part in parts if part.first < last and first < part.last]
                if not touching:
                    continue
                batch.append(_Piece(self._grid.name(cell), start, stop, touching))
                size += last - first
                if size >= self._reader.limits.task:
                    tasks.append(functools.partial(self._run, batch))
                    batch, size = [], 0
        if batch:
            tasks.append(functools.partial(self._run, batch))
        return tasks

    def _ranges(self, parts: Sequence[_Part]) -> Iterable[tuple[int, int]]:
        """The blocks of a chunk that are read together: to be hashed, all of them."""
        if self._checks is not None:
            return [(0, self._blocks.count)]
        span = min(part.first for part in parts), max(part.last for part in parts)
        return self._blocks.ranges(self._reader.limits.task, *span)

    def _parts(self) -> dict[tuple[int, ...], list[_Part]]:
        """By chunk, what is wanted of it."""
        parts: dict[tuple[int, ...], list[_Part]] = {}
        for box, buffer in self._wanted.buffers.items():
            for cell in itertools.product(*_cells(self._grid, box)):
                parts.setdefault(cell, []).append(self._part(cell, box, buffer))
        return parts

    def _part(self, cell: Sequence[int], box: Box, buffer: np.ndarray) -> _Part:
        chunks, itemsize = self._grid.chunks, self._grid.itemsize
        corner = [index * size for index, size in zip(cell, chunks, strict=True)]
        both = [
            (max(start, at), min(stop, at + size)) for (start, stop), at, size in zip(box, corner, chunks, strict=True)
        ]
        within = tuple((start - at, stop - at) for (start, stop), at in zip(both, corner, strict=True))
        origin = [start for start, _ in box]
        target = buffer[(..., *(slice(a - at, b - at) for (a, b), at in zip(both, origin, strict=True)))]
        first, contiguous = range_of([slice(*ends) for ends in within], chunks)
        length = sum(
            (stop - start - 1) * stride for (start, stop), stride in zip(within, _strides(chunks), strict=True)
        )
        straight = None
        if contiguous and target.flags.c_contiguous and not self._converts:
            straight = target.reshape(-1).view(np.uint8).data
        return _Part(within, first * itemsize, (first + length + 1) * itemsize, target, straight)

    def _run(self, pieces: Sequence[_Piece]) -> None:
        array, leaf, root = self._wanted.array, self._wanted.leaf, self._reader.root
        is_range = isinstance(self._grid, RangeGrid)
        base = self._grid.base if isinstance(self._grid, RangeGrid) else 0
        location = '' if is_range else array.location
        with (
            foreign_errors(f'{leaf} ({os.path.join(root, array.location)})'),
            ChunkFiles(root, location, leaf, follow_links=self._reader.follow_links) as files,
        ):
            opened: collections.deque[tuple[ChunkFile, _Piece]] = collections.deque()
            try:
                for piece in pieces:
                    if len(opened) == _AHEAD:
                        self._read_first(opened)
                    fd = files.open_chunk(piece.name, self._grid.size_on_disk)
                    opened.append((ChunkFile(fd, files.path(piece.name), leaf, base), piece))
                    opened[-1][0].announce(self._blocks.offset(piece.start), self._blocks.offset(piece.stop))
                while opened:
                    self._read_first(opened)
            finally:
                for file, _ in opened:
                    file.close()

    def _read_first(self, opened: collections.deque[tuple[ChunkFile, _Piece]]) -> None:
        file, piece = opened[0]
        if self._checks is None:
            self._read(file, piece)
        else:
            self._read_checked(file, piece, self._checks)
        opened.popleft()
        file.close()

    def _read(self, file: ChunkFile, piece: _Piece) -> None:
        start, stop = self._blocks.offset(piece.start), self._blocks.offset(piece.stop)
        scattered: list[_Part] = []
        for part in piece.parts:
            if part.straight is None:
                scattered.append(part)
                continue
            first, last = max(start, part.first), min(stop, part.last)
            file.read(part.straight[first - part.first : last - part.first], first)
        for index in range(piece.start, piece.stop) if scattered else ():
            self._read_block(file, index, scattered)

    def _read_checked(self, file: ChunkFile, piece: _Piece, checks: Checks) -> None:
        """Reads a whole chunk in blocks, each of which is hashed while it is in the processor's cache."""
        state = xxhash.xxh3_64()
        for index in range(piece.start, piece.stop):
            start, stop = self._blocks.offset(index), self._blocks.offset(index + 1)
            direct = next((part for part in piece.parts if part.takes(start, stop)), None)
            if direct is None or direct.straight is None:
                into = self._reader.scratch()[: stop - start].data
            else:
                into = direct.straight[start - direct.first : stop - direct.first]
            file.read(into, start)
            state.update(into)
            others = [part for part in piece.parts if part is not direct]
            self._hand_out(index, into, self._touching(index, others))
        name = f'{self._wanted.array.location}/{piece.name}'
        checks.compare(name, self._wanted.leaf, (self._grid.cell_bytes, state.hexdigest()))

    def _read_block(self, file: ChunkFile, index: int, parts: Sequence[_Part]) -> None:
        found = self._touching(index, parts)
        if found and self._scatters:
            self._scatter(file, found)
        elif found:
            self._copy(file, index, found)

    def _touching(self, index: int, parts: Sequence[_Part]) -> list[tuple[_Part, Box]]:
        """The parts that want some of a block, each with what both have in common."""
        if not parts:
            return []
        box = self._blocks.box(index)
        return [(part, both) for part in parts if (both := _overlap(part.within, box)) is not None]

    def _scatter(self, file: ChunkFile, found: Sequence[tuple[_Part, Box]]) -> None:
        """Reads runs to where they belong, those that follow one another in the file in one call."""
        itemsize = self._grid.itemsize
        strides = [stride * itemsize for stride in _strides(self._grid.chunks)]
        offsets, places, lengths = [], [], []
        for part, both in found:
            target = part.target[(..., *_slices(both, part.within))]
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

    def _copy(self, file: ChunkFile, index: int, found: Sequence[tuple[_Part, Box]]) -> None:
        """Reads a block into the scratch and copies what is wanted of it."""
        start, stop = self._blocks.offset(index), self._blocks.offset(index + 1)
        scratch = self._reader.scratch()[: stop - start].data
        file.read(scratch, start)
        self._hand_out(index, scratch, found)

    def _hand_out(self, index: int, data: memoryview, found: Sequence[tuple[_Part, Box]]) -> None:
        """Copies a block to whoever wants some of it."""
        if not found:
            return
        box = self._blocks.box(index)
        block = np.frombuffer(data, self._dtype).reshape([b - a for a, b in box])
        if self._converts:
            block = from_stored(block, self._wanted.dtype)
        for part, both in found:
            source = block[(..., *_slices(both, box))]
            target = part.target[(..., *_slices(both, part.within))]
            if self._converts:
                np.copyto(target, source, casting='unsafe')
            else:
                word = _WORDS.get(self._dtype.itemsize, self._dtype)
                np.copyto(target.view(word), source.view(word))


def _cells(grid: Grid, box: Box) -> list[range]:
    """The chunks that a box touches, by axis; none for an empty box."""
    if any(start >= stop for start, stop in box):
        return [range(0)]
    return [range(start // size, -(-stop // size)) for (start, stop), size in zip(box, grid.chunks, strict=True)]


def _strides(shape: Sequence[int]) -> list[int]:
    """Elements from one index to the next, by axis, in a C-order array."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _split(starts: np.ndarray, length: int, shorter: int) -> np.ndarray:
    """Where runs begin when each is cut into shorter ones."""
    return starts if length == shorter else (starts[:, None] + np.arange(0, length, shorter)).reshape(-1)


def _overlap(a: Box, b: Box) -> Box | None:
    both = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in both) else both


def _slices(part: Box, whole: Box) -> list[slice]:
    return [slice(start - at, stop - at) for (start, stop), (at, _) in zip(part, whole, strict=True)]
