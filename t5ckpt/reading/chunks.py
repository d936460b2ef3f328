"""Reads the chunks of an array into the boxes that a caller wants, on a disk, in memory and in a bucket.

A chunk is a file of zarr v2, or a range of bytes of a tensor file. There are two ways to read one:

- **whole**, if it is encoded, or if it has a checksum and at least half of it is wanted (with ``verify='full'``: any of it). It
  is fetched once, hashed on the way, compared, and decoded.
- **in ranges of bytes** otherwise. Rows with few bytes between them are read at once, since a request takes as long as the
  transfer of these bytes.

In both, bytes that are contiguous in a buffer are read straight into it, and the others are copied from a block of 1 MiB that
fits a core's cache. Each byte is read once, however many boxes overlap it. Values are cast on the way if the buffers have another
dtype than the leaf.

Notes: no memory except the buffers, a block for each thread and, for encoded chunks, one chunk per core; in a bucket the bytes of
the requests in flight.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import xxhash

from t5ckpt.core.text import CURE_OF_DAMAGE
from t5ckpt.core.thread_pool import Pool
from t5ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, NotEnoughMemoryError, UnsupportedFormatError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box, ChunkGrid, ChunkIndex, strides_of
from t5ckpt.format.codecs import WORDS, decode
from t5ckpt.format.dtypes import cast, from_stored, is_stored_by_value
from t5ckpt.format.file_checksums import entry_of, size_text
from t5ckpt.format.zarray import ChunkLayout
from t5ckpt.reading.aligned_memory import ALIGNMENT, aligned_empty
from t5ckpt.reading.checkpoint_files import BLOCK_BYTES, CheckpointFiles, OpenFile
from t5ckpt.reading.mapped import FileMap
from t5ckpt.reading.size_limits import check_chunk, check_memory

Task = Callable[[], None]
# Of an array with a fill value, more chunks are looked up in one listing, since a task for each absent one takes 800 bytes.
_MANY_CHUNKS = 1000


class OpenArray(abc.ABC):
    """An opened array.

    Attributes:
      leaf: the array as the manifest describes it.
      grid: of its chunks.
      file_bytes: of the file of each chunk; None if it does not follow from the metadata.
      is_filled: whether an absent chunk has the fill value of the array.
    """

    grid: ChunkGrid
    file_bytes: int | None
    is_filled: bool

    def __init__(self, leaf: StoredArray, name: str, files: CheckpointFiles):
        """Takes the array, the name of the leaf for errors, and the files of the checkpoint."""
        self.leaf = leaf
        self._name = name
        self._files = files

    @abc.abstractmethod
    def tasks(self, buffers: Mapping[Box, np.ndarray]) -> list[Task]:
        """The tasks that fill C-order buffers with boxes of the array, in the leaf's dtype or in the one to cast to."""

    def read(self, picked: Sequence[range]) -> np.ndarray:
        """Reads the elements at ascending positions on each axis, in the leaf's dtype."""
        if all(axis.step == 1 for axis in picked):
            return self._read_box(Box([(axis.start, axis.stop) for axis in picked]))
        # In parts, since the box may be much larger than the elements that are wanted of it.
        out = self._new([*map(len, picked)])
        for cuts in itertools.product(*map(_in_chunks, picked, self.grid.chunk_shape)):
            wanted = [axis[cut] for axis, cut in zip(picked, cuts, strict=True)]
            values = self._read_box(Box([(axis[0], axis[-1] + 1) for axis in wanted]))
            out[cuts] = values[tuple([slice(None, None, axis.step) for axis in wanted])]
        return out

    def _read_box(self, box: Box) -> np.ndarray:
        out = self._new(box.shape)
        run_tasks(self.tasks({box: out}), self._files.threads)
        return out

    def _where(self) -> str:
        return self._files.where(self.leaf.location, self._name)

    def _new(self, shape: Sequence[int]) -> np.ndarray:
        check_memory(math.prod(shape) * self.leaf.dtype.itemsize, self._where())
        return aligned_empty(shape, self.leaf.dtype)


def _in_chunks(axis: range, size: int) -> Iterator[slice]:
    """The parts of the positions on an axis that are in different chunks."""
    start = 0
    while start < len(axis):
        stop = bisect_left(axis, (axis[start] // size + 1) * size, start)
        yield slice(start, stop)
        start = stop


def run_tasks(tasks: Sequence[Task], threads: int) -> None:
    """Runs tasks in threads; one task in the caller's."""
    if len(tasks) <= 1:
        for task in tasks:
            task()
        return
    with Pool(min(threads, len(tasks))) as pool:
        for future in [pool.submit(task) for task in tasks]:
            future.result()


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """The elements that a buffer gets of a chunk, in a chunk whose last axis varies fastest.

    Attributes:
      box: of these elements, in the chunk's coordinates.
      view: the view of the buffer for them.
      start: the first byte of the box in the chunk.
      straight: the bytes of ``view``, if they equal as many bytes of the chunk from ``start``.
    """

    box: Box
    view: np.ndarray
    start: int
    straight: memoryview | None


class ChunkedArray(OpenArray):
    """An array whose chunks are files of zarr v2, or a range of bytes of one file."""

    def __init__(
        self, leaf: StoredArray, name: str, files: CheckpointFiles, layout: ChunkLayout, *, verifies_all: bool
    ):
        """Takes what :class:`OpenArray` does, the layout, and whether also chunks of which little is wanted are verified."""
        super().__init__(leaf, name, files)
        self.grid, self.file_bytes, self.is_filled = layout.grid, layout.file_bytes, layout.fill is not None
        self._layout = layout
        self._verifies_all = verifies_all
        shape = layout.grid.chunk_shape
        self._shape = shape[::-1] if layout.is_fortran else shape
        # Whether the bits of an element are those on disk.
        self._has_bits = layout.dtype.isnative and (leaf.dtype == leaf.disk_dtype or not is_stored_by_value(leaf.dtype))

    def tasks(self, buffers: Mapping[Box, np.ndarray]) -> list[Task]:
        """The tasks: one for each chunk that is read whole and each range of others, or for several small ones."""
        boxes: dict[ChunkIndex, list[Box]] = {}
        is_listed = self.is_filled and sum(map(self.grid.count, buffers)) > _MANY_CHUNKS
        listed = self._listed() if is_listed else ()
        for box, buffer in buffers.items():
            chunks = self.grid.chunks_of(box)
            if is_listed:
                buffer[...] = self._converted(np.asarray(self._layout.fill), buffer.dtype)
                ranges = self.grid.ranges(box)
                chunks = [index for index in listed if all(map(operator.contains, ranges, index))]
            for index in chunks:
                boxes.setdefault(index, []).append(box)
        tasks: list[Task] = []
        batch: list[Task] = []
        size = 0
        for index, chunk_boxes in boxes.items():
            wanted = {box: buffers[box] for box in chunk_boxes}
            for nbytes, region in self._parts(index, chunk_boxes):
                batch.append(functools.partial(self._read, index, wanted, region))
                size += nbytes
                if size >= self._files.task_bytes:
                    tasks.append(functools.partial(_run, batch))
                    batch, size = [], 0
        return [*tasks, functools.partial(_run, batch)] if batch else tasks

    def _listed(self) -> list[ChunkIndex]:
        """The chunks that are there."""
        key = self._files.key(self.leaf.location)
        names = [name[len(key) + 1 :] for name, _ in self._files.storage.walk(key)]
        return [index for index in map(self.grid.index, names) if index is not None]

    def map_boxes(self, boxes: Sequence[Box]) -> dict[Box, np.ndarray] | None:
        """Arrays on private maps of chunks, by box, in the leaf's dtype; None if a box cannot be mapped.

        Raises:
          CorruptCheckpointError: a chunk is missing or has another size; it is verified if all chunks are.
        """
        layout, mapped = self._layout, dict[Box, np.ndarray]()
        if layout.codecs or not self._has_bits or layout.is_fortran or self.is_filled:
            return None
        files: dict[str, np.ndarray] = {}
        for box in boxes:
            if box.is_empty or self.grid.count(box) > 1:
                return None
            index = next(self.grid.chunks_of(box))
            in_chunk = self._in_chunk(box, index)
            start, contiguous = range_of(in_chunk, self._shape)
            start *= layout.dtype.itemsize
            if not contiguous or start % ALIGNMENT:
                return None
            file = self._file(index)
            if file not in files:
                found = self._map(file)
                if found is None:
                    return None
                files[file] = found
            mapped[box] = np.ndarray(box.shape, self.leaf.dtype, files[file], start)
        return mapped

    def _map(self, file: str) -> np.ndarray | None:
        try:
            with self._files.opened(file, self._name) as opened:
                self._check_size(opened, file)
                if self._verifies_all and self._files.checksums is not None:
                    self._files.verify(file, self._name)
                return FileMap.of(opened.descriptor, self._layout.chunk_bytes)
        except CheckpointNotFoundError as error:
            raise self._files.missing(file, self._name) from error

    def _file(self, index: ChunkIndex) -> str:
        return self.leaf.location if self.leaf.driver == 'bytes' else f'{self.leaf.location}/{self.grid.key(index)}'

    def _check_size(self, opened: OpenFile, file: str) -> None:
        if opened.size is not None and opened.size != self.file_bytes:
            text = size_text(opened.size, self.file_bytes or 0)
            raise CorruptCheckpointError(
                f'{self._files.where(file, self._name)} {text}. It is truncated or damaged. {CURE_OF_DAMAGE}'
            )

    def _parts(self, index: ChunkIndex, boxes: Sequence[Box]) -> Iterator[tuple[int, Box | None]]:
        """The parts of a chunk that are read at once: the bytes of each, and its region, or None for the whole chunk."""
        files, layout, chunk = self._files, self._layout, self.grid.box(index)
        inside = [box.intersect(chunk) for box in boxes]
        covered = sum(box.size for box in inside)
        if layout.codecs or (files.checksums is not None and (self._verifies_all or covered * 2 >= chunk.size)):
            yield layout.chunk_bytes, None
            return
        regions = [self._in_chunk(box, index) for box in inside]
        around = Box([(min(a for a, _ in axis), max(b for _, b in axis)) for axis in zip(*regions, strict=True)])
        sizes = max(files.block_bytes, files.task_bytes), max(files.gap_bytes, files.task_bytes)
        for region in [around] if covered * 2 >= around.size else regions:
            for part in blocks_of(self._shape, region, layout.dtype.itemsize, *sizes):
                yield part.size * layout.dtype.itemsize, part

    def _in_chunk(self, box: Box, index: ChunkIndex) -> Box:
        relative = box.relative_to(self.grid.full_box(index))
        return Box(relative[::-1]) if self._layout.is_fortran else relative

    def _read(self, index: ChunkIndex, buffers: Mapping[Box, np.ndarray], part: Box | None) -> None:
        regions = [self._region(index, box, buffer) for box, buffer in buffers.items()]
        file = self._file(index)
        try:
            with self._files.opened(file, self._name, whole=part is None) as opened:
                if self._layout.codecs:
                    self._read_encoded(opened, file, regions)
                else:
                    self._read_plain(opened, file, regions, part)
        except CheckpointNotFoundError as error:
            if not self.is_filled:
                raise self._files.missing(file, self._name) from error
            for region in regions:
                region.view[...] = self._converted(np.asarray(self._layout.fill), region.view.dtype)

    def _region(self, index: ChunkIndex, box: Box, buffer: np.ndarray) -> Region:
        overlap = box.intersect(self.grid.box(index))
        view = buffer[(..., *overlap.relative_to(box).slices)]
        in_chunk = self._in_chunk(overlap, index)
        view = view.T if self._layout.is_fortran else view
        start, contiguous = range_of(in_chunk, self._shape)
        straight = None
        if contiguous and self._has_bits and buffer.dtype == self.leaf.dtype and view.flags.c_contiguous:
            straight = view.reshape(-1).view(np.uint8).data
        return Region(in_chunk, view, start * self._layout.dtype.itemsize, straight)

    def _read_plain(self, opened: OpenFile, file: str, regions: Sequence[Region], part: Box | None) -> None:
        self._check_size(opened, file)
        layout, itemsize = self._layout, self._layout.dtype.itemsize
        sizes = (BLOCK_BYTES, 0) if part is None else (self._files.block_bytes, self._files.gap_bytes)
        state = xxhash.xxh3_64()
        steps = strides_of(self._shape, itemsize)
        for block in blocks_of(self._shape, Box.whole(self._shape) if part is None else part, itemsize, *sizes):
            start = sum(first * step for (first, _), step in zip(block, steps, strict=True))
            stop = sum((end - 1) * step for (_, end), step in zip(block, steps, strict=True)) + itemsize
            into, others = _straight(regions, start, stop)
            data = opened.read(layout.offset + start, layout.offset + stop, into)
            if part is None:
                state.update(data)
            if others:
                self._copy(np.ndarray(block.shape, layout.dtype, data, strides=steps), block, others)
        if part is None:
            self._files.compare(file, self._name, (layout.chunk_bytes, state.hexdigest()))

    def _read_encoded(self, opened: OpenFile, file: str, regions: Sequence[Region]) -> None:
        size, chunk_bytes = opened.size or 0, self._layout.chunk_bytes
        where = self._files.where(file, self._name)
        check_chunk(chunk_bytes, lambda: size, where)
        into, others = _straight(regions, 0, chunk_bytes)
        # Those of a bucket are in memory.
        held = size if opened.descriptor >= 0 else 0
        try:
            with self._files.memory.taken(held + (chunk_bytes if into is None else 0)) as memory:
                encoded = opened.read(0, size, memory[:held] if held else None)
                self._files.compare(file, self._name, entry_of(encoded))
                values = memory[held:] if into is None else into
                try:
                    decode(encoded, self._layout.codecs, values)
                except UnsupportedFormatError as error:
                    raise UnsupportedFormatError(f'{where}: {error}.') from error
                except ValueError as error:
                    text = f'{where} cannot be decoded: {error}. It is damaged. {CURE_OF_DAMAGE}'
                    raise CorruptCheckpointError(text) from error
                whole = Box.whole(self._shape)
                self._copy(np.frombuffer(values, self._layout.dtype).reshape(self._shape), whole, others)
        except MemoryError as error:
            raise NotEnoughMemoryError(
                f'{where}: memory for {chunk_bytes:,} bytes of values cannot be allocated. Raise the limit of this process.'
            ) from error

    def _copy(self, values: np.ndarray, box: Box, regions: Iterable[Region]) -> None:
        """Copies the values of a box of the chunk to the regions that overlap it."""
        for region in regions:
            overlap = region.box.intersect(box)
            if overlap.is_empty:
                continue
            source = values[(..., *overlap.relative_to(box).slices)]
            into = region.view[(..., *overlap.relative_to(region.box).slices)]
            if self._has_bits and into.dtype == self.leaf.dtype:
                # NumPy copies integers faster than extension dtypes.
                word = WORDS.get(into.itemsize, self.leaf.disk_dtype)
                np.copyto(into.view(word), source.view(word))
            else:
                into[...] = self._converted(source, into.dtype)

    def _converted(self, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
        native = values.astype(self.leaf.disk_dtype, copy=False)
        return cast(from_stored(native, self.leaf.dtype), dtype, self._name)


def _run(tasks: Iterable[Task]) -> None:
    for task in tasks:
        task()


def _straight(regions: Sequence[Region], start: int, stop: int) -> tuple[memoryview | None, Sequence[Region]]:
    """The memory of the first region that these bytes of the chunk can be read into, and the other regions."""
    for position, region in enumerate(regions):
        first, last = start - region.start, stop - region.start
        if region.straight is not None and first >= 0 and last <= len(region.straight):
            return region.straight[first:last], [*regions[:position], *regions[position + 1 :]]
    return None, regions


def range_of(box: Box, shape: Sequence[int]) -> tuple[int, bool]:
    """The offset of a box in a C-order array, in elements, and whether the box is contiguous."""
    offset, stride, cut, contiguous = 0, 1, False, True
    for (start, stop), size in zip(reversed(box), reversed(shape), strict=True):
        length = stop - start
        contiguous = contiguous and (length == 1 or not cut)
        cut = cut or length < size
        offset += start * stride
        stride *= size
    return offset, contiguous


def blocks_of(shape: Sequence[int], region: Box, itemsize: int, block_bytes: int, gap_bytes: int) -> Iterator[Box]:
    """Cuts a region of a C-order array into boxes, in their order in the file.

    Each has about ``block_bytes`` from its first to its last byte, and no more than ``gap_bytes`` between two of its rows.
    """
    axis = next((axis for axis, (start, stop) in enumerate(region) if stop - start > 1), None)
    if axis is None:
        yield region
        return
    start, stop = region[axis]
    step, *steps = strides_of(shape, itemsize)[axis:]
    inner = region[axis + 1 :]
    span = sum((b - a - 1) * stride for (a, b), stride in zip(inner, steps, strict=True)) + itemsize
    is_split = step - span > gap_bytes
    rows = 1 if is_split else max(1, block_bytes // step)
    for row in range(start, stop, rows):
        part = Box([*region[:axis], (row, min(stop, row + rows)), *inner])
        if is_split or span > block_bytes:
            yield from blocks_of(shape, part, itemsize, block_bytes, gap_bytes)
        else:
            yield part
