"""Chooses chunk shapes: T5X's greedy algorithm (``_choose_chunk_shape``), and a finer grid for replicated shards.

:func:`chunk_shape_for` decides for an array; :func:`choose_chunks` is the greedy algorithm for one shard.

No chunk overlaps two shards, so two writers never share a chunk file. A chunk divides the shard, except where a shard that
several processes hold has too few divisors; then the last chunk of an unsharded axis exceeds the array. A chunk holds at most
``limit`` bytes if possible; the largest dimension is split first. Two things differ from T5X:

- Divisors come from a factorization instead of a trial of every number below the size. A dimension of 10^9 takes
  milliseconds instead of a minute.
- A dimension without a useful divisor, such as a vocabulary of 32,003, which is prime, is not split into slices of 1, which
  would make 32,003 files. The next largest dimension is split instead. If none helps, the chunk is larger than the limit,
  since one large file is better than a million small ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from t5ckpt.format.chunk_grid import ChunkGrid, ceil_div

DEFAULT_CHUNK_BYTES = 64 * 2**20
_OVERSHOOT = 8
_TRIAL_LIMIT = 2**20
# Smaller chunks are not worth distributing: a file takes 0.3 to 0.8 ms.
_MIN_SPLIT_BYTES = 2**20
# blosc encodes 2 GiB at most, and S3 takes 5 GiB in one request.
_LARGEST_BYTES = 2**30


def chunk_shape_for(
    shape: Sequence[int], shard_shape: Sequence[int], itemsize: int, limit: int, replicas: int
) -> tuple[int, ...]:
    """The chunk shape of an array whose shards are held by up to ``replicas`` processes each.

    With replicas, a shard is cut so that each holder writes about the same number of bytes, but not into chunks below 1 MiB.
    If no divisor gives enough chunks, or a chunk would have more than 1 GiB and ``limit``, an axis that is not sharded is cut
    unevenly; its last chunk exceeds the array.
    """
    nbytes = math.prod(shard_shape) * itemsize
    if nbytes == 0:
        # zarr has no chunks of size 0, even of an empty array.
        return tuple(max(1, size) for size in shard_shape)
    parts = min(replicas, max(1, nbytes // _MIN_SPLIT_BYTES))
    chunks = list(choose_chunks(shard_shape, itemsize, min(limit, ceil_div(nbytes, parts))))
    if math.prod(chunks) * itemsize > max(limit, _LARGEST_BYTES):
        parts = max(parts, ceil_div(nbytes, limit))
    whole = [axis for axis, size in enumerate(shape) if shard_shape[axis] == size]
    for axis in sorted(whole, key=lambda axis: (-chunks[axis], axis)):
        grid = ChunkGrid(tuple(shard_shape), tuple(chunks))
        count = grid.num_chunks
        if count >= parts:
            break
        along = min(shard_shape[axis], ceil_div(parts * grid.grid_shape[axis], count))
        chunks[axis] = ceil_div(shard_shape[axis], along)
    return tuple(chunks)


def choose_chunks(shard_shape: Sequence[int], itemsize: int, limit: int = DEFAULT_CHUNK_BYTES) -> tuple[int, ...]:
    """Chooses the chunk shape for a shard.

    Args:
      shard_shape: the shape that one writer writes, every dimension at least 1.
      itemsize: bytes per element.
      limit: the desired largest size of a chunk, in bytes.

    Returns:
      A shape of the same rank that divides ``shard_shape``.
    """
    target = max(1, limit // itemsize)
    chunk = list(shard_shape)
    total = math.prod(chunk)
    if total <= target:
        return tuple(chunk)
    divisors = [_divisors(size) for size in shard_shape]
    while total > target:
        step = _next_split(chunk, divisors, total, target)
        if step is None:
            break
        axis, size = step
        total = total // chunk[axis] * size
        chunk[axis] = size
    return tuple(chunk)


def _next_split(chunk: list[int], divisors: list[list[int]], total: int, target: int) -> tuple[int, int] | None:
    """The largest dimension whose next smaller divisor does not make chunks much smaller than the limit."""
    for axis in sorted(range(len(chunk)), key=lambda i: (-chunk[i], i)):
        smaller = divisors[axis]
        while smaller and smaller[-1] >= chunk[axis]:
            smaller.pop()
        if smaller and total // chunk[axis] * smaller[-1] * _OVERSHOOT >= target:
            return axis, smaller[-1]
    return None


def _divisors(size: int) -> list[int]:
    """All divisors in ascending order, as far as trial division up to 2^20 finds the factors.

    A cofactor with two prime factors above 2^20 counts as prime; the divisors that are returned are still divisors.
    """
    factors: dict[int, int] = {}
    rest, factor = size, 2
    while factor * factor <= rest and factor < _TRIAL_LIMIT:
        while rest % factor == 0:
            factors[factor] = factors.get(factor, 0) + 1
            rest //= factor
        factor += 1 if factor == 2 else 2
    if rest > 1:
        factors[rest] = factors.get(rest, 0) + 1
    divisors = [1]
    for prime, power in factors.items():
        divisors = [base * prime**k for base in divisors for k in range(power + 1)]
    return sorted(divisors)
