"""Fits leaves to the template of a checkpointer: the template of each leaf, and leaves of other sources than checkpoints."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.protocols import Partitioner
from t5ckpt.core.text import some_of
from t5ckpt.errors import UnmatchedPattern
from t5ckpt.planning.restore_plan import RestoreOptions, RestorePlan, plan_restore
from t5ckpt.restore.make_leaf import make_inline_leaf
from t5ckpt.restore.report import warn_if_narrowed
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


def put_leaves(plan: RestorePlan, state: Any) -> Any:
    """Builds a state with the structure of ``state``; its leaves are read and put on devices one after another."""
    warn_if_narrowed(plan)
    return flatten_state(state).rebuild(plan.kept | {read.path: make_inline_leaf(read) for read in plan.inline})


def leaf_templates(
    view: StateView, state: Any, partitioner: Partitioner | None, only: AbstractSet[Path] | None = None
) -> dict[Path, LeafTemplate]:
    """The template of each leaf: with the sharding of the partitioner's mesh and axes, or else the leaf's own.

    With ``only``, all other leaves are left out.

    Raises:
      UnmatchedPattern: the template lacks one of ``only``.
    """
    templates = _all_templates(view, state, partitioner)
    if only is None:
        return templates
    unknown = sorted(leaf_name(path) for path in only - templates.keys())
    if unknown:
        raise UnmatchedPattern(
            f'leaves: the template has no {some_of(unknown, 5, ", ")}. A leaf is named by its path, such as '
            f'{next(iter(templates), ())!r}.'
        )
    return {path: template if path in only else template.left_out() for path, template in templates.items()}


def _all_templates(view: StateView, state: Any, partitioner: Partitioner | None) -> dict[Path, LeafTemplate]:
    if partitioner is None:
        return {path: leaf_template(path, leaf) for path, leaf in view.table.items()}
    if not getattr(partitioner, 'params_on_devices', True):
        return {path: leaf_template(path, leaf, host=True) for path, leaf in view.table.items()}
    from jax.sharding import NamedSharding, PartitionSpec

    axes = axes_tree(partitioner, state)
    templates: dict[Path, LeafTemplate] = {}
    for path, leaf in view.table.items():
        spec = lookup(axes, path) if hasattr(leaf, 'shape') else None
        sharding = NamedSharding(partitioner.mesh, spec if spec is not None else PartitionSpec())
        templates[path] = leaf_template(path, leaf, sharding)
    return templates
