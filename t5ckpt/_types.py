"""Protocols of what a user hands in. Duck typing is checked here, once, and nowhere else."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from t5ckpt.core.call_site import warn_caller
from t5ckpt.errors import NoEffectWarning

__all__ = [
    'Clock',
    'DataLayout',
    'DatasetIterator',
    'MetricSource',
    'ParameterInfo',
    'Partitioner',
    'Path',
    'Progress',
    'RestoreStateTransformationFn',
    'SaveStateTransformationFn',
    'TrainState',
    'check_callables',
    'check_flags',
    'check_kind',
    'check_patterns',
    'check_policies',
    'given_steps',
    'integer',
    'leaf_name',
    'leaf_pattern',
    'native_dtype',
    'number',
    'path_of',
    'root_names',
    'set_fields',
    'warn_no_effect',
]

Path: TypeAlias = tuple[str, ...]
Clock: TypeAlias = Callable[[], float]
Progress: TypeAlias = Callable[[int, int], None]


def warn_no_effect(text: str) -> None:
    """Gives a NoEffectWarning at the line that called the package."""
    warn_caller(NoEffectWarning(text))


def native_dtype(dtype: Any) -> np.dtype:
    """The numpy dtype in this machine's byte order."""
    plain = np.dtype(dtype)
    return plain.newbyteorder('=') if plain.byteorder in '<>' else plain


def leaf_pattern(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    """Compiles a pattern for names of leaves; a compiled one stays as it is.

    A key may hold line breaks, and a pattern such as ``params/.*`` has to match these names, too.
    """
    return re.compile(pattern, re.DOTALL) if isinstance(pattern, str) else re.compile(pattern)


def check_patterns(patterns: Iterable[str | re.Pattern[str]], what: str) -> None:
    """Refuses what is not a regular expression.

    Raises:
      ValueError: with the pattern, and where it goes wrong.
    """
    for pattern in patterns:
        try:
            leaf_pattern(pattern)
        except (re.error, TypeError) as error:
            one = ' Join several with |.' if isinstance(pattern, (list, tuple)) else ''
            raise ValueError(f'{what}: {pattern!r} is not a regular expression: {error}.{one}') from error


def integer(name: str, value: Any, least: int = 0, otherwise: str = '') -> int:
    """An option that is an integer, of Python, NumPy or JAX, as Python's; a bool or a float is not one.

    Args:
      name: the option's, for the error.
      value: what the caller gave.
      least: the smallest integer allowed.
      otherwise: what else may be given, as a sentence for the error.

    Raises:
      ValueError: naming the option and the value.
    """
    try:
        # A bool is an integer for Python, and keep=True a mistake.
        found = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        found = None
    if found is None or found < least:
        tail = f' {otherwise}' if otherwise else ''
        raise ValueError(f'{name} must be an integer of at least {least}, got {value!r:.80}.{tail}')
    return found


def number(name: str, value: Any, *, least: float | None = None) -> float:
    """An option that is a finite number, above 0 or of at least ``least``, as Python's float.

    Raises:
      ValueError: naming the option and the value.
    """
    found = math.nan
    if not isinstance(value, (bool, np.bool_, str, bytes)):
        try:
            found = float(value)
        except (TypeError, ValueError, OverflowError):
            found = math.nan
    if not math.isfinite(found) or (found <= 0 if least is None else found < least):
        bound = 'above 0' if least is None else f'of at least {least:g}'
        raise ValueError(f'{name} must be a finite number {bound}, got {value!r:.80}.')
    return found


def set_fields(policy: Any, **fields: Any) -> None:
    """Sets fields of a frozen policy to what was made of the caller's: NumPy's integers have no place in a sidecar."""
    for name, value in fields.items():
        object.__setattr__(policy, name, value)


def given_steps(steps: Any) -> Collection[int]:
    """Steps that a caller gave, as integers. A range stays one, since it may be large.

    Raises:
      ValueError: no collection, or something in it is not a step.
    """
    if isinstance(steps, range):
        return steps
    check_kind('steps', steps, Collection, '{100, 200}')
    return frozenset(integer('each of the steps', step) for step in steps)


def check_flags(**flags: Any) -> None:
    """Raises ValueError unless each option is True or False: 'no' would count as True."""
    for name, value in flags.items():
        if type(value) not in (bool, np.bool_):
            raise ValueError(f'{name} must be True or False, got {value!r:.80}.')


def check_callables(**functions: Any) -> None:
    """Raises ValueError unless each option is a function, or None."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise ValueError(f'{name} must be a function, got {value!r:.80}.')


def check_kind(name: str, value: Any, kind: type[Any], example: str) -> None:
    """Raises ValueError unless an option is an object of a class, or None."""
    if value is not None and not isinstance(value, kind):
        raise ValueError(f'{name} must be a {kind.__name__} such as {example}, got {value!r:.80}.')


def check_policies(policies: Any, kind: type[Any], owner: str) -> None:
    """Raises ValueError unless there is one and all are policies of the kind."""
    if not policies:
        raise ValueError(f'{owner} needs at least one policy, got none in policies={policies!r:.80}.')
    wrong = next((policy for policy in policies if not isinstance(policy, kind)), None)
    if wrong is not None:
        raise ValueError(f'{owner} joins policies of type {kind.__name__}, got {wrong!r:.80}.')


def leaf_name(path: Path) -> str:
    """The leaf's name: its path joined with '/'; a '/' or a backslash inside a key has a backslash before it.

    Different paths have different names; :func:`path_of` is the inverse.
    """
    name = '/'.join(path)
    if '\\' not in name and name.count('/') == len(path) - 1:
        return name
    return '/'.join(key.replace('\\', '\\\\').replace('/', '\\/') for key in path)


_KEY_END = re.compile(r'\\([/\\])|/')


def path_of(name: str) -> Path:
    """The path whose name this is; a backslash that stands before neither '/' nor a backslash is itself."""
    if '\\' not in name:
        return tuple(name.split('/'))
    keys, start, key = [], 0, ''
    for match in _KEY_END.finditer(name):
        key += name[start : match.start()]
        start = match.end()
        if match[1] is None:
            keys.append(key)
            key = ''
        else:
            key += match[1]
    return (*keys, key + name[start:])


# Roots that are rarely meant when somebody speaks of the weights.
_STATE_ROOT = re.compile(r'opt|state|step|ema', re.IGNORECASE)


def root_names(paths: Iterable[Path]) -> list[str]:
    """The roots of a tree for a message, ``'model/'`` or the name of a leaf; those of optimizers and steps come last."""
    roots = {leaf_name(path[:1]) + ('/' if len(path) > 1 else '') for path in paths}
    return sorted(roots, key=lambda name: (_STATE_ROOT.match(name) is not None, name))


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
    """Transforms the checkpoint's state dict before it is matched with the model's."""

    def __call__(self, state_dict: Any, target_state_dict: Any) -> Any:
        """Returns the new state dict; stored arrays are spec dicts in it and may be moved or dropped."""
        ...
