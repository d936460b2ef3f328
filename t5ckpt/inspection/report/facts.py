"""The facts of a report, as JSON: steps, leaves, statistics, changes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from t5ckpt.catalog.step_summaries import StepSummary
from t5ckpt.core.leaf_path import leaf_name
from t5ckpt.core.protocols import Progress
from t5ckpt.core.text import printable
from t5ckpt.inspection.kept import GOES
from t5ckpt.inspection.layers import layers_of
from t5ckpt.inspection.leaf_tree import LeafInfo
from t5ckpt.inspection.stats import LeafStats, leaf_stats

BINS = 40
_OF_STEP = ('step', 'state', 'nbytes', 'created', 'metrics', 'pinned', 'layout')
_OF_LEAF = ('name', 'path', 'kind', 'dtype', 'shape', 'size', 'nbytes', 'location', 'value')
_OF_STATS = ('mean', 'std', 'min', 'max', 'zeros', 'nan', 'inf')
# Browsers show larger trees slowly.
_MAX_LEAVES = 20_000


def plain(value: Any) -> Any:
    """A value as JSON with printable text, and with null and text for NaN and infinities, which JSON lacks."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in cast('Mapping[str, Any]', value).items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in cast('Sequence[Any]', value)]
    if not isinstance(value, (float, np.floating)):
        return value
    number = float(value)
    return None if math.isnan(number) else number if math.isfinite(number) else 'inf' if number > 0 else '-inf'


def step_facts(steps: Iterable[StepSummary]) -> list[dict[str, Any]]:
    """The steps with sizes, times, metrics and reasons."""
    return [
        {
            **plain({field: getattr(step, field) for field in _OF_STEP}),
            'goes': step.kept.startswith(GOES),
            'kept': printable('; '.join(filter(None, [step.kept, step.reason]))),
            'custom_metadata': printable(json.dumps(step.custom_metadata, ensure_ascii=False))
            if step.custom_metadata
            else '',
        }
        for step in steps
    ]


def largest(infos: Sequence[LeafInfo]) -> list[LeafInfo]:
    """The leaves that a page lists, in their order: all, or the largest 20,000."""
    kept = sorted(range(len(infos)), key=lambda index: (-infos[index].nbytes, index))[:_MAX_LEAVES]
    return [infos[index] for index in sorted(kept)]


def checkpoint_facts(
    view: Mapping[str, Any], infos: Sequence[LeafInfo], sample_bytes: int | None, progress: Progress | None
) -> dict[str, Any]:
    """The facts of one checkpoint: its leaves and their statistics.

    Args:
      view: the checkpoint, for many reads.
      infos: all leaves.
      sample_bytes: about how many bytes to read; None reads everything.
      progress: called with (bytes read, bytes to read).
    """
    listed = largest(infos)
    return {
        'leaves': leaf_facts(listed, leaf_stats(view, listed, BINS, progress, sample_bytes)),
        'all_leaves': len(infos),
        'size': sum(info.size for info in infos),
        'nbytes': sum(info.nbytes for info in infos),
        'sample_bytes': sample_bytes,
    }


def leaf_facts(infos: Iterable[LeafInfo], stats: Mapping[str, LeafStats]) -> list[dict[str, Any]]:
    """The leaves with their statistics."""
    return [
        plain({field: getattr(info, field) for field in _OF_LEAF} | {'stats': _stats(stats.get(info.name), info.size)})
        for info in infos
    ]


def _stats(stats: LeafStats | None, size: int) -> dict[str, Any] | None:
    """Statistics of a leaf; those of a sample have ``read`` below the leaf's size, and a norm for the complete leaf."""
    if stats is None or not stats.size:
        return None
    found = {name: getattr(stats, name) for name in _OF_STATS}
    found |= {'read': stats.size, 'norm': stats.norm * math.sqrt(size / stats.size)}
    if stats.counts is not None and stats.edges is not None:
        found |= {'counts': stats.counts.tolist(), 'low': stats.edges[0], 'high': stats.edges[-1]}
    return found


def heat_facts(infos: Iterable[LeafInfo], changed: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The changes of all arrays of the later step by layer and parameter, with those that are equal.

    Args:
      infos: the leaves of the later step.
      changed: the facts of the leaves that differ.
    """
    found = {leaf['name']: leaf for leaf in changed}
    cells: list[dict[str, Any]] = []
    for path, (layer, parameter) in layers_of(info.path for info in infos if info.dtype).items():
        name = printable(leaf_name(path))
        change = found.get(name, {'name': name, 'relative': 0})
        if change.get('what') != 'added':
            cells.append(plain({'part': path[0], 'layer': layer, 'parameter': parameter, **change}))
    return cells
