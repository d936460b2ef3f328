"""The leaves that a restore reads: the part of each array that this process needs, and its dtype."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from t5ckpt.core.leaf_path import Path
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box
from t5ckpt.planning.device_boxes import boxes_by_process, boxes_wanted, uses_host_buffer
from t5ckpt.tree.leaves import LeafTemplate


@dataclasses.dataclass(frozen=True)
class StoredRead:
    """One array to read, with its ``dtype`` after the cast. The template's shape differs from the leaf's if it is resized."""

    path: Path
    name: str
    leaf: StoredArray
    template: LeafTemplate
    dtype: np.dtype

    @functools.cached_property
    def boxes(self) -> list[Box]:
        """The distinct boxes of the restored leaf that this process's devices hold."""
        return boxes_wanted(self.template)

    @functools.cached_property
    def source_boxes(self) -> list[Box]:
        """The boxes of the stored array from which ``boxes`` are filled; they differ for a leaf that is resized."""
        return _source_boxes(self.boxes, self.leaf.shape)

    def source_boxes_by_process(self, count: int) -> list[list[Box]]:
        """For each of ``count`` processes, its ``source_boxes``."""
        boxes = boxes_by_process(self.template, count)
        return [_source_boxes(of_process, self.leaf.shape) for of_process in boxes]

    def chunk_files(self, *, whole: bool) -> Iterator[str]:
        """Yields the chunk files of ``source_boxes`` or of the whole array, by the manifest; some of them more than once."""
        array = self.leaf
        for box in [Box.whole(array.shape)] if whole else self.source_boxes:
            yield from (f'{array.location}/{array.grid.key(index)}' for index in array.grid.chunks_of(box))

    @functools.cached_property
    def uses_host_buffer(self) -> bool:
        """Whether the restored leaf can use a host buffer in place."""
        return uses_host_buffer(self.template)

    @property
    def resizes(self) -> bool:
        """Whether the values are padded or truncated."""
        return self.template.shape != self.leaf.shape


@dataclasses.dataclass(frozen=True)
class InlineRead:
    """One leaf that the manifest holds, or an array that a restore transform returned.

    ``resizes`` allows a value whose shape differs from the template's.
    """

    path: Path
    name: str
    value: Any
    template: LeafTemplate
    dtype: np.dtype
    resizes: bool = False


# --- other shapes: the values keep their indices, as in JAX and Orbax; the rest of a larger template is zero ---------


def clipped(box: Box, shape: Sequence[int]) -> Box | None:
    """The part of a box that lies inside an array of this shape; None if that is empty."""
    part = box.intersect(Box.whole(shape))
    return None if part.is_empty and part != box else part


def _source_boxes(boxes: Sequence[Box], shape: Sequence[int]) -> list[Box]:
    """The boxes of a stored array of this shape from which boxes of the restored leaf are filled."""
    return [part for box in boxes if (part := clipped(box, shape)) is not None]


def resized(values: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """An array of another shape with the same values at the indices that both have, and zeros elsewhere."""
    out = np.zeros(shape, values.dtype)
    common = Box.whole(values.shape).intersect(Box.whole(shape)).slices
    out[common] = values[common]
    return out
