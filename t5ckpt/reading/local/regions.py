"""Computes the elements of each chunk, and their bytes, that each buffer of a read gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box, ChunkIndex, strides_of
from t5ckpt.reading.local.native_chunks import NativeChunks, range_of


@dataclasses.dataclass(frozen=True)
class ReadRequest:
    """The boxes of one array to read.

    Attributes:
      array: the array as the manifest describes it.
      name: of the leaf, for errors.
      buffers: C-order arrays of the boxes' shapes, all in ``array.disk_dtype`` or all in the dtype to convert to.
    """

    array: StoredArray
    name: str
    buffers: Mapping[Box, np.ndarray]

    @property
    def converts(self) -> bool:
        """Whether the buffers have another dtype than the file."""
        return any(buffer.dtype != self.array.disk_dtype for buffer in self.buffers.values())


@dataclasses.dataclass(frozen=True)
class Region:
    """The elements that one buffer takes from one chunk.

    Attributes:
      box: of these elements, in the chunk's coordinates.
      start_byte, stop_byte: the byte range in the chunk from the first element to the end of the last.
      view: the view of the buffer for these elements.
      straight: the bytes of ``view``, if they equal the bytes from ``start_byte`` to ``stop_byte``.
    """

    box: Box
    start_byte: int
    stop_byte: int
    view: np.ndarray
    straight: memoryview | None

    def view_of(self, box: Box) -> np.ndarray:
        """The view of the buffer for a box inside this region, in the chunk's coordinates."""
        return self.view[(..., *box.relative_to(self.box).slices)]

    def straight_bytes(self, start: int, stop: int) -> memoryview | None:
        """The bytes of the buffer for these bytes of the chunk; None if they are not contiguous in both."""
        if self.straight is None or start < self.start_byte or self.stop_byte < stop:
            return None
        return self.straight[start - self.start_byte : stop - self.start_byte]


def regions_by_chunk(request: ReadRequest, chunks: NativeChunks) -> dict[ChunkIndex, list[Region]]:
    """The regions to read, by chunk index."""
    converts = request.converts
    regions: dict[ChunkIndex, list[Region]] = {}
    for box, buffer in request.buffers.items():
        for chunk_index in chunks.grid.chunks_of(box):
            region = _region(chunks, chunks.grid.full_box(chunk_index), box, buffer, converts=converts)
            regions.setdefault(chunk_index, []).append(region)
    return regions


def _region(chunks: NativeChunks, chunk: Box, box: Box, buffer: np.ndarray, *, converts: bool) -> Region:
    if box == chunk:
        # A fast path: most leaves of a model have one chunk, which one device reads completely.
        box_in_chunk, view = Box.whole(box.shape), buffer
    else:
        overlap = box.intersect(chunk)
        box_in_chunk, view = overlap.relative_to(chunk), buffer[(..., *overlap.relative_to(box).slices)]
    shape, itemsize = chunks.grid.chunk_shape, chunks.itemsize
    first, contiguous = range_of(box_in_chunk, shape)
    length = sum((size - 1) * stride for size, stride in zip(box_in_chunk.shape, strides_of(shape), strict=True))
    straight = None
    if contiguous and view.flags.c_contiguous and not converts:
        straight = view.reshape(-1).view(np.uint8).data
    return Region(box_in_chunk, first * itemsize, (first + length + 1) * itemsize, view, straight)


def takes_whole_chunks(regions: Mapping[ChunkIndex, Sequence[Region]], chunks: NativeChunks) -> bool:
    """Whether each chunk is read completely into one buffer, except for elements outside the array."""
    for chunk_index, chunk_regions in regions.items():
        inside = Box.whole(chunks.grid.box(chunk_index).shape)
        if all(region.box != inside for region in chunk_regions):
            return False
    return True


def shortest_run(regions: Mapping[ChunkIndex, Sequence[Region]], itemsize: int) -> int:
    """Bytes of the shortest run of elements that is contiguous in its buffer, of the regions that are not straight."""
    scattered = (region for chunk_regions in regions.values() for region in chunk_regions if region.straight is None)
    return min((region.view.shape[-1] * itemsize for region in scattered), default=0)
