"""Decides which values a checkpoint can hold as leaves.

jax.Arrays, numpy arrays and scalars, Python numbers and LazyArrays are leaves. ``tree/leaves_to_save.py`` reads a ``jax.Ref`` or
an object with ``__array__``. An object of any other type is an error that names it.

A subclass of a Python number, such as an IntEnum, is saved as the number (:func:`base_number`, called by
``tree/leaves_to_save.py``) and restored as the type of the template (:func:`as_instance`, called by ``restore/make_leaf.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from t5ckpt.core.arguments import native_dtype
from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.errors import UnsupportedLeafError

# Libraries whose arrays have more than values, and the conversion that an error suggests.
_OTHERS = {
    'pandas': 'x.to_numpy()',
    'scipy': 'x.toarray(), or its arrays in a dict,',
    'tensorflow': 'x.numpy()',
    'torch': 'x.detach().cpu().numpy()',
    'xarray': 'x.to_numpy()',
}


def is_jax_array(leaf: Any) -> bool:
    """Whether a leaf is a jax.Array; checks only the type, since the attributes of a donated array raise."""
    return hasattr(type(leaf), 'addressable_shards')


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of JAX's typed keys; does not import jax."""
    return not isinstance(dtype, np.dtype) and type(dtype).__name__ == 'KeyTy'


def check_is_array(path: Path, leaf: Any) -> None:
    """Checks that a leaf has the shape and the dtype of an array; not for Python numbers, text and containers.

    Raises:
      UnsupportedLeafError: it does not, or it has more than values, such as a mask or an index.
    """
    name, kind = leaf_name(path), f'{type(leaf).__module__}.{type(leaf).__qualname__}'.removeprefix('builtins.')
    library = kind.partition('.')[0]
    if library in _OTHERS:
        raise UnsupportedLeafError(
            f'{name}: {kind} is not saved, because it could not be restored as one. Give {_OTHERS[library]} instead.'
        )
    try:
        is_array = isinstance(leaf.shape, tuple)
        if not is_key(leaf.dtype):
            # Raises if NumPy does not have the dtype.
            native_dtype(leaf.dtype)
    except Exception:  # noqa: BLE001 - the attributes may be properties of any class
        is_array = False
    if isinstance(leaf, np.ma.MaskedArray) or not is_array:
        raise UnsupportedLeafError(
            f'{name}: {kind} is neither an array nor a number. Give it as an array (numpy.asarray), or mark the field '
            'static, so that it is not a leaf.'
        )


def check_has_values(path: Path, value: Any) -> None:
    """Checks that a leaf has values.

    Raises:
      UnsupportedLeafError: it is a tracer, or its buffer was donated.
    """
    # First, since most attributes of a tracer raise.
    if 'Tracer' in type(value).__name__:
        raise UnsupportedLeafError(
            f'{leaf_name(path)}: is a tracer. Save outside of jit, with the arrays that the step returned.'
        )
    if callable(getattr(value, 'is_deleted', None)) and value.is_deleted():
        raise UnsupportedLeafError(
            f'{leaf_name(path)}: its buffer is gone, it was donated to a jitted step. Save the state that the step returned.'
        )


def is_abstract(leaf: Any) -> bool:
    """Whether a leaf is a ``jax.ShapeDtypeStruct``."""
    return type(leaf).__name__ == 'ShapeDtypeStruct'


def leaf_devices(leaf: Any) -> int:
    """The number of devices of a leaf; 1 for a leaf that is not a jax.Array."""
    # A tracer has no such attribute.
    sharding = getattr(leaf, 'sharding', None) if is_jax_array(leaf) else None
    return 1 if sharding is None else len(sharding.device_set)


def most_devices(leaves: Iterable[Any]) -> int:
    """The largest number of devices of any leaf."""
    # Many leaves share few shardings, and each call of leaf_devices makes a set.
    distinct = {id(getattr(leaf, 'sharding', None)): leaf for leaf in leaves if is_jax_array(leaf)}
    return max(map(leaf_devices, distinct.values()), default=1)


def base_number(python: type) -> type:
    """The Python number that a subclass of it (IntEnum, IntFlag, a float with a unit) is saved as."""
    return next(base for base in (bool, int, float, complex) if issubclass(python, base))


def as_instance(python: type, value: Any) -> Any:
    """Converts a number or text to the template's subclass, if that has exactly this value; else returns it unchanged."""
    if type(value) is python:
        return value
    try:
        made = python(value)
        is_same = bool(made == value or (np.isnan(made) and np.isnan(value)))
    except Exception:  # noqa: BLE001 - the user's class, such as an enum without this member
        return value
    return made if is_same else value
