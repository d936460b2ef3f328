"""Dtypes on disk.

Real T5X and TensorStore's zarr v2 driver between them cannot hold four of JAX's dtypes in a stored array
(tensorstore 0.1.86): uint2, uint4 and float8_e4m3 have no zarr name, and uint16 is refused by T5X on load, because in
version 2 it meant bfloat16. Such leaves are stored in a dtype that holds them exactly, and the sidecar says what they
were: integers by value (T5X then reads the right numbers), float8_e4m3 by its bits (NaN payloads survive).
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

__all__ = [
    'STORED_AS',
    'dtype_from_name',
    'dtype_from_typestr',
    'floating_dtype',
    'from_stored',
    'kind',
    'name_of',
    'stored_dtype',
    'to_stored',
    'zarr_typestr',
]

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

_BY_VALUE = {'uint2': 'uint8', 'uint4': 'uint8', 'uint16': 'uint32'}
_BY_BITS = {'float8_e4m3': 'uint8', 'float6_e2m3fn': 'uint8', 'float6_e3m2fn': 'uint8'}

STORED_AS = {**_BY_VALUE, **_BY_BITS}
"""Dtypes that are stored as another, by name."""


def dtype_from_name(name: str) -> np.dtype:
    """The numpy dtype of a name in a manifest or sidecar, from a fixed list.

    Raises:
      KeyError: for any other name. A name from a file never reaches ``np.dtype``, which would accept structured types.
    """
    return _BY_NAME[name]


def dtype_from_typestr(typestr: str) -> np.dtype | None:
    """The dtype of a ``.zarray``: '<f4' and '>f4' are float32, 'bfloat16' is itself; None for what is not known."""
    if typestr in _BY_NAME:
        return _BY_NAME[typestr]
    if typestr[:1] not in ('<', '>', '|'):
        return None
    return next((dtype for name, dtype in _BY_NAME.items() if name in _PLAIN and dtype.str[1:] == typestr[1:]), None)


def floating_dtype(dtype: Any, option: str) -> np.dtype | None:
    """Checks the dtype of a cast option; None stays None.

    Raises:
      ValueError: not a floating dtype: weights cast to integers are lost.
    """
    if dtype is None:
        return None
    try:
        wanted = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(
            f"{option}: {dtype!r:.40} is no dtype. Pass one, such as jnp.bfloat16 or 'bfloat16'."
        ) from error
    if kind(wanted) != 'float':
        raise ValueError(
            f'{option} must be a floating dtype, got {wanted.name}: only floating leaves are cast. Pass jnp.bfloat16, say.'
        )
    return wanted


@functools.cache
def name_of(dtype: np.dtype) -> str:
    """The dtype's plain name; numpy takes 7 us to make it each time."""
    return dtype.name


@functools.cache
def kind(dtype: np.dtype) -> str:
    """The kind between which nothing is cast silently: 'bool', 'int', 'uint', 'float', 'complex' or 'other'."""
    name = dtype.name
    for prefix in ('bool', 'uint', 'int', 'float', 'bfloat', 'complex'):
        if name.startswith(prefix):
            return 'float' if prefix == 'bfloat' else prefix
    return 'other'


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype that a stored array of ``dtype`` has on disk; mostly itself."""
    name = dtype.name
    return _BY_NAME[_BY_VALUE.get(name) or _BY_BITS.get(name) or name]


def to_stored(array: np.ndarray) -> np.ndarray:
    """``array`` in its stored dtype, without a copy where the dtype stays."""
    name = array.dtype.name
    if name in _BY_VALUE:
        return array.astype(_BY_NAME[_BY_VALUE[name]])
    if name in _BY_BITS:
        return array.view(_BY_NAME[_BY_BITS[name]])
    return array


def from_stored(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The inverse of :func:`to_stored`; also the view of version 2's bfloat16 that was written as uint16."""
    if array.dtype == dtype:
        return array
    if dtype.name in _BY_VALUE:
        return array.astype(dtype)
    return array.view(dtype)


def zarr_typestr(dtype: np.dtype) -> str:
    """The dtype's name in ``.zarray``: numpy's typestr, or the plain name for ml_dtypes' types as TensorStore has it."""
    return dtype.name if dtype.name in _EXTENDED else dtype.newbyteorder('<').str
