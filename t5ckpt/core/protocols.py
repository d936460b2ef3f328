"""Protocols of the objects that a user passes. Duck typing is checked only here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

Clock: TypeAlias = Callable[[], float]
Progress: TypeAlias = Callable[[int, int], None]


@runtime_checkable
class TrainState(Protocol):
    """T5X's train state (t5x/train_state.py), which converts to and from nested dicts."""

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the state as nested dicts with string keys."""
        ...

    def restore_state(self, state_dict: Mapping[str, Any]) -> Any:
        """Returns a new state from a dict of the same structure."""
        ...


class DataLayout(Protocol):
    """The shard of the data that this process reads (t5x/partitioning.py, DataLayout)."""

    shard_id: int
    num_shards: int
    is_first_host_in_replica_set: bool


class Partitioner(Protocol):
    """The part of T5X's BasePartitioner that a checkpointer uses."""

    mesh: Any
    params_on_devices: bool

    def get_mesh_axes(self, train_state: Any) -> Any:
        """Returns the state's structure with a PartitionSpec or None at each leaf."""
        ...

    def get_data_layout(self) -> DataLayout:
        """Returns the data shard of this process."""
        ...


@runtime_checkable
class DatasetIterator(Protocol):
    """A data iterator that can write its position (clu.data.DatasetIterator)."""

    def save(self, filename: str) -> Any:
        """Writes the position to files whose names begin with ``filename``."""
        ...

    def load(self, filename: str) -> Any:
        """Restores the position from these files."""
        ...


@runtime_checkable
class MetricSource(Protocol):
    """A source of metrics in addition to those passed to ``save``, such as ``TensorBoardMetrics``."""

    def by_step(self, metric: str, steps: Collection[int]) -> Mapping[int, float]:
        """Returns the values of the steps that have one so far. After an error, which is logged, no step is deleted."""
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
    """The information of a leaf for save transforms: T5X's ``_ParameterInfo`` and, with ``mesh_axes``, ``_OrbaxParamInfo``.

    A transform that moves a leaf has to move its info with it. The array's directory follows ``ts_spec``, or ``name`` without a
    spec; it does not depend on the key. With a partitioner, a leaf is written into the manifest, whatever its size, if its info
    is None or has neither ``ts_spec`` nor ``axes``.

    Attributes:
      name: the leaf's name before any transform.
      shape: of the leaf.
      ts_spec: the relative ``tensorstore.Spec`` of its array, made on first access. None for a leaf that goes into the manifest
        because the partitioner gives it no axes.
      local_chunk_info: the result of the partitioner's ``get_local_chunk_info``, or None.
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
        """The axes, under their name in T5X's infos for Orbax."""
        return self.axes

    @mesh_axes.setter
    def mesh_axes(self, axes: Any) -> None:
        self.axes = axes

    @property
    def is_stored(self) -> bool:
        """Whether T5X stores the leaf as an array, and not in the manifest."""
        return self.axes is not None or self.__dict__['ts_spec'] is not None

    @property
    def array_name(self) -> str:
        """The name from which the array's directory is derived: the path in ``ts_spec`` if a transform set it, else ``name``."""
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
        """Returns the new state dict. A stored array is an object with a shape and a dtype in it, which may be moved."""
        ...
