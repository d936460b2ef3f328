"""Plots weights with matplotlib, which is in the extra ``notebook``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from t5ckpt.errors import MissingDependencyError

__all__ = ['plot_heatmap', 'plot_histogram', 'plot_series']

# Larger matrices are reduced to the means of equal blocks, since a picture has a few hundred pixels per side.
_MAX_PIXELS = 512


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingDependencyError(
            "plots need matplotlib: pip install matplotlib, or pip install 't5ckpt[notebook]'"
        ) from error
    return plt.subplots(figsize=(5, 3), layout='constrained')[1]


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
