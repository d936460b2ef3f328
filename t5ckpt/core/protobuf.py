"""Reads the wire format of protocol buffers (protobuf.dev/programming-guides/encoding)."""

from __future__ import annotations

from collections.abc import Iterator

VARINT, BYTES = 0, 2
"""The wire types of a number and of bytes, text or a message."""
_FIXED = {1: 8, 5: 4}


def fields(message: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Yields (number, wire type, value) of each field; a number of fixed size is its bytes.

    Raises:
      ValueError: the bytes are not a message.
    """
    at, end = 0, len(message)
    while at < end:
        key, at = varint(message, at)
        kind = key & 7
        if kind == VARINT:
            value, at = varint(message, at)
            yield key >> 3, kind, value
            continue
        if kind == BYTES:
            count, at = varint(message, at)
        elif kind in _FIXED:
            count = _FIXED[kind]
        else:
            raise ValueError(f'wire type {kind} at byte {at}')
        if at + count > end:
            raise ValueError(f'a field ends {at + count - end} bytes after its message')
        yield key >> 3, kind, message[at : at + count]
        at += count


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at a byte, and the byte after it.

    Raises:
      ValueError: the number does not end, or has more than 64 bits.
    """
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f'an unterminated number at byte {at}')
