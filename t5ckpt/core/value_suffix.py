"""The suffix ``/value``, which names of Flax NNX's variables have in an ``nnx.State`` but not in a pure dict."""

from __future__ import annotations

import re
from collections.abc import Collection

_SUFFIX = '/value'


def value_rule(lacking: Collection[str], excess: Collection[str]) -> tuple[str, str] | None:
    """One rule of an assignment map for all leaves that differ only in the suffix; None if there are none.

    Args:
      lacking: names that the template has and the checkpoint lacks.
      excess: names that the checkpoint has and the template lacks.
    """
    existing = set(excess)
    lack = [name for name in lacking if name + _SUFFIX in existing]
    if lack:
        return rf'({_scopes(lack)})', rf'\1{_SUFFIX}'
    have = [
        name.removesuffix(_SUFFIX) for name in lacking if name.endswith(_SUFFIX) and name[: -len(_SUFFIX)] in existing
    ]
    return (rf'({_scopes(have)}){_SUFFIX}', r'\1') if have else None


def _scopes(names: Collection[str]) -> str:
    """A pattern for the leaves below the roots of these names, so that others, such as a step, keep their names."""
    roots = {
        re.escape(root).replace('\\-', '-') + ('/.*' if below else '')
        for root, below, _ in (n.partition('/') for n in names)
    }
    return '|'.join(sorted(roots))
