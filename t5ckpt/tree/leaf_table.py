"""The leaf table: a flat dict from path to leaf, and its conversion from and to nested dicts.

A path is a tuple of strings. Paths follow ``jax.tree_util`` key paths: dict keys, sequence indices and attribute names, each as
text, like Flax's ``to_state_dict`` for the trees that T5X and Flax train. None and empty containers are leaves, because a
restore must return them.

A state is either an object with T5X's protocol, whose ``state_dict()`` is the tree, or any other pytree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.text import CURE_OF_DAMAGE
from t5ckpt.errors import CorruptCheckpointError, UnsupportedLeafError

# The limits on the levels of a tree that is read or saved, and on the dimensions of an array. A file above them is damaged.
MAX_DEPTH = 250
MAX_SAVED_DEPTH = 200
MAX_RANK = 32

LeafTable = dict[Path, Any]


@dataclasses.dataclass(frozen=True)
class Empty:
    """An empty container: ``kind`` is 'dict', 'list' or 'tuple'."""

    kind: str

    @classmethod
    def of(cls, node: Any) -> Empty | None:
        """Describes a node of a tree; None if it is not an empty container."""
        if not isinstance(node, (Mapping, list, tuple)) or len(node) > 0:
            return None
        return cls('dict' if isinstance(node, Mapping) else 'list' if isinstance(node, list) else 'tuple')

    def build(self) -> Any:
        """A new empty container."""
        return {'dict': dict, 'list': list, 'tuple': tuple}[self.kind]()


# --- nested dicts <-> tables -----------------------------------------------------------------------------------------


def unflatten(table: Mapping[Path, Any]) -> dict[str, Any]:
    """Converts a table to nested dicts; an ``Empty`` becomes a new container.

    Raises:
      UnsupportedLeafError: the path of a leaf goes through another leaf.
    """
    root: dict[str, Any] = {}
    owned: set[int] = {id(root)}
    for path, leaf in table.items():
        node: Any = root
        for key in path[:-1]:
            child = node.get(key)
            if child is None and key not in node:
                child = node[key] = {}
                owned.add(id(child))
            if id(child) not in owned:
                raise UnsupportedLeafError(
                    f'{leaf_name(path)}: its path goes through another leaf. Rename one of them.'
                )
            node = child
        if path[-1] in node:
            raise UnsupportedLeafError(f'{leaf_name(path)}: is a leaf and also a subtree. Rename one of them.')
        node[path[-1]] = leaf.build() if isinstance(leaf, Empty) else leaf
    return root


def flatten_nested(
    tree: Mapping[Any, Any], is_leaf: Callable[[Any], bool] = lambda _: False, prefix: Path = ()
) -> LeafTable:
    """Converts nested dicts to a table; empty containers become ``Empty``, and mappings with ``is_leaf`` are leaves.

    The paths begin with ``prefix``.
    """
    table: LeafTable = {}
    for key, value in tree.items():
        path = (*prefix, str(key))
        # First, because most leaves are arrays, and a check for Mapping takes ten times as long.
        if isinstance(value, np.ndarray) or not isinstance(value, (Mapping, list, tuple)) or is_leaf(value):
            table[path] = value
        elif isinstance(value, Mapping) and value:
            table |= flatten_nested(value, is_leaf, path)
        else:
            table[path] = value or Empty.of(value)
    return table


def unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """The map of a file of JSON or msgpack, for their decoders, which would keep the last of several entries with one key.

    Raises:
      CorruptCheckpointError: two entries have one key.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise CorruptCheckpointError(f'a map has the key {twice!r:.60} twice. {CURE_OF_DAMAGE}')
    return fields


def lookup(tree: Any, path: Path, default: Any = None) -> Any:
    """The node at ``path`` in a tree of mappings, sequences and attributes, or ``default`` if there is no such node."""
    from jax.sharding import PartitionSpec

    node: Any = tree
    for key in path:
        if node is None:
            return default
        if isinstance(node, Mapping):
            node = node.get(key, default)
        elif isinstance(node, (list, tuple)) and key.isdigit() and int(key) < len(node):
            node = node[int(key)]
        else:
            # A PartitionSpec is a leaf of a tree of axes: a key below it does not name its method (``count``, ``index``).
            node = default if isinstance(node, PartitionSpec) else getattr(node, key, default)
        if node is default:
            return default
    return node
