"""Divides names of leaves into a layer and the parameter in it, for tables with a row per layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.leaf_patterns import leaf_pattern, meant_pattern
from t5ckpt.inspection.leaf_tree import LeafInfo

_NUMBERED = re.compile(r'(.*?)(\d+)')
_OF_STACK = re.compile(r'.*\[\d+\]')
_TOLD = re.compile(r'axis (\d) of (.+?)(/\.\*)?')
# Haliax's Stacked; the usual names of scanned layers, and the one that flax.linen.scan makes of the class.
_STACKED = re.compile(r'stacked|layers|blocks|Scan[A-Z]\w*_\d+')
# A longer axis is that of a weight.
_MAX_LAYERS = 512


class Stack(NamedTuple):
    """The axis along which an array holds several layers, and the number of the first keys, which name all of them."""

    axis: int
    depth: int

    def path(self, path: Path, index: int) -> Path:
        """The path of one layer's part of an array, ``params/layers[3]/kernel``."""
        return *path[: self.depth - 1], f'{path[self.depth - 1]}[{index}]', *path[self.depth :]


def stacks_of(infos: Iterable[LeafInfo], told: str | None) -> dict[Path, Stack]:
    """The arrays that hold several layers.

    Args:
      infos: the leaves.
      told: 'axis 0 of params/layers/.*', the axis and a pattern of the arrays or of their group. None takes only the arrays
        whose names and shapes leave no doubt, see ``_axis_of``.

    Raises:
      ValueError: ``told`` is something else, or matches no array with this axis.
    """
    arrays = [info for info in infos if info.dtype]
    groups: dict[Path, list[LeafInfo]] = {}
    for info in arrays:
        for depth, key in enumerate(info.path[:-1], 1):
            if _STACKED.fullmatch(key):
                groups.setdefault(info.path[:depth], []).append(info)
    stacks = {
        info.path: Stack(axis, len(group))
        for group, below in groups.items()
        if (axis := _axis_of(group, below)) is not None
        for info in below
    }
    return stacks if told is None else stacks | _told(arrays, told)


def _axis_of(group: Path, below: Sequence[LeafInfo]) -> int | None:
    """The axis that all arrays of a group have in common with one size, if no other can be meant and none is a vector.

    Beside Haliax's ``stacked``, a group needs vectors beside matrices, so that a dense layer of the name ``layers`` is none. A
    list of layers is divided by their numbers.
    """
    ranks = {len(info.shape) for info in below}
    if min(ranks) < 2 or any(info.path[len(group)].isdecimal() for info in below):
        return None
    sizes = [{info.shape[axis] for info in below} for axis in (0, 1)]
    axes = [axis for axis in (0, 1) if len(sizes[axis]) == 1 and 1 < min(sizes[axis]) <= _MAX_LAYERS]
    is_sure = 0 in axes if group[-1] == 'stacked' else len(axes) == 1 and min(ranks) == 2 < max(ranks)
    return axes[0] if is_sure else None


def _told(arrays: Sequence[LeafInfo], told: str) -> dict[Path, Stack]:
    match = _TOLD.fullmatch(told)
    if match is None:
        raise ValueError(f"layers: {told!r} is not 'axis N of PATTERN', such as 'axis 0 of params/layers/.*'.")
    axis, group = int(match[1]), leaf_pattern(match[2], 'layers')
    stacks = {
        info.path: Stack(axis, depth)
        for info in arrays
        # The shortest path that matches comes last.
        for depth in range(len(info.path), 0, -1)
        if len(info.shape) > axis and group.fullmatch(leaf_name(info.path[:depth]))
    }
    if not stacks:
        meant = meant_pattern(match[2], [info.name for info in arrays if len(info.shape) > axis])
        cure = meant or ' t5ckpt show lists names and shapes.'
        raise ValueError(f'layers: {told!r} matches no array that has axis {axis}.{cure}')
    return stacks


def layers_of(paths: Iterable[Path]) -> dict[Path, tuple[str, str]]:
    """The layer and the parameter of each leaf, as names.

    A layer ends at the key that is numbered, as ``layers_3`` is, with the most siblings of other numbers: in
    ``opt/0/mu/decoder/layers_3/mlp/wi_0/kernel`` that is ``layers_3``. If several keys have equally many, it is the first one
    that is not only a number. A number without siblings does not count, as in the ``weight/0`` of a module with one array.
    Without a numbered key the last key is the parameter, with the numbers that follow it. The number of a :class:`Stack` is
    always that of the layer.
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
    of_stack = [depth for depth, key in enumerate(path, 1) if _OF_STACK.fullmatch(key)]
    if of_stack:
        end = of_stack[0]
    elif counts:
        end = max(counts, key=counts.__getitem__) + 1
    return leaf_name(path[:end]), leaf_name(path[end:])
