"""A train state as a flat table of leaves, its step, and the template of each leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from t5ckpt.core.gc_pause import paused
from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.protocols import Partitioner, TrainState
from t5ckpt.core.text import shown, some_of
from t5ckpt.errors import UnsupportedLeafError
from t5ckpt.lazy import LazyArray
from t5ckpt.tree.leaf_table import Empty, LeafTable, lookup
from t5ckpt.tree.leaves import LeafTemplate, check_has_values, explicit_transfers, leaf_template

MAX_STEP = 10**18
# Deeper than a state that can be saved, and shallower than the stack of Python.
_MOST_LEVELS = 400
BARE_ARRAY: Path = ('array',)
"""The path of a state that is an array."""
# The paths of the step in states of T5X and Flax.
OWN_STEPS: tuple[Path, ...] = (('state', 'step'), ('step',))


@dataclasses.dataclass(frozen=True)
class StateView:
    """A state as a table.

    Attributes:
      table: path to leaf; ``Empty`` stands for an empty container.
      rebuild: makes a state of the same type from a table with the same paths.
    """

    table: LeafTable
    rebuild: Callable[[LeafTable], Any]


def flatten_state(state: Any) -> StateView:
    """Views a train state or any pytree as a table.

    Raises:
      UnsupportedLeafError: two leaves would get one name ({1: x, '1': y}), or the state is a single number.
    """
    if isinstance(state, TrainState):
        inner = _view_pytree(state.state_dict())
        return dataclasses.replace(inner, rebuild=lambda table: state.restore_state(inner.rebuild(table)))
    return _view_pytree(state)


@paused()
def _view_pytree(tree: Any) -> StateView:
    import jax

    _check_depth(tree)
    try:
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_kept)
    except ValueError as error:
        # JAX sorts the keys of a dict, which fails for a mix such as {1: x, '1': y}.
        clash = next(_clashes(tree, ()), None)
        text = f'the state is not a pytree: {error}' if clash is None else _clash_text(clash)
        raise UnsupportedLeafError(text) from error
    originals: LeafTable = {}
    for keys, leaf in flat:
        path = tuple(map(_key_text, keys)) or _path_of_single(leaf)
        if path in originals:
            raise UnsupportedLeafError(_clash_text(path))
        originals[path] = leaf

    def rebuild(values: LeafTable) -> Any:
        leaves = {p: leaf if isinstance(values[p], Empty) else values[p] for p, leaf in originals.items()}
        try:
            return jax.tree_util.tree_unflatten(treedef, leaves.values())
        except Exception as error:
            both = ((p, _dtype_and_shape(originals[p]), _dtype_and_shape(leaf)) for p, leaf in leaves.items())
            changed = [f'{leaf_name(p)}: {old} in the template, {new} restored' for p, old, new in both if old != new]
            if changed:
                error.add_note(
                    f'A class of the template refused the leaves, of which these differ: {some_of(changed, 5)}'
                )
            raise

    table = {p: Empty.of(leaf) or leaf for p, leaf in originals.items()}
    return StateView(table, rebuild)


def _dtype_and_shape(leaf: Any) -> str:
    return f'{getattr(leaf, "dtype", type(leaf).__name__)}{getattr(leaf, "shape", "")}'


def _path_of_single(state: Any) -> Path:
    """The path of a state that is one leaf.

    Raises:
      UnsupportedLeafError: it is not an array.
    """
    if Empty.of(state) is not None:
        raise UnsupportedLeafError('the state is empty: there is nothing to save or restore.')
    # A NumPy scalar is more likely a misplaced step.
    if hasattr(state, 'shape') and hasattr(state, 'dtype') and not isinstance(state, np.generic):
        return BARE_ARRAY
    if state is None:
        raise UnsupportedLeafError(
            'the state is None, and a checkpoint holds a tree. To look into a checkpoint without a template, call '
            'load_t5x_checkpoint(path) or open_checkpoint(path).'
        )
    is_value = isinstance(state, (bool, int, float, complex, str, np.generic))
    cure = 'Pass a dict: {"x": x}.' if is_value else 'It is not a pytree: pass the tree of arrays itself.'
    raise UnsupportedLeafError(f'the state is a single {type(state).__name__}, a checkpoint holds a tree. {cure}')


def _check_depth(tree: Any) -> None:
    """Rejects a tree that contains itself. JAX's recursion into it would leave Python without stack for all later calls."""
    level = [tree] if isinstance(tree, (dict, list, tuple)) else []
    for _ in range(_MOST_LEVELS):
        below = {
            id(child): child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list, tuple))
        }
        if not below:
            return
        level = list(below.values())
    raise UnsupportedLeafError(
        f'the state contains itself, or is nested more than {_MOST_LEVELS} deep. A checkpoint holds a tree: remove the reference.'
    )


def _clash_text(path: Path) -> str:
    return (
        f'{leaf_name(path)}: two leaves of the state have this name, because a checkpoint holds keys as text. '
        'Rename one of the keys.'
    )


def _clashes(tree: Any, prefix: Path) -> Iterator[Path]:
    """Paths in nested dicts at which two keys are the same as text."""
    if isinstance(tree, Mapping):
        texts = [str(key) for key in tree]
        yield from ((*prefix, text) for text in texts if texts.count(text) > 1)
        for key, value in tree.items():
            yield from _clashes(value, (*prefix, str(key)))


def _is_kept(node: Any) -> bool:
    return node is None or Empty.of(node) is not None


def _key_text(key: Any) -> str:
    for attribute in ('key', 'idx', 'name'):
        text = getattr(key, attribute, None)
        if text is not None or hasattr(key, attribute):
            return str(text)
    return str(key).strip('.[]\'"')


def step_to_save(state: Any, table: LeafTable, step: int | None) -> int:
    """The step of a save.

    Args:
      state: may have an attribute ``step``.
      table: may have a leaf ``state/step`` or ``step``.
      step: from the caller; overrides the others.

    Raises:
      ValueError: there is no step, or it is not a non-negative integer.
      UnsupportedLeafError: it was donated, or is a tracer.
    """
    value: Any = step if step is not None else _found_step(state, table)
    if value is None:
        near = [f'; it has {leaf_name(path)}' for path in table if 'step' in path][:1]
        raise ValueError(f'the state has no step (no attribute or leaf "step"{"".join(near)}): pass step= to save.')
    check_has_values(('step',), value)
    if isinstance(value, LazyArray):
        value = value.get()
    if getattr(value, 'is_fully_addressable', True) is False:
        if not value.addressable_shards:
            raise ValueError('the step is an array on other processes only: pass step= to save.')
        value = value.addressable_data(0)
    with explicit_transfers():
        number = np.asarray(value)
    if number.shape != () or not np.issubdtype(number.dtype, np.integer) or not 0 <= int(number) < MAX_STEP:
        of_state = ' from the state. Pass step=, or save one of its copies (flax.jax_utils.unreplicate)' * (
            step is None
        )
        raise ValueError(f'the step must be one integer of at least 0 and below 10^18, got {shown(value)}{of_state}.')
    return int(number)


def _found_step(state: Any, table: LeafTable) -> Any:
    own_step = getattr(state, 'step', None)
    if own_step is not None and not callable(own_step):
        return own_step
    return next((table[path] for path in OWN_STEPS if path in table), None)


# --- the template of a checkpointer, with the shardings of a partitioner or its own ----------------------------------


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
