"""Dtypes on disk.

Stored arrays cannot hold four of JAX's dtypes: TensorStore's zarr v2 driver (0.1.86) has no name for uint2, uint4 and
float8_e4m3, and T5X refuses uint16 on load, because in version 2 it meant bfloat16. Such leaves are stored in a dtype that holds
them exactly, and the sidecar records the original dtype. Integers are stored by value, so that T5X reads the right numbers;
float8_e4m3 is stored by its bits, which preserves NaN payloads.
"""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

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
"""The dtype on disk of each dtype that is stored as another one, by name."""


def dtype_from_name(name: str) -> np.dtype:
    """The numpy dtype of a name in a manifest or sidecar, from a fixed list.

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


def zarr_typestr(dtype: np.dtype) -> str:
    """The dtype's name in ``.zarray``: NumPy's typestr, or TensorStore's name for the types of ml_dtypes."""
    return name_of(dtype) if name_of(dtype) in _EXTENDED else dtype.newbyteorder('<').str
