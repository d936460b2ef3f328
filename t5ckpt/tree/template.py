"""The template of a checkpointer, the state to restore to, leaf by leaf: with the shardings of a partitioner or its own."""

from __future__ import annotations

from typing import Any

from t5ckpt.core.leaf_path import Path
from t5ckpt.core.protocols import Partitioner
from t5ckpt.tree.leaf_table import lookup
from t5ckpt.tree.leaves import LeafTemplate, leaf_template
from t5ckpt.tree.train_state import BARE_ARRAY, StateView


def leaf_templates(view: StateView, state: Any, partitioner: Partitioner | None) -> dict[Path, LeafTemplate]:
    """The template of each leaf: with the sharding of the partitioner's mesh and axes, or else the leaf's own."""
    if partitioner is None or not getattr(partitioner, 'params_on_devices', True):
        return {path: leaf_template(path, leaf, host=partitioner is not None) for path, leaf in view.table.items()}
    from jax.sharding import NamedSharding, PartitionSpec

    axes = axes_tree(partitioner, state)
    templates: dict[Path, LeafTemplate] = {}
    for path, leaf in view.table.items():
        spec = lookup(axes, path) if hasattr(leaf, 'shape') else None
        sharding = NamedSharding(partitioner.mesh, spec if spec is not None else PartitionSpec())
        templates[path] = leaf_template(path, leaf, sharding)
    return templates


def axes_tree(partitioner: Partitioner, state: Any) -> Any:
    """The partitioner's PartitionSpecs, as nested dicts or a tree of the state's own types."""
    from jax.sharding import PartitionSpec

    axes = partitioner.get_mesh_axes(state)
    if isinstance(axes, PartitionSpec):
        return {BARE_ARRAY[0]: axes}
    return axes.state_dict() if hasattr(axes, 'state_dict') else axes
