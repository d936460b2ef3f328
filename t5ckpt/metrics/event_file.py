"""Reads the scalars of TensorBoard's event files while they grow, without TensorFlow and TensorBoard.

A record is its length in 8 bytes, a checksum of these, the data, and a checksum of the data. All numbers are little-endian; the
checksums are CRC-32C, rotated and offset (tensorflow/core/lib/io/record_writer.h, tensorflow/core/lib/hash/crc32c.h). The data is
a protocol buffer:

    Event        wall_time = 1, step = 2, summary = 5           tensorboard/compat/proto/event.proto
    Summary      value = 1 (repeated)                           tensorboard/compat/proto/summary.proto
    Value        tag = 1, simple_value = 2, tensor = 8
    TensorProto  dtype = 1, tensor_content = 4, float_val = 5

Notes: checksums are verified. Long records are skipped, since they hold no scalar, and memory does not depend on the lengths in
the file. A length with a wrong checksum ends the file, because the start of the next record is unknown; a record with a wrong
checksum is skipped. An incomplete record is read by the next call. A tensor is a scalar if it is one float32, to which
``tf.summary.scalar`` converts every value. All values of an event are read; T5X reads only the first.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from t5ckpt.core.protobuf import BYTES, FIXED32, FIXED64, VARINT, fields

_HEADER = struct.Struct('<QI')
_CRC_BYTES = 4
_MAX_RECORD = 2**20
_BLOCK = 2**22
_FLOAT32 = 1
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected


class Scalar(NamedTuple):
    """A scalar of an event; the time in unix seconds."""

    step: int
    time: float
    tag: str
    value: float


@functools.cache
def _table() -> tuple[int, ...]:
    def entry(value: int) -> int:
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        return value

    return tuple(map(entry, range(256)))


def masked_crc32c(data: bytes) -> int:
    """The checksum of a record's length or data; RFC 3720, appendix B.4, has test vectors of the unmasked CRC."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


class EventScan:
    """The state of reading one file.

    Attributes:
      offset: of the next record.
      broken: the number of records and lengths that are damaged.
      ended: whether the rest of the file cannot be read.
    """

    def __init__(self, marker: bytes = b'', max_record: int = _MAX_RECORD):
        """Only records of at most ``max_record`` bytes that contain ``marker`` are verified and returned."""
        self._marker = marker
        self._max_record = max_record
        self.offset = 0
        self.broken = 0
        self.ended = False

    def scalars(self, size: int, read: Callable[[int, int], bytes]) -> Iterator[Scalar]:
        """Yields the scalars of the records that were added since the last call.

        Args:
          size: the current size of the file in bytes.
          read: takes (offset, count) and returns these bytes, or fewer at the end of the file.
        """
        for record in self.records(size, read):
            try:
                yield from scalars_of(record)
            except ValueError:
                self.broken += 1

    def records(self, size: int, read: Callable[[int, int], bytes]) -> Iterator[bytes]:
        """Yields the records that were added since the last call; see :meth:`scalars`."""
        while not self.ended and self.offset + _HEADER.size <= size:
            start, block = self.offset, read(self.offset, _BLOCK)
            while (position := self.offset - start) + _HEADER.size <= len(block):
                length, crc = _HEADER.unpack_from(block, position)
                if masked_crc32c(block[position : position + 8]) != crc:
                    self.ended = True
                    self.broken += 1
                    return
                data_start = position + _HEADER.size
                end = data_start + length + _CRC_BYTES
                if start + end > size:
                    return
                if length <= self._max_record:
                    if end > len(block):
                        # The next block begins with this record.
                        break
                    data, crc = block[data_start : data_start + length], block[data_start + length : end]
                    if self._marker in data:
                        if int.from_bytes(crc, 'little') == masked_crc32c(data):
                            yield data
                        else:
                            self.broken += 1
                self.offset = start + end
            if self.offset == start:
                return


def scalars_of(data: bytes) -> list[Scalar]:
    """The scalars of an event.

    Raises:
      ValueError: the bytes are not an event.
    """
    event = fields(data)
    # A varint of 64 bits is a signed number.
    step = ((event[2, VARINT] or [0])[-1] + 2**63) % 2**64 - 2**63
    time = struct.unpack('<d', (event[1, FIXED64] or [bytes(8)])[-1])[0]
    found: list[Scalar] = []
    for value in [fields(value) for summary in event[5, BYTES] for value in fields(summary)[1, BYTES]]:
        floats = value[2, FIXED32][-1:] or [_float32(tensor) for tensor in value[8, BYTES][-1:]]
        if floats and len(floats[0]) == 4:
            tag = b''.join(value[1, BYTES][-1:]).decode('utf-8', 'replace')
            found.append(Scalar(step, time, tag, struct.unpack('<f', floats[0])[0]))
    return found


def _float32(data: bytes) -> bytes:
    tensor = fields(data)
    is_float32 = tensor[1, VARINT][-1:] == [_FLOAT32]
    return b''.join(tensor[4, BYTES] + tensor[5, BYTES] + tensor[5, FIXED32]) if is_float32 else b''
