"""Protocols of what a user hands in. Duck typing is checked here, once, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

__all__ = [
    'Clock',
    'DataLayout',
    'DatasetIterator',
    'MetricSource',
    'Partitioner',
    'Path',
    'Progress',
    'RestoreStateTransformationFn',
    'SaveStateTransformationFn',
    'TrainState',
    'check_patterns',
    'leaf_name',
    'native_dtype',
]

Path: TypeAlias = tuple[str, ...]
Clock: TypeAlias = Callable[[], float]
Progress: TypeAlias = Callable[[int, int], None]


def native_dtype(dtype: Any) -> np.dtype:
    """The numpy dtype in this machine's byte order."""
    plain = np.dtype(dtype)
    return plain.newbyteorder('=') if plain.byteorder in '<>' else plain


def check_patterns(patterns: Iterable[str], what: str) -> None:
    """Refuses what is no regular expression.

    Raises:
      ValueError: with the pattern, and where it goes wrong.
    """
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f'{what}: {pattern!r} is no regular expression: {error}.') from error


def leaf_name(path: Path) -> str:
    """The leaf's name: its path joined with '/'; a '/' inside a key is written as a backslash and '/'."""
    name = '/'.join(path)
    if name.count('/') == len(path) - 1:
        return name
    return '/'.join(key.replace('/', '\\/') for key in path)


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


class MetricSource(Protocol):
    """Where the metrics of steps are found besides those given to save, such as ``TensorBoardMetrics``."""

    def by_step(self, metric: str, steps: Collection[int]) -> Mapping[int, float]:
        """The values of those of the steps that have one by now. An error is logged, and nothing is deleted then."""
        ...


class SaveStateTransformationFn(Protocol):
    """Transforms the state dict and the parameter infos before they are written."""

    def __call__(self, state_dict: Any, parameter_infos: Any) -> tuple[Any, Any]:
        """Returns the new state dict and the new infos, of the same structure as each other."""
        ...


class RestoreStateTransformationFn(Protocol):
    """Transforms the checkpoint's state dict before it is matched with the model's."""

    def __call__(self, state_dict: Any, target_state_dict: Any) -> Any:
        """Returns the new state dict; stored arrays are spec dicts in it and may be moved or dropped."""
        ...
