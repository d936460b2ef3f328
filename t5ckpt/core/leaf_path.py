"""Paths of leaves, and their names, which are unique for each path."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeAlias

Path: TypeAlias = tuple[str, ...]
PARAMETER_ROOTS = ('target', 'params')
"""The first keys of the paths of parameters, in states of T5X and of Flax."""
OPTIMIZER = r'((.*/)?(param_states|opt_state)|opt)(/.*)?'
"""The optimizer's state, also of each model in a state of several; a pattern for ``leave``."""
MODEL = r'(?!(.*/)?rngs/(.*/)?(key|count)(/value)?$)(target|params)/.*'
"""The weights, in T5X's and in Flax's train state; a pattern for ``take``.

Of Flax NNX these are all variables of the model but the keys and counters of RNG streams in attributes called ``rngs``.
"""
_KEY_END = re.compile(r'\\([/\\])|/')
# Roots that rarely hold weights.
_STATE_ROOT = re.compile(r'opt|state|step|ema', re.IGNORECASE)


def leaf_name(path: Path) -> str:
    """The leaf's name: its path joined with '/'; a '/' or a backslash inside a key has a backslash before it.

    Different paths have different names; :func:`path_of` is the inverse.
    """
    name = '/'.join(path)
    if '\\' not in name and name.count('/') == len(path) - 1:
        return name
    return '/'.join(key.replace('\\', '\\\\').replace('/', '\\/') for key in path)


def path_of(name: str) -> Path:
    """The inverse of :func:`leaf_name`; a backslash before any other character than '/' and a backslash stands for itself."""
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


def root_names(paths: Iterable[Path]) -> list[str]:
    """The roots of a tree for a message, ``'model/'`` or the name of a leaf; optimizers and steps come last."""
    roots = {leaf_name(path[:1]) + ('/' if len(path) > 1 else '') for path in paths}
    return sorted(roots, key=lambda name: (_STATE_ROOT.match(name) is not None, name))
