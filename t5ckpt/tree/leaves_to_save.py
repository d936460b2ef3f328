"""The leaves of a state to be saved: their values, and what the save needs to know of each.

An IntEnum, or another subclass of a Python number, is saved as the number (``tree/leaf_values.base_number``).

What a state may hold is decided and reported here, before anything is planned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.text import lines
from t5ckpt.errors import UnsupportedLeafError
from t5ckpt.lazy import LazyArray
from t5ckpt.tree.leaf_table import MAX_RANK, MAX_SAVED_DEPTH, Empty, LeafTable
from t5ckpt.tree.leaf_values import base_number, check_has_values, check_is_array, is_abstract, is_jax_array
from t5ckpt.tree.template import leaf_template

_VALUED = (np.ndarray, np.generic, bool, int, float, complex, str, LazyArray)


class LeafToSave(NamedTuple):
    """A leaf of a state to be saved.

    A named tuple, since one is made per leaf, and a frozen dataclass takes three times as long to make.

    Attributes:
      path: of the leaf.
      name: of the leaf.
      value: a jax.Array, numpy array, Python number, LazyArray or None. Typed keys are their data, and a subclass of a Python
        number is that number.
      kind: 'array', 'scalar' (a Python number), 'key' (typed PRNG keys), 'text', 'none' or 'empty'.
      shape: of the array; of the key data for keys.
      dtype: of the array; None for text, none and empty.
      note: what the sidecar records of the kind: the name of the number's type, of the keys' implementation, or of the
        empty container's type; the text itself.
    """

    path: Path
    name: str
    value: Any
    kind: str
    shape: tuple[int, ...] = ()
    dtype: np.dtype | None = None
    note: str = ''

    @property
    def is_global(self) -> bool:
        """Whether every process holds the whole value, or can take it from process 0."""
        value = self.value
        return getattr(value, 'is_fully_addressable', True) or getattr(value, 'is_fully_replicated', False)


def leaves_to_save(table: LeafTable, is_storable: Callable[[np.dtype], bool]) -> list[LeafToSave]:
    """The leaves of a table, in its order.

    Args:
      table: path to leaf.
      is_storable: whether the format has arrays of a dtype.

    Raises:
      UnsupportedLeafError: naming every leaf that cannot be saved.
    """
    leaves: list[LeafToSave] = []
    problems: list[str] = []
    for path, value in table.items():
        try:
            leaf = _leaf_to_save(path, value)
            _check_format(leaf, is_storable)
            leaves.append(leaf)
        except UnsupportedLeafError as error:
            problems.append(str(error))
    problems += [f'{leaf_name(path)}: {text}' for path, text in _spec_lookalikes(table)]
    if problems:
        raise UnsupportedLeafError(lines('the state cannot be saved as it is:', *problems, between='\n  '))
    return leaves


def _leaf_to_save(path: Path, leaf: Any) -> LeafToSave:
    """The record of one leaf.

    Raises:
      UnsupportedLeafError: the leaf has no values, or is not an array or a number.
    """
    name = leaf_name(path)
    if is_jax_array(leaf) and isinstance(leaf.dtype, np.dtype):
        # First, because most leaves are such.
        check_has_values(path, leaf)
        return LeafToSave(path, name, leaf, 'array', leaf.shape, leaf.dtype)
    if isinstance(leaf, Empty):
        return LeafToSave(path, name, leaf, 'empty', note=leaf.kind)
    value = _valued(path, leaf)
    template = leaf_template(path, value)
    if template.kind == 'skip':
        raise UnsupportedLeafError(
            f'{name}: is ..., which stands for a leaf that a restore left out. Put its value there before you save.'
        )
    if template.dtype is not None and is_abstract(value):
        raise UnsupportedLeafError(f'{name}: a ShapeDtypeStruct has no values to save. Pass the arrays themselves.')
    note = ''
    if template.kind == 'key':
        import jax

        value, note = jax.random.key_data(value), template.impl
    elif template.kind == 'scalar':
        number = base_number(type(value))
        value, note = number(value), number.__name__
    elif template.kind == 'text':
        note = str.__str__(value)
    return LeafToSave(path, name, value, template.kind, template.shape, template.dtype, note)


def _valued(path: Path, leaf: Any) -> Any:
    """The values of a leaf of a state to save.

    Reads the current array of a ``jax.Ref``, and converts an object with ``__array__`` to numpy. Returns other leaves unchanged.

    Raises:
      UnsupportedLeafError: its values cannot be read, or it is a tracer or a donated array.
    """
    check_has_values(path, leaf)
    if is_jax_array(leaf) or isinstance(leaf, _VALUED) or leaf is None or leaf is ...:
        return leaf
    check_is_array(path, leaf)
    if is_abstract(leaf):
        return leaf
    name, kind = leaf_name(path), type(leaf).__qualname__
    try:
        if _is_ref(leaf):
            return leaf[...]
        values = np.asarray(leaf) if hasattr(type(leaf), '__array__') else None
    except Exception as error:
        raise UnsupportedLeafError(
            f'{name}: the values of {kind} cannot be read ({error!s:.200}). Give a numpy array.'
        ) from error
    if values is None or (values.shape, values.dtype) != (leaf.shape, np.dtype(leaf.dtype)):
        found = 'no array' if values is None else f'an array of {values.dtype} {values.shape}'
        raise UnsupportedLeafError(
            f'{name}: {kind} says that it is an array of {leaf.dtype} {leaf.shape} and gives {found}. Give a numpy array.'
        )
    return values


def _is_ref(leaf: Any) -> bool:
    """Whether a leaf is a mutable array of JAX (``jax.new_ref``)."""
    if not type(leaf).__module__.startswith('jax.'):
        return False
    import jax

    return isinstance(leaf, getattr(jax, 'Ref', ()))


def _check_format(leaf: LeafToSave, is_storable: Callable[[np.dtype], bool]) -> None:
    """Rejects leaves that could be written and never read again."""
    path, name = leaf.path, leaf.name
    if len(path) > MAX_SAVED_DEPTH or len(leaf.shape) > MAX_RANK:
        raise UnsupportedLeafError(
            f'{name[:200]}: nested {len(path)} deep with {len(leaf.shape)} dimensions, the format holds '
            f'{MAX_SAVED_DEPTH} and {MAX_RANK}. Flatten the state.'
        )
    # Most names are ASCII, which is a fast check.
    if not name.isascii():
        _check_unicode(name)
    if '__msgpack_chunked_array__' in path:
        raise UnsupportedLeafError(f'{name}: Flax uses this key for split arrays. Rename it.')
    if leaf.dtype is not None and not is_storable(leaf.dtype):
        raise UnsupportedLeafError(
            f'{name}: {type(leaf.value).__name__} of dtype {leaf.dtype} cannot be saved: a checkpoint holds bool, integers of 2 '
            'to 64 bits, floats of 4 to 64 bits, complex64 and complex128. Convert it to one of these, or mark the field static.'
        )


def _check_unicode(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedLeafError(
            f'{name!r}: the key is not valid Unicode text ({error.reason}). Rename it.'
        ) from error


def _spec_lookalikes(table: LeafTable) -> list[tuple[Path, str]]:
    """Subtrees that every reader of the format would take for a stored array."""
    children: dict[Path, set[str]] = {}
    # Few states have such a key, and this check takes a fifth of the time.
    if not any('kvstore' in path for path in table):
        return []
    for path in table:
        for length in range(len(path)):
            children.setdefault(path[:length], set()).add(path[length])
    text = 'a subtree with the keys driver, kvstore and metadata reads as a stored array. Rename one of the keys.'
    return [(path, text) for path, names in children.items() if names >= {'driver', 'kvstore', 'metadata'}]
