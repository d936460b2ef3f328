"""Computes the parts of an array that this process's devices hold.

A part is a ``Box``. ``restore/read_arrays.py`` reads it, and ``reading/local/regions.py`` or TensorStore maps it to chunks and to
bytes of their files.
"""

from __future__ import annotations

from t5ckpt.format.chunk_grid import Box
from t5ckpt.tree.leaves import LeafTemplate


def boxes_wanted(target: LeafTemplate, shape: tuple[int, ...]) -> list[Box]:
    """The distinct boxes that this process's devices hold, or the whole array for a host target."""
    if not target.device or target.sharding is None:
        return [Box.whole(shape)]
    indices = target.sharding.addressable_devices_indices_map(shape)
    return list(dict.fromkeys(Box.from_slices(index, shape) for index in indices.values()))


def is_on_cpu(target: LeafTemplate) -> bool:
    """Whether the result can use a host buffer in place: a numpy array, or default memory of the CPU backend."""
    if not target.device:
        return True
    import jax

    if target.sharding is None:
        return jax.default_backend() == 'cpu'
    device = next(iter(target.sharding.addressable_devices), None)
    if device is None or device.platform != 'cpu':
        return False
    return target.sharding.memory_kind in (None, device.default_memory().kind)
