"""Computes statistics of every leaf of a checkpoint, block by block with bounded memory.

Counts, means and sums of squared deviations of blocks are merged in float64 with the formula of Chan, Golub and LeVeque (Updating
Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979). NaN and infinite values are counted, and excluded from
all other statistics. Complex values are replaced by their magnitudes.

Notes: memory is a few blocks of 8 MiB (or one chunk, up to 64 MiB) per thread, for a checkpoint of any size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from t5ckpt.core.protocols import Progress
from t5ckpt.core.text import aligned, printable
from t5ckpt.inspection.block_iteration import Block, blocks_in, bytes_in, pieces_of, reduce_blocks, sum_of_squares
from t5ckpt.inspection.dataframes import pandas
from t5ckpt.inspection.leaf_tree import LeafInfo
from t5ckpt.inspection.notebook_html import table_html
from t5ckpt.progress import Meter

_COLUMNS = ('name', 'size', 'mean', 'std', 'min', 'max', 'norm', 'zeros', 'nan', 'inf')
_SHOWN = 60


class Viewed(Protocol):
    """The part of ``CheckpointView`` that is used here."""

    @property
    def path(self) -> str:
        """The path, for the title."""
        ...

    def infos(self) -> list[LeafInfo]:
        """Shapes, dtypes and chunks."""
        ...

    def __getitem__(self, name: str) -> Any:
        """A lazy array."""
        ...


@dataclasses.dataclass(frozen=True)
class LeafStats:
    """Statistics of one leaf.

    Attributes:
      size: the number of elements.
      mean, std, min, max: of the finite values, ``std`` of the population; NaN if no value is finite.
      norm: the square root of the sum of squares of the finite values.
      zeros: the number of values that are exactly zero.
      nan, inf: the numbers of NaN and infinite values.
      counts, edges: the histogram, ``len(edges) == len(counts) + 1``; None without ``bins``.
    """

    size: int = 0
    mean: float = math.nan
    std: float = math.nan
    min: float = math.nan
    max: float = math.nan
    norm: float = 0.0
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    counts: np.ndarray | None = None
    edges: np.ndarray | None = None

    @property
    def sparsity(self) -> float:
        """The share of zeros."""
        return self.zeros / self.size if self.size else 0.0


@dataclasses.dataclass(frozen=True)
class _Moments:
    """Sums over a block, in a form that can be merged."""

    size: int = 0
    finite: int = 0
    mean: float = 0.0
    squared: float = 0.0  # the sum of squared deviations from the mean
    min: float = math.inf
    max: float = -math.inf
    zeros: int = 0
    nan: int = 0

    def merged(self, other: _Moments) -> _Moments:
        """The sums over both blocks."""
        finite = self.finite + other.finite
        if finite == 0:
            return dataclasses.replace(self, size=self.size + other.size, nan=self.nan + other.nan)
        delta = other.mean - self.mean
        return _Moments(
            self.size + other.size,
            finite,
            self.mean + delta * other.finite / finite,
            self.squared + other.squared + delta * delta * self.finite * other.finite / finite,
            min(self.min, other.min),
            max(self.max, other.max),
            self.zeros + other.zeros,
            self.nan + other.nan,
        )

    def finished(self) -> LeafStats:
        """Computes the statistics from the sums."""
        if self.finite == 0:
            return LeafStats(self.size, nan=self.nan, inf=self.size - self.nan)
        return LeafStats(
            size=self.size,
            mean=self.mean,
            std=math.sqrt(self.squared / self.finite),
            min=self.min,
            max=self.max,
            norm=math.sqrt(self.squared + self.finite * self.mean * self.mean),
            zeros=self.zeros,
            nan=self.nan,
            inf=self.size - self.finite - self.nan,
        )


def _values(block: np.ndarray) -> np.ndarray:
    return np.abs(block).astype(np.float64) if block.dtype.kind == 'c' else block.astype(np.float64)


def moments_of(block: np.ndarray) -> _Moments:
    """The moments of a block."""
    return functools.reduce(_Moments.merged, map(_piece, pieces_of(block)), _Moments())


def _piece(piece: np.ndarray) -> _Moments:
    values = _values(piece)
    finite = values[np.isfinite(values)]
    nan = int(np.count_nonzero(np.isnan(values))) if finite.size < values.size else 0
    if finite.size == 0:
        return _Moments(size=values.size, nan=nan)
    # Sums of squares beyond 1e308 become infinite.
    with np.errstate(over='ignore'):
        mean = float(finite.mean())
        deviations = finite - mean
        squared = sum_of_squares(deviations)
    return _Moments(
        values.size,
        finite.size,
        mean,
        squared,
        float(finite.min()),
        float(finite.max()),
        values.size - int(np.count_nonzero(values)),
        nan,
    )


class CheckpointStats(Mapping[str, LeafStats]):
    """A mapping from leaf name to :class:`LeafStats`; its repr is a table."""

    def __init__(self, title: str, leaves: Mapping[str, LeafStats]):
        self._title = title
        self._leaves = dict(leaves)

    def __getitem__(self, name: str) -> LeafStats:
        return self._leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def rows(self) -> list[list[str]]:
        """The table's cells as text, a row per leaf, in the order of ``columns``."""
        return [
            [name, *[_cell(getattr(leaf, column)) for column in _COLUMNS[1:]]] for name, leaf in self._leaves.items()
        ]

    columns = _COLUMNS

    def to_pandas(self) -> Any:
        """A DataFrame with a row per leaf, by name."""
        fields = (*_COLUMNS[1:], 'sparsity')
        values = [[getattr(leaf, field) for field in fields] for leaf in self._leaves.values()]
        return pandas().DataFrame(values, columns=[*fields], index=pandas().Index([*self._leaves], name='name'))

    def plot(self, name: str, ax: Any = None) -> Any:
        """Plots the histogram of a leaf, which needs ``stats(bins=...)``; returns the matplotlib axes."""
        from t5ckpt.plots import plot_histogram

        leaf = self[name]
        if leaf.counts is None or leaf.edges is None:
            raise ValueError(f'{name} has no histogram, because bins is 0. Pass bins to stats: view.stats(bins=64).')
        return plot_histogram(leaf.counts, leaf.edges, name, ax)

    def __repr__(self) -> str:
        rows = self.rows()
        lines = [printable(self._title), *aligned([_COLUMNS, *rows[:_SHOWN]], (False, *[True] * (len(_COLUMNS) - 1)))]
        if len(rows) > _SHOWN:
            lines.append(f'... and {len(rows) - _SHOWN:,} more: .to_pandas() has all')
        return '\n'.join(lines)

    def _repr_html_(self) -> str:
        counts = [[] if leaf.counts is None else leaf.counts.tolist() for leaf in self._leaves.values()]
        return table_html(self._title, _COLUMNS, self.rows(), counts if any(counts) else None)


def _cell(value: float) -> str:
    return f'{value:,}' if isinstance(value, int) else f'{value:.5g}'


def checkpoint_stats(
    view: Viewed,
    bins: int = 0,
    progress: Progress | None = None,
    threads: int | None = None,
    sample_bytes: int | None = None,
) -> CheckpointStats:
    """Computes statistics of every array of a view; reads each once, or twice with ``bins``.

    Args:
      view: a checkpoint or a part of one.
      bins: of a histogram between the smallest and the largest finite value of each leaf; 0 for no histogram.
      progress: called with (bytes read, bytes in all).
      threads: the number of threads; by default one per core.
      sample_bytes: about how many bytes to read instead of all, see ``blocks_in``. The statistics describe the sample.
    """
    if bins < 0:
        raise ValueError(f'bins must be 0 or more, got {bins}.')
    infos = [info for info in view.infos() if info.dtype]
    meter = Meter(progress, bytes_in(infos, sample_bytes) * (2 if bins else 1))

    def values_of(block: Block) -> np.ndarray:
        return np.asarray(view[block.leaf.name][block.index])

    parts: dict[str, _Moments] = {info.name: _Moments() for info in infos}
    for block, part in reduce_blocks(
        blocks_in(infos, sample_bytes), lambda block: moments_of(values_of(block)), threads
    ):
        parts[block.leaf.name] = parts[block.leaf.name].merged(part)
        meter.add(block.nbytes)
    stats = {name: part.finished() for name, part in parts.items()}
    if bins:
        edges = {name: _edges(leaf, bins) for name, leaf in stats.items()}
        counts = {name: np.zeros(bins, np.int64) for name in stats}

        def count(block: Block) -> np.ndarray:
            return _count(values_of(block), edges[block.leaf.name])

        for block, counted in reduce_blocks(blocks_in(infos, sample_bytes), count, threads):
            counts[block.leaf.name] += counted
            meter.add(block.nbytes)
        stats = {
            name: dataclasses.replace(leaf, counts=counts[name], edges=edges[name]) for name, leaf in stats.items()
        }
    return CheckpointStats(str(view.path), stats)


def _edges(leaf: LeafStats, bins: int) -> np.ndarray:
    if math.isnan(leaf.min):
        return np.linspace(0.0, 1.0, bins + 1)
    # Each bin is at least two floats wide, and a leaf of one value gets a bin around it. Halves avoid an overflow.
    least = max(2 * bins * float(np.spacing(max(abs(leaf.min), abs(leaf.max)))), 1.0 if leaf.min == leaf.max else 0.0)
    more = max(0.0, least / 2 - (leaf.max / 2 - leaf.min / 2)) / 2
    return 2 * np.linspace(leaf.min / 2 - more, leaf.max / 2 + more, bins + 1)


def _count(block: np.ndarray, edges: np.ndarray) -> np.ndarray:
    counts = np.zeros(len(edges) - 1, np.int64)
    for piece in pieces_of(block):
        values = _values(piece)
        counts += np.histogram(values[np.isfinite(values)], edges)[0]
    return counts
