"""Computes the parts of an array that this process's devices hold, and finds shardings that do not fit their leaves.

A part is a ``Box``. ``restore/read_arrays.py`` reads it, and ``reading/chunks.py`` or TensorStore maps it to chunks and to bytes
of their files.

JAX raises ``IndivisibleError`` or ``ValueError`` for the first array whose sharding does not fit its shape or names no devices,
without the array's name. A restore reports all of them before it reads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from t5ckpt.format.chunk_grid import Box
from t5ckpt.tree.leaves import LeafTemplate, unreduced_axes


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
