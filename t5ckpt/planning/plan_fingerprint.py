"""Formats a save plan as text, which all processes must have in common, and describes how two plans differ."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from t5ckpt.core.text import lines
from t5ckpt.errors import DisagreementError
from t5ckpt.format.checksum import digest
from t5ckpt.planning.save_plan import ArrayWrite, InlineWrite, SavePlan

_MAX_DIFF_LINES = 40


def plan_text(plan: SavePlan, header: Sequence[str]) -> str:
    """One line per leaf, after the header. Excludes the chunks of this process.

    Python numbers and host arrays may differ between processes; those of process 0 are saved.
    """
    shardings: dict[int, str] = {}
    leaves = [f'{write.name}: {_leaf_text(write, shardings)}' for write in (*plan.writes, *plan.inline)]
    return '\n'.join([*header, *sorted(leaves)])


def _leaf_text(write: ArrayWrite | InlineWrite, shardings: dict[int, str]) -> str:
    leaf = write.leaf
    if leaf is None:
        return 'None'
    sharding = getattr(leaf, 'sharding', None)
    if sharding is None:
        place = 'host'
    else:
        # Many leaves share few shardings, and formatting one is slow.
        if id(sharding) not in shardings:
            shardings[id(sharding)] = f'{sharding} on {_devices_text(sharding)}'
        place = shardings[id(sharding)]
    shape = tuple(getattr(leaf, 'shape', ()))
    chunks = tuple(write.array.metadata['chunks']) if isinstance(write, ArrayWrite) else 'inline'
    dtype = '' if write.dtype is None else write.dtype.name
    return f'{dtype} {shape} in {chunks}, {place}'


def _devices_text(sharding: Any) -> str:
    """The devices in their order; the text of a mesh has only their number."""
    mesh = getattr(sharding, 'mesh', None)
    devices = sharding.device_set if mesh is None else mesh.devices.flat
    ids = [device.id for device in devices]
    return f'devices {digest(str(sorted(ids) if mesh is None else ids).encode())}'


def difference(first: str, other: str, process: int) -> DisagreementError:
    """The error for a process whose plan differs from that of process 0."""
    changes = difflib.unified_diff(
        first.splitlines(), other.splitlines(), 'process 0', f'process {process}', '', '', 0, ''
    )
    shown = [line for line in changes if not line.startswith('@@')]
    more = [f'... and {len(shown) - _MAX_DIFF_LINES} more lines'] if len(shown) > _MAX_DIFF_LINES else []
    head = 'the processes were asked to save different things; nothing was written:'
    listed = lines(head, *shown[:_MAX_DIFF_LINES], *more, between='\n  ')
    return DisagreementError(
        lines(listed, 'Every process has to save the same tree, to the same directory, as the same step.')
    )
