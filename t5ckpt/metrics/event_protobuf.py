"""Decodes scalars in TensorBoard's protocol buffers.

    Event        wall_time = 1, step = 2, summary = 5           tensorboard/compat/proto/event.proto
    Summary      value = 1 (repeated)                           tensorboard/compat/proto/summary.proto
    Value        tag = 1, simple_value = 2, tensor = 8
    TensorProto  dtype = 1, tensor_content = 4, float_val = 5

A tensor is a scalar if it is one float32, to which ``tf.summary.scalar`` converts every value. All values of an event are read;
T5X reads only the first.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Iterator
from typing import NamedTuple

from t5ckpt.core.protobuf import fields

_FLOAT32 = 1


class Scalar(NamedTuple):
    """A scalar of an event; the time in unix seconds."""

    step: int
    time: float
    tag: bytes
    value: float


def all_scalars(event: bytes) -> Iterator[Scalar]:
    """Yields each scalar in an event.

    Raises:
      ValueError: the bytes are not an event.
    """
    numbers, parts = _split(event)
    # A varint of 64 bits is a signed number.
    step = (numbers.get(2, 0) + 2**63) % 2**64 - 2**63
    time = sum(struct.unpack('<d', value)[0] for value in parts[1][-1:] if len(value) == 8)
    for value in (value for summary in parts[5] for value in _split(summary)[1][1]):
        _, of_value = _split(value)
        data = b''.join(of_value[2][-1:] or map(_float_bytes, of_value[8][-1:]))
        if len(data) == 4:
            yield Scalar(step, time, b''.join(of_value[1][-1:]), struct.unpack('<f', data)[0])


def _float_bytes(tensor: bytes) -> bytes:
    numbers, parts = _split(tensor)
    return b''.join(parts[4] + parts[5]) if numbers.get(1) == _FLOAT32 else b''


def _split(message: bytes) -> tuple[dict[int, int], dict[int, list[bytes]]]:
    """The last number of each field, and its messages, bytes and numbers of fixed size."""
    numbers: dict[int, int] = {}
    parts: dict[int, list[bytes]] = collections.defaultdict(list)
    for field, _, value in fields(message):
        if isinstance(value, int):
            numbers[field] = value
        else:
            parts[field].append(value)
    return numbers, parts
