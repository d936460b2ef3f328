"""Reading chunk files straight into the buffers that wait for them, without TensorStore.

A chunk of plain bytes (``_local.py``) needs no decoding. TensorStore still reads it into memory of its own first, and
on a machine whose memory is dear to touch for the first time that alone halves the speed. Here a thread reads

- bytes that lie one after another both in the file and in the buffer: directly to where they belong;
- a chunk whose rows are cut up among the devices of another sharding: with one system call for many rows, each to the
  buffer that it belongs to (``_scatter.py``);
- the rest (runs of a few bytes, a dtype to convert): block by block into a scratch of 1 MiB that stays in the processor's
  cache, and from there to every buffer that wants some of it.

So each byte is read once however many devices want parts of its chunk, and the only memory that is touched besides the
buffers is the scratch.

Notes: one thread per 8 MiB of a file. Files are told to the kernel before they are read (``posix_fadvise``), which
keeps a disk busy when nothing is cached.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from t5ckpt._chunks import Box
from t5ckpt._dtypes import from_stored
from t5ckpt._local import ChunkFiles, Grid, grid_of, has_plain_chunks, range_of
from t5ckpt._scatter import can_scatter, read_runs, runs_in
from t5ckpt._specs import StoredArray
from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.storage import foreign_errors

__all__ = ['DirectReader', 'Limits', 'Wanted']

# Beyond it the list of chunks would itself be large; TensorStore works through such a grid piece by piece.
_MAX_CELLS = 2**14
# Elements are moved as words, which numpy copies faster than the dtypes that it does not know itself.
_WORDS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}

Task = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes in bytes.

    Attributes:
      task: what one task reads at least.
      scratch: what is copied at once; fits a core's cache.
      scatter: what is read at once to many places.
      min_run: shorter runs are copied, since each place costs the kernel as much as to copy some hundred bytes.
    """

    task: int = 8 * 2**20
    scratch: int = 2**20
    scatter: int = 8 * 2**20
    min_run: int = 512


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

    def __init__(self, root: str, limits: Limits | None = None):
        """Takes the checkpoint's directory."""
        self._root = root
        self._limits = Limits() if limits is None else limits
        self._local = threading.local()

    def grid(self, array: StoredArray, leaf: str) -> Grid | None:
        """The chunk grid of an array that can be read here; None for any other.

        Raises:
          CorruptCheckpointError: its ``.zarray`` is no regular file.
        """
        if not has_plain_chunks(array):
            return None
        try:
            with ChunkFiles(self._root, array.location, leaf, follow_links=True) as files:
                return grid_of(files.metadata(), array)
        except OSError:
            # TensorStore finds the words for what is wrong.
            return None

    def tasks(self, wanted: Wanted, grid: Grid) -> list[Task] | None:
        """Cuts a read into tasks for threads; the buffers are filled when all are done. None: too many chunks."""
        if sum(math.prod(map(len, _cells(grid, box))) for box in wanted.buffers) > _MAX_CELLS:
            return None
        return _ArrayRead(self._root, wanted, grid, self._limits, self._scratch).tasks()

    def _scratch(self) -> np.ndarray:
        if not hasattr(self._local, 'scratch'):
            self._local.scratch = np.empty(self._limits.scratch, np.uint8)
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


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Blocks ``start`` to ``stop`` of one chunk file, and the parts that lie there."""

    name: str
    start: int
    stop: int
    parts: list[_Part]


class _ArrayRead:
    """The tasks of one array."""

    def __init__(self, root: str, wanted: Wanted, grid: Grid, limits: Limits, scratch: Callable[[], np.ndarray]):
        self._root = root
        self._wanted = wanted
        self._grid = grid
        self._limits = limits
        self._scratch = scratch
        array = wanted.array
        self._dtype = array.dtype
        self._converts = any(buffer.dtype != array.dtype for buffer in wanted.buffers.values())
        self._cells = self._parts()
        self._scatters = can_scatter() and not self._converts and self._shortest_run() >= limits.min_run
        self._blocks = _Blocks(grid, limits.scatter if self._scatters else limits.scratch)

    def _shortest_run(self) -> int:
        parts = (part for parts in self._cells.values() for part in parts if part.straight is None)
        return min((part.target.shape[-1] * self._grid.itemsize for part in parts), default=0)

    def tasks(self) -> list[Task]:
        """All of them; see ``DirectReader.tasks``."""
        tasks: list[Task] = []
        batch: list[_Piece] = []
        size = 0
        for cell, parts in self._cells.items():
            span = min(part.first for part in parts), max(part.last for part in parts)
            for start, stop in self._blocks.ranges(self._limits.task, *span):
                first, last = self._blocks.offset(start), self._blocks.offset(stop)
                touching = [part for part in parts if part.first < last and first < part.last]
                if not touching:
                    continue
                batch.append(_Piece(self._grid.name(cell), start, stop, touching))
                size += last - first
                if size >= self._limits.task:
                    tasks.append(functools.partial(self._run, batch))
                    batch, size = [], 0
        if batch:
            tasks.append(functools.partial(self._run, batch))
        return tasks

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
        array, leaf = self._wanted.array, self._wanted.leaf
        with (
            foreign_errors(f'{leaf} ({os.path.join(self._root, array.location)})'),
            ChunkFiles(self._root, array.location, leaf, follow_links=True) as files,
        ):
            for piece in pieces:
                fd = files.open_chunk(piece.name, self._grid.cell_bytes)
                try:
                    self._read(_File(fd, files.path(piece.name), leaf), piece)
                finally:
                    os.close(fd)

    def _read(self, file: _File, piece: _Piece) -> None:
        start, stop = self._blocks.offset(piece.start), self._blocks.offset(piece.stop)
        file.announce(start, stop)
        scattered: list[_Part] = []
        for part in piece.parts:
            if part.straight is None:
                scattered.append(part)
                continue
            first, last = max(start, part.first), min(stop, part.last)
            file.read(part.straight[first - part.first : last - part.first], first)
        for index in range(piece.start, piece.stop) if scattered else ():
            self._read_block(file, index, scattered)

    def _read_block(self, file: _File, index: int, parts: Sequence[_Part]) -> None:
        box = self._blocks.box(index)
        found = [(part, both) for part in parts if (both := _overlap(part.within, box)) is not None]
        if found and self._scatters:
            self._scatter(file, found)
        elif found:
            self._copy(file, index, found)

    def _scatter(self, file: _File, found: Sequence[tuple[_Part, Box]]) -> None:
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

    def _copy(self, file: _File, index: int, found: Sequence[tuple[_Part, Box]]) -> None:
        """Reads a block into the scratch and copies what is wanted of it."""
        box, start, stop = self._blocks.box(index), self._blocks.offset(index), self._blocks.offset(index + 1)
        scratch = self._scratch()[: stop - start]
        file.read(scratch.data, start)
        block = scratch.view(self._dtype).reshape([b - a for a, b in box])
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


class _Blocks:
    """The bytes of a chunk in blocks that are boxes, too: some rows of one axis, whole in all later ones."""

    def __init__(self, grid: Grid, limit: int):
        self._chunks = grid.chunks or (1,)
        self._is_scalar = not grid.chunks
        axis, row = len(self._chunks) - 1, grid.itemsize
        while axis > 0 and row * self._chunks[axis] <= limit:
            row *= self._chunks[axis]
            axis -= 1
        self._axis = axis
        self._row = row
        self._rows = min(self._chunks[axis], limit // row)
        self._per_lead = -(-self._chunks[axis] // self._rows)
        self._count = math.prod(self._chunks[:axis]) * self._per_lead

    def ranges(self, size: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Ranges of blocks of about ``size`` bytes that hold the bytes from ``first`` to ``last``.

        A chunk may claim to be larger than anything, so its blocks are not counted one by one.
        """
        step = max(1, size // (self._rows * self._row))
        begin, end = self._block_at(first), self._block_at(last - 1) + 1
        return ((start, min(start + step, end)) for start in range(begin, end, step))

    def _block_at(self, offset: int) -> int:
        lead, row = divmod(offset // self._row, self._chunks[self._axis])
        return lead * self._per_lead + row // self._rows

    def offset(self, index: int) -> int:
        """Where a block begins in the file, in bytes."""
        lead, rest = divmod(index, self._per_lead)
        return (lead * self._chunks[self._axis] + rest * self._rows) * self._row

    def box(self, index: int) -> Box:
        """A block in the chunk's coordinates."""
        if self._is_scalar:
            return ()
        lead, rest = divmod(index, self._per_lead)
        rows = (rest * self._rows, min((rest + 1) * self._rows, self._chunks[self._axis]))
        before: list[tuple[int, int]] = []
        for size in reversed(self._chunks[: self._axis]):
            lead, position = divmod(lead, size)
            before.append((position, position + 1))
        return (*reversed(before), rows, *((0, size) for size in self._chunks[self._axis + 1 :]))


@dataclasses.dataclass(frozen=True)
class _File:
    """An open chunk file."""

    fd: int
    path: str
    leaf: str

    def announce(self, start: int, stop: int) -> None:
        """Has the kernel begin to read; where it cannot be asked to, it reads when it must."""
        if hasattr(os, 'posix_fadvise'):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.fd, start, stop - start, os.POSIX_FADV_WILLNEED)

    def read(self, into: memoryview, offset: int) -> None:
        """Fills a buffer."""
        while into:
            count = os.preadv(self.fd, [into], offset)
            if count == 0:
                raise self._cut_off()
            offset, into = offset + count, into[count:]

    def read_runs(self, offset: int, places: np.ndarray, lengths: np.ndarray) -> None:
        """Fills many places."""
        try:
            read_runs(self.fd, offset, places, lengths)
        except EOFError as error:
            raise self._cut_off() from error

    def _cut_off(self) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f'{self.leaf}: {self.path} became shorter while it was read. Restore an older step, or copy the checkpoint again.'
        )


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
