"""Handles states that are a bare array, and leaves that are objects with a state of their own.

An object with ``state_dict()`` and ``load_state_dict()`` as a leaf is a part (torch's Stateful). Its state dict is saved below
its name. A restore loads it into the live object and returns that object in the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.errors import UnsupportedLeafError
from t5ckpt.lazy import LazyArray

BARE: Path = ('array',)
"""The path of a state that is an array."""


def is_bare_array(state: Any) -> bool:
    """Whether a state that is a single leaf is an array. A number or NumPy scalar is more likely a misplaced step."""
    return hasattr(state, 'shape') and hasattr(state, 'dtype') and not isinstance(state, np.generic)


def is_part(leaf: Any) -> bool:
    """Whether a leaf is an object with a state dict."""
    return hasattr(type(leaf), 'load_state_dict') and hasattr(type(leaf), 'state_dict')


def with_parts(view: Any, view_tree: Callable[[Any], Any]) -> Any:
    """A view of a state in which each part is replaced by the result of its ``state_dict()``.

    Args:
      view: a StateView.
      view_tree: makes a StateView of a state dict.

    Raises:
      UnsupportedLeafError: the state dict of a part is not a mapping, or is empty.
    """
    parts = {path: leaf for path, leaf in view.table.items() if is_part(leaf)}
    if not parts:
        return view
    inner = {path: _view_of(path, part, view_tree) for path, part in parts.items()}
    table: dict[Path, Any] = {}
    for path, leaf in view.table.items():
        below = inner[path].table if path in inner else {(): leaf}
        table |= {(*path, *rest): value for rest, value in below.items()}

    def rebuild(values: Mapping[Path, Any]) -> Any:
        for path, part in parts.items():
            of_part = inner[path]
            state = of_part.rebuild({rest: _read(values[(*path, *rest)]) for rest in of_part.table})
            try:
                part.load_state_dict(state)
            except Exception as error:
                loaded = ', '.join(map(leaf_name, list(parts)[: list(parts).index(path)])) or 'nothing'
                error.add_note(
                    f'{leaf_name(path)}: load_state_dict() of {type(part).__name__} failed in a restore, which loaded '
                    f'{loaded} before it. Correct it and restore again: the objects are not reset.'
                )
                raise
        return view.rebuild({path: parts[path] if path in parts else values[path] for path in view.table})

    return dataclasses.replace(view, table=table, rebuild=rebuild)


def _read(value: Any) -> Any:
    """The values of a LazyArray, since ``load_state_dict`` expects arrays."""
    return value.get() if isinstance(value, LazyArray) else value


def _view_of(path: Path, part: Any, view_tree: Callable[[Any], Any]) -> Any:
    state = part.state_dict()
    if not isinstance(state, Mapping) or not state:
        raise UnsupportedLeafError(
            f'{leaf_name(path)}: state_dict() of {type(part).__name__} returned {state!r:.80}, expected a dict with at least '
            'one entry. Leave the object out of the state.'
        )
    return view_tree(state)
