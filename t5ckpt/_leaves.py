"""State <-> LeafTable.

A leaf table is a flat dict from path (a tuple of strings) to leaf. Paths follow ``jax.tree_util`` key paths: dict
keys, sequence indices, attribute names, each as text; which is also what Flax's ``to_state_dict`` gives for the trees
that T5X and Flax train. None and empty containers are leaves here, because a manifest or its sidecar must bring them
back.

Two kinds of state come in: one with T5X's protocol, whose ``state_dict()`` is the tree, and any other pytree, which is
the tree itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from t5ckpt._gc import paused
from t5ckpt._types import Path, TrainState, leaf_name, native_dtype
from t5ckpt.errors import UnsupportedLeafError
from t5ckpt.lazy import LazyArray
from t5ckpt.tree.leaf_values import base_number, check_is_array, is_jax_array, is_key
from t5ckpt.tree.parts import BARE, is_bare_array, with_parts

__all__ = [
    'MAX_STEP',
    'OWN_STEPS',
    'Empty',
    'LeafTable',
    'StateView',
    'Target',
    'check_has_values',
    'flatten_nested',
    'is_jax_array',
    'lookup',
    'narrowed',
    'nest',
    'step_of',
    'target_of',
    'view_state',
]

LeafTable = dict[Path, Any]

MAX_STEP = 10**18
# Where a state may hold its step: T5X's and Flax's.
OWN_STEPS: tuple[Path, ...] = (('state', 'step'), ('step',))

# From the tag in a key dtype's name to the name that jax.random.wrap_key_data takes (jax/_src/prng.py).
_KEY_IMPLS = {'fry': 'threefry2x32', 'rbg': 'rbg', 'urbg': 'unsafe_rbg'}


@dataclasses.dataclass(frozen=True)
class Empty:
    """An empty container: ``kind`` is 'dict', 'list' or 'tuple'."""

    kind: str

    def build(self) -> Any:
        """A new empty container."""
        return {'dict': dict, 'list': list, 'tuple': tuple}[self.kind]()


@dataclasses.dataclass(frozen=True)
class StateView:
    """A state seen as a table.

    Attributes:
      table: path to leaf; ``Empty`` stands for an empty container.
      rebuild: makes a state of the same type from a table with the same paths.
    """

    table: LeafTable
    rebuild: Callable[[LeafTable], Any]


def view_state(state: Any) -> StateView:
    """Views a train state or any pytree as a table.

    Raises:
      UnsupportedLeafError: two leaves would get one name ({1: x, '1': y}), or the state is a single number.
    """
    if isinstance(state, TrainState):
        inner = _view_pytree(state.state_dict())
        return StateView(inner.table, lambda table: state.restore_state(inner.rebuild(table)))
    return _view_pytree(state)


def _view_pytree(tree: Any) -> StateView:
    with paused():
        view = _flattened(tree)
    # Outside of the pause, since a part's state_dict() is the user's code.
    return with_parts(view, _view_pytree)


def _flattened(tree: Any) -> StateView:
    import jax

    try:
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_kept)
    except ValueError as error:
        # JAX sorts the keys of a dict, which fails for a mix such as {1: x, '1': y}.
        clash = next(_clashes(tree, ()), None)
        text = f'the state is no pytree: {error}' if clash is None else _clash_text(clash)
        raise UnsupportedLeafError(text) from error
    table: LeafTable = {}
    paths: list[Path] = []
    originals: dict[Path, Any] = {}
    for keys, leaf in flat:
        path = tuple(_key_text(key) for key in keys)
        if path in table:
            raise UnsupportedLeafError(_clash_text(path))
        if path == () and _empty_kind(leaf) is not None:
            raise UnsupportedLeafError('the state is empty: there is nothing to save or restore.')
        if path == () and is_bare_array(leaf):
            path = BARE
        if path == ():
            raise UnsupportedLeafError(
                f'the state is a single {type(leaf).__name__}, a checkpoint holds a tree. Pass a dict: {{"x": x}}.'
            )
        empty = _empty_kind(leaf)
        table[path] = leaf if empty is None else Empty(empty)
        originals[path] = leaf
        paths.append(path)

    def rebuild(values: LeafTable) -> Any:
        return jax.tree_util.tree_unflatten(
            treedef, [originals[p] if isinstance(values[p], Empty) else values[p] for p in paths]
        )

    return StateView(table, rebuild)


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
    return node is None or _empty_kind(node) is not None


def _empty_kind(node: Any) -> str | None:
    if not isinstance(node, (Mapping, list, tuple)) or len(node) > 0:
        return None
    return 'dict' if isinstance(node, Mapping) else 'list' if isinstance(node, list) else 'tuple'


def _key_text(key: Any) -> str:
    for attribute in ('key', 'idx', 'name'):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key).strip('.[]\'"')


# --- nested dicts <-> tables -----------------------------------------------------------------------------------------


def nest(table: Mapping[Path, Any]) -> dict[str, Any]:
    """Nested dicts from a table.

    Raises:
      UnsupportedLeafError: one leaf's path goes through another leaf.
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
        node[path[-1]] = leaf
    return root


def flatten_nested(tree: Mapping[Any, Any], is_leaf: Callable[[Any], bool], prefix: Path = ()) -> LeafTable:
    """A table from nested dicts; what is empty becomes ``Empty``, and ``is_leaf`` maps stay whole."""
    table: LeafTable = {}
    _flatten_into(table, tree, is_leaf, prefix)
    return table


def _flatten_into(table: LeafTable, tree: Mapping[Any, Any], is_leaf: Callable[[Any], bool], prefix: Path) -> None:
    for key, value in tree.items():
        path = (*prefix, str(key))
        if isinstance(value, np.ndarray):
            # First: most leaves are arrays, and to ask whether it is a Mapping takes ten times as long.
            table[path] = value
        elif isinstance(value, Mapping) and not is_leaf(value):
            if value:
                _flatten_into(table, value, is_leaf, path)
            else:
                table[path] = Empty('dict')
        elif isinstance(value, (list, tuple)) and not value:
            table[path] = Empty('list' if isinstance(value, list) else 'tuple')
        else:
            table[path] = value


def lookup(tree: Any, path: Path, default: Any = None) -> Any:
    """The node at ``path`` in a tree of mappings, sequences and attributes, or ``default`` where it ends early."""
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


# --- leaves ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Target:
    """What a model wants at one leaf.

    Attributes:
      kind: 'array', 'scalar' (a Python number), 'key' (typed PRNG keys), 'text', 'none', 'empty', 'skip' (``...``, a
        leaf that a restore leaves out) or 'unread' (one that this restore is not asked for).
      shape: of the array; of the key data for keys.
      dtype: numpy dtype; uint32 for keys. None for text, none, empty and skip.
      device: whether the result is a jax.Array.
      sharding: where it goes; None with ``device`` leaves the place to JAX (uncommitted).
      python: the scalar's type, for 'scalar', which may be a subclass such as an IntEnum; ``np.generic`` where an array leaf
        is a numpy scalar.
      impl: the name of the PRNG implementation, for 'key'.
      example: the leaf itself for 'none', 'empty' and 'text', which come back as they are.
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: np.dtype | None = None
    device: bool = False
    sharding: Any = None
    python: type | None = None
    impl: str = ''
    example: Any = None

    def left_out(self) -> Target:
        """The target of a leaf of which nothing is read."""
        return dataclasses.replace(self, kind='unread', sharding=None)


def target_of(path: Path, leaf: Any, sharding: Any = None, host: bool = False) -> Target:
    """Describes a template leaf.

    Args:
      path: the leaf's, for the error.
      leaf: jax.Array, ShapeDtypeStruct, numpy array or scalar, Python number, LazyArray, typed key, None, Empty, str.
      sharding: overrides the leaf's own, where a partitioner decides.
      host: the result is a numpy array whatever the leaf is.
    """
    if is_jax_array(leaf) and isinstance(leaf.dtype, np.dtype):
        # First, because most leaves are such: none of the other questions needs to be asked.
        place = _own_sharding(leaf) if sharding is None else sharding
        return Target('array', leaf.shape, leaf.dtype, not host, None if host else place)
    if leaf is None or leaf is ...:
        return Target('none' if leaf is None else 'skip')
    if isinstance(leaf, (Empty, str)):
        return Target('text' if isinstance(leaf, str) else 'empty', example=leaf)
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic):
        return Target('scalar', (), np.asarray(base_number(type(leaf))(leaf)).dtype, python=type(leaf))
    check_is_array(path, leaf)
    if is_key(leaf.dtype):
        return _key_target(leaf, sharding)
    on_device = not isinstance(leaf, (np.ndarray, np.generic, LazyArray)) or sharding is not None
    if sharding is None and on_device:
        sharding = _own_sharding(leaf)
    place = (on_device and not host, None if host else sharding)
    return Target(
        'array',
        tuple(leaf.shape),
        native_dtype(leaf.dtype),
        *place,
        np.generic if isinstance(leaf, np.generic) else None,
    )


def _own_sharding(leaf: Any) -> Any:
    sharding = getattr(leaf, 'sharding', None)
    return sharding if getattr(leaf, 'committed', True) else None


def _key_target(leaf: Any, sharding: Any) -> Target:
    import jax

    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    if sharding is None:
        sharding = _own_sharding(leaf)
    # The dtype's name is 'key<fry>'; its implementation has no other public name for a ShapeDtypeStruct.
    impl = str(_KEY_IMPLS.get(leaf.dtype.name[4:-1], leaf.dtype.name[4:-1]))
    return Target('key', tuple(data.shape), np.dtype(data.dtype), True, sharding, impl=impl)


def check_has_values(name: str, value: Any) -> None:
    """Before a leaf's values are asked for.

    Raises:
      UnsupportedLeafError: it is a tracer, or its buffer was donated.
    """
    # First, since a tracer answers hardly any question.
    if 'Tracer' in type(value).__name__:
        raise UnsupportedLeafError(f'{name}: is a tracer. Save outside of jit, with the arrays that the step returned.')
    if callable(getattr(value, 'is_deleted', None)) and value.is_deleted():
        raise UnsupportedLeafError(
            f'{name}: its buffer is gone, it was donated to a jitted step. Save the state that the step returned.'
        )


def step_of(state: Any, table: LeafTable, step: int | None) -> int:
    """The step that a save is named after.

    Args:
      state: may have an attribute ``step``.
      table: may have a leaf ``state/step`` or ``step``.
      step: the caller's word, which wins.

    Raises:
      ValueError: no step anywhere, or not a non-negative integer.
      UnsupportedLeafError: it was donated, or is a tracer.
    """
    value: Any = step if step is not None else _found_step(state, table)
    if value is None:
        raise ValueError('the state names no step (no attribute or leaf "step"): pass step= to save.')
    check_has_values('step', value)
    if isinstance(value, LazyArray):
        value = value.get()
    if getattr(value, 'is_fully_addressable', True) is False:
        if not value.addressable_shards:
            raise ValueError('the step lies on other processes alone: pass step= to save.')
        value = value.addressable_data(0)
    number = np.asarray(value)
    if number.shape != () or not np.issubdtype(number.dtype, np.integer) or not 0 <= int(number) < MAX_STEP:
        raise ValueError(f'the step must be one integer of at least 0 and below 10^18, got {value!r:.80}.')
    return int(number)


def _found_step(state: Any, table: LeafTable) -> Any:
    own = getattr(state, 'step', None)
    if own is not None and not callable(own):
        return own
    return next((table[path] for path in OWN_STEPS if path in table), None)


def narrowed(dtype: np.dtype) -> np.dtype:
    """What JAX makes of a dtype on a device: of 64 bits 32, unless ``jax_enable_x64`` is set."""
    import jax

    return jax.dtypes.canonicalize_dtype(dtype)
