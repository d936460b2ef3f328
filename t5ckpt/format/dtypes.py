"""Dtypes on disk.

Stored arrays cannot hold four of JAX's dtypes: TensorStore's zarr v2 driver (0.1.86) has no name for uint2, uint4 and
float8_e4m3, and T5X refuses uint16 on load, because in version 2 it meant bfloat16. Such leaves are stored in a dtype that holds
them exactly, and the facts record the original dtype. Integers are stored by value, so that T5X reads the right numbers;
float8_e4m3 is stored by its bits, which preserves NaN payloads.

Casts of floating leaves are in :func:`cast`, so that none loses a finite value in silence.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
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
DTYPES: Mapping[str, np.dtype] = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in (*_PLAIN, *_EXTENDED)}
"""The dtypes of arrays by name. A name in a file never reaches ``np.dtype``, which would accept structured types."""

# Casts to these saturate.
_WITHOUT_NAN = ('float4_e2m1fn', 'float6_e2m3fn', 'float6_e3m2fn')
_BY_VALUE = {'uint2': 'uint8', 'uint4': 'uint8', 'uint16': 'uint32'}
_BY_BITS = {'float8_e4m3': 'uint8', 'float6_e2m3fn': 'uint8', 'float6_e3m2fn': 'uint8'}

STORED_AS = {**_BY_VALUE, **_BY_BITS}
"""The dtype on disk of each dtype that is stored as another one, by name."""


def is_storable(dtype: np.dtype) -> bool:
    """Whether a checkpoint holds arrays of a dtype."""
    return name_of(dtype) in DTYPES


TYPESTRS: Mapping[str, np.dtype] = {
    **DTYPES,
    **{order + DTYPES[name].str[1:]: DTYPES[name] for name in _PLAIN for order in '<>|'},
}
"""The dtypes by their names in a ``.zarray``, in native byte order: '<f4' and '>f4' are float32."""


@functools.cache
def name_of(dtype: np.dtype) -> str:
    """The dtype's name, cached because NumPy takes 7 us to build it each time."""
    return dtype.name


@functools.cache
def kind(dtype: np.dtype) -> str:
    """'bool', 'int', 'uint', 'float', 'complex' or 'other'. Nothing is cast silently from one kind to another."""
    found = re.search('bool|uint|int|float|complex', dtype.name)
    return found[0] if found else 'other'


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype on disk of a stored array of ``dtype``; ``dtype`` itself, except for those in ``STORED_AS``."""
    name = name_of(dtype)
    return DTYPES[STORED_AS.get(name, name)]


def to_stored(array: np.ndarray) -> np.ndarray:
    """``array`` in its stored dtype; without a copy if that is the same."""
    dtype = stored_dtype(array.dtype)
    return array.view(dtype) if name_of(array.dtype) in _BY_BITS else array.astype(dtype, copy=False)


def is_stored_by_value(dtype: np.dtype) -> bool:
    """Whether the elements of ``dtype`` have other bits on disk."""
    return name_of(dtype) in _BY_VALUE


def from_stored(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The inverse of :func:`to_stored`; also views uint16 of version 2 as bfloat16."""
    return array.astype(dtype, copy=False) if is_stored_by_value(dtype) else array.view(dtype)


@functools.cache
def _may_overflow(dtype: np.dtype, wanted: np.dtype) -> bool:
    """Whether one floating dtype has finite values beyond the range of another; False for other kinds, which no cast narrows."""
    if kind(dtype) != 'float' or kind(wanted) != 'float':
        return False
    held, limits = ml_dtypes.finfo(dtype), ml_dtypes.finfo(wanted)
    return not (_is_within(held.min, limits) and _is_within(held.max, limits))


def _is_within(values: Any, limits: Any) -> Any:
    """Whether numbers are in the range of a dtype, and not NaN; a mask for an array."""
    return (values >= float(limits.min)) & (values <= float(limits.max))


def cast(values: Any, dtype: np.dtype, name: str) -> Any:
    """Casts the values of a leaf, a numpy array or a jax.Array.

    Raises:
      UnsupportedLeafError: the dtype has no number near a finite value, which would become infinite, NaN or the largest number.
    """
    held, is_host = values.dtype, isinstance(values, np.ndarray)
    if held == dtype or not _may_overflow(held, dtype):
        return values if held == dtype else values.astype(dtype)
    limits = ml_dtypes.finfo(dtype)
    # Half as expensive as the cast. For narrow dtypes NumPy's loops take longer than the cast.
    is_fast = is_host and held.itemsize > 2 and values.size
    if is_fast and _is_within(values.min(), limits) and _is_within(values.max(), limits):
        return values.astype(dtype)
    with np.errstate(over='ignore', invalid='ignore'):
        result = values.astype(dtype)
        if name_of(dtype) in _WITHOUT_NAN:
            lost = ~_is_within(values, limits)
        else:
            lost = _is_within(values, ml_dtypes.finfo(held)) & ~_is_within(result, limits)
    if bool(lost.any()):
        example = f', such as {values[lost].flat[0]}' if is_host else ''
        raise UnsupportedLeafError(
            f'{name} has values{example}, that {dtype.name} cannot hold: its range is {float(limits.min):g} to '
            f'{float(limits.max):g}. Choose another dtype, such as bfloat16.'
        )
    return result


def zarr_typestr(dtype: np.dtype) -> str:
    """The dtype's name in ``.zarray``: NumPy's typestr, or TensorStore's name for the types of ml_dtypes."""
    return name_of(dtype) if name_of(dtype) in _EXTENDED else dtype.newbyteorder('<').str
