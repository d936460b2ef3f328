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

_KINDS: Mapping[Any, type[Any]] = {
    kind.__name__: kind for kind in (KeepAll, KeepAny, KeepBest, KeepEvery, KeepEveryHours, KeepLatest, KeepSteps)
}


def fields_of(policy: KeepPolicy) -> dict[str, Any] | None:
    """A policy in types of JSON; None for one of another module, or joined with one of another module."""
    fields = {**vars(policy), 'keep': type(policy).__name__}
    if isinstance(policy, KeepAny):
        fields['policies'] = [fields_of(part) for part in policy.policies]
    if isinstance(policy, KeepSteps):
        fields['steps'] = sorted(policy.steps)
    is_known = _KINDS.get(fields['keep']) is type(policy) and None not in fields.get('policies', ())
    return fields if is_known else None


def policy_of(fields: Any, depth: int = 4) -> KeepPolicy | None:
    """The inverse of :func:`fields_of`; None for other values, and for policies that are nested deeper than ``depth``."""
    try:
        rest = {**fields}
        kind = _KINDS[rest.pop('keep') if depth else None]
        if 'policies' in rest:
            # A KeepAny refuses None.
            rest['policies'] = tuple(policy_of(part, depth - 1) for part in rest['policies'])
        return kind(**rest)
    except (LookupError, OverflowError, TypeError, ValueError):
        return None
