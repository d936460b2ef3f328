"""A chunk cut into blocks that are read and copied one at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from t5ckpt._chunks import Box
from t5ckpt._local import Grid

__all__ = ['Blocks', 'Limits']


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


class Blocks:
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
        self.count = math.prod(self._chunks[:axis]) * self._per_lead

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
