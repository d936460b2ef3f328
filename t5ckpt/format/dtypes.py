"""Dtypes on disk.

Stored arrays cannot hold four of JAX's dtypes: TensorStore's zarr v2 driver (0.1.86) has no name for uint2, uint4 and
float8_e4m3, and T5X refuses uint16 on load, because in version 2 it meant bfloat16. Such leaves are stored in a dtype that holds
them exactly, and the facts record the original dtype. Integers are stored by value, so that T5X reads the right numbers;
float8_e4m3 is stored by its bits, which preserves NaN payloads.

Casts of floating leaves are in :func:`cast`, so that none loses a finite value in silence.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from t5ckpt.errors import UnsupportedLeafError

_EXTENDED = (
    'bfloat16',
    'float4_e2m1fn',
    'float6_e2m3fn',
    'float6_e3m2fn',
    'float8_e3m4',
    'float8_e4m3',
    'float8_e4m3b11fnuz',
    'float8_e4m3fn',
    'float8_e4m3fnuz',
    'float8_e5m2',
    'float8_e5m2fnuz',
    'float8_e8m0fnu',
    'int2',
    'int4',
    'uint2',
    'uint4',
)
_PLAIN = (
    'bool',
    'int8',
    'int16',
    'int32',
    'int64',
    'uint8',
    'uint16',
    'uint32',
    'uint64',
    'float16',
    'float32',
    'float64',
    'complex64',
    'complex128',
)
_BY_NAME: dict[str, np.dtype] = {name: np.dtype(name) for name in _PLAIN} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in _EXTENDED if hasattr(ml_dtypes, name)
}

# Casts to these saturate.
_WITHOUT_NAN = ('float4_e2m1fn', 'float6_e2m3fn', 'float6_e3m2fn')
_BY_VALUE = {'uint2': 'uint8', 'uint4': 'uint8', 'uint16': 'uint32'}
_BY_BITS = {'float8_e4m3': 'uint8', 'float6_e2m3fn': 'uint8', 'float6_e3m2fn': 'uint8'}

STORED_AS = {**_BY_VALUE, **_BY_BITS}
"""The dtype on disk of each dtype that is stored as another one, by name."""


def dtype_from_name(name: str) -> np.dtype:
    """The numpy dtype of a name in a manifest or its facts, from a fixed list.

    Raises:
      KeyError: for any other name. A name from a file never reaches ``np.dtype``, which would accept structured types.
    """
    return _BY_NAME[name]


def is_storable(dtype: np.dtype) -> bool:
    """Whether a checkpoint holds arrays of a dtype."""
    return name_of(dtype) in _BY_NAME


def dtype_from_typestr(typestr: str) -> np.dtype | None:
    """The dtype of a name in a ``.zarray``, in native byte order ('<f4' and '>f4' are float32); None for an unknown name."""
    if typestr in _BY_NAME:
        return _BY_NAME[typestr]
    if typestr[:1] not in ('<', '>', '|'):
        return None
    return next((dtype for name, dtype in _BY_NAME.items() if name in _PLAIN and dtype.str[1:] == typestr[1:]), None)


@functools.cache
def name_of(dtype: np.dtype) -> str:
    """The dtype's name, cached because NumPy takes 7 us to build it each time."""
    return dtype.name


@functools.cache
def kind(dtype: np.dtype) -> str:
    """'bool', 'int', 'uint', 'float', 'complex' or 'other'. Nothing is cast silently from one kind to another."""
    name = dtype.name
    for prefix in ('bool', 'uint', 'int', 'float', 'bfloat', 'complex'):
        if name.startswith(prefix):
            return 'float' if prefix == 'bfloat' else prefix
    return 'other'


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype on disk of a stored array of ``dtype``; ``dtype`` itself, except for those in ``STORED_AS``."""
    name = name_of(dtype)
    return _BY_NAME[_BY_VALUE.get(name) or _BY_BITS.get(name) or name]


def to_stored(array: np.ndarray) -> np.ndarray:
    """``array`` in its stored dtype; without a copy if that is the same."""
    name = name_of(array.dtype)
    if name in _BY_VALUE:
        return array.astype(_BY_NAME[_BY_VALUE[name]])
    if name in _BY_BITS:
        return array.view(_BY_NAME[_BY_BITS[name]])
    return array


def from_stored(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The inverse of :func:`to_stored`; also views uint16 of version 2 as bfloat16."""
    if array.dtype == dtype:
        return array
    if name_of(dtype) in _BY_VALUE:
        return array.astype(dtype)
    return array.view(dtype)


@functools.cache
def may_overflow(dtype: np.dtype, wanted: np.dtype) -> bool:
    """Whether one floating dtype has finite values beyond the range of another; False for other kinds, which no cast narrows."""
    if kind(dtype) != 'float' or kind(wanted) != 'float':
        return False
    held, limits = ml_dtypes.finfo(dtype), ml_dtypes.finfo(wanted)
    return not (float(limits.min) <= float(held.min) and float(held.max) <= float(limits.max))


def cast(values: Any, dtype: np.dtype, name: str) -> Any:
    """Casts the values of a leaf, a numpy array or a jax.Array.

    Raises:
      UnsupportedLeafError: the dtype has no number near a finite value, which would become infinite, NaN or the largest number.
    """
    if values.dtype == dtype or not may_overflow(values.dtype, dtype):
        return values if values.dtype == dtype else values.astype(dtype)
    limits = ml_dtypes.finfo(dtype)
    low, high = float(limits.min), float(limits.max)
    is_host = isinstance(values, np.ndarray)
    # Half as expensive as the cast. For narrow dtypes NumPy's loops take longer than the cast.
    if is_host and values.dtype.itemsize > 2 and values.size and low <= values.min() and values.max() <= high:
        return values.astype(dtype)
    with np.errstate(over='ignore', invalid='ignore'):
        result = values.astype(dtype)
        lost = _lost(values, result, low, high, is_host)
    if bool(lost.any()):
        example = f', such as {values[lost].flat[0]}' if is_host else ''
        raise UnsupportedLeafError(
            f'{name} has values{example}, that {dtype.name} cannot hold: its range is {low:g} to {high:g}. Choose another '
            'dtype, such as bfloat16.'
        )
    return result


def _lost(values: Any, result: Any, low: float, high: float, is_host: bool) -> Any:
    """A mask of the values that are lost: finite ones, and for dtypes without NaN all outside their range."""
    numbers: Any = np
    if not is_host:
        import jax

        numbers = jax.numpy
    if name_of(result.dtype) in _WITHOUT_NAN:
        return ~((values >= low) & (values <= high))
    lost = ~numbers.isfinite(result)
    return lost & numbers.isfinite(values)


def zarr_typestr(dtype: np.dtype) -> str:
    """The dtype's name in ``.zarray``: NumPy's typestr, or TensorStore's name for the types of ml_dtypes."""
    return name_of(dtype) if name_of(dtype) in _EXTENDED else dtype.newbyteorder('<').str
