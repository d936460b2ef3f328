"""Dtypes on disk.

Stored arrays cannot hold four of JAX's dtypes: TensorStore's zarr v2 driver (0.1.86) has no name for uint2, uint4 and
float8_e4m3, and T5X refuses uint16 on load, because in version 2 it meant bfloat16. Such leaves are stored in a dtype that holds
them exactly, and the sidecar records the original dtype. Integers are stored by value, so that T5X reads the right numbers;
float8_e4m3 is stored by its bits, which preserves NaN payloads.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from t5ckpt.core.arguments import check_patterns
from t5ckpt.core.leaf_path import Path, leaf_name, root_names
from t5ckpt.core.protocols import leaf_pattern, meant_pattern
from t5ckpt.core.text import did_you_mean, shown
from t5ckpt.errors import UnmatchedPattern

if TYPE_CHECKING:
    from t5ckpt.tree.leaves import LeafToSave

# The dtypes that a misspelt cast may mean.
_USUAL = ('bfloat16', 'float16', 'float32', 'float64')
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
_CAST_ROOTS = ('target', 'params')


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


def floating_dtype(dtype: Any, option: str) -> np.dtype | None:
    """Checks the dtype of a cast option; None is returned as it is.

    Raises:
      ValueError: the dtype is not floating; a cast to integers would lose the weights.
    """
    if dtype is None:
        return None
    try:
        wanted = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(
            f"{option}: {shown(dtype)} is not a dtype. Pass one, such as jnp.bfloat16 or 'bfloat16'."
            f'{did_you_mean(dtype, _USUAL) if isinstance(dtype, str) else ""}'
        ) from error
    if kind(wanted) != 'float':
        raise ValueError(
            f'{option} must be a floating dtype such as jnp.bfloat16, got {wanted.name}: only floating leaves are cast.'
        )
    return wanted


@dataclasses.dataclass(frozen=True)
class Cast:
    """A cast of floating leaves.

    Attributes:
      dtype: the dtype after the cast; None for that of the template.
      leaves: a pattern, matched with the whole names of leaves; None for the leaves under ``target`` and ``params``, or for all
        leaves if the dtype is the template's.
      option: the option that requests the cast, for messages.
    """

    dtype: np.dtype | None
    leaves: str | re.Pattern[str] | None = None
    option: str = 'save_dtype'

    @classmethod
    def of(cls, dtype: Any, leaves: str | re.Pattern[str] | None, option: str) -> Cast | None:
        """Parses the two options of a cast; None if neither is given.

        Raises:
          ValueError: the dtype is not floating, the pattern is not a regular expression, or it comes without a dtype.
        """
        wanted = floating_dtype(dtype, option)
        if leaves is not None:
            check_patterns([leaves], 'cast_leaves')
        if wanted is None and leaves is not None:
            raise ValueError(f'cast_leaves={leaves!r} has no effect without {option}. Pass the dtype, too, or neither.')
        return None if wanted is None else cls(wanted, leaves, option)

    @classmethod
    def of_restore(cls, dtype: Any, leaves: str | re.Pattern[str] | None) -> Cast | None:
        """Parses the cast of a restore, whose dtype may be 'template'; None if there is no dtype.

        Raises:
          ValueError: the dtype is not floating, or the pattern is not a regular expression.
        """
        if dtype is None:
            return None
        if not isinstance(dtype, str) or dtype != 'template':
            return cls.of(dtype, leaves, 'restore_dtype')
        check_patterns([] if leaves is None else [leaves], 'cast_leaves')
        return cls(None, leaves, 'restore_dtype')

    @property
    def requested(self) -> np.dtype | str:
        """The dtype, or 'template'."""
        return 'template' if self.dtype is None else self.dtype

    def touches(self, path: Path) -> bool:
        """Whether the cast applies to a leaf with this path, provided that the leaf is floating."""
        if self.leaves is None:
            return self.dtype is None or path[0] in _CAST_ROOTS
        return leaf_pattern(self.leaves).fullmatch(leaf_name(path)) is not None


def array_dtype(leaf: Any) -> np.dtype | None:
    """The NumPy dtype of an array; None for any other leaf, such as a typed PRNG key."""
    dtype = getattr(leaf, 'dtype', None)
    return dtype if isinstance(dtype, np.dtype) else None


def check_cast(cast: Cast | None, dtypes: Mapping[Path, np.dtype | None]) -> None:
    """Raises UnmatchedPattern for a cast that applies to none of the floating leaves.

    Args:
      cast: the cast, if there is one.
      dtypes: of all leaves; None for a leaf that is not an array.
    """
    if cast is None or (cast.dtype is None and cast.leaves is None):
        return
    floating = [path for path, dtype in dtypes.items() if dtype is not None and kind(dtype) == 'float']
    if any(cast.touches(path) for path in floating):
        return
    asked = f'{cast.option}={"template" if cast.dtype is None else cast.dtype.name}'
    if not floating:
        raise UnmatchedPattern(f'{asked} casts floating leaves, but the tree has none. Leave {cast.option} out.')
    roots = root_names(floating)
    shown = ', '.join(roots[:8]) + (', ...' if len(roots) > 8 else '')
    which = "under 'target' and 'params'" if cast.leaves is None else f'that match cast_leaves={cast.leaves!r}'
    example = re.escape(roots[0]).replace('\\-', '-') + '.*' if roots[0].endswith('/') else '.*'
    cure = f' Pass a pattern for the whole names of the leaves to cast: cast_leaves={example!r}.'
    if cast.leaves is not None:
        cure = meant_pattern(cast.leaves, map(leaf_name, floating), option='cast_leaves=') or cure
    raise UnmatchedPattern(
        f'{asked} would have no effect: it casts floating leaves {which}, but the floating leaves are {shown}.{cure}'
    )


def cast_dtype(path: Path, dtype: np.dtype, cast: Cast | None, template: np.dtype | None = None) -> np.dtype:
    """The dtype of a leaf after a cast; ``template`` is the leaf's dtype in the template.

    Only floating leaves are cast. T5X also casts the integers in ``target``, and so loses step counters inside models.
    """
    if cast is None or kind(dtype) != 'float' or not cast.touches(path):
        return dtype
    wanted = template if cast.dtype is None else cast.dtype
    return dtype if wanted is None else wanted


def cast_leaves(leaves: Sequence[LeafToSave], cast: Cast | None) -> Sequence[LeafToSave]:
    """The leaves of a save, each with its dtype after the cast.

    Raises:
      UnmatchedPattern: the cast applies to no leaf.
    """
    if cast is None:
        return leaves
    check_cast(cast, {leaf.path: leaf.dtype for leaf in leaves})
    return [
        leaf if leaf.dtype is None else leaf._replace(dtype=cast_dtype(leaf.path, leaf.dtype, cast)) for leaf in leaves
    ]


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
