"""Divides a chunk into blocks that are read and copied one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from t5ckpt.format.chunk_grid import Box, ChunkGrid
from t5ckpt.reading.local.uncompressed import PlainChunks


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes in bytes.

    Attributes:
      task: the least that one task reads.
      scratch: a block that is copied; fits a core's cache.
      scatter: a block that is read into many buffers with one system call.
      min_run: shorter runs are copied, since each address of a scatter read costs as much as a copy of some hundred bytes.
    """

    task: int = 8 * 2**20
    scratch: int = 2**20
    scatter: int = 8 * 2**20
    min_run: int = 512


class Blocks:
    """The blocks of a chunk: each is a contiguous range of bytes and a box of some rows of one axis, whole in all later axes."""

    def __init__(self, chunks: PlainChunks, limit: int):
        self._is_scalar = not chunks.grid.chunk_shape
        shape = chunks.grid.chunk_shape or (1,)
        axis, row = len(shape) - 1, chunks.itemsize
        while axis > 0 and row * shape[axis] <= limit:
            row *= shape[axis]
            axis -= 1
        self._row = row
        self._rows = min(shape[axis], limit // row)
        self._axis_rows = shape[axis]
        self._grid = ChunkGrid(shape, (*[1] * axis, self._rows, *shape[axis + 1 :]))
        self._per_lead = self._grid.grid_shape[axis]
        self.count = self._grid.num_chunks

    def ranges(self, size: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Ranges of blocks of about ``size`` bytes that cover the bytes from ``first`` to ``last``.

        Damaged metadata may describe a huge chunk, so the blocks are not enumerated.
        """
        step = max(1, size // (self._rows * self._row))
        begin, end = self._block_at(first), self._block_at(last - 1) + 1
        return ((start, min(start + step, end)) for start in range(begin, end, step))

    def _block_at(self, offset: int) -> int:
        lead, row = divmod(offset // self._row, self._axis_rows)
        return lead * self._per_lead + row // self._rows

    def offset(self, index: int) -> int:
        """The offset of a block in the file, in bytes."""
        lead, rest = divmod(index, self._per_lead)
        return (lead * self._axis_rows + rest * self._rows) * self._row

    def box(self, index: int) -> Box:
        """A block in the chunk's coordinates."""
        return Box() if self._is_scalar else self._grid.box(self._grid.index_at(index))
