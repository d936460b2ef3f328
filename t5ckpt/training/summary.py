"""Describes a train state as text with one line per leaf, like axlearn's ``trainer_state_tree.txt``."""

from __future__ import annotations

import math
import os
from typing import Any

from t5ckpt.core.leaf_path import PARAMETER_ROOTS, leaf_name
from t5ckpt.core.text import aligned, counted
from t5ckpt.distributed.processes import jax_processes
from t5ckpt.storage import open_storage
from t5ckpt.tree.leaf_table import Empty
from t5ckpt.tree.train_state import flatten_state

FILE = 'trainer_state_tree.txt'
_HEADER = ('path', 'dtype', 'shape', 'bytes', 'sharding')


def state_summary(state: Any) -> str:
    """A table with path, dtype, shape, bytes and sharding of every leaf, and totals; reads no array.

    Args:
      state: as for ``Checkpointer``; leaves may be jax.ShapeDtypeStruct.
    """
    table = flatten_state(state).table
    rows: list[tuple[str, ...]] = [_HEADER]
    parameters = on_device = in_all = 0
    # The scope of the weights in T5X and in Flax; without either, all arrays count as parameters.
    weights = next((name for name in PARAMETER_ROOTS if any(path[0] == name for path in table)), None)
    for path, leaf in table.items():
        shape = getattr(leaf, 'shape', None)
        if shape is None:
            text = f'empty {leaf.kind}' if isinstance(leaf, Empty) else f'{type(leaf).__name__} {leaf!r:.40}'
            rows.append((leaf_name(path), text, '', '', ''))
            continue
        sharding = getattr(leaf, 'sharding', None)
        nbytes = math.prod(shape) * leaf.dtype.itemsize
        local = shape if sharding is None else sharding.shard_shape(tuple(shape))
        in_all += nbytes
        on_device += math.prod(local) * leaf.dtype.itemsize
        if weights is None or path[0] == weights:
            parameters += math.prod(shape)
        rows.append((leaf_name(path), str(leaf.dtype), str(tuple(shape)), f'{nbytes:,}', _sharding_text(sharding)))
    of = 'all arrays' if weights is None else weights
    lines = aligned(rows, [False] * len(_HEADER))
    lines += ['', f'{counted(len(table), "leaf", "leaves")}, {in_all:,} bytes, {on_device:,} bytes on each device']
    return '\n'.join([*lines, f'{parameters:,} parameters ({of})', ''])


def _sharding_text(sharding: Any) -> str:
    spec = getattr(sharding, 'spec', None)
    if sharding is None:
        return 'host'
    if spec is None:
        return f'{type(sharding).__name__} on {counted(len(sharding.device_set), "device")}'
    mesh = ', '.join(f'{name} {size}' for name, size in sharding.mesh.shape.items())
    return f'({", ".join(map(repr, spec))}) over mesh ({mesh})'


def write_state_summary(directory: str | os.PathLike[str], state: Any) -> None:
    """Writes the table to ``trainer_state_tree.txt`` in a directory, in process 0."""
    if jax_processes().index == 0:
        storage = open_storage(directory)
        storage.make_dir('')
        storage.write(FILE, state_summary(state).encode())
