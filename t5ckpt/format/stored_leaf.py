"""Parses a manifest into a table of leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.format.array_spec import StoredArray, is_spec, parse_spec
from t5ckpt.format.dtypes import STORED_AS, dtype_from_name, stored_dtype
from t5ckpt.format.sidecar import TreeFacts
from t5ckpt.tree.leaf_table import Empty, LeafTable, flatten_nested


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """A stored leaf of a checkpoint; ``dtype`` is the dtype after reading, ``array.dtype`` the dtype on disk."""

    array: StoredArray
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self.array.shape


def checkpoint_leaves(state: Mapping[str, Any], version: int, facts: TreeFacts) -> LeafTable:
    """Parses a (possibly transformed) manifest state into a table.

    Args:
      state: nested dicts with specs, arrays, scalars, None and empty dicts.
      version: the manifest's.
      facts: the sidecar's.

    Returns:
      A table with values of type StoredLeaf, array, None, Empty and str.

    Raises:
      FormatError: a spec that is not accepted, see ``parse_spec``.
    """
    table = flatten_nested(state, is_spec)
    for path, value in table.items():
        if not isinstance(value, np.ndarray) and is_spec(value):
            table[path] = stored_leaf(value, version, facts, path)
    return with_facts(table, facts)


def with_facts(table: LeafTable, facts: TreeFacts) -> LeafTable:
    """Adds the strings and the empty containers in the sidecar to a table."""
    full: LeafTable = {**facts.text, **table} if facts.text else table
    if not facts.empty:
        return full
    occupied = {path[:length] for path in full for length in range(1, len(path) + 1)}
    empties = {path: Empty(kind) for path, kind in facts.empty.items() if path not in occupied}
    return full | empties


def stored_leaf(spec: Mapping[str, Any], version: int, facts: TreeFacts, path: Path) -> StoredLeaf:
    """Parses one spec and determines the dtype after reading."""
    array = parse_spec(spec, version, leaf_name(path))
    if array.bits_of is not None:
        return StoredLeaf(array, array.bits_of)
    name = facts.stored.get(array.location)
    if name is None:
        return StoredLeaf(array, array.dtype)
    try:
        dtype = dtype_from_name(name)
    except KeyError:
        dtype = np.dtype(np.void)
    if dtype.name not in STORED_AS or stored_dtype(dtype) != array.dtype:
        raise CorruptCheckpointError(
            f'{leaf_name(path)}: its dtype in the sidecar is {name!r:.40}, which is never stored as {array.dtype.name}. '
            'Remove t5ckpt.json to read it as T5X does.'
        )
    return StoredLeaf(array, dtype)
