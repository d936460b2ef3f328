"""Protocols of what a user hands in. Duck typing is checked here, once, and nowhere else."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

__all__ = [
    'Clock',
    'DataLayout',
    'DatasetIterator',
    'MetricSource',
    'ParameterInfo',
    'Partitioner',
    'Progress',
    'RestoreStateTransformationFn',
    'SaveStateTransformationFn',
    'TrainState',
    'leaf_pattern',
]

Clock: TypeAlias = Callable[[], float]
Progress: TypeAlias = Callable[[int, int], None]


def leaf_pattern(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    """Compiles a pattern for names of leaves; a compiled one stays as it is.

    A key may hold line breaks, and a pattern such as ``params/.*`` has to match these names, too.
    """
    return re.compile(pattern, re.DOTALL) if isinstance(pattern, str) else re.compile(pattern)


@runtime_checkable
class TrainState(Protocol):
    """T5X's train state (t5x/train_state.py): a nested dict out, a nested dict in."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state as nested dicts with string keys."""
        ...

    def restore_state(self, state_dict: Mapping[str, Any]) -> Any:
        """A new state from a dict of the same structure."""
        ...


class DataLayout(Protocol):
    """Which shard of the data this process reads (t5x/partitioning.py, DataLayout)."""

    shard_id: int
    num_shards: int
    is_first_host_in_replica_set: bool


class Partitioner(Protocol):
    """The part of T5X's BasePartitioner that a checkpointer uses."""

    mesh: Any
    params_on_devices: bool

    def get_mesh_axes(self, train_state: Any) -> Any:
        """The state's structure with a PartitionSpec, or None, at each leaf."""
        ...

    def get_data_layout(self) -> DataLayout:
        """The data shard of this process."""
        ...


@runtime_checkable
class DatasetIterator(Protocol):
    """A data iterator that can write its position (clu.data.DatasetIterator)."""

    def save(self, filename: str) -> Any:
        """Writes the position to files whose names begin with ``filename``."""
        ...

    def load(self, filename: str) -> Any:
        """Takes the position back from those files."""
        ...


@runtime_checkable
class MetricSource(Protocol):
    """Where the metrics of steps are found besides those given to save, such as ``TensorBoardMetrics``."""

    def by_step(self, metric: str, steps: Collection[int]) -> Mapping[int, float]:
        """The values of those of the steps that have one by now. An error is logged, and nothing is deleted then."""
        ...


class _OnDemand:
    """A field that may be given as a ``functools.partial``, which is called when the field is first read."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, info: Any, owner: type) -> Any:
        if info is None:
            # The field's default, for dataclasses.
            return None
        value = info.__dict__[self._name]
        if isinstance(value, functools.partial):
            value = info.__dict__[self._name] = value()
        return value

    def __set__(self, info: Any, value: Any) -> None:
        info.__dict__[self._name] = value


@dataclasses.dataclass(init=False)
class ParameterInfo:
    """What a save transform sees beside each leaf: T5X's ``_ParameterInfo`` and, with ``mesh_axes``, ``_OrbaxParamInfo``.

    A transform that moves a leaf moves its info along. The array's directory follows ``ts_spec``, or ``name`` where there is
    no spec; never the key. With a partitioner a leaf whose info is None, or has neither ``ts_spec`` nor ``axes``, is
    written into the manifest, whatever its size.

    Attributes:
      name: the leaf's name before any transform.
      shape: of the leaf.
      ts_spec: the ``tensorstore.Spec`` of its array, relative; made when it is asked for. None where the leaf goes into the
        manifest because the partitioner gives it no axes.
      local_chunk_info: what the partitioner's ``get_local_chunk_info`` says of it, or None.
      axes: the PartitionSpec that the partitioner gives it, or None.
      mesh_axes: another name of ``axes``.
    """

    name: str
    shape: tuple[int, ...] | None
    ts_spec: Any = _OnDemand('ts_spec')
    local_chunk_info: Any = _OnDemand('local_chunk_info')
    axes: Any = None

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        ts_spec: Any = None,
        local_chunk_info: Any = None,
        axes: Any = None,
        mesh_axes: Any = None,
    ):
        self.name = name
        self.shape = shape
        self.ts_spec = ts_spec
        self.local_chunk_info = local_chunk_info
        self.axes = axes if mesh_axes is None else mesh_axes

    @property
    def mesh_axes(self) -> Any:
        """The axes, by the name that they have in T5X's infos for Orbax."""
        return self.axes

    @mesh_axes.setter
    def mesh_axes(self, axes: Any) -> None:
        self.axes = axes

    @property
    def is_stored(self) -> bool:
        """Whether T5X writes an array for the leaf, and not a part of the manifest."""
        return self.axes is not None or self.__dict__['ts_spec'] is not None

    @property
    def array_name(self) -> str:
        """What the directory of the leaf's array is called after: the path in ``ts_spec``, if a transform gave one."""
        spec = self.__dict__['ts_spec']
        if spec is None or isinstance(spec, functools.partial):
            return self.name
        plain = spec if isinstance(spec, Mapping) else spec.to_json()
        path = str(plain.get('kvstore', {}).get('path') or plain.get('path') or '').rstrip('/')
        return self.name if path in ('', self.name.replace('/', '.')) else path


class SaveStateTransformationFn(Protocol):
    """Transforms the state dict and the parameter infos before they are written."""

    def __call__(self, state_dict: Any, parameter_infos: Any) -> tuple[Any, Any]:
        """Returns the new state dict and the new infos, of the same structure as each other."""
        ...


class RestoreStateTransformationFn(Protocol):
    """Transforms the checkpoint's state dict before it is matched with the template's."""

    def __call__(self, state_dict: Any, target_state_dict: Any) -> Any:
        """Returns the new state dict; stored arrays are spec dicts in it and may be moved or dropped."""
        ...
