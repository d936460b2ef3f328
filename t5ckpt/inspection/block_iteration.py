"""Iterates over arrays in blocks of bounded size, of whole chunks where possible, so that no chunk is read twice."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from t5ckpt.core.arguments import integer
from t5ckpt.errors import T5CkptError
from t5ckpt.format.chunk_grid import ChunkGrid
from t5ckpt.inspection.leaf_tree import LeafInfo
from t5ckpt.progress import Meter
from t5ckpt.reading.checkpoint_files import in_threads

# Large enough that reading takes longer than its set-up, small enough to hold several blocks in memory.
BLOCK_BYTES = 8 * 2**20
# Larger chunks are divided, although each part decodes the chunk again.
_CHUNK_BYTES = 64 * 2**20
# A sample takes strips of this size, so that it covers many parts of an array. A compressed chunk is always decoded completely.
_STRIP_BYTES = 256 * 2**10
# The elements of a piece, which fits into a core's cache in float64 with its temporaries.
_PIECE = 2**16
# The most blocks in a batch of small leaves, so that threads share the work evenly.
_BATCH = 500
Sum = TypeVar('Sum')


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of a leaf, by its index."""

    leaf: LeafInfo
    index: tuple[slice, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return _itemsize(self.leaf) * math.prod(part.stop - part.start for part in self.index)


def _itemsize(leaf: LeafInfo) -> int:
    return max(1, leaf.nbytes // max(1, leaf.size))


def _batches_of(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Yields blocks in batches, because a thread's job costs more than a small leaf."""
    batch: list[Block] = []
    held = 0
    for block in blocks:
        batch.append(block)
        held += block.nbytes
        if held >= BLOCK_BYTES or len(batch) >= _BATCH:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def blocks_in(infos: Sequence[LeafInfo], sample_bytes: int | None = None) -> Iterator[Block]:
    """Yields the blocks of all leaves, or of a sample of them.

    Args:
      infos: the leaves.
      sample_bytes: about how many bytes to read: leaves up to a common size are read completely, and larger ones in strips of
        this size together, one at a random place of each of as many equal parts. The places are the same for the same shapes.
        Compressed leaves are read by the chunk, at least one of each. None reads everything.
    """
    limit = _common_limit([info.nbytes for info in infos], sample_bytes)
    return (Block(info, index) for info in infos for index in _indices(info, limit))


def bytes_in(infos: Sequence[LeafInfo], sample_bytes: int | None = None) -> int:
    """The bytes of ``blocks_in`` with the same arguments."""
    if sample_bytes is None:
        return sum(info.nbytes for info in infos)
    return sum(block.nbytes for block in blocks_in(infos, sample_bytes))


def _common_limit(sizes: Sequence[int], total: int | None) -> int | None:
    """The largest limit for which the sizes, each cut to it, sum to at most ``total``; None if no limit is needed."""
    if total is None:
        return None
    left = integer('sample_bytes', total, 1, 'None reads everything.')
    if sum(sizes) <= left:
        return None
    for position, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - position)
        if size > share:
            return share
        left -= size
    return None


def _indices(info: LeafInfo, limit: int | None) -> Iterator[tuple[slice, ...]]:
    itemsize = _itemsize(info)
    if limit is None or info.nbytes <= limit:
        yield from blocks_of(info.shape, itemsize, info.chunks)
        return
    if info.codec in ('', 'none') or info.chunks is None:
        strip = max(itemsize, min(_STRIP_BYTES, limit))
        block = _block_shape(info.shape, itemsize, info.shape, strip, strip)
    else:
        block = _block_shape(info.shape, itemsize, info.chunks)
    grid = ChunkGrid(info.shape, tuple(block))
    count = min(grid.num_chunks, max(1, limit // max(1, itemsize * math.prod(block))))
    random = np.random.default_rng(0)
    for part in range(count):
        first, end = part * grid.num_chunks // count, (part + 1) * grid.num_chunks // count
        yield grid.box(grid.index_at(int(random.integers(first, end)))).slices


def blocks_of(shape: Sequence[int], itemsize: int, chunks: Sequence[int] | None = None) -> Iterator[tuple[slice, ...]]:
    """Yields slices that cover an array once, in C order; one empty index for an array without dimensions.

    Args:
      shape: of the array.
      itemsize: bytes per element.
      chunks: the chunk shape; None for one chunk that may be divided.
    """
    most = BLOCK_BYTES if chunks is None else _CHUNK_BYTES
    block = _block_shape(shape, itemsize, shape if chunks is None else chunks, most)
    grid = ChunkGrid(tuple(shape), tuple(block))
    for index in grid:
        yield grid.box(index).slices


def _block_shape(
    shape: Sequence[int], itemsize: int, chunks: Sequence[int], most: int = _CHUNK_BYTES, wanted: int = BLOCK_BYTES
) -> list[int]:
    """A chunk above ``most`` bytes is divided, and up to ``wanted`` bytes chunks are joined."""
    block = [max(1, min(size, chunk)) for size, chunk in zip(shape, chunks, strict=True)]
    for axis in range(len(block)):
        # Divides the first axes first, so that blocks are contiguous in C order.
        rest = itemsize * math.prod(block) // block[axis]
        if rest * block[axis] > most:
            block[axis] = max(1, most // rest)
    for axis in reversed(range(len(block))):
        nbytes = itemsize * math.prod(block)
        block[axis] = min(max(1, shape[axis]), block[axis] * max(1, wanted // nbytes))
        if block[axis] < shape[axis]:
            break
    return block


def pieces_of(block: np.ndarray) -> Iterator[np.ndarray]:
    """Yields a block's elements in flat pieces that fit into a core's cache."""
    flat = block.reshape(-1)
    for start in range(0, flat.size, _PIECE):
        yield flat[start : start + _PIECE]


def sums_by_leaf(
    infos: Sequence[LeafInfo],
    sum_of: Callable[[Block], Sum],
    merge: Callable[[Sum, Sum], Sum],
    meter: Meter,
    sample_bytes: int | None = None,
) -> dict[str, Sum]:
    """Applies a function to all blocks of leaves, or of a sample of them, in threads, one per core; merges its results by leaf.

    Args:
      infos: the leaves.
      sum_of: the function.
      merge: joins the results of two blocks.
      meter: counts the bytes of the blocks.
      sample_bytes: see ``blocks_in``.

    Raises:
      T5CkptError: from ``sum_of``.
    """

    def sums_of_batch(batch: list[Block]) -> list[tuple[Block, Sum]]:
        return [(block, sum_of(block)) for block in batch]

    sums: dict[str, Sum] = {}
    for _, results in in_threads(_batches_of(blocks_in(infos, sample_bytes)), sums_of_batch, os.cpu_count() or 1):
        if isinstance(results, T5CkptError):
            raise results
        for block, part in results:
            name = block.leaf.name
            sums[name] = merge(sums[name], part) if name in sums else part
            meter.add(block.nbytes)
    return sums
