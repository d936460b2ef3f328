"""Reads a replicated array once per job instead of once per process, and gathers it over the devices' network.

By default an array that is replicated over N processes is read N times from the storage. If the network between the devices
is faster than the storage, each device reads a part instead, and one all-gather completes all such arrays (a jitted identity
with replicated outputs).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt.core.leaf_path import Path
from t5ckpt.planning.leaf_reads import StoredRead

# Smaller parts are not worth a collective.
_MIN_BYTES = 2**20
_AXIS = 'part'


def split_replicated(reads: Sequence[StoredRead], processes: int) -> tuple[list[StoredRead], dict[Path, Any]]:
    """Splits the reads that can be split.

    Args:
      reads: from ``plan_restore``.
      processes: of the job.

    Returns:
      The reads, with another sharding for those that are split, and by path the final sharding of these.
    """
    split: list[StoredRead] = []
    final_shardings: dict[Path, Any] = {}
    for read in reads:
        sharding = _sharding_in_parts(read) if processes > 1 else None
        if sharding is None:
            split.append(read)
        else:
            split.append(dataclasses.replace(read, template=dataclasses.replace(read.template, sharding=sharding)))
            final_shardings[read.path] = read.template.sharding
    return split, final_shardings


def _sharding_in_parts(read: StoredRead) -> Any:
    sharding, shape = read.template.sharding, read.template.shape
    mesh = getattr(sharding, 'mesh', None)
    is_large_array = read.template.kind == 'array' and read.leaf.nbytes >= _MIN_BYTES
    if mesh is None or not is_large_array or not sharding.is_fully_replicated or sharding.is_fully_addressable:
        return None
    axis = next((axis for axis, size in enumerate(shape) if size % mesh.size == 0), None)
    if axis is None:
        return None
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    flat = Mesh(mesh.devices.reshape(-1), (_AXIS,))
    return NamedSharding(flat, PartitionSpec(*[None] * axis, _AXIS))


def gather(values: Mapping[Path, Any], final_shardings: Mapping[Path, Any]) -> dict[Path, Any]:
    """Gathers the split arrays into their final shardings. Every process calls it at the same point."""
    if not final_shardings:
        return {}
    import jax

    # One computation runs on one order of devices.
    by_mesh: dict[Any, list[Path]] = {}
    for path, sharding in final_shardings.items():
        by_mesh.setdefault(sharding.mesh, []).append(path)
    gathered: dict[Path, Any] = {}
    for paths in by_mesh.values():
        identity = jax.jit(lambda arrays: arrays, out_shardings=[final_shardings[path] for path in paths])
        gathered |= zip(paths, identity([values[path] for path in paths]), strict=True)
    return gathered
