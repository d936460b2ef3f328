"""Divides names of leaves into a layer and the parameter in it, for tables with a row per layer."""

from __future__ import annotations

import re
from collections.abc import Iterable

from t5ckpt.core.leaf_path import Path, leaf_name

_NUMBERED = re.compile(r'(.*?)(\d+)')


def layers_of(paths: Iterable[Path]) -> dict[Path, tuple[str, str]]:
    """The layer and the parameter of each leaf, as names.

    A layer ends at the key that is numbered, as ``layers_3`` is, with the most siblings of other numbers: in
    ``opt/0/mu/decoder/layers_3/mlp/wi_0/kernel`` that is ``layers_3``. If several keys have equally many, it is the first one
    that is not only a number. A number without siblings does not count, as in the ``weight/0`` of a module with one array.
    Without a numbered key the last key is the parameter, with the numbers that follow it.
    """
    known_paths = list(paths)
    siblings: dict[tuple[Path, str], set[str]] = {}
    for path in known_paths:
        for depth, key in enumerate(path[:-1]):
            numbered = _NUMBERED.fullmatch(key)
            if numbered is not None:
                siblings.setdefault((path[:depth], numbered[1]), set()).add(numbered[2])
    return {path: _divided(path, siblings) for path in known_paths}


def _divided(path: Path, siblings: dict[tuple[Path, str], set[str]]) -> tuple[str, str]:
    counts: dict[int, tuple[int, bool]] = {}
    for depth, key in enumerate(path[:-1]):
        numbered = _NUMBERED.fullmatch(key)
        if numbered is not None:
            count = len(siblings[path[:depth], numbered[1]])
            if count > 1 or numbered[1]:
                counts[depth] = count, bool(numbered[1])
    end = max(len(path) - 1, 0)
    while end and path[end].isdecimal():
        end -= 1
    if counts:
        end = max(counts, key=counts.__getitem__) + 1
    return leaf_name(path[:end]), leaf_name(path[end:])
