"""Iterates over arrays in blocks of bounded size, of whole chunks where possible, so that no chunk is read twice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TypeVar

import numpy as np

from t5ckpt.core.thread_pool import Pool
from t5ckpt.format.chunk_grid import ChunkGrid
from t5ckpt.inspection.leaf_tree import LeafInfo

__all__ = ['BLOCK_BYTES', 'Block', 'batches_of', 'blocks_of', 'pieces_of', 'run_all']

# Large enough that reading takes longer than its set-up, small enough to hold several blocks in memory.
BLOCK_BYTES = 8 * 2**20
# Larger chunks are divided, although each part decodes the chunk again.
_CHUNK_BYTES = 64 * 2**20
# The elements of a piece, which fits into a core's cache in float64 with its temporaries.
_PIECE = 2**16
# The most blocks in a batch of small leaves, so that threads share the work evenly.
_BATCH = 500
Result = TypeVar('Result')


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


def batches_of(infos: Iterable[LeafInfo]) -> Iterator[list[Block]]:
    """Yields the blocks of all leaves in batches, because a thread's job costs more than a small leaf."""
    batch: list[Block] = []
    held = 0
    for info in infos:
        for index in blocks_of(info.shape, _itemsize(info), info.chunks):
            block = Block(info, index)
            batch.append(block)
            held += block.nbytes
            if held >= BLOCK_BYTES or len(batch) >= _BATCH:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch


def blocks_of(shape: Sequence[int], itemsize: int, chunks: Sequence[int] | None = None) -> Iterator[tuple[slice, ...]]:
    """Yields slices that cover an array once, in C order; one empty index for an array without dimensions.

    Args:
      shape: of the array.
      itemsize: bytes per element.
      chunks: the chunk shape; None for one chunk that may be divided.
    """
    block = _block_shape(shape, itemsize, shape if chunks is None else chunks, chunks is not None)
    grid = ChunkGrid(tuple(shape), tuple(block))
    for index in grid:
        yield grid.box(index).slices


def _block_shape(shape: Sequence[int], itemsize: int, chunks: Sequence[int], whole: bool) -> list[int]:
    block = [max(1, min(size, chunk)) for size, chunk in zip(shape, chunks, strict=True)]
    limit = _CHUNK_BYTES if whole else BLOCK_BYTES
    for axis in range(len(block)):
        # Divides the first axes first, so that blocks are contiguous in C order.
        rest = itemsize * math.prod(block) // block[axis]
        if rest * block[axis] > limit:
            block[axis] = max(1, limit // rest)
    for axis in reversed(range(len(block))):
        nbytes = itemsize * math.prod(block)
        block[axis] = min(max(1, shape[axis]), block[axis] * max(1, BLOCK_BYTES // nbytes))
        if block[axis] < shape[axis]:
            break
    return block


def pieces_of(block: np.ndarray) -> Iterator[np.ndarray]:
    """Yields a block's elements in flat pieces that fit into a core's cache."""
    flat = block.reshape(-1)
    for at in range(0, flat.size, _PIECE):
        yield flat[at : at + _PIECE]


def run_all(work: Iterator[Callable[[], Result]], threads: int) -> Iterator[Result]:
    """Runs jobs in threads and yields their results in any order; at most two jobs per thread are submitted at a time."""
    with Pool(threads) as executor:
        begun: set[Future[Result]] = set()
        try:
            for job in work:
                begun.add(executor.submit(job))
                if len(begun) >= 2 * threads:
                    done, begun = wait(begun, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            while begun:
                done, begun = wait(begun, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:
            for future in begun:
                future.cancel()
