"""Encodes keep policies in types of JSON, as they are recorded in facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from t5ckpt.policies import KeepPolicy

_KINDS: Mapping[Any, type[Any]] = {
    kind.__name__: kind for kind in KeepPolicy.__subclasses__() if kind.__module__ == KeepPolicy.__module__
}


def fields_of(policy: KeepPolicy) -> dict[str, Any] | None:
    """A policy in types of JSON; None for one of another module, or joined with one of another module."""
    name = type(policy).__name__
    if _KINDS.get(name) is not type(policy):
        return None
    fields: dict[str, Any] = {**vars(policy), 'keep': name}
    if 'policies' in fields:
        fields['policies'] = [fields_of(part) for part in fields['policies']]
    if isinstance(fields.get('steps'), frozenset):
        fields['steps'] = sorted(fields['steps'])
    return None if None in fields.get('policies', ()) else fields


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
