"""Reads arrays that are a range of bytes of a file, from a storage without local files.

A read becomes requests for ranges of bytes. Boxes that cover at least half of their bounding region are read as that region,
each byte once; other boxes are read one by one. Within a region, rows with few bytes between them are read in one request,
since a request takes as long as the transfer of a few hundred kilobytes.

Notes: each thread holds one block of 16 MiB.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from t5ckpt.core.keys import join
from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box, strides_of
from t5ckpt.storage import Storage

_BLOCK_BYTES = 16 * 2**20
# About the bytes that an object store transfers in the time to its first byte, a few milliseconds.
_GAP_BYTES = 256 * 2**10


def read_range(storage: Storage, key: str, start: int, stop: int) -> bytes:
    """Reads a range of bytes of a file.

    Raises:
      CorruptCheckpointError: the file ends before the end of the range.
      CheckpointNotFoundError: there is no such file.
    """
    data = storage.read_range(key, start, stop)
    if len(data) != stop - start:
        raise CorruptCheckpointError(f'{storage.url(key)} ends before byte {stop:,}. Copy it again.')
    return data


class RangeReader:
    """Reads arrays of one checkpoint. Safe from any thread."""

    def __init__(self, storage: Storage, directory: str):
        """Takes the directory of the files."""
        self._storage = storage
        self._directory = directory

    def tasks(self, array: StoredArray, buffers: Mapping[Box, np.ndarray]) -> list[Callable[[], None]]:
        """The tasks for threads that fill the buffers with their boxes of the array."""
        boxes = [box for box in buffers if not box.is_empty]
        if not boxes:
            return []
        around = Box([(min(a for a, _ in axis), max(b for _, b in axis)) for axis in zip(*boxes, strict=True)])
        regions = [around] if sum(box.size for box in boxes) * 2 >= around.size else boxes
        return [
            functools.partial(self._read, array, block, {box: buffers[box] for box in boxes})
            for region in regions
            for block in _blocks(array.shape, region, array.dtype.itemsize)
        ]

    def _read(self, array: StoredArray, block: Box, buffers: Mapping[Box, np.ndarray]) -> None:
        steps = strides_of(array.shape, array.dtype.itemsize)
        first = sum(start * step for (start, _), step in zip(block, steps, strict=True))
        last = sum((stop - 1) * step for (_, stop), step in zip(block, steps, strict=True)) + array.dtype.itemsize
        offset = array.metadata['offset']
        data = read_range(self._storage, join(self._directory, array.location), offset + first, offset + last)
        values = np.ndarray(block.shape, array.dtype, data, strides=steps)
        for box, buffer in buffers.items():
            shared = box.intersect(block)
            if not shared.is_empty:
                buffer[shared.relative_to(box).slices] = values[shared.relative_to(block).slices]


def _blocks(shape: Sequence[int], region: Box, itemsize: int) -> Iterator[Box]:
    """Cuts a region into boxes that are each read with one request."""
    axis = next((axis for axis, (start, stop) in enumerate(region) if stop - start > 1), None)
    if axis is None:
        yield region
        return
    start, stop = region[axis]
    step, *steps = strides_of(shape, itemsize)[axis:]
    inner = region[axis + 1 :]
    span = sum((b - a - 1) * each for (a, b), each in zip(inner, steps, strict=True)) + itemsize
    rows = 1 if step - span > _GAP_BYTES else max(1, _BLOCK_BYTES // step)
    for row in range(start, stop, rows):
        part = Box([*region[:axis], (row, min(stop, row + rows)), *inner])
        if (rows == 1 and span > _BLOCK_BYTES) or step - span > _GAP_BYTES:
            yield from _blocks(shape, part, itemsize)
        else:
            yield part
