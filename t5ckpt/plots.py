"""Pictures of weights on matplotlib axes. matplotlib comes with the extra ``notebook``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from t5ckpt.errors import MissingDependencyError

__all__ = ['plot_heatmap', 'plot_histogram', 'plot_series']

# A picture has a few hundred pixels a side; a larger matrix is shown by the means of equal blocks.
_MAX_PIXELS = 512


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingDependencyError("plots need matplotlib: pip install 't5ckpt[notebook]'") from error
    return plt.subplots(figsize=(5, 3), layout='constrained')[1]


def plot_histogram(counts: np.ndarray, edges: np.ndarray, title: str, ax: Any = None) -> Any:
    """A histogram that was counted before, with a logarithmic axis of counts, since weights have long tails."""
    ax = _axes(ax)
    ax.stairs(counts, edges, fill=True)
    ax.set(title=title, yscale='log', xlabel='value', ylabel='count')
    return ax


def plot_heatmap(array: Any, title: str = '', ax: Any = None) -> Any:
    """A matrix as a picture, zero in the middle of the colours; leading dimensions are put on top of each other."""
    values = np.asarray(array)
    if values.ndim < 1:
        raise ValueError(f'{title or "array"}: a picture needs at least one dimension, got shape {values.shape}.')
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
    """A number (or a vector of numbers) over steps."""
    ax = _axes(ax)
    ax.plot(list(values), [np.asarray(value).ravel() for value in values.values()], marker='.')
    ax.set(title=title, xlabel='step')
    return ax
