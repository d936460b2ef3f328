"""The leaves that a restore reads: the parts of each array that this process's devices hold, and its dtype.

A part is a ``Box``. ``restore/read_arrays.py`` reads it, and ``reading/chunks.py`` or TensorStore maps it to chunks and to bytes
of their files.

JAX raises ``IndivisibleError`` or ``ValueError`` for the first array whose sharding does not fit its shape or names no devices,
without the array's name. A restore reports all of them before it reads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from t5ckpt.core.leaf_path import Path
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box
from t5ckpt.tree.leaves import LeafTemplate, unreduced_axes


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


# --- the parts that devices hold, and shardings that do not fit ------------------------------------------------------


def boxes_wanted(template: LeafTemplate) -> list[Box]:
    """The distinct boxes that this process's devices hold, or the whole array for a host template."""
    shape = template.shape
    if not template.device or template.sharding is None:
        return [Box.whole(shape)]
    return _distinct(template.sharding.addressable_devices_indices_map(shape).values(), shape)


def boxes_by_process(template: LeafTemplate, count: int) -> list[list[Box]]:
    """For each of ``count`` processes, the boxes that :func:`boxes_wanted` returns in it."""
    shape = template.shape
    if not template.device or template.sharding is None:
        return [[Box.whole(shape)]] * count
    indices: list[list[Any]] = [[] for _ in range(count)]
    for device, index in template.sharding.devices_indices_map(shape).items():
        indices[device.process_index].append(index)
    return [_distinct(of_process, shape) for of_process in indices]


def _distinct(indices: Iterable[Any], shape: tuple[int, ...]) -> list[Box]:
    return list(dict.fromkeys(Box.from_slices(index, shape) for index in indices))


def uses_host_buffer(template: LeafTemplate) -> bool:
    """Whether the result can use a host buffer in place: a numpy array, or default memory of the CPU backend."""
    if not template.device:
        return True
    import jax

    if template.sharding is None:
        return jax.default_backend() == 'cpu'
    device = next(iter(template.sharding.addressable_devices), None)
    if device is None or device.platform != 'cpu':
        return False
    return template.sharding.memory_kind in (None, device.default_memory().kind)


@functools.lru_cache(256)
def sharding_problem(sharding: Any, shape: tuple[int, ...]) -> tuple[str, str]:
    """The kind and the description of the reason why an array cannot be sharded so; both are empty if it can."""
    mesh: Any = getattr(sharding, 'mesh', None)
    if type(mesh).__name__ == 'AbstractMesh':
        return 'mesh', f'{sharding.spec} over an AbstractMesh {dict(mesh.shape)}, which has no devices'
    if names := unreduced_axes(sharding):
        return 'sharding', f'{sharding.spec} is unreduced over {names}, and a checkpoint holds sums'
    spec = getattr(sharding, 'spec', None)
    if spec is not None and len(spec) > len(shape):
        return 'sharding', f'{spec} has {len(spec)} entries, the leaf has {len(shape)} dimensions {shape}'
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        return 'sharding', f'{error!s:.500}'
    return '', ''
