"""Compares leaves of a checkpoint, or of a new state, with leaves of a template, and describes them for messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.text import lines
from t5ckpt.errors import UnsupportedLeafError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.dtypes import kind
from t5ckpt.tree.leaf_table import Empty, LeafTable
from t5ckpt.tree.leaves import LeafTemplate, as_key_data, base_number, check_has_values


def as_leaf(path: Path, value: Any, giver: str = 'a state transformation') -> Any:
    """A leaf of the checkpoint, or one that the caller gave: numbers as numpy, typed keys as ``KeyData``.

    Raises:
      UnsupportedLeafError: the caller gave something that cannot be a leaf, or that has no values.
    """
    if value is None or isinstance(value, (StoredArray, np.ndarray, np.generic, Empty, str)):
        return value
    if hasattr(value, 'shape') and hasattr(value, 'dtype'):
        check_has_values(path, value)
        return as_key_data(value)
    if isinstance(value, (bool, int, float, complex)):
        return np.asarray(value)
    if isinstance(value, (list, tuple)) and not value:
        return Empty(type(value).__name__)
    raise UnsupportedLeafError(
        f'{leaf_name(path)}: {giver} put a {type(value).__name__} there. Give an array or a number.'
    )


def both_python_ints(dtype: np.dtype, template: LeafTemplate) -> bool:
    """Whether both are Python ints: one of 2^63 or more is stored as uint64 and restored as a Python int."""
    is_int = template.kind == 'scalar' and template.python is not None and base_number(template.python) is int
    return is_int and kind(dtype) in ('int', 'uint')


def leaf_text(leaf: Any) -> str:
    """Describes a leaf of the checkpoint, for a message."""
    if leaf is None or isinstance(leaf, Empty):
        return 'None' if leaf is None else 'an empty container'
    return (
        f'{np.dtype(leaf.dtype).name} {tuple(leaf.shape)}'
        if hasattr(leaf, 'dtype')
        else 'text'
        if isinstance(leaf, str)
        else type(leaf).__name__
    )


def template_text(template: LeafTemplate) -> str:
    """Describes a leaf of the template, for a message."""
    if template.kind == 'scalar' and template.python is not None:
        return f'Python {template.python.__name__}'
    return f'{"" if template.dtype is None else template.dtype.name} {template.shape}'.strip()


def is_empty(leaf: Any) -> bool:
    """Whether a leaf of a checkpoint or of a template is an empty container."""
    return isinstance(leaf, Empty) or getattr(leaf, 'kind', '') == 'empty'


def topmost_in(path: Path, paths: Collection[Path]) -> Path | None:
    """The path, or its ancestor nearest to the root, that is one of these; None if there is none."""
    return next((path[:length] for length in range(1, len(path) + 1) if path[:length] in paths), None)


def check_new_state(fresh: LeafTable, template: LeafTable, needed: Sequence[Path]) -> None:
    """Raises where the state of ``init_fn`` is not one of the checkpointer's template.

    Raises:
      ValueError: with every leaf that is missing, too many, or of another shape.
    """
    problems = [(path, 'in the template, not in the new state') for path in needed if path not in fresh]
    problems += [(path, 'in the new state, not in the template') for path in fresh if path not in template]
    for path in needed:
        shapes = [getattr(table.get(path), 'shape', None) for table in (fresh, template)]
        if None not in shapes and shapes[0] != shapes[1]:
            problems.append((path, f'shape {shapes[0]} in the new state, {shapes[1]} in the template'))
    if problems:
        texts = [f'{leaf_name(path)}: {text}' for path, text in problems]
        cure = 'Let init_fn return a state of the tree that Checkpointer was given.'
        raise ValueError(lines("init_fn: its state is not one of the checkpointer's template.", *texts, cure))
