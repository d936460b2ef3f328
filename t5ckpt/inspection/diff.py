"""Compares two checkpoints: leaves, shapes, dtypes, and values.

Values are compared block by block in float64, with bounded memory. The checkpoints may have different formats, such as T5X and
Orbax. Arrays of the same bits are equal, also with NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from t5ckpt.core.arguments import check_word
from t5ckpt.core.leaf_path import Path, leaf_name, path_of
from t5ckpt.core.protocols import Progress
from t5ckpt.core.text import aligned, counted, printable
from t5ckpt.inspection.block_iteration import Block, blocks_in, bytes_in, pieces_of, reduce_blocks, sum_of_squares
from t5ckpt.inspection.dataframes import pandas
from t5ckpt.inspection.layers import Stack, layers_of, stacks_of
from t5ckpt.inspection.leaf_tree import LeafInfo
from t5ckpt.inspection.notebook_html import table_html
from t5ckpt.inspection.view import CheckpointView, open_checkpoint
from t5ckpt.plots import plot_layers
from t5ckpt.progress import Meter

_COLUMNS = ('name', 'what', 'a', 'b', 'relative', 'largest')
_WAYS = ('added', 'removed', 'shape', 'dtype', 'kind', 'values')
_SHOWN = 60


@dataclasses.dataclass(frozen=True)
class LeafDiff:
    """A leaf that differs.

    Attributes:
      name: of the leaf.
      what: ``'added'`` (only in b), ``'removed'`` (only in a), ``'shape'``, ``'dtype'`` (the values are compared, too),
        ``'kind'`` (an array on one side only, or another text) or ``'values'``.
      a, b: dtype and shape on each side, or ''.
      relative: ||b - a|| / ||a||, with Euclidean norms, of a over its finite values; infinite if a is all zeros; NaN if
        the values were not compared, or a value is NaN on one side only.
      largest: the largest |b - a|.
      size: the number of values; 0 if they were not compared.
      delta: ||b - a||.
      norm: ||a||, over finite values.
    """

    name: str
    what: str
    a: str = ''
    b: str = ''
    relative: float = math.nan
    largest: float = math.nan
    size: int = 0
    delta: float = math.nan
    norm: float = math.nan

    @property
    def weight(self) -> float:
        """``relative``, at most 1, times ``size``: small for counters and for biases, which begin at zero. NaN is infinite."""
        return math.inf if math.isnan(self.relative) else min(self.relative, 1.0) * self.size


@dataclasses.dataclass(frozen=True)
class CheckpointDiff:
    """The differences between two checkpoints.

    Attributes:
      a, b: the paths.
      leaves: the leaves that differ, in the order of the leaves.
      same: the number of leaves that are equal bit by bit.
      parts: ``leaves``; of an array that holds several layers, the parts that differ, with names such as ``layers[3]/kernel``.
    """

    a: str
    b: str
    leaves: tuple[LeafDiff, ...]
    same: int
    parts: tuple[LeafDiff, ...]

    def __bool__(self) -> bool:
        """Whether any leaf differs."""
        return bool(self.leaves)

    def only(self, what: str) -> list[LeafDiff]:
        """The leaves that differ in one way: 'added', 'removed', 'shape', 'dtype', 'kind' or 'values'.

        Raises:
          ValueError: any other word.
        """
        check_word('what', what, _WAYS)
        return [leaf for leaf in self.leaves if leaf.what == what]

    def top(self, count: int = 10) -> list[LeafDiff]:
        """The ``count`` leaves whose values moved most, by ``weight``; leaves with NaN on one side come first."""
        return sorted(_compared(self.leaves), key=lambda leaf: -leaf.weight)[:count]

    def by_layer(self) -> list[LeafDiff]:
        """The sum over the leaves of each layer whose values differ; ``what`` is 'layer', and ``a`` counts the leaves."""
        layers = layers_of(path_of(leaf.name) for leaf in self.parts)
        by_layer: dict[str, list[LeafDiff]] = {}
        for leaf in _compared(self.parts):
            by_layer.setdefault(layers[path_of(leaf.name)][0], []).append(leaf)
        return [_summed(name, leaves) for name, leaves in by_layer.items()]

    def to_pandas(self) -> Any:
        """A DataFrame with a row for each leaf that differs."""
        return pandas().DataFrame([dataclasses.asdict(leaf) for leaf in self.leaves], columns=[*_COLUMNS])

    def plot(self, ax: Any = None) -> Any:
        """Plots ``relative`` of all arrays as a heat map of layers and parameters; returns the matplotlib axes."""
        layers = layers_of(path_of(leaf.name) for leaf in self.parts)
        # The relative change of a counter would determine the colors.
        arrays = [leaf for leaf in self.parts if leaf.size > 1] or self.parts
        values = {layers[path_of(leaf.name)]: leaf.relative for leaf in arrays}
        return plot_layers(values, 'norm of b - a over the norm of a', ax)

    def rows(self) -> list[list[str]]:
        """The table's cells as text, in the order of ``columns``; an equal dtype and shape are not repeated."""
        return [
            [
                leaf.name,
                leaf.what,
                leaf.a,
                'same' if leaf.a == leaf.b else leaf.b,
                _number(leaf.relative),
                _number(leaf.largest),
            ]
            for leaf in self.leaves
        ]

    columns = _COLUMNS

    @property
    def title(self) -> str:
        """The paths and the counts, in one line."""
        return f'{self.a} -> {self.b}: {counted(len(self.leaves), "leaf differs", "leaves differ")}, {self.same:,} the same'

    def __repr__(self) -> str:
        rows = self.rows()
        lines = [printable(self.title)]
        if rows:
            lines += aligned([_COLUMNS, *rows[:_SHOWN]], (False, False, False, False, True, True))
        if len(rows) > _SHOWN:
            lines.append(f'... and {len(rows) - _SHOWN:,} more: .top(), .to_pandas()')
        return '\n'.join(lines)

    def _repr_html_(self) -> str:
        return table_html(self.title, _COLUMNS, self.rows())


def _compared(leaves: tuple[LeafDiff, ...]) -> list[LeafDiff]:
    return [leaf for leaf in leaves if leaf.what in ('values', 'dtype')]


def _summed(name: str, leaves: list[LeafDiff]) -> LeafDiff:
    sums = _Sums(
        squared_a=sum(leaf.norm**2 for leaf in leaves),
        squared_delta=sum(leaf.delta**2 for leaf in leaves),
        largest=float(np.max([leaf.largest for leaf in leaves])),
    )
    size = sum(leaf.size for leaf in leaves)
    return _with_values(LeafDiff(name or '(top)', 'layer', counted(len(leaves), 'leaf', 'leaves')), sums, size)


def _with_values(leaf: LeafDiff, sums: _Sums, size: int) -> LeafDiff:
    delta, norm = math.sqrt(sums.squared_delta), math.sqrt(sums.squared_a)
    return dataclasses.replace(leaf, relative=sums.relative, largest=sums.largest, size=size, delta=delta, norm=norm)


def _number(value: float) -> str:
    return '' if math.isnan(value) else f'{value:.4g}'


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Sums over blocks of one leaf."""

    same: bool = True
    squared_a: float = 0.0
    squared_delta: float = 0.0
    largest: float = 0.0
    size: int = 0

    def merged(self, other: _Sums) -> _Sums:
        return _Sums(
            self.same and other.same,
            self.squared_a + other.squared_a,
            self.squared_delta + other.squared_delta,
            # max() would ignore a NaN in its second argument.
            float(np.maximum(self.largest, other.largest)),
            self.size + other.size,
        )

    @property
    def relative(self) -> float:
        if self.squared_delta == 0.0:
            return 0.0
        return math.sqrt(self.squared_delta / self.squared_a) if self.squared_a else math.inf


def diff(
    a: str | os.PathLike[str] | CheckpointView,
    b: str | os.PathLike[str] | CheckpointView,
    *,
    values: bool = True,
    layers: str | None = None,
    progress: Progress | None = None,
) -> CheckpointDiff:
    """Compares two checkpoints, leaf by leaf.

    Args:
      a: the first checkpoint: a path as for ``open_checkpoint``, or a view, which may be a part of a checkpoint.
      b: the second one, in the same or another format.
      values: False compares only names, shapes and dtypes, and reads no array.
      layers: which arrays hold several layers, stacked along an axis: ``'axis 0 of params/layers/**'``, with a glob. ``by_layer``
        and ``plot`` divide them. None divides the arrays below Haliax's ``stacked``, and those of flax's scan where names
        and shapes leave no doubt.
      progress: called with (bytes compared, bytes to compare).

    Raises:
      ValueError: ``layers`` matches no array that has this axis, or no values are compared.
    """
    if layers is not None and not values:
        raise ValueError('layers: values=False compares no values, which layers would divide. Leave one of them out.')
    first = a if isinstance(a, CheckpointView) else open_checkpoint(a)
    second = b if isinstance(b, CheckpointView) else open_checkpoint(b)
    stacks = stacks_of([*first.infos(), *second.infos()], layers)
    return compare(first, second, stacks, values=values, progress=progress)


def compare(
    first: CheckpointView,
    second: CheckpointView,
    stacks: Mapping[Path, Stack],
    *,
    values: bool = True,
    progress: Progress | None = None,
    sample_bytes: int | None = None,
) -> CheckpointDiff:
    """Compares two views, with ``stacks`` of both; with ``sample_bytes`` a sample of the values, see ``blocks_in``."""
    first_infos = {info.name: info for info in first.infos()}
    second_infos = {info.name: info for info in second.infos()}
    names = [*first_infos, *(name for name in second_infos if name not in first_infos)]
    by_facts = {name: _compare_facts(name, first_infos.get(name), second_infos.get(name)) for name in names}
    open_ones = [
        first_infos[name] for name, difference in by_facts.items() if difference is None or difference.what == 'dtype'
    ]
    sums: dict[str, dict[str, _Sums]] = {}
    if values:
        with first.in_one() as one, second.in_one() as other:
            arrays = [info for info in open_ones if info.dtype]
            sums = _compare_values(one, other, arrays, stacks, progress, sample_bytes)
    differences = [
        _conclude(name, by_facts[name], sums.get(name), first_infos.get(name), second_infos.get(name)) for name in names
    ]
    differing = tuple(leaf for leaf in differences if leaf is not None)
    parts = tuple(part for leaf in differing for part in _parts(leaf, sums.get(leaf.name, {})))
    return CheckpointDiff(first.path, second.path, differing, len(names) - len(differing), parts)


def _parts(leaf: LeafDiff, sums: Mapping[str, _Sums]) -> Iterator[LeafDiff]:
    if sums.keys() <= {leaf.name}:
        yield leaf
        return
    for name, each in sums.items():
        if not each.same:
            yield _with_values(dataclasses.replace(leaf, name=name), each, each.size)


def _text(info: LeafInfo | None) -> str:
    if info is None:
        return ''
    return f'{info.dtype} {info.shape}' if info.dtype else f'{info.kind} {info.value}'.strip()


def _compare_facts(name: str, a: LeafInfo | None, b: LeafInfo | None) -> LeafDiff | None:
    """The difference in kind, shape or dtype; None if these are equal."""
    made = functools.partial(LeafDiff, name, a=_text(a), b=_text(b))
    if a is None:
        return made(what='added')
    if b is None:
        return made(what='removed')
    if {a.kind, b.kind} == {'none', 'empty'}:
        # Neither has values. Orbax stores None in the place of an empty container.
        return None
    if bool(a.dtype) != bool(b.dtype) or (not a.dtype and (a.kind, a.value, a.text) != (b.kind, b.value, b.text)):
        return made(what='kind')
    if a.shape != b.shape:
        return made(what='shape')
    return made(what='dtype') if a.dtype != b.dtype else None


def _conclude(
    name: str, by_facts: LeafDiff | None, parts: dict[str, _Sums] | None, a: LeafInfo | None, b: LeafInfo | None
) -> LeafDiff | None:
    if parts is None:
        return by_facts
    sums = functools.reduce(_Sums.merged, parts.values(), _Sums())
    if by_facts is None and sums.same:
        return None
    what = 'values' if by_facts is None else by_facts.what
    size = 0 if a is None else a.size
    return _with_values(LeafDiff(name, what, _text(a), _text(b)), sums, size)


def _compare_values(
    a: CheckpointView,
    b: CheckpointView,
    infos: list[LeafInfo],
    stacks: Mapping[Path, Stack],
    progress: Progress | None,
    sample_bytes: int | None,
) -> dict[str, dict[str, _Sums]]:
    """The sums of each leaf by the names of its parts: of its layers, or its own."""
    sums: dict[str, dict[str, _Sums]] = {info.name: {} for info in infos}
    meter = Meter(progress, bytes_in(infos, sample_bytes))

    def sums_of(block: Block) -> dict[str, _Sums]:
        first, second = (np.asarray(view[block.leaf.name][block.index]) for view in (a, b))
        stack = stacks.get(block.leaf.path)
        if stack is None:
            return {block.leaf.name: _compare_arrays(first, second)}
        first, second = np.moveaxis(first, stack.axis, 0), np.moveaxis(second, stack.axis, 0)
        part = block.index[stack.axis]
        return {
            leaf_name(stack.path(block.leaf.path, index)): _compare_arrays(first[at, ...], second[at, ...])
            for at, index in enumerate(range(part.start, part.stop))
        }

    for block, parts in reduce_blocks(blocks_in(infos, sample_bytes), sums_of):
        known = sums[block.leaf.name]
        known |= {name: known.get(name, _Sums()).merged(part) for name, part in parts.items()}
        meter.add(block.nbytes)
    return sums


def _compare_arrays(a: np.ndarray, b: np.ndarray) -> _Sums:
    sums = map(_compare_piece, pieces_of(a), pieces_of(b))
    return functools.reduce(_Sums.merged, sums, _Sums(size=a.size))


def _compare_piece(a: np.ndarray, b: np.ndarray) -> _Sums:
    wide = _wide(a)
    if a.dtype == b.dtype and a.tobytes() == b.tobytes():
        return _Sums(True, _squared(wide))
    other = _wide(b)
    with np.errstate(invalid='ignore', over='ignore'):
        delta = np.abs(other - wide)
        # NaN on both sides, or the same infinity, counts as equal.
        delta[(np.isnan(wide) & np.isnan(other)) | (wide == other)] = 0.0
        return _Sums(False, _squared(wide), sum_of_squares(delta), float(delta.max(initial=0.0)))


def _wide(block: np.ndarray) -> np.ndarray:
    return block.astype(np.complex128 if block.dtype.kind == 'c' else np.float64)


def _squared(values: np.ndarray) -> float:
    finite = np.abs(values[np.isfinite(values)])
    return sum_of_squares(finite)
