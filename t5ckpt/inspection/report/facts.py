"""The facts of a report, as JSON: steps, leaves, statistics, changes. Nothing is read here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from t5ckpt.catalog.step_summaries import StepSummary
from t5ckpt.core.text import printable
from t5ckpt.inspection.kept import GOES
from t5ckpt.inspection.layers import layers_of
from t5ckpt.inspection.leaf_tree import LeafInfo
from t5ckpt.inspection.stats import LeafStats
from t5ckpt.metrics.curves import Curve

BINS = 40
# Browsers show larger trees slowly.
_MAX_LEAVES = 20_000


class Changed(Protocol):
    """The part of ``LeafDiff`` that is used here."""

    @property
    def name(self) -> str:
        """The leaf's name."""
        ...

    @property
    def what(self) -> str:
        """The kind of the difference."""
        ...

    @property
    def a(self) -> str:
        """Its dtype and shape before."""
        ...

    @property
    def b(self) -> str:
        """Its dtype and shape after."""
        ...

    @property
    def relative(self) -> float:
        """The norm of the change over the norm of the leaf before."""
        ...

    @property
    def largest(self) -> float:
        """The largest change of a value."""
        ...


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
    layers = layers_of(info.path for info in infos)
    return [
        {
            'name': printable(info.name),
            'keys': [printable(key) for key in info.path],
            'layer': [printable(part) for part in layers[info.path]],
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


def change_facts(steps: tuple[int, int], leaves: Iterable[Changed], same: int) -> dict[str, Any]:
    """The changes between two steps."""
    rows = [
        {
            'name': printable(leaf.name),
            'what': leaf.what,
            'a': printable(leaf.a),
            'b': printable(leaf.b),
            'relative': _number(leaf.relative),
            'largest': _number(leaf.largest),
        }
        for leaf in leaves
    ]
    return {'steps': steps, 'same': same, 'leaves': rows}


def _number(value: float) -> float | str | None:
    """JSON has no infinity and no NaN."""
    value = float(np.float64(value))
    return None if math.isnan(value) else value if math.isfinite(value) else 'inf' if value > 0 else '-inf'
