"""Geometry of chunked arrays: boxes of elements, and the regular grid of chunks that covers an array.

A chunk index counts chunks along each axis; a box counts elements. A chunk that extends beyond the array's end is stored in full,
but its box ends at the array's end. All functions are arithmetic on integers. Hostile metadata may describe a grid with a huge
number of chunks, so only functions whose docstring says so make a list of all chunks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias

ChunkIndex: TypeAlias = tuple[int, ...]
"""A chunk's position in its grid, one integer per dimension."""

# As str(int) writes it. Shapes are below 2**62, which has 19 digits; int() refuses texts of thousands.
_DECIMAL = re.compile('0|[1-9][0-9]{0,18}')


def ceil_div(dividend: int, divisor: int) -> int:
    """The quotient rounded up."""
    return -(-dividend // divisor)


def strides_of(shape: Sequence[int], itemsize: int = 1) -> tuple[int, ...]:
    """The strides of a C-order array: in elements, or in bytes with the ``itemsize``."""
    return tuple([itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))])


def chunk_key(chunk_index: Sequence[int], separator: str = '.') -> str:
    """The key of a chunk in zarr v2."""
    return separator.join(map(str, chunk_index)) or '0'


def separator_of(zarray: Mapping[str, Any]) -> Any:
    """The separator in the keys that zarr v2's metadata describes."""
    return zarray.get('dimension_separator', '.')


class Box(tuple[tuple[int, int], ...]):
    """A rectangular region of an array: (start, stop) per dimension.

    A subclass of tuple, because boxes are keys of many dicts and tuples are hashed and compared in C. The box of an array without
    dimensions is ``Box()``, which holds one element.
    """

    __slots__ = ()

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Self:
        """The box that covers an array of ``shape``."""
        return cls([(0, size) for size in shape])

    @classmethod
    def from_slices(cls, index: Iterable[slice], shape: Sequence[int]) -> Self:
        """The box that an index of one forward slice per dimension spans, whatever the steps.

        Args:
          index: the slices; as in numpy, ends may be None, negative, or beyond the array's.
          shape: of the array.
        """
        ends = [part.indices(size) for part, size in zip(index, shape, strict=True)]
        return cls([(start, max(start, stop)) for start, stop, _ in ends])

    @property
    def start(self) -> tuple[int, ...]:
        """The first index in each dimension."""
        return tuple([start for start, _ in self])

    @property
    def stop(self) -> tuple[int, ...]:
        """The first index after the box in each dimension."""
        return tuple([stop for _, stop in self])

    @property
    def shape(self) -> tuple[int, ...]:
        """The size in each dimension."""
        return tuple([stop - start for start, stop in self])

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod([stop - start for start, stop in self])

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the box, for numpy and TensorStore."""
        return tuple([slice(start, stop) for start, stop in self])

    @property
    def is_empty(self) -> bool:
        """Whether the box has no elements."""
        # any() of a generator takes three times as long.
        for start, stop in self:  # noqa: SIM110
            if start >= stop:
                return True
        return False

    def intersect(self, other: Box) -> Box:
        """The box of the elements in both boxes; empty if they do not overlap."""
        bounds = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(self, other, strict=True)]
        return Box([(start, max(start, stop)) for start, stop in bounds])

    def relative_to(self, other: Box) -> Box:
        """The same box in coordinates relative to the start of another box."""
        return Box([(start - origin, stop - origin) for (start, stop), (origin, _) in zip(self, other, strict=True)])


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkGrid:
    """A regular grid of chunks over an array, and the key of each chunk.

    Attributes:
      shape: of the array.
      chunk_shape: of a chunk, of the same rank; every size at least 1.
      separator: between the indices in a key, ``'.'`` or ``'/'``.
      prefix: of every key; empty in zarr v2, ``'c'`` in the default encoding of zarr v3.
    """

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    separator: str = '.'
    prefix: str = ''

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], shape: Sequence[int], chunk_shape: Sequence[int]) -> Self:
        """The grid whose keys zarr v2's ``dimension_separator`` or zarr v3's ``chunk_key_encoding`` describe."""
        encoding = metadata.get('chunk_key_encoding')
        if encoding is None:
            return cls(tuple(shape), tuple(chunk_shape), separator_of(metadata))
        is_default = encoding.get('name') == 'default'
        separator = encoding.get('configuration', {}).get('separator', '/' if is_default else '.')
        return cls(tuple(shape), tuple(chunk_shape), separator, 'c' if is_default else '')

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """The number of chunks along each axis."""
        return tuple([ceil_div(size, chunk) for size, chunk in zip(self.shape, self.chunk_shape, strict=True)])

    @property
    def num_chunks(self) -> int:
        """The number of chunks; 1 for an array without dimensions."""
        return math.prod(self.grid_shape)

    def __iter__(self) -> Iterator[ChunkIndex]:
        """Every chunk index in C order, made one at a time."""
        # itertools.product would first make tuples as long as the axes.
        return map(self.index_at, range(self.num_chunks))

    def index_at(self, position: int) -> ChunkIndex:
        """The chunk index at a position in C order."""
        reversed_index: list[int] = []
        for size in reversed(self.grid_shape):
            position, axis_index = divmod(position, size)
            reversed_index.append(axis_index)
        return tuple(reversed(reversed_index))

    def key(self, chunk_index: Sequence[int]) -> str:
        """The key of a chunk: its file's name below the array's directory."""
        if self.prefix:
            return self.separator.join([self.prefix, *map(str, chunk_index)])
        return chunk_key(chunk_index, self.separator)

    def index(self, key: str) -> ChunkIndex | None:
        """The chunk index of a key, which may be outside the grid; None for any other text."""
        parts = key.split(self.separator)
        if self.prefix:
            first, *parts = parts
            if first != self.prefix:
                return None
        elif not self.shape:
            return () if parts == ['0'] else None
        good = len(parts) == len(self.shape) and all(map(_DECIMAL.fullmatch, parts))
        return tuple(map(int, parts)) if good else None

    def box(self, chunk_index: Sequence[int]) -> Box:
        """The array's elements in a chunk, without the part beyond the array's end."""
        sizes = zip(chunk_index, self.chunk_shape, self.shape, strict=True)
        return Box([(i * chunk, min((i + 1) * chunk, size)) for i, chunk, size in sizes])

    def full_box(self, chunk_index: Sequence[int]) -> Box:
        """The complete chunk as it is stored, in the array's coordinates; it may extend beyond the array's end."""
        return Box([(i * chunk, (i + 1) * chunk) for i, chunk in zip(chunk_index, self.chunk_shape, strict=True)])

    def index_of(self, box: Box) -> ChunkIndex:
        """The index of the chunk that holds the first element of a box."""
        return tuple([start // chunk for (start, _), chunk in zip(box, self.chunk_shape, strict=True)])

    def ranges(self, box: Box) -> list[range]:
        """The chunk indices that a box overlaps, as one range per axis; for an empty box, all ranges are empty."""
        if box.is_empty:
            return [range(0)] * len(box)
        return [
            range(start // chunk, ceil_div(stop, chunk))
            for (start, stop), chunk in zip(box, self.chunk_shape, strict=True)
        ]

    def count(self, box: Box) -> int:
        """The number of chunks that a box overlaps."""
        return math.prod(map(len, self.ranges(box)))

    def chunks_of(self, box: Box) -> Iterator[ChunkIndex]:
        """The index of every chunk that a box overlaps, in C order."""
        return itertools.product(*self.ranges(box))

    def split(self, box: Box) -> list[Box]:
        """A list of the parts of a box in different chunks, in C order."""
        axes = [
            [(max(start, axis_index * chunk), min(stop, (axis_index + 1) * chunk)) for axis_index in indices]
            for (start, stop), chunk, indices in zip(box, self.chunk_shape, self.ranges(box), strict=True)
        ]
        return list(map(Box, itertools.product(*axes)))
