"""Reads the wire format of protocol buffers (protobuf.dev/programming-guides/encoding)."""

from __future__ import annotations

import collections
from typing import Any

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""The wire types of a number, of one of fixed size, and of bytes, text or a message."""
_FIXED = {FIXED64: 8, FIXED32: 4}


def fields(message: bytes) -> dict[tuple[int, int], list[Any]]:
    """The values of each field of a message, in order, by its number and wire type; a number of fixed size is its bytes.

    Raises:
      ValueError: the bytes are not a message.
    """
    found: dict[tuple[int, int], list[Any]] = collections.defaultdict(list)
    position, end = 0, len(message)
    while position < end:
        key, position = varint(message, position)
        kind = key & 7
        if kind == VARINT:
            value, position = varint(message, position)
            found[key >> 3, kind].append(value)
            continue
        if kind == BYTES:
            count, position = varint(message, position)
        elif kind in _FIXED:
            count = _FIXED[kind]
        else:
            raise ValueError(f'wire type {kind} at byte {position}')
        if position + count > end:
            raise ValueError(f'a field ends {position + count - end} bytes after its message')
        found[key >> 3, kind].append(message[position : position + count])
        position += count
    return found


def varint(data: bytes, position: int) -> tuple[int, int]:
    """The number that begins at a byte, and the byte after it.

    Raises:
      ValueError: the number does not end, or has more than 64 bits.
    """
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f'an unterminated number at byte {position}')
