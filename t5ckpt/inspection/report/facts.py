"""The facts of a report, as JSON: steps, leaves, statistics, changes. Nothing is read here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.catalog.step_summaries import StepSummary
from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.text import printable
from t5ckpt.inspection.kept import GOES
from t5ckpt.inspection.layers import Stack, layers_of
from t5ckpt.inspection.leaf_tree import LeafInfo
from t5ckpt.inspection.stats import LeafStats
from t5ckpt.metrics.curves import Curve

BINS = 40
# Browsers show larger trees slowly.
_MAX_LEAVES = 20_000


def step_facts(steps: Iterable[StepSummary]) -> list[dict[str, Any]]:
    """The steps with sizes, times, metrics and reasons."""
    return [
        {
            'step': summary.step,
            'state': summary.state,
            'bytes': summary.nbytes,
            'created': summary.created,
            'metrics': {printable(name): _number(value) for name, value in summary.metrics.items()},
            'pinned': summary.pinned,
            'goes': summary.kept.startswith(GOES),
            'kept': printable('; '.join(filter(None, [summary.kept, summary.reason]))),
            'writer': printable(summary.writer),
            'layout': summary.layout,
            'custom_metadata': _json_text(summary.custom_metadata),
        }
        for summary in steps
    ]


def _json_text(value: Mapping[str, Any]) -> str:
    return printable(json.dumps(value, ensure_ascii=False)) if value else ''


def curve_facts(curves: Iterable[Curve]) -> list[dict[str, Any]]:
    """The curves of the run's event files."""
    return [
        {
            'name': printable(curve.name),
            'count': curve.count,
            'steps': [step for step, _, _ in curve.points],
            'times': [_number(time) for _, time, _ in curve.points],
            'values': [_number(value) for _, _, value in curve.points],
        }
        for curve in curves
    ]


def largest(infos: Sequence[LeafInfo]) -> list[LeafInfo]:
    """The leaves that a page lists, in their order: all, or the largest 20,000."""
    if len(infos) <= _MAX_LEAVES:
        return list(infos)
    kept = sorted(range(len(infos)), key=lambda index: (-infos[index].nbytes, index))[:_MAX_LEAVES]
    return [infos[index] for index in sorted(kept)]


def leaf_facts(infos: Sequence[LeafInfo], stats: Mapping[str, LeafStats]) -> list[dict[str, Any]]:
    """The leaves with their statistics."""
    return [
        {
            'name': printable(info.name),
            'keys': [printable(key) for key in info.path],
            'kind': info.kind,
            'dtype': info.dtype,
            'shape': info.shape,
            'size': info.size,
            'bytes': info.nbytes,
            'chunks': info.chunks,
            'codec': info.codec,
            'value': printable(info.value),
            'stats': _stats(stats.get(info.name), info.size),
        }
        for info in infos
    ]


def _stats(stats: LeafStats | None, size: int) -> dict[str, Any] | None:
    """Statistics of a leaf; those of a sample have ``read`` below the leaf's size, and a norm for the complete leaf."""
    if stats is None or not stats.size:
        return None
    bins: dict[str, Any] = {}
    if stats.counts is not None and stats.edges is not None:
        bins = {'counts': stats.counts.tolist(), 'low': _number(stats.edges[0]), 'high': _number(stats.edges[-1])}
    return {
        'read': stats.size,
        'mean': _number(stats.mean),
        'std': _number(stats.std),
        'min': _number(stats.min),
        'max': _number(stats.max),
        'norm': _number(stats.norm * math.sqrt(size / stats.size)),
        'zeros': stats.zeros,
        'nan': stats.nan,
        'inf': stats.inf,
        **bins,
    }


def change_facts(leaf: Mapping[str, Any]) -> dict[str, Any]:
    """A leaf that changed, from the fields of a ``LeafDiff``."""
    texts = {key: printable(leaf[key]) for key in ('name', 'what', 'a', 'b')}
    return texts | {key: _number(leaf[key]) for key in ('relative', 'largest')}


def heat_facts(
    infos: Iterable[LeafInfo], stacks: Mapping[Path, Stack], changed: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The changes of all arrays of the later step by layer and parameter, with those that are equal."""
    found = {leaf['name']: leaf for leaf in changed}
    parts: dict[Path, str] = {}
    for info in infos:
        stack = stacks.get(info.path)
        if info.dtype:
            paths = (
                [info.path] if stack is None else [stack.path(info.path, at) for at in range(info.shape[stack.axis])]
            )
            parts |= dict.fromkeys(paths, printable(info.path[0]))
    cells: list[dict[str, Any]] = []
    for path, (layer, parameter) in layers_of(parts).items():
        leaf = found.get(leaf_name(path))
        if leaf is None or leaf['what'] != 'added':
            change = {'name': printable(leaf_name(path)), 'relative': 0} if leaf is None else change_facts(leaf)
            names = {'part': parts[path], 'layer': printable(layer), 'parameter': printable(parameter)}
            cells.append({**names, **change})
    return cells


def _number(value: float) -> float | str | None:
    """JSON has no infinity and no NaN."""
    value = float(np.float64(value))
    return None if math.isnan(value) else value if math.isfinite(value) else 'inf' if value > 0 else '-inf'
