"""Decodes scalars in TensorBoard's protocol buffers.

    Event        wall_time = 1, step = 2, summary = 5                          tensorboard/compat/proto/event.proto
    Summary      value = 1 (repeated)                           tensorboard/compat/proto/summary.proto
    Value        tag = 1, simple_value = 2, tensor = 8
    TensorProto  dtype = 1, tensor_shape = 2, tensor_content = 4, *_val by dtype

All values of an event are read; T5X reads only the first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

from t5ckpt.core.protobuf import BYTES, VARINT, fields, varint

# By DataType (types.proto): the NumPy dtype, and the field of values that are not in tensor_content.
_DTYPES = {
    1: (np.float32, 5),
    2: (np.float64, 6),
    3: (np.int32, 7),
    4: (np.uint8, 7),
    5: (np.int16, 7),
    6: (np.int8, 7),
    9: (np.int64, 10),
    10: (np.bool_, 11),
    14: (ml_dtypes.bfloat16, 13),
    17: (np.uint16, 7),
    19: (np.float16, 13),
    22: (np.uint32, 16),
    23: (np.uint64, 17),
}
_HALVES = 13


class Scalar(NamedTuple):
    """A scalar of an event; the time in unix seconds."""

    step: int
    time: float
    tag: bytes
    value: float


def scalars(event: bytes, tag: bytes) -> Iterator[tuple[int, float]]:
    """Yields (step, value) for each scalar with this tag in an event.

    Raises:
      ValueError: the bytes are not an event.
    """
    return ((scalar.step, scalar.value) for scalar in all_scalars(event) if scalar.tag == tag)


def all_scalars(event: bytes) -> Iterator[Scalar]:
    """Yields each scalar in an event.

    Raises:
      ValueError: the bytes are not an event.
    """
    step, time, summaries = 0, 0.0, list[bytes]()
    for number, kind, value in fields(event):
        match number, kind, value:
            case 1, 1, bytes():
                time = struct.unpack('<d', value)[0]
            case 2, 0, int():
                step = _signed(value)
            case 5, 2, bytes():
                summaries.append(value)
            case _:
                pass
    for summary in summaries:
        for number, kind, value in fields(summary):
            if (number, kind) == (1, BYTES) and isinstance(value, bytes):
                tag, scalar = _scalar(value)
                if scalar is not None:
                    yield Scalar(step, time, tag, scalar)


def _scalar(message: bytes) -> tuple[bytes, float | None]:
    result: float | None = None
    name = b''
    for number, kind, value in fields(message):
        match number, kind, value:
            case 1, _, bytes():
                name = value
            case 2, 5, bytes():
                result = struct.unpack('<f', value)[0]
            case 8, _, bytes():
                result = _one_number(value)
            case _:
                pass
    return name, result


def _one_number(tensor: bytes) -> float | None:
    """The value of a tensor with one element; None for other tensors."""
    kind_of, elements, content = 0, 1, b''
    given: dict[int, list[int | bytes]] = {}
    for number, kind, value in fields(tensor):
        match number, kind, value:
            case 1, 0, int():
                kind_of = value
            case 2, _, bytes():
                elements = _elements(value)
            case 4, _, bytes():
                content = value
            case _:
                given.setdefault(number, []).append(value)
    if kind_of not in _DTYPES or elements != 1:
        return None
    dtype, field = np.dtype(_DTYPES[kind_of][0]).newbyteorder('<'), _DTYPES[kind_of][1]
    if content:
        return float(np.frombuffer(content, dtype)[0]) if len(content) == dtype.itemsize else None
    values = given.get(field, [])
    return _listed(values[0], dtype, field) if len(values) == 1 else None


def _listed(value: int | bytes, dtype: np.dtype, field: int) -> float | None:
    """A value in a ``*_val`` field, packed or not."""
    if isinstance(value, bytes) and dtype.itemsize >= 4 and dtype.kind == 'f':
        return float(np.frombuffer(value, dtype)[0]) if len(value) == dtype.itemsize else None
    if isinstance(value, bytes):
        value = varint(value, 0)[0]
    number = _signed(value)
    if field == _HALVES:
        return float(np.array(number & 0xFFFF, '<u2').view(dtype))
    return float(number if dtype.kind != 'u' else value)


def _elements(shape: bytes) -> int:
    product = 1
    for number, kind, value in fields(shape):
        if (number, kind) == (2, BYTES) and isinstance(value, bytes):
            size = next((int(size) for field, wire, size in fields(value) if (field, wire) == (1, VARINT)), 0)
            product *= size
    return product


def _signed(value: int) -> int:
    """Converts a varint to int64."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value
