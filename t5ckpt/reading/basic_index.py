"""Splits a numpy index into slices to read and an index that numpy applies to the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def basic_index(index: Any, shape: Sequence[int]) -> tuple[tuple[slice, ...], tuple[Any, ...]] | None:
    """Splits a numpy basic index into forward slices to read, one per dimension, and an index for numpy on the result.

    Returns:
      None for an advanced index (arrays, lists), which numpy applies to the whole array.

    Raises:
      IndexError: too many indices, or one out of bounds.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is None or part is Ellipsis or isinstance(part, slice) or _is_integer(part) for part in parts):
        return None
    used = sum(part is not None and part is not Ellipsis for part in parts)
    if used > len(shape) or sum(part is Ellipsis for part in parts) > 1:
        raise IndexError(f'{index!r:.80}: does not fit an array of {len(shape)} dimensions')
    if not any(part is Ellipsis for part in parts):
        parts = (*parts, Ellipsis)
    read: list[slice] = []
    after: list[Any] = []
    for part in parts:
        if part is None:
            after.append(None)
        elif part is Ellipsis:
            rest = len(shape) - used
            read += [slice(0, size) for size in shape[len(read) : len(read) + rest]]
            after += [slice(None)] * rest
        else:
            forward, then = _axis_index(part, shape[len(read)], len(read))
            read.append(forward)
            after.append(then)
    return tuple(read), tuple(after)


def _is_integer(part: Any) -> bool:
    return hasattr(part, '__index__') and np.ndim(part) == 0 and not isinstance(part, (bool, np.bool_))


def _axis_index(part: Any, size: int, axis: int) -> tuple[slice, Any]:
    if not isinstance(part, slice):
        position = part.__index__()
        if not -size <= position < size:
            raise IndexError(f'index {position} is out of bounds for axis {axis} with size {size}')
        return slice(position % size, position % size + 1), 0
    chosen = range(*part.indices(size))
    if not chosen:
        return slice(0, 0), slice(None)
    if chosen.step > 0:
        return slice(chosen[0], chosen[-1] + 1, chosen.step), slice(None)
    return slice(chosen[-1], chosen[0] + 1, -chosen.step), slice(None, None, -1)
