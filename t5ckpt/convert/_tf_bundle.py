"""Reading TensorFlow checkpoints without TensorFlow, any part of a tensor at a time.

TensorFlow's own reader gives whole tensors, and one embedding of mT5 XXL has 4 GB. What lies on disk is simple
(tensorflow/core/util/tensor_bundle/tensor_bundle.h, core/lib/io/table_format.txt, core/protobuf/tensor_bundle.proto):

    <prefix>.index                 a LevelDB table: '' -> BundleHeaderProto, tensor name -> BundleEntryProto
    <prefix>.data-00000-of-00002   the tensors' bytes, one after another, little endian, C order

An entry has dtype, shape, data file, offset, size and the CRC-32C of the bytes, which is compared when a tensor is first
read. Left to TensorFlow are tensors of strings, variables that were saved in parts, compressed tables, and the
format of before 2016.

Nothing in the files is believed: sizes must agree with shapes and lie inside the files.
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from t5ckpt._dtypes import dtype_from_name
from t5ckpt.errors import CorruptCheckpointError, MissingDependencyError, UnsupportedFormatError
from t5ckpt.lazy import LazyArray, LazyThreadPoolArray
from t5ckpt.storage import foreign_errors

__all__ = ['read_bundle']

_FOOTER_BYTES, _TRAILER_BYTES = 48, 5
_MAGIC = 0xDB4775248B80FB57
_READ_BYTES = 8 * 2**20
# core/framework/types.proto
_DTYPES = {
    1: 'float32', 2: 'float64', 3: 'int32', 4: 'uint8', 5: 'int16', 6: 'int8', 8: 'complex64', 9: 'int64', 10: 'bool',
    14: 'bfloat16', 17: 'uint16', 18: 'complex128', 19: 'float16', 22: 'uint32', 23: 'uint64',
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One tensor: where its bytes are, and their masked CRC-32C."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    file: str
    offset: int
    crc: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_bundle(prefix: str) -> dict[str, LazyArray]:
    """The tensors of a checkpoint on a local disk, each to be read when asked for, whole or in slices.

    Raises:
      CheckpointNotFoundError: no such file.
      UnsupportedFormatError: something that only TensorFlow reads.
      CorruptCheckpointError: damaged.
    """
    checksum = _checksum_function()
    path = f'{prefix}.index'
    with foreign_errors(path), open(path, 'rb') as file:
        data = file.read()
    try:
        entries = list(_entries(data, prefix))
    except (IndexError, ValueError, struct.error, UnicodeDecodeError, OverflowError) as error:
        if isinstance(error, (CorruptCheckpointError, UnsupportedFormatError)):
            raise
        raise CorruptCheckpointError(f'{path} does not decode ({error!s:.120}). Copy the checkpoint again.') from error
    return {entry.name: _lazy(_Tensor(entry, checksum)) for entry in entries}


def _lazy(tensor: _Tensor) -> LazyArray:
    entry = tensor.entry
    return LazyThreadPoolArray(entry.shape, entry.dtype, lambda: tensor.read(...), tensor.read)


class _Tensor:
    """Reads one tensor; its checksum is compared once."""

    def __init__(self, entry: _Entry, checksum: Any):
        self.entry = entry
        self._checksum = checksum
        self._guard = threading.Lock()
        self._checked = False

    def read(self, index: Any) -> np.ndarray:
        """The values of a numpy basic index, as a copy; only what it touches is brought into memory."""
        entry = self.entry
        with foreign_errors(entry.file), open(entry.file, 'rb') as file:
            if entry.offset + entry.nbytes > os.fstat(file.fileno()).st_size:
                raise CorruptCheckpointError(f'{entry.name}: {entry.file} is too short. Copy the checkpoint again.')
            self._check(file.fileno())
            if not entry.nbytes:
                return np.empty(entry.shape, entry.dtype)[index]
            box = _box(index, entry.shape)
            if box is None:
                return _read_box(file.fileno(), entry, tuple((0, size) for size in entry.shape))[index]
            return _read_box(file.fileno(), entry, box)

    def _check(self, fd: int) -> None:
        with self._guard:
            if self._checked:
                return
            entry, crc, done = self.entry, 0, 0
            while done < entry.nbytes:
                part = os.pread(fd, min(_READ_BYTES, entry.nbytes - done), entry.offset + done)
                if not part:
                    break
                crc, done = self._checksum(crc, part), done + len(part)
            if _masked(crc) != entry.crc:
                raise CorruptCheckpointError(
                    f'{entry.name}: {entry.file} is damaged there (CRC-32C {_masked(crc):08x}, expected {entry.crc:08x}). '
                    'Copy the checkpoint again.'
                )
            self._checked = True


def _box(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
    """The box of an index that is one slice of step 1 for every dimension, as writers ask for; else None."""
    if not isinstance(index, tuple) or len(index) != len(shape):
        return None
    if not all(isinstance(part, slice) and part.step in (None, 1) for part in index):
        return None
    ends = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return tuple((start, max(start, stop)) for start, stop in ends)


def _read_box(fd: int, entry: _Entry, box: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Reads a box, run after run; a map would count all that it touches as memory of this process."""
    shape = tuple(stop - start for start, stop in box)
    out = np.empty(shape, entry.dtype)
    cut = [axis for axis, size in enumerate(entry.shape) if shape[axis] != size]
    outer = cut[-1] if cut else 0
    strides = [math.prod(entry.shape[axis + 1 :]) for axis in range(len(shape))]
    flat = out.reshape(math.prod(shape[:outer]), -1).view(np.uint8)
    for row, position in enumerate(np.ndindex(*shape[:outer])):
        first = sum((at + start) * stride for at, (start, _), stride in zip(position, box, strides, strict=False))
        first += box[outer][0] * strides[outer] if shape else 0
        view, at = memoryview(flat[row]), entry.offset + first * entry.dtype.itemsize
        while view:
            count = os.preadv(fd, [view], at)
            if not count:
                raise CorruptCheckpointError(f'{entry.name}: {entry.file} is too short. Copy the checkpoint again.')
            view, at = view[count:], at + count
    return out


def _masked(crc: int) -> int:
    # core/lib/hash/crc32c.h: so that the checksum of data that hold checksums is no weak one.
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _checksum_function() -> Any:
    try:
        import google_crc32c
    except ImportError as error:
        raise MissingDependencyError("reading a TensorFlow checkpoint needs pip install 't5ckpt[tf]'") from error
    return google_crc32c.extend


# --- the index -------------------------------------------------------------------------------------------------------


def _entries(data: bytes, prefix: str) -> Iterator[_Entry]:
    shards = 1
    for key, value in _table(data, f'{prefix}.index'):
        if key == b'':
            header = _message(value)
            if header.get(2, [0])[0] != 0:
                raise UnsupportedFormatError(f'{prefix}.index: written on a big-endian machine, which is not read.')
            shards = header.get(1, [1])[0]
            continue
        if key[0] == 0:
            # A slice: such keys are no text, and stand before all names (core/util/saved_tensor_slice_util.cc).
            raise UnsupportedFormatError(
                f'{prefix}.index: variables were saved in parts, which TensorFlow alone reads.'
            )
        yield _entry(key.decode(), _message(value), prefix, shards)


def _entry(name: str, fields: Mapping[int, list[Any]], prefix: str, shards: int) -> _Entry:
    number = fields.get(1, [0])[0]
    if number not in _DTYPES:
        raise UnsupportedFormatError(
            f'{prefix}.index: {name} has the dtype {number} of types.proto, which TensorFlow alone reads.'
        )
    shard, offset, size = (fields.get(field, [0])[0] for field in (3, 4, 5))
    dims = _message(fields.get(2, [b''])[0]).get(2, [])
    shape = tuple(_message(dim).get(1, [0])[0] for dim in dims)
    dtype = dtype_from_name(_DTYPES[number])
    if max(shape, default=0) >= 2**62 or math.prod(shape) * dtype.itemsize != size or shard >= shards:
        raise CorruptCheckpointError(
            f'{prefix}.index: {name} of shape {shape} and dtype {dtype.name} has {size} bytes in file {shard} of {shards}. '
            'Copy the checkpoint again.'
        )
    file = f'{prefix}.data-{shard:05d}-of-{shards:05d}'
    return _Entry(name, dtype, shape, file, offset, fields.get(6, [0])[0])


def _table(data: bytes, where: str) -> Iterator[tuple[bytes, bytes]]:
    """The pairs of a LevelDB table."""
    if len(data) < _FOOTER_BYTES or struct.unpack('<Q', data[-8:])[0] != _MAGIC:
        raise CorruptCheckpointError(f'{where} is no index of a TensorFlow checkpoint, or is truncated.')
    footer = data[-_FOOTER_BYTES:]
    _, at = _handle(footer, 0)
    (start, size), _ = _handle(footer, at)
    for _, value in _block(data, start, size, where):
        (start, size), _ = _handle(value, 0)
        yield from _block(data, start, size, where)


def _handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    start, at = _varint(data, at)
    size, at = _varint(data, at)
    return (start, size), at


def _block(data: bytes, start: int, size: int, where: str) -> Iterator[tuple[bytes, bytes]]:
    trailer = data[start + size : start + size + _TRAILER_BYTES]
    if len(trailer) < _TRAILER_BYTES or size < 4:
        raise CorruptCheckpointError(f'{where} is truncated. Copy the checkpoint again.')
    if _masked(_checksum_function()(0, data[start : start + size + 1])) != struct.unpack('<I', trailer[1:])[0]:
        raise CorruptCheckpointError(f'{where} is damaged (CRC-32C). Copy the checkpoint again.')
    if trailer[0] != 0:
        raise UnsupportedFormatError(f'{where} is compressed, which TensorFlow alone reads.')
    block = data[start : start + size]
    end = size - 4 * (1 + struct.unpack('<I', block[-4:])[0])
    at, key = 0, b''
    while at < end:
        shared, at = _varint(block, at)
        rest, at = _varint(block, at)
        length, at = _varint(block, at)
        if shared > len(key) or at + rest + length > end:
            raise CorruptCheckpointError(f'{where} is damaged. Copy the checkpoint again.')
        key = key[:shared] + block[at : at + rest]
        at += rest
        yield key, block[at : at + length]
        at += length


def _message(data: bytes) -> dict[int, list[Any]]:
    """The fields of a protocol buffer by number: integers and bytes."""
    fields: dict[int, list[Any]] = {}
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                value, at = _varint(data, at)
            case 2:
                length, at = _varint(data, at)
                value, at = data[at : at + length], at + length
            case 5:
                value, at = struct.unpack_from('<I', data, at)[0], at + 4
            case 1:
                value, at = struct.unpack_from('<Q', data, at)[0], at + 8
            case kind:
                raise ValueError(f'wire type {kind}')
        if at > len(data):
            raise ValueError('a field reaches beyond the end')
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError('a number of more than 64 bits')
