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
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.core.protocols import Progress
from t5ckpt.inspection.block_iteration import Block, bytes_in, pieces_of, sums_by_leaf
from t5ckpt.inspection.leaf_tree import LeafInfo
from t5ckpt.inspection.tables import histogram, pandas, table_html, table_text
from t5ckpt.progress import Meter

_COLUMNS = ('name', 'size', 'mean', 'std', 'min', 'max', 'norm', 'zeros', 'nan', 'inf')


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
class Moments:
    """Sums over a part of a leaf, in a form that can be merged; ``squared`` are the deviations from the mean."""

    size: int = 0
    finite: int = 0
    mean: float = 0.0
    squared: float = 0.0
    min: float = math.inf
    max: float = -math.inf
    zeros: int = 0
    nan: int = 0

    def merged(self, other: Moments) -> Moments:
        """The sums over both parts."""
        finite = self.finite + other.finite
        delta, share = other.mean - self.mean, other.finite / max(1, finite)
        return Moments(
            self.size + other.size,
            finite,
            self.mean + delta * share,
            # In this order, because the square of a large mean is infinite.
            self.squared + other.squared + delta * share * self.finite * delta,
            min(self.min, other.min),
            max(self.max, other.max),
            self.zeros + other.zeros,
            self.nan + other.nan,
        )

    def finished(self) -> LeafStats:
        """Computes the statistics from the sums."""
        inf = self.size - self.finite - self.nan
        if not self.finite:
            return LeafStats(self.size, nan=self.nan, inf=inf)
        std = math.sqrt(self.squared / self.finite)
        norm = math.sqrt(self.squared + self.finite * self.mean * self.mean)
        return LeafStats(self.size, self.mean, std, self.min, self.max, norm, self.zeros, self.nan, inf)


def _values(block: np.ndarray) -> np.ndarray:
    return np.abs(block).astype(np.float64) if block.dtype.kind == 'c' else block.astype(np.float64)


def moments_of_piece(piece: np.ndarray) -> Moments:
    """The moments of a piece, which fits into a core's cache."""
    values = _values(piece)
    finite = values[np.isfinite(values)]
    nan = int(np.count_nonzero(np.isnan(values))) if finite.size < values.size else 0
    if finite.size == 0:
        return Moments(size=values.size, nan=nan)
    # Sums of squares beyond 1e308 become infinite.
    with np.errstate(over='ignore'):
        mean = float(finite.mean())
        deviations = finite - mean
        # numpy.dot would use BLAS, whose threads slow down the reading threads: it takes two to eight times as long.
        squared = float(np.add.reduce(deviations * deviations))
    zeros = values.size - int(np.count_nonzero(values))
    return Moments(values.size, finite.size, mean, squared, float(finite.min()), float(finite.max()), zeros, nan)


class CheckpointStats(Mapping[str, LeafStats]):
    """A mapping from leaf name to :class:`LeafStats`; its repr is a table."""

    columns = _COLUMNS

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

    def to_pandas(self) -> Any:
        """A DataFrame with a row per leaf, by name."""
        fields = (*_COLUMNS[1:], 'sparsity')
        values = [[getattr(leaf, field) for field in fields] for leaf in self._leaves.values()]
        return pandas().DataFrame(values, columns=[*fields], index=pandas().Index([*self._leaves], name='name'))

    def __repr__(self) -> str:
        return table_text(self._title, _COLUMNS, self.rows(), 1, '.to_pandas() has all')

    def _repr_html_(self) -> str:
        counts = [leaf.counts for leaf in self._leaves.values()]
        if all(each is None for each in counts):
            return table_html(self._title, _COLUMNS, self.rows())
        pictures = [histogram([] if each is None else each.tolist()) for each in counts]
        rows = [[name, picture, *row] for (name, *row), picture in zip(self.rows(), pictures, strict=True)]
        return table_html(self._title, [_COLUMNS[0], 'histogram', *_COLUMNS[1:]], rows)


def _cell(value: float) -> str:
    return f'{value:,}' if isinstance(value, int) else f'{value:.5g}'


def leaf_stats(
    arrays: Mapping[str, Any],
    infos: Sequence[LeafInfo],
    bins: int = 0,
    progress: Progress | None = None,
    sample_bytes: int | None = None,
) -> dict[str, LeafStats]:
    """Computes statistics of arrays, by name; reads each once, or twice with ``bins``.

    Args:
      arrays: such as a view.
      infos: of those that are read.
      bins: of a histogram between the smallest and the largest finite value of each leaf; 0 for no histogram.
      progress: called with (bytes read, bytes in all).
      sample_bytes: about how many bytes to read instead of all, see ``blocks_in``. The statistics describe the sample.
    """
    if bins < 0:
        raise ValueError(f'bins must be 0 or more, got {bins}.')
    infos = [info for info in infos if info.dtype]
    meter = Meter(progress, bytes_in(infos, sample_bytes) * (2 if bins else 1))

    def values_of(block: Block) -> np.ndarray:
        return np.asarray(arrays[block.leaf.name][block.index])

    def moments(block: Block) -> Moments:
        return functools.reduce(Moments.merged, map(moments_of_piece, pieces_of(values_of(block))), Moments())

    def counts(block: Block) -> np.ndarray:
        return _count(values_of(block), edges[block.leaf.name])

    found = sums_by_leaf(infos, moments, Moments.merged, meter, sample_bytes)
    stats = {info.name: found.get(info.name, Moments()).finished() for info in infos}
    if not bins:
        return stats
    edges = {name: _edges(leaf, bins) for name, leaf in stats.items()}
    counted = sums_by_leaf(infos, counts, operator.add, meter, sample_bytes)
    return {
        name: dataclasses.replace(leaf, counts=counted.get(name, np.zeros(bins, np.int64)), edges=edges[name])
        for name, leaf in stats.items()
    }


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
