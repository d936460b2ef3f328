"""Pads leaves with zeros or truncates them to the shape of the template, for ``resize=``.

As in JAX and Orbax, the values keep their indices: the part common to both shapes is copied, the rest of a larger template
is zero, and the rest of a larger checkpoint is not read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from t5ckpt.core.arguments import check_patterns
from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.protocols import leaf_pattern, meant_pattern
from t5ckpt.format.chunk_grid import Box

Patterns: TypeAlias = str | re.Pattern[str] | Sequence[str | re.Pattern[str]]
"""One regular expression or several, as text or compiled."""


class Resize:
    """The patterns of the leaves that may be resized."""

    def __init__(self, patterns: Patterns | None):
        """Takes regular expressions, as text or compiled, for the whole names of leaves.

        Raises:
          ValueError: one of them is not a regular expression.
        """
        given: Any = patterns
        if given is None or not isinstance(given, Collection) or isinstance(given, (str, bytes)):
            # Includes values that are not patterns, which the check reports.
            given = () if given is None else (given,)
        self.patterns: tuple[str | re.Pattern[str], ...] = tuple(given)
        check_patterns(self.patterns, 'resize')

    def covers(self, name: str) -> bool:
        """Whether a leaf of this name may be resized."""
        return any(leaf_pattern(pattern).fullmatch(name) for pattern in self.patterns)

    def check(self, paths: Iterable[Path]) -> None:
        """Raises for a pattern that names no leaf.

        Raises:
          ValueError: with the pattern and some of the names.
        """
        names = [leaf_name(path) for path in paths] if self.patterns else []
        for pattern in self.patterns:
            if not any(leaf_pattern(pattern).fullmatch(name) for name in names):
                raise ValueError(
                    f'resize={pattern!r} names no leaf of the template, which has {", ".join(names[:3])}, ... Patterns are '
                    f'matched with whole names.{meant_pattern(pattern, names)}'
                )


def clipped(box: Box, shape: Sequence[int]) -> Box | None:
    """The part of a box that lies inside an array of this shape; None if that is empty."""
    part = box.intersect(Box.whole(shape))
    return None if part.is_empty and part != box else part


def source_boxes(boxes: Sequence[Box], shape: Sequence[int]) -> list[Box]:
    """The boxes of a stored array of this shape from which boxes of the restored leaf are filled."""
    return [part for box in boxes if (part := clipped(box, shape)) is not None]


def resized(values: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """An array of another shape with the same values at the indices that both have, and zeros elsewhere."""
    out = np.zeros(shape, values.dtype)
    common = Box.whole(values.shape).intersect(Box.whole(shape)).slices
    out[common] = values[common]
    return out
