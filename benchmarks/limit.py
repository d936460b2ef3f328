"""What the machine can do: arrays written to plain files and read back, with nothing else done to them.

Writing: the shards are cut into pieces, the pieces are dealt out to a few files, one thread writes each file, tells the
kernel after every piece to start writing it out, and syncs it at the end. Reading: threads read the pieces straight
into aligned buffers, which the backend takes over without a further copy where it can. No names, no metadata worth the
word, no checksums, no atomic commit: a checkpointer has to do more, and can only be as fast.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import json
import os
import pathlib
from typing import TYPE_CHECKING, Any

import cases
import jax
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LANES = 4
_READERS = 16
_PIECE = 16 << 20
_ALIGNMENT = 64
_START_WRITEBACK = 2  # SYNC_FILE_RANGE_WRITE
_LIBC = ctypes.CDLL(None, use_errno=True)

Index = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Bytes [start, start + size) of one shard, at `offset` of file `lane`."""

    path: str
    shard: Index
    start: int
    size: int
    lane: int
    offset: int


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _nbytes(shard: Index, dtype: np.dtype[Any]) -> int:
    return dtype.itemsize * int(np.prod([stop - start for start, stop in shard], dtype=np.int64))


def _deal(shards: list[tuple[str, Index, int]]) -> Iterator[Piece]:
    """Cuts shards into pieces and gives each piece to the lane that has least."""
    used = [0] * _LANES
    for path, shard, nbytes in shards:
        for start in range(0, nbytes, _PIECE):
            lane = used.index(min(used))
            size = min(_PIECE, nbytes - start)
            yield Piece(path, shard, start, size, lane, used[lane])
            used[lane] += size


def _host_bytes(array: jax.Array) -> np.ndarray:
    return np.asarray(array).reshape(-1).view(np.uint8)


def _write_lane(file: pathlib.Path, pieces: list[Piece], shards: Mapping[tuple[str, Index], jax.Array]) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for piece in pieces:
            left = memoryview(_host_bytes(shards[piece.path, piece.shard]))[piece.start : piece.start + piece.size]
            at = piece.offset
            while left:
                written = os.pwrite(descriptor, left, at)
                at, left = at + written, left[written:]
            if piece.size == _PIECE and hasattr(_LIBC, 'sync_file_range'):
                where = ctypes.c_int64(piece.offset), ctypes.c_int64(piece.size)
                _LIBC.sync_file_range(descriptor, *where, _START_WRITEBACK)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(directory: pathlib.Path, state: cases.Tree) -> None:
    """Writes every shard once, durably."""
    shards = {}
    for path, array in cases.flatten(state).items():
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                shards[path, _bounds(shard.index, array.shape)] = shard.data
    pieces = list(_deal([(path, index, data.nbytes) for (path, index), data in shards.items()]))
    directory.mkdir(parents=True)
    (directory / 'index').write_text(json.dumps([dataclasses.astuple(piece) for piece in pieces]))
    lanes = [[piece for piece in pieces if piece.lane == lane] for lane in range(_LANES)]
    with concurrent.futures.ThreadPoolExecutor(_LANES) as pool:
        for future in [pool.submit(_write_lane, directory / str(i), lane, shards) for i, lane in enumerate(lanes)]:
            future.result()
    _sync(directory / 'index')
    _sync(directory)


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aligned(nbytes: int) -> np.ndarray:
    buffer = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + nbytes]


def _read_piece(descriptor: int, piece: Piece, buffer: np.ndarray) -> None:
    left, at = memoryview(buffer)[piece.start : piece.start + piece.size], piece.offset
    while left:
        count = os.preadv(descriptor, [left], at)
        if count == 0:
            raise EOFError(f'file {piece.lane} ends at byte {at}')
        at, left = at + count, left[count:]


def _read_shards(directory: pathlib.Path, dtypes: Mapping[str, np.dtype[Any]]) -> dict[tuple[str, Index], np.ndarray]:
    """Every shard, as it was written, in a buffer of its own."""
    index = json.loads((directory / 'index').read_text())
    pieces = [Piece(path, tuple(map(tuple, shard)), *rest) for path, shard, *rest in index]
    buffers: dict[tuple[str, Index], np.ndarray] = {}
    for piece in pieces:
        if piece.start == 0:
            buffers[piece.path, piece.shard] = _aligned(_nbytes(piece.shard, dtypes[piece.path]))
    descriptors = [os.open(directory / str(lane), os.O_RDONLY) for lane in range(_LANES)]
    try:
        with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
            batches = [pieces[start::_READERS] for start in range(_READERS)]
            for future in [pool.submit(_read_batch, descriptors, batch, buffers) for batch in batches]:
                future.result()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return {
        (path, shard): buffer.view(dtypes[path]).reshape([stop - start for start, stop in shard])
        for (path, shard), buffer in buffers.items()
    }


def _read_batch(descriptors: list[int], pieces: list[Piece], buffers: Mapping[tuple[str, Index], np.ndarray]) -> None:
    for piece in pieces:
        _read_piece(descriptors[piece.lane], piece, buffers[piece.path, piece.shard])


def _overlap(wanted: Index, stored: Index) -> Index | None:
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, stored, strict=True))
    return None if any(start >= stop for start, stop in both) else both


def _within(part: Index, whole: Index) -> tuple[slice, ...]:
    return tuple(slice(a - origin, b - origin) for (a, b), (origin, _) in zip(part, whole, strict=True))


def _assemble(wanted: Index, dtype: np.dtype[Any], stored: Mapping[Index, np.ndarray]) -> np.ndarray:
    """One shard put together from parts of the stored ones."""
    shape = [stop - start for start, stop in wanted]
    out = _aligned(_nbytes(wanted, dtype)).view(dtype).reshape(shape)
    for index, data in stored.items():
        both = _overlap(wanted, index)
        if both is not None:
            np.copyto(out[_within(both, wanted)], data[_within(both, index)])
    return out


def read(directory: pathlib.Path, target: cases.Tree) -> cases.Tree:
    """Arrays like `target`. Another sharding is put together in memory after reading."""
    flat = cases.flatten(target)
    dtypes = {path: np.dtype(leaf.dtype) for path, leaf in flat.items()}
    stored: dict[str, dict[Index, np.ndarray]] = {path: {} for path in flat}
    for (path, index), data in _read_shards(directory, dtypes).items():
        stored[path][index] = data
    with concurrent.futures.ThreadPoolExecutor() as pool:
        wanted = list(pool.map(lambda path: _wanted_shards(flat[path], stored[path]), flat))
    buffers = [buffer for shards in wanted for _, buffer in shards]
    devices = [device for shards in wanted for device, _ in shards]
    placed = iter(jax.device_put(buffers, devices, may_alias=True))
    return cases.nest(
        {
            path: jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [next(placed) for _ in shards])
            for (path, leaf), shards in zip(flat.items(), wanted, strict=True)
        }
    )


def _wanted_shards(
    leaf: jax.ShapeDtypeStruct, stored: Mapping[Index, np.ndarray]
) -> list[tuple[jax.Device, np.ndarray]]:
    """The shard each device of this process is to hold; devices that hold the same one share its buffer."""
    shards: dict[Index, np.ndarray] = {}
    result = []
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = _bounds(index, leaf.shape)
        if bounds not in shards:
            found = stored.get(bounds)
            shards[bounds] = _assemble(bounds, np.dtype(leaf.dtype), stored) if found is None else found
        result.append((device, shards[bounds]))
    return result
