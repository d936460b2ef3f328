"""Reads TensorFlow checkpoints without TensorFlow, any part of a tensor at a time.

TensorFlow's own reader returns whole tensors, and one embedding of mT5 XXL has 4 GB. The format
(tensorflow/core/util/tensor_bundle/tensor_bundle.h, core/lib/io/table_format.txt, core/protobuf/tensor_bundle.proto):

    <prefix>.index                 a LevelDB table: '' -> BundleHeaderProto, tensor name -> BundleEntryProto
    <prefix>.data-00000-of-00002   the tensors' bytes, one after another, little endian, C order

This is the format of version 2. An entry has dtype, shape, data file, offset, size and the CRC-32C of the bytes, which is
verified when a tensor is first read. bfloat16 is read as bfloat16. Only TensorFlow reads tensors of strings, variables that
were saved in parts, compressed tables, and the format before 2016.

All sizes are checked against the shapes and the files.
"""

from __future__ import annotations

import functools
import math
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from t5ckpt.catalog.locate import Located
from t5ckpt.core import protobuf
from t5ckpt.errors import CorruptCheckpointError, MissingDependencyError, UnsupportedFormatError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.dtypes import DTYPES
from t5ckpt.lazy import LazyArray, LazyThreadPoolArray
from t5ckpt.reading.array_reader import ArrayReader
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.storage import open_storage, split_path

_FOOTER_BYTES, _TRAILER_BYTES = 48, 5
_MAGIC = 0xDB4775248B80FB57
_READ_BYTES = 8 * 2**20
# A tensor takes about 100 bytes of an index.
_INDEX_BYTES = 256 * 2**20
_CURE = 'Copy the checkpoint again.'
_ONLY_TENSORFLOW = (
    'Only TensorFlow reads this: save the tensors of tf.train.load_checkpoint again, each whole (tf.raw_ops.SaveV2).'
)
# core/framework/types.proto
_DTYPES = {
    1: 'float32', 2: 'float64', 3: 'int32', 4: 'uint8', 5: 'int16', 6: 'int8', 8: 'complex64', 9: 'int64', 10: 'bool',
    14: 'bfloat16', 17: 'uint16', 18: 'complex128', 19: 'float16', 22: 'uint32', 23: 'uint64',
}  # fmt: skip


def read_bundle(prefix: str) -> dict[str, LazyArray]:
    """Returns the tensors of a checkpoint on any storage as lazy arrays.

    Raises:
      UnsupportedFormatError: a feature that only TensorFlow reads, such as the format without an index, before 2016.
      CorruptCheckpointError: the index is damaged.
    """
    _checksum_function()
    parent, name = split_path(prefix)
    reader = ArrayReader(Located(open_storage(parent), '', '', None, follow_links=True))
    files, index = reader.files, f'{name}.index'
    where = files.url(index)
    if files.storage.kind(index) is None:
        raise UnsupportedFormatError(f'{where} does not exist. {_ONLY_TENSORFLOW}')
    data = files.read(index, limit=_INDEX_BYTES)
    try:
        return {tensor: _lazy(reader, tensor, leaf, crc) for tensor, leaf, crc in _entries(data, files, name)}
    except (IndexError, ValueError, struct.error, UnicodeDecodeError, OverflowError) as error:
        if isinstance(error, (CorruptCheckpointError, UnsupportedFormatError)):
            raise
        raise CorruptCheckpointError(f'{where} does not decode ({error!s:.120}). {_CURE}') from error


def _lazy(reader: ArrayReader, name: str, leaf: StoredArray, crc: int) -> LazyArray:
    """A tensor, whose checksum is verified before the first read."""
    guard, is_checked = threading.Lock(), False

    def read(index: Any = ...) -> np.ndarray:
        nonlocal is_checked
        if leaf.dtype.hasobject:
            raise UnsupportedFormatError(f'{name} is not an array of numbers. {_ONLY_TENSORFLOW}')
        with guard:
            if not is_checked:
                _check(reader.files, name, leaf, crc)
                is_checked = True
        return reader.read(leaf, name, index)

    return LazyThreadPoolArray(leaf.shape, leaf.dtype, read, read)


def _check(files: CheckpointFiles, name: str, leaf: StoredArray, expected: int) -> None:
    """Raises CorruptCheckpointError if the bytes of a tensor differ from their masked CRC-32C."""
    start = leaf.metadata['offset']
    stop, crc = start + math.prod(leaf.shape) * leaf.dtype.itemsize, 0
    with files.opened(leaf.location, name, whole=False) as opened:
        if opened.size is not None and stop > opened.size:
            raise CorruptCheckpointError(f'{name}: {files.url(leaf.location)} is too short. {_CURE}')
        for at in range(start, stop, _READ_BYTES):
            crc = _checksum_function()(crc, bytes(opened.read(at, min(stop, at + _READ_BYTES))))
    if _masked(crc) != expected:
        raise CorruptCheckpointError(
            f'{name}: its bytes in {files.url(leaf.location)} are damaged (CRC-32C {_masked(crc):08x}, expected '
            f'{expected:08x}). {_CURE}'
        )


def _masked(crc: int) -> int:
    # TensorFlow masks checksums because the CRC of data that contains CRCs is weak (core/lib/hash/crc32c.h).
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _checksum_function() -> Any:
    try:
        import google_crc32c
    except ImportError as error:
        raise MissingDependencyError(
            'reading a TensorFlow checkpoint needs google-crc32c: pip install google-crc32c, or pip install '
            "'.[tf]' in the checkout of t5ckpt"
        ) from error
    return google_crc32c.extend


# --- the index -------------------------------------------------------------------------------------------------------


def _entries(data: bytes, files: CheckpointFiles, prefix: str) -> Iterator[tuple[str, StoredArray, int]]:
    """Yields the name of each tensor, its place, and the masked CRC-32C of its bytes."""
    where, shards, size = files.url(f'{prefix}.index'), 1, functools.cache(files.storage.size)
    for key, value in _table(data, where):
        fields = protobuf.fields(value)
        if key == b'':
            if _number(fields, 2) != 0:
                raise UnsupportedFormatError(f'{where} was written on a big-endian machine, which is not supported.')
            shards = _number(fields, 1, 1)
        elif key[0] == 0:
            # The key of a slice is not text, and precedes all names (core/util/saved_tensor_slice_util.cc).
            raise UnsupportedFormatError(f'{where}: variables were saved in parts. {_ONLY_TENSORFLOW}')
        else:
            name, shard = key.decode(), _number(fields, 3)
            file = f'{prefix}.data-{shard:05d}-of-{shards:05d}'
            if shard >= shards:
                raise CorruptCheckpointError(f'{where}: {name} is in file {shard} of {shards}. {_CURE}')
            crc = int.from_bytes(b''.join(fields[6, protobuf.FIXED32][-1:]), 'little')
            yield name, _array(name, fields, where, file, size), crc


def _array(
    name: str, fields: Mapping[tuple[int, int], list[Any]], where: str, file: str, size_of: Callable[[str], int | None]
) -> StoredArray:
    # Text, and dtypes that NumPy lacks, are objects, which a rule may drop.
    dtype = DTYPES.get(_DTYPES.get(_number(fields, 1), ''), np.dtype(object))
    offset, size = (_number(fields, field) for field in (4, 5))
    shapes = [protobuf.fields(shape) for shape in fields[2, protobuf.BYTES]]
    dims = [protobuf.fields(dim) for shape in shapes for dim in shape[2, protobuf.BYTES]]
    shape = tuple(_number(dim, 1) for dim in dims)
    if not dtype.hasobject and (max(shape, default=0) >= 2**62 or math.prod(shape) * dtype.itemsize != size):
        raise CorruptCheckpointError(
            f'{where}: {name} of shape {shape} and dtype {dtype.name} has {size} bytes. {_CURE}'
        )
    return StoredArray(file, shape, dtype, dtype, {'offset': offset, 'file_bytes': size_of(file)}, 'bytes')


def _table(data: bytes, where: str) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a LevelDB table."""
    if len(data) < _FOOTER_BYTES or struct.unpack('<Q', data[-8:])[0] != _MAGIC:
        raise CorruptCheckpointError(f'{where} is not the index of a TensorFlow checkpoint, or is truncated. {_CURE}')
    footer = data[-_FOOTER_BYTES:]
    _, position = _handle(footer, 0)
    (start, size), _ = _handle(footer, position)
    read, last = 0, b''
    for _, value in _block(data, start, size, where):
        (start, size), _ = _handle(value, 0)
        read += size
        if read > len(data):
            raise CorruptCheckpointError(f'{where} is damaged: its blocks are larger than the file. {_CURE}')
        for key, entry in _block(data, start, size, where):
            if key <= last and last:
                raise CorruptCheckpointError(f'{where} is damaged: its names are not in order. {_CURE}')
            last = key
            yield key, entry


def _handle(data: bytes, position: int) -> tuple[tuple[int, int], int]:
    start, position = protobuf.varint(data, position)
    size, position = protobuf.varint(data, position)
    return (start, size), position


def _block(data: bytes, start: int, size: int, where: str) -> Iterator[tuple[bytes, bytes]]:
    trailer = data[start + size : start + size + _TRAILER_BYTES]
    if len(trailer) < _TRAILER_BYTES or size < 4:
        raise CorruptCheckpointError(f'{where} is truncated. {_CURE}')
    if _masked(_checksum_function()(0, data[start : start + size + 1])) != struct.unpack('<I', trailer[1:])[0]:
        raise CorruptCheckpointError(f'{where} is damaged (CRC-32C). {_CURE}')
    if trailer[0] != 0:
        raise UnsupportedFormatError(f'{where} is compressed. {_ONLY_TENSORFLOW}')
    block = data[start : start + size]
    end = size - 4 * (1 + struct.unpack('<I', block[-4:])[0])
    position, key = 0, b''
    while position < end:
        shared, position = protobuf.varint(block, position)
        rest, position = protobuf.varint(block, position)
        length, position = protobuf.varint(block, position)
        if shared > len(key) or position + rest + length > end:
            raise CorruptCheckpointError(f'{where} is damaged. {_CURE}')
        key = key[:shared] + block[position : position + rest]
        position += rest
        yield key, block[position : position + length]
        position += length


def _number(message: Mapping[tuple[int, int], list[Any]], number: int, default: int = 0) -> int:
    return (message[number, protobuf.VARINT] or [default])[-1]
