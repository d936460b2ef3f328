"""Reading a replicated array once in a job instead of once in each process.

An array that every device of several processes holds whole is read by all of them: N times the bytes from the storage.
Where the network between the devices is faster than the way to the storage, each device reads its part instead and the
devices complete each other's: one all-gather for all such arrays (a jitted identity with replicated outputs).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt.core.leaf_path import Path
from t5ckpt.planning.restore_plan import StoredRead

__all__ = ['completed', 'in_parts']

# Below it the parts are too small to be worth a collective.
_MIN_BYTES = 2**20
_AXIS = 'part'


def in_parts(reads: Sequence[StoredRead], processes: int) -> tuple[list[StoredRead], dict[Path, Any]]:
    """Splits the reads that can be split.

    Args:
      reads: from ``plan_restore``.
      processes: of the job.

    Returns:
      The reads, with another sharding for those that are split, and by path the sharding that these are to have.
    """
    split: list[StoredRead] = []
    wanted: dict[Path, Any] = {}
    for read in reads:
        sharding = _sharding_in_parts(read) if processes > 1 else None
        if sharding is None:
            split.append(read)
        else:
            split.append(dataclasses.replace(read, target=dataclasses.replace(read.target, sharding=sharding)))
            wanted[read.path] = read.target.sharding
    return split, wanted


def _sharding_in_parts(read: StoredRead) -> Any:
    sharding, shape = read.target.sharding, read.target.shape
    mesh = getattr(sharding, 'mesh', None)
    if mesh is None or read.target.kind != 'array' or read.leaf.array.nbytes < _MIN_BYTES:
        return None
    if not sharding.is_fully_replicated or sharding.is_fully_addressable:
        return None
    axis = next((axis for axis, size in enumerate(shape) if size % mesh.size == 0), None)
    if axis is None:
        return None
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    flat = Mesh(mesh.devices.reshape(-1), (_AXIS,))
    return NamedSharding(flat, PartitionSpec(*[None] * axis, _AXIS))


def completed(values: Mapping[Path, Any], wanted: Mapping[Path, Any]) -> dict[Path, Any]:
    """The split arrays in the shardings they are to have; every process calls it at the same point."""
    if not wanted:
        return {}
    import jax

    # One computation takes place on one order of devices.
    by_mesh: dict[Any, list[Path]] = {}
    for path, sharding in wanted.items():
        by_mesh.setdefault(sharding.mesh, []).append(path)
    found: dict[Path, Any] = {}
    for paths in by_mesh.values():
        gather = jax.jit(lambda arrays: arrays, out_shardings=[wanted[path] for path in paths])
        found |= zip(paths, gather([values[path] for path in paths]), strict=True)
    return found
