"""Reads the scalars of TensorBoard's event files while they grow; tensorboardX decodes the events (extra ``tensorboard``).

A record is its length in 8 bytes, a checksum of these, the data, and a checksum of the data. All numbers are little-endian; the
checksums are CRC-32C, rotated and offset (tensorflow/core/lib/io/record_writer.h, tensorflow/core/lib/hash/crc32c.h).

Notes: checksums are verified. Long records are skipped, since they hold no scalar, and memory does not depend on the lengths in
the file. A length with a wrong checksum ends the file, because the start of the next record is unknown; a record with a wrong
checksum is skipped. An incomplete record is read by the next call. A tensor is a scalar if it is one float32, to which
``tf.summary.scalar`` converts every value. All values of an event are read; T5X reads only the first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from t5ckpt.errors import MissingDependencyError

_HEADER = struct.Struct('<QI')
_CRC_BYTES = 4
_MAX_RECORD = 2**20
_BLOCK = 2**22
_FLOAT32 = 1


class Scalar(NamedTuple):
    """A scalar of an event; the time in unix seconds."""

    step: int
    time: float
    tag: str
    value: float


def _library() -> tuple[Any, Any]:
    """Returns the function for checksums, and the module with the class of events, which is generated when it is loaded."""
    try:
        from tensorboardX.crc32c import crc32c
        from tensorboardX.proto import event_pb2
    except ImportError as error:
        raise MissingDependencyError(
            "TensorBoard's event files need tensorboardX: pip install tensorboardX, or pip install 't5ckpt[tensorboard]'"
        ) from error
    return crc32c, event_pb2


def masked_crc32c(data: bytes) -> int:
    """The checksum of a record's length or data."""
    crc = _library()[0](data)
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
        from google.protobuf.message import DecodeError

        _, events = _library()
        for record in self.records(size, read):
            try:
                event = events.Event.FromString(record)
            except DecodeError:
                self.broken += 1
                continue
            for value in event.summary.value:
                floats = [value.simple_value] if value.HasField('simple_value') else _floats(value.tensor)
                if len(floats) == 1:
                    yield Scalar(event.step, event.wall_time, value.tag, floats[0])

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


def _floats(tensor: Any) -> tuple[float, ...]:
    data = tensor.tensor_content + struct.pack(f'<{len(tensor.float_val)}f', *tensor.float_val)
    is_float32 = tensor.dtype == _FLOAT32 and len(data) % 4 == 0
    return struct.unpack(f'<{len(data) // 4}f', data) if is_float32 else ()
