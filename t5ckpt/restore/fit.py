"""Fits leaves to the template of a checkpointer: the template of each leaf, and leaves of other sources than checkpoints."""

from __future__ import annotations

from typing import Any

from t5ckpt.core.leaf_path import Path
from t5ckpt.core.protocols import Partitioner
from t5ckpt.planning.restore_plan import RestoreOptions, RestorePlan, plan_restore
from t5ckpt.restore.make_leaf import make_inline_leaf
from t5ckpt.restore.warnings import warn_if_narrowed
from t5ckpt.tree.leaf_table import LeafTable, lookup
from t5ckpt.tree.leaves import LeafTemplate, leaf_template
from t5ckpt.tree.train_state import StateView, axes_tree, flatten_state


def fit_leaves(
    leaves: LeafTable,
    where: str,
    state: Any,
    partitioner: Partitioner | None,
    options: RestoreOptions | None = None,
) -> RestorePlan:
    """Matches leaves from another source than a checkpoint, such as LazyArrays, with a template.

    Raises:
      TreeMismatchError: with all differences.
    """
    options = RestoreOptions() if options is None else options
    return plan_restore(leaves, leaf_templates(flatten_state(state), state, partitioner), options, where)


def place_leaves(plan: RestorePlan, state: Any) -> Any:
    """Builds a state with the structure of ``state``; its leaves are read and put on devices one after another."""
    warn_if_narrowed(plan)
    return flatten_state(state).rebuild(plan.kept | {read.path: make_inline_leaf(read) for read in plan.inline})


def leaf_templates(view: StateView, state: Any, partitioner: Partitioner | None) -> dict[Path, LeafTemplate]:
    """The template of each leaf: with the sharding of the partitioner's mesh and axes, or else the leaf's own."""
    if partitioner is None:
        return {path: leaf_template(path, leaf) for path, leaf in view.table.items()}
    if not getattr(partitioner, 'params_on_devices', True):
        return {path: leaf_template(path, leaf, host=True) for path, leaf in view.table.items()}
    from jax.sharding import NamedSharding, PartitionSpec

    axes = axes_tree(partitioner, state)
    targets: dict[Path, LeafTemplate] = {}
    for path, leaf in view.table.items():
        spec = lookup(axes, path) if hasattr(leaf, 'shape') else None
        sharding = NamedSharding(partitioner.mesh, spec if spec is not None else PartitionSpec())
        targets[path] = leaf_template(path, leaf, sharding)
    return targets
