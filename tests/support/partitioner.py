"""Duck types of T5X: a train state and a partitioner with the methods `Checkpointer` uses, and no more."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from support.golden import flatten, nest

Rules = Callable[[str, tuple[int, ...]], PartitionSpec | None]


class DataLayout(NamedTuple):
    """T5X's four facts about the input pipeline of this host."""

    batch_size: int = 8
    shard_id: int = 0
    num_shards: int = 1
    is_first_host_in_replica_set: bool = True


@dataclasses.dataclass(frozen=True)
class T5XState:
    """A train state with T5X's protocol: {'target', 'state': {'step', 'param_states'}[, 'flax_mutables']}."""

    tree: dict[str, Any]

    @property
    def step(self) -> Any:
        """The step, as T5X keeps it: an array."""
        return self.tree['state']['step']

    @property
    def params(self) -> Any:
        """The parameters."""
        return self.tree['target']

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts; every caller gets its own."""
        return _copy(self.tree)

    def restore_state(self, state_dict: dict[str, Any]) -> 'T5XState':
        """A new state with the same structure and other leaves."""
        assert _structure(state_dict) == _structure(self.tree), sorted(
            set(flatten(state_dict)) ^ set(flatten(self.tree))
        )
        return T5XState(_copy(state_dict))


class Partitioner:
    """T5X's partitioner, by its public face: mesh, mesh axes, data layout."""

    def __init__(self, mesh: Mesh, rules: Rules, *, params_on_devices: bool = True) -> None:
        self.mesh = mesh
        self.params_on_devices = params_on_devices
        self._rules = rules

    def get_data_layout(self, batch_size: int | None = None, host_index: int | None = None) -> DataLayout:
        """One host reads everything."""
        return DataLayout()

    def get_mesh_axes(self, train_state: T5XState) -> T5XState:
        """The same state with a PartitionSpec, or None, in place of every array."""
        axes = {
            key: self._rules(key, tuple(leaf.shape)) if hasattr(leaf, 'shape') else leaf
            for key, leaf in flatten(train_state.state_dict()).items()
        }
        return T5XState(nest(axes))


def mesh(shape: tuple[int, ...] = (2, 4), names: tuple[str, ...] = ('data', 'model')) -> Mesh:
    """A mesh of the first prod(shape) devices."""
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names)


def t5x_rules(key: str, shape: tuple[int, ...]) -> PartitionSpec | None:
    """Like T5X's: the larger divisible dimension over 'model'; scalars, dummies and Adafactor's factors have no axes."""
    if not shape or shape == (1,) or key == 'state/step' or key.endswith(('/v_row', '/v_col')):
        return None
    order = sorted(range(len(shape)), key=lambda d: -shape[d])
    for dim in order:
        if shape[dim] % 4 == 0 and len(shape) > 1:
            return PartitionSpec(*('model' if d == dim else None for d in range(len(shape))))
    return PartitionSpec(*(None for _ in shape))


def other_rules(key: str, shape: tuple[int, ...]) -> PartitionSpec | None:
    """Another layout of the same arrays: rows over both axes where they divide, else the last dimension over 'data'."""
    if not shape or shape == (1,):
        return None
    if shape[0] % 8 == 0:
        return PartitionSpec(('data', 'model'), *(None for _ in shape[1:]))
    if shape[-1] % 2 == 0:
        return PartitionSpec(*(None for _ in shape[1:]), 'data')
    return PartitionSpec(*(None for _ in shape))


def shard(array: Any, where: Mesh, rules: Rules, key: str = '') -> jax.Array:
    """Puts an array on devices."""
    axes = rules(key, tuple(array.shape))
    return jax.device_put(array, NamedSharding(where, PartitionSpec() if axes is None else axes))


def _copy(tree: Any) -> Any:
    return {k: _copy(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def _structure(tree: Any) -> Any:
    return {k: _structure(v) for k, v in tree.items()} if isinstance(tree, dict) else tree is None
