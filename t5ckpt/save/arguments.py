"""Checks the arguments of ``Checkpointer``, and parses those of a save.

A save takes T5X's order (state, transforms) and Orbax's (step, state).
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.core.arguments import check_kind
from t5ckpt.core.call_site import warn_caller
from t5ckpt.core.protocols import MetricSource
from t5ckpt.core.text import shown
from t5ckpt.errors import NoEffectWarning
from t5ckpt.policies import KeepPolicy
from t5ckpt.save_policies import SaveOnPreemption, SavePolicy, parts_of
from t5ckpt.storage import Storage
from t5ckpt.tree.leaves import explicit_transfers


def ordered(first: Any, second: Any, step: Any) -> tuple[Any, Sequence[Any], Any]:
    """Orders the arguments of ``Checkpointer.save``, (state, transforms) or (step, state); returns state, transforms and step.

    Raises:
      ValueError: the order is ambiguous, or the transforms are not functions.
    """
    if _is_step(second) or (_is_step(first) and not _are_transforms(second)):
        named, state = in_order(first, second, 'save')
        if step is not None:
            raise ValueError(
                f'the step is given twice: {shown(named)} and step={shown(step)}. Write save(state, step=...).'
            )
        return state, (), named
    if type(first) is int and step is None:
        raise ValueError(f'save received the step {first} in place of the state. Write save(state, step={first}).')
    if isinstance(first, str):
        raise ValueError(f'the step must be an integer, got {shown(first)}. Write save(state, step=...).')  # noqa: TRY004 - as for all options
    return first, second, step


def in_order(first: Any, second: Any, method: str) -> tuple[Any, Any]:
    """Returns (step, state), whichever of the two was passed first.

    Raises:
      ValueError: both arguments could be the step, or neither.
    """
    is_first, is_second = _is_step(first), _is_step(second)
    if is_first and is_second:
        raise ValueError(
            f'{method}({shown(first)}, {shown(second)}): both are integers, so the arguments may be swapped. Name them: '
            f'{method}(step=..., train_state=...).'
        )
    if not is_first and not is_second:
        raise ValueError(
            f'{method}: neither the {type(first).__name__} nor the {type(second).__name__} is a step, which is one integer. '
            f'Write {method}(step=100, train_state=state).'
        )
    return (first, second) if is_first else (second, first)


def plain_json(name: str, value: Any) -> dict[str, Any]:
    """Copies a mapping of JSON types, since the caller may change it before it is written. None gives {}.

    Raises:
      ValueError: the value is not a mapping of JSON types, or would not survive the round trip, such as an integer key.
    """
    if not _is_mapping(value):
        check_kind(name, value, Mapping, "{'git': 'a1b2c3'}")
        return {}
    try:
        return _plain(value, f'{name}: ', '')
    except RecursionError as error:
        raise ValueError(f'{name} is nested too deeply, or contains itself.') from error


def _is_mapping(value: Any) -> bool:
    # ml_collections' ConfigDict is not registered as a Mapping.
    return callable(getattr(value, 'keys', None))


def _plain(value: Any, before: str, path: str) -> Any:
    """The value in JSON's types; errors begin with ``before`` and the path in the value."""
    where = f'{before}{path}: ' if path else before
    inner = f'{path}/' if path else ''
    if _is_mapping(value):
        for key in value.keys():  # noqa: SIM118 - not all mappings iterate over their keys
            if not isinstance(key, str):
                raise ValueError(f'{where}key {shown(key)} is not a str, but keys in JSON are strings. Pass str(key).')  # noqa: TRY004 - as for all options
        return {str(key): _plain(value[key], before, f'{inner}{key}') for key in value.keys()}  # noqa: SIM118
    if isinstance(value, (list, tuple)):
        return [_plain(item, before, f'{inner}{index}') for index, item in enumerate(value)]
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f'{where}{shown(value)} is of type {type(value).__name__}, which JSON lacks ({error}). JSON has strings, finite '
            'numbers, booleans, None, lists and dicts.'
        ) from error


def metric_numbers(metrics: Mapping[Any, Any] | None) -> dict[str, float]:
    """Converts metrics to Python numbers. Arrays of one element are accepted; reading one waits for its device.

    Raises:
      ValueError: a value is not a number.
    """
    check_kind('metrics', metrics, Mapping, "{'loss': 0.5}")
    numbers: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str):
            raise ValueError(f"the name of a metric must be a str such as 'loss', got {shown(name)}.")  # noqa: TRY004 - as for options
        try:
            with explicit_transfers():
                numbers[name] = _number(value)
        except RuntimeError as error:
            # JAX's error has no name.
            raise ValueError(f'metrics: {name!r} cannot be read: {error}') from error
        except (TypeError, ValueError) as error:
            raise ValueError(f'metrics: {name!r} is {shown(value)}, which is not a number.') from error
        except OverflowError as error:
            raise ValueError(
                f'metrics: {name!r} is an integer too large for a float. Save its logarithm, or float("inf").'
            ) from error
    return numbers


def _number(value: Any) -> float:
    """An int for an integer, so that it stays exact; else a float."""
    try:
        number = int(operator.index(value))
    except TypeError:
        return float(value)
    return number if abs(number) < 2**64 else float(number)


def _is_step(value: Any) -> bool:
    """Whether a value is a scalar integer of Python, NumPy or JAX. Does not wait for a device."""
    if isinstance(value, (int, np.integer)):
        return not isinstance(value, bool)
    dtype = getattr(value, 'dtype', None)
    return isinstance(dtype, np.dtype) and dtype.kind in 'iu' and getattr(value, 'shape', None) == ()


def _are_transforms(value: Any) -> bool:
    """Whether a value is a list of transforms, possibly empty, and therefore not a state."""
    return isinstance(value, (list, tuple)) and all(map(callable, value))


def check_policies(keep: int | None, keep_policy: Any, save_policy: Any, metric_source: Any) -> None:
    """Checks the types of the policies, and that only one of ``keep`` and ``keep_policy`` is passed."""
    if keep is not None and keep_policy is not None:
        raise ValueError('keep and keep_policy exclude each other: pass one of them.')
    check_kind('keep_policy', keep_policy, KeepPolicy, 'KeepLatest(3)')
    check_kind('save_policy', save_policy, SavePolicy, 'SaveEvery(1000)')
    check_kind('metric_source', metric_source, MetricSource, 'TensorBoardMetrics(directory)')


def check_preemption(policy: SavePolicy | None, preempted: Any, verb: str) -> None:
    """Raises ValueError for a policy that waits for a preemption without ``preempted``; ``verb`` is what it would do then."""
    if preempted is None and any(isinstance(part, SaveOnPreemption) for part in parts_of(policy)):
        raise ValueError(
            f'SaveOnPreemption never {verb} without preempted=: pass preempted=PreemptionNotice() to the constructor.'
        )


def check_no_directory(**options: Any) -> None:
    """Raises ValueError if one of the options is a directory."""
    for name, value in options.items():
        if isinstance(value, (str, os.PathLike, Storage)):
            raise ValueError(  # noqa: TRY004 - T5X's callers catch ValueError
                f'{name} is {shown(value)}, which looks like a directory. Pass it as checkpoints_dir=: Checkpointer(train_state, '
                'checkpoints_dir=...).'
            )


def warn_of_idle(policy: KeepPolicy, source: Any, dataset: Any, keep_datasets: int | None, use_gda: Any) -> None:
    """Warns about each option of a constructor that has no effect, alone or beside the others."""
    texts: list[str] = []
    if use_gda is not None:
        texts.append(
            f'use_gda={use_gda!r} has no effect: arrays are always global. T5X removed it in 2023; leave it out.'
        )
    if source is not None and not policy.metric_names:
        texts.append(
            'metric_source has no effect: no keep policy compares a metric. Pass keep_policy=KeepBest(...), or leave it out.'
        )
    if keep_datasets is not None and dataset is None:
        texts.append(
            'keep_dataset_checkpoints has no effect on what is saved: there is no data iterator. Pass dataset_iterator=, or '
            'leave it out.'
        )
    for text in texts:
        warn_caller(NoEffectWarning(text))
