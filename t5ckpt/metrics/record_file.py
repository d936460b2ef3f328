"""TensorFlow's record files, read while they grow.

A record is its length as 8 bytes, a checksum of these, the data, and a checksum of the data: all little-endian, the
checksums CRC-32C, rotated and shifted (tensorflow/core/lib/io/record_writer.h, tensorflow/core/lib/hash/crc32c.h).

Notes: nothing is believed before it is checked. No record longer than a megabyte is looked at, since no scalar is in it, and
nothing is allocated because of a length. A length whose checksum is wrong ends the file, since where the next record begins
is not known then; a record whose own checksum is wrong is left out. What a writer has not finished is read the next time.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator

__all__ = ['RecordScan', 'masked_crc32c']

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
    """The checksum of a record's length or data; RFC 3720, appendix B.4, has test vectors of the unmasked one."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


class RecordScan:
    """Where the reading of one file has come to."""

    def __init__(self, marker: bytes):
        """Only records that contain ``marker`` are checked and returned."""
        self._marker = marker
        self.offset = 0
        self.broken = 0
        """How many records were left out, or lengths were wrong."""
        self.ended = False
        """Whether nothing more of the file can be read."""

    def records(self, size: int, read: Callable[[int, int], bytes]) -> Iterator[bytes]:
        """The records that came since the last time.

        Args:
          size: bytes of the file now.
          read: gives (offset, count) bytes, or fewer where the file ends.
        """
        start, block = self.offset, b''
        while not self.ended and self.offset + _HEADER.size <= size:
            at = self.offset - start
            if at + _HEADER.size > len(block):
                start, at = self.offset, 0
                block = read(start, _BLOCK)
                if len(block) < _HEADER.size:
                    return
            length, crc = _HEADER.unpack_from(block, at)
            if masked_crc32c(block[at : at + 8]) != crc:
                self.ended = True
                self.broken += 1
                return
            after = self.offset + _HEADER.size + length + _CRC_BYTES
            if after > size:
                return
            if length <= _MAX_RECORD:
                if after - start > len(block):
                    start, at = self.offset, 0
                    block = read(start, _BLOCK)
                    if after - start > len(block):
                        return
                data = block[at + _HEADER.size : at + _HEADER.size + length]
                if self._marker in data:
                    if int.from_bytes(block[after - start - _CRC_BYTES : after - start], 'little') == masked_crc32c(
                        data
                    ):
                        yield data
                    else:
                        self.broken += 1
            self.offset = after
