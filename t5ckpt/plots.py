"""Plots weights with matplotlib, which is in the extra ``notebook``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from t5ckpt.core.text import printable
from t5ckpt.errors import MissingDependencyError

__all__ = ['plot_heatmap', 'plot_histogram', 'plot_layers', 'plot_series']

# Larger matrices are reduced to the means of equal blocks, since a picture has a few hundred pixels per side.
_MAX_PIXELS = 512

# More rows and columns than these have no room for labels in a notebook, which scales wide figures down.
_MAX_LAYERS = (40, 20)
_TITLE_WIDTH = 48


def _axes(ax: Any, size: tuple[float, float] = (5, 3)) -> Any:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingDependencyError(
            "plots need matplotlib: pip install matplotlib, or pip install 't5ckpt[notebook]'"
        ) from error
    made = plt.subplots(figsize=size, layout='constrained')[1]
    # An offset such as +2.22e2 would overlap the title. (rc_context would undo the settings of a notebook's first figure.)
    made.ticklabel_format(useOffset=False)
    return made


def plot_histogram(counts: np.ndarray, edges: np.ndarray, title: str, ax: Any = None) -> Any:
    """Plots counts with a logarithmic axis, since weights have long tails."""
    ax = _axes(ax)
    ax.stairs(counts, edges, fill=True)
    ax.set(title=_title(title), yscale='log', xlabel='value', ylabel='count')
    return ax


def plot_heatmap(array: Any, title: str = '', ax: Any = None) -> Any:
    """Plots a matrix with zero in the middle of the colors; leading dimensions are flattened into rows.

    The axes count the rows and columns of the whole matrix. The 0.5 % of largest values have the color of the limit.
    """
    values = np.asarray(array)
    if values.ndim < 1:
        raise ValueError(f'{title or "array"}: a heatmap needs at least one dimension, got shape {values.shape}.')
    matrix = values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)
    picture = _shrunk(_shrunk(matrix.astype(np.float32), 0), 1)
    finite = np.abs(picture[np.isfinite(picture)])
    limit = float(np.quantile(finite, 0.995)) if finite.size else 1.0
    ax = _axes(ax)
    height, width = matrix.shape
    image = ax.imshow(
        picture,
        cmap='RdBu_r',
        vmin=-limit or -1.0,
        vmax=limit or 1.0,
        aspect='auto',
        interpolation='nearest',
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
    )
    label = 'value' if picture.shape == matrix.shape else 'mean of a block'
    ax.figure.colorbar(image, ax=ax, label=label, extend='both')
    ax.set(title=_title(title or f'{tuple(values.shape)}'), xlabel='column', ylabel='row')
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
    ax.set(title=_title(title), xlabel='step', ylabel='value')
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    if isinstance(locator := ax.xaxis.get_major_locator(), MaxNLocator):
        locator.set_params(integer=True)
    if isinstance(formatter := ax.yaxis.get_major_formatter(), ScalarFormatter):
        # An offset above the axis, such as +2.22e2, is easily overlooked.
        formatter.set_useOffset(False)
    return ax


def plot_layers(values: Mapping[tuple[str, str], float], title: str, ax: Any = None) -> Any:
    """Plots a number for each (layer, parameter) as a heat map with logarithmic colors.

    Shows the 40 layers with the largest values, and the 20 parameters that most of them have. Zero, NaN and infinite values
    are left blank.
    """
    shown = {key: value for key, value in values.items() if 0 < value < np.inf}
    rows = _first(shown, 0, lambda values: (max(values), len(values)))
    shown = {key: value for key, value in shown.items() if key[0] in rows}
    columns = _first(shown, 1, lambda values: (len(values), max(values)))
    shown = {key: value for key, value in shown.items() if key[1] in columns}
    rows = _first(shown, 0, max)
    matrix = np.full((max(1, len(rows)), max(1, len(columns))), np.nan)
    for (row, column), value in shown.items():
        matrix[rows.index(row), columns.index(column)] = value
    ax = _axes(ax, (4.5 + 0.3 * len(columns), 2.5 + 0.2 * len(rows)))
    scale = 'log' if shown else None
    image = ax.imshow(matrix, cmap='viridis', norm=scale, aspect='auto', interpolation='nearest')
    ax.figure.colorbar(image, ax=ax)
    ax.set(title=title)
    ax.set_xticks(range(len(columns)), [_label(name) for name in columns], rotation=60, ha='right', fontsize=8)
    ax.set_yticks(range(len(rows)), [_label(name) or '(top)' for name in rows], fontsize=8)
    return ax


def _first(values: Mapping[tuple[str, str], float], axis: int, rank: Callable[[list[float]], Any]) -> list[str]:
    """The names along an axis that rank highest, in their order; as many as there is room for."""
    values_by_key: dict[str, list[float]] = {}
    for key, value in values.items():
        values_by_key.setdefault(key[axis], []).append(value)
    kept = set(sorted(values_by_key, key=lambda name: rank(values_by_key[name]), reverse=True)[: _MAX_LAYERS[axis]])
    return [name for name in values_by_key if name in kept]


def _label(name: str) -> str:
    """A name as matplotlib shows it: a dollar would begin a formula."""
    return printable(name).replace('$', r'\$')


def _title(name: str) -> str:
    """A name in lines that fit a figure, broken before a slash where one is."""
    lines = ['']
    for part in re.findall(r'/?[^/]*', _label(name)):
        if lines[-1] and len(lines[-1]) + len(part) > _TITLE_WIDTH:
            lines.append('')
        lines[-1] += part
    return '\n'.join(lines)
