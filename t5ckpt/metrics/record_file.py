"""Reads TensorFlow's record files while they grow.

A record is its length in 8 bytes, a checksum of these, the data, and a checksum of the data. All numbers are little-endian; the
checksums are CRC-32C, rotated and offset (tensorflow/core/lib/io/record_writer.h, tensorflow/core/lib/hash/crc32c.h).

Notes: checksums are verified. Records above one megabyte are skipped, since they hold no scalar, and memory does not depend on
the lengths in the file. A length with a wrong checksum ends the file, because the start of the next record is unknown; a record
with a wrong checksum is skipped. An incomplete record is read by the next call.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator

_HEADER = struct.Struct('<QI')
_CRC_BYTES = 4
_MAX_RECORD = 2**20
_BLOCK = 2**22
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected


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


class RecordScan:
    """The state of reading one file.

    Attributes:
      offset: of the next record.
      broken: the number of records and lengths with a wrong checksum.
      ended: whether the rest of the file cannot be read.
    """

    def __init__(self, marker: bytes, max_record: int = _MAX_RECORD):
        """Only records of at most ``max_record`` bytes that contain ``marker`` are verified and returned."""
        self._marker = marker
        self._max_record = max_record
        self.offset = 0
        self.broken = 0
        self.ended = False

    def records(self, size: int, read: Callable[[int, int], bytes]) -> Iterator[bytes]:
        """Yields the records that were added since the last call.

        Args:
          size: the current size of the file in bytes.
          read: takes (offset, count) and returns these bytes, or fewer at the end of the file.
        """
        start, block = self.offset, b''
        while not self.ended and self.offset + _HEADER.size <= size:
            position = self.offset - start
            if position + _HEADER.size > len(block):
                start, position = self.offset, 0
                block = read(start, _BLOCK)
                if len(block) < _HEADER.size:
                    return
            length, crc = _HEADER.unpack_from(block, position)
            if masked_crc32c(block[position : position + 8]) != crc:
                self.ended = True
                self.broken += 1
                return
            after = self.offset + _HEADER.size + length + _CRC_BYTES
            if after > size:
                return
            if length <= self._max_record:
                if after - start > len(block):
                    start, position = self.offset, 0
                    block = read(start, _BLOCK)
                    if after - start > len(block):
                        return
                data = block[position + _HEADER.size : position + _HEADER.size + length]
                if self._marker in data:
                    if int.from_bytes(block[after - start - _CRC_BYTES : after - start], 'little') == masked_crc32c(
                        data
                    ):
                        yield data
                    else:
                        self.broken += 1
            self.offset = after
