"""Plots weights with matplotlib, which is in the extra ``notebook``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from t5ckpt.core.text import printable
from t5ckpt.errors import MissingDependencyError

__all__ = ['plot_heatmap', 'plot_histogram', 'plot_layers', 'plot_series']

# Larger matrices are reduced to the means of equal blocks, since a picture has a few hundred pixels per side.
_MAX_PIXELS = 512


# More rows or columns than these have no room for labels.
_MAX_LAYERS = 40


def _axes(ax: Any, size: tuple[float, float] = (5, 3)) -> Any:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingDependencyError(
            "plots need matplotlib: pip install matplotlib, or pip install 't5ckpt[notebook]'"
        ) from error
    return plt.subplots(figsize=size, layout='constrained')[1]


def plot_histogram(counts: np.ndarray, edges: np.ndarray, title: str, ax: Any = None) -> Any:
    """Plots counts with a logarithmic axis, since weights have long tails."""
    ax = _axes(ax)
    ax.stairs(counts, edges, fill=True)
    ax.set(title=title, yscale='log', xlabel='value', ylabel='count')
    return ax


def plot_heatmap(array: Any, title: str = '', ax: Any = None) -> Any:
    """Plots a matrix with zero in the middle of the colours; leading dimensions are flattened into rows."""
    values = np.asarray(array)
    if values.ndim < 1:
        raise ValueError(f'{title or "array"}: a heatmap needs at least one dimension, got shape {values.shape}.')
    matrix = values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)
    picture = _shrunk(_shrunk(matrix.astype(np.float32), 0), 1)
    finite = np.abs(picture[np.isfinite(picture)])
    limit = float(np.quantile(finite, 0.995)) if finite.size else 1.0
    ax = _axes(ax)
    image = ax.imshow(
        picture, cmap='RdBu_r', vmin=-limit or -1.0, vmax=limit or 1.0, aspect='auto', interpolation='nearest'
    )
    ax.figure.colorbar(image, ax=ax)
    ax.set(title=title or f'{tuple(values.shape)}')
    return ax


def _shrunk(matrix: np.ndarray, axis: int) -> np.ndarray:
    size = matrix.shape[axis]
    if size <= _MAX_PIXELS:
        return matrix
    starts = np.arange(_MAX_PIXELS) * size // _MAX_PIXELS
    widths = np.diff(np.append(starts, size))
    sums = np.add.reduceat(matrix, starts, axis=axis)
    return sums / (widths[:, None] if axis == 0 else widths[None, :])


def plot_series(values: Mapping[int, Any], title: str, ax: Any = None) -> Any:
    """Plots a number or a vector over steps."""
    ax = _axes(ax)
    ax.plot(list(values), [np.asarray(value).ravel() for value in values.values()], marker='.')
    ax.set(title=title, xlabel='step')
    return ax


def plot_layers(values: Mapping[tuple[str, str], float], title: str, ax: Any = None) -> Any:
    """Plots a number for each (layer, parameter) as a heat map with logarithmic colours; the largest 40 rows and columns.

    Zero, NaN and infinite values are left blank.
    """
    shown = {key: value for key, value in values.items() if 0 < value < np.inf}
    rows, columns = (_strongest(shown, axis) for axis in (0, 1))
    matrix = np.full((max(1, len(rows)), max(1, len(columns))), np.nan)
    for (row, column), value in shown.items():
        if row in rows and column in columns:
            matrix[rows.index(row), columns.index(column)] = np.log10(value)
    ax = _axes(ax, (4.5 + 0.3 * len(columns), 2.5 + 0.2 * len(rows)))
    image = ax.imshow(matrix, cmap='viridis', aspect='auto', interpolation='nearest')
    ax.figure.colorbar(image, ax=ax, label='log10')
    ax.set(title=title)
    ax.set_xticks(range(len(columns)), [_label(name) for name in columns], rotation=60, ha='right', fontsize=7)
    ax.set_yticks(range(len(rows)), [_label(name) for name in rows], fontsize=7)
    return ax


def _strongest(values: Mapping[tuple[str, str], float], axis: int) -> list[str]:
    """The names along an axis with the largest values, in their order."""
    best: dict[str, float] = {}
    for key, value in values.items():
        best[key[axis]] = max(best.get(key[axis], 0.0), value)
    kept = set(sorted(best, key=lambda name: -best[name])[:_MAX_LAYERS])
    return [name for name in best if name in kept]


def _label(name: str) -> str:
    """A name as matplotlib shows it: a dollar would begin a formula."""
    return printable(name).replace('$', r'\$')
