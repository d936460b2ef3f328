"""Save transforms: the state dict and the infos beside it, through the functions that the caller gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt._leaves import Empty, LeafTable, flatten_nested, lookup, nest
from t5ckpt._plan import ParameterInfo
from t5ckpt._types import Partitioner, Path, leaf_name
from t5ckpt.errors import UnsupportedLeafError
from t5ckpt.tree.parts import BARE

__all__ = ['axes_tree', 'parameter_infos', 'transformed']


def parameter_infos(table: LeafTable, state: Any, partitioner: Partitioner | None) -> dict[Path, ParameterInfo]:
    """What a save transform sees beside each leaf that is an array."""
    axes = None if partitioner is None else axes_tree(partitioner, state)
    return {
        path: ParameterInfo(leaf_name(path), tuple(leaf.shape), lookup(axes, path))
        for path, leaf in table.items()
        if hasattr(leaf, 'shape')
    }


def axes_tree(partitioner: Partitioner, state: Any) -> Any:
    """The partitioner's PartitionSpecs as a tree of dicts or whatever the state is made of."""
    from jax.sharding import PartitionSpec

    axes = partitioner.get_mesh_axes(state)
    if isinstance(axes, PartitionSpec):
        return {BARE[0]: axes}
    return axes.state_dict() if hasattr(axes, 'state_dict') else axes


def transformed(
    table: LeafTable, infos: dict[Path, ParameterInfo], fns: Sequence[Any]
) -> tuple[LeafTable, dict[Path, ParameterInfo]]:
    """The leaves and their infos after the transforms.

    Raises:
      UnsupportedLeafError: a transform returned something else than two mappings.
    """
    if not fns:
        return table, infos
    state: Any = nest({path: leaf.build() if isinstance(leaf, Empty) else leaf for path, leaf in table.items()})
    # Leaves without an array (None, numbers, empty) have None for an info, as in T5X.
    tree: Any = nest({path: infos.get(path) for path in table})
    for fn in fns:
        state, tree = fn(state, tree)
    if not isinstance(state, Mapping) or not isinstance(tree, Mapping):
        raise UnsupportedLeafError('a state transformation must return the new state dict and the new parameter infos.')
    leaves = flatten_nested(state, lambda _: False)
    moved = flatten_nested(tree, lambda _: False)
    return leaves, {path: info for path, info in moved.items() if isinstance(info, ParameterInfo)}
