"""Encodes keep policies in types of JSON, as they are recorded in facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from t5ckpt.policies import (
    KeepAll,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepEveryHours,
    KeepLatest,
    KeepPolicy,
    KeepSteps,
)

_KINDS: Mapping[str, type[Any]] = {
    kind.__name__: kind for kind in (KeepAll, KeepLatest, KeepBest, KeepEvery, KeepEveryHours, KeepSteps)
}


def fields_of(policy: KeepPolicy) -> dict[str, Any] | None:
    """A policy in types of JSON; None for one of another module, or joined with one of another module."""
    if isinstance(policy, KeepAny):
        parts = [fields_of(part) for part in policy.policies]
        return None if None in parts else {'keep': 'KeepAny', 'policies': parts}
    kind = _KINDS.get(type(policy).__name__)
    if kind is not type(policy):
        return None
    fields = dict(vars(policy))
    if isinstance(policy, KeepSteps):
        fields['steps'] = sorted(policy.steps)
    return {'keep': kind.__name__, **fields}


def policy_of(fields: Any, depth: int = 4) -> KeepPolicy | None:
    """The inverse of :func:`fields_of`; None for other values, and for policies that are nested deeper than ``depth``."""
    if not isinstance(fields, Mapping) or depth == 0:
        return None
    rest = {str(name): value for name, value in fields.items() if name != 'keep'}
    parts = rest.get('policies')
    if fields.get('keep') == 'KeepAny':
        policies = [policy_of(part, depth - 1) for part in parts] if isinstance(parts, list) else []
        decoded = tuple(policy for policy in policies if policy is not None)
        return KeepAny(decoded) if decoded and len(decoded) == len(policies) else None
    kind = _KINDS.get(str(fields.get('keep')))
    if kind is None or not all(_is_of_its_type(kind, name, value) for name, value in rest.items()):
        return None
    try:
        return kind(**rest)
    except (TypeError, ValueError):
        return None


def _is_of_its_type(kind: type[Any], name: str, value: Any) -> bool:
    match name:
        case 'metric' | 'mode':
            return isinstance(value, str)
        case 'steps' if kind is KeepSteps:
            return isinstance(value, list) and all(type(step) is int for step in value)
        case 'hours':
            return type(value) in (int, float) and 0 < value < 10**9
        case 'keep_without_metric':
            return value is None or isinstance(value, bool)
        case _:
            return type(value) is int or (name == 'period' and value is None)
