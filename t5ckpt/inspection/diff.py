"""Compares two checkpoints: leaves, shapes, dtypes, and values.

Values are compared block by block in float64, with bounded memory. The checkpoints may have different formats, such as T5X and
Orbax. Arrays of the same bits are equal, also with NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from t5ckpt.core.arguments import check_word
from t5ckpt.core.leaf_path import leaf_name, path_of
from t5ckpt.core.protocols import Progress
from t5ckpt.core.text import counted
from t5ckpt.inspection.block_iteration import Block, bytes_in, pieces_of, sums_by_leaf
from t5ckpt.inspection.layers import layers_of
from t5ckpt.inspection.leaf_tree import LeafInfo
from t5ckpt.inspection.stats import Moments, moments_of_piece
from t5ckpt.inspection.tables import pandas, table_html, table_text
from t5ckpt.inspection.view import CheckpointView, open_checkpoint
from t5ckpt.progress import Meter

_COLUMNS = ('name', 'what', 'a', 'b', 'relative', 'largest')
_WAYS = ('added', 'removed', 'shape', 'dtype', 'kind', 'values')


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


@dataclasses.dataclass(frozen=True, repr=False)
class CheckpointDiff:
    """The differences between two checkpoints.

    Attributes:
      a, b: the paths.
      leaves: the leaves that differ, in the order of the leaves.
      same: the number of leaves that are equal bit by bit.
    """

    a: str
    b: str
    leaves: tuple[LeafDiff, ...]
    same: int

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
        by_layer: dict[str, list[LeafDiff]] = {}
        for leaf in _compared(self.leaves):
            by_layer.setdefault(self.layers[leaf.name][0], []).append(leaf)
        return [_summed(name, leaves) for name, leaves in by_layer.items()]

    @functools.cached_property
    def layers(self) -> dict[str, tuple[str, str]]:
        """The layer and the parameter in it of each of ``leaves``, by its name."""
        return {leaf_name(path): found for path, found in layers_of(path_of(leaf.name) for leaf in self.leaves).items()}

    def to_pandas(self) -> Any:
        """A DataFrame with a row for each leaf that differs."""
        return pandas().DataFrame([dataclasses.asdict(leaf) for leaf in self.leaves], columns=[*_COLUMNS])

    def rows(self) -> list[list[str]]:
        """The table's cells as text, in the order of ``columns``; an equal dtype and shape are not repeated."""
        return [
            [leaf.name, leaf.what, leaf.a, 'same' if leaf.a == leaf.b else leaf.b]
            + ['' if math.isnan(value) else f'{value:.4g}' for value in (leaf.relative, leaf.largest)]
            for leaf in self.leaves
        ]

    columns = _COLUMNS

    @property
    def title(self) -> str:
        """The paths and the counts, in one line."""
        return f'{self.a} -> {self.b}: {counted(len(self.leaves), "leaf differs", "leaves differ")}, {self.same:,} the same'

    def __repr__(self) -> str:
        return table_text(self.title, _COLUMNS, self.rows(), 4, '.top(), .to_pandas()')

    def _repr_html_(self) -> str:
        return table_html(self.title, _COLUMNS, self.rows())


def _compared(leaves: Sequence[LeafDiff]) -> list[LeafDiff]:
    return [leaf for leaf in leaves if leaf.what in ('values', 'dtype')]


def _summed(name: str, leaves: Sequence[LeafDiff]) -> LeafDiff:
    """The sum over the leaves of a layer."""
    delta, norm = math.hypot(*(leaf.delta for leaf in leaves)), math.hypot(*(leaf.norm for leaf in leaves))
    # max() would ignore a NaN.
    largest, size = float(np.max([leaf.largest for leaf in leaves])), sum(leaf.size for leaf in leaves)
    text = counted(len(leaves), 'leaf', 'leaves')
    return LeafDiff(name or '(top)', 'layer', text, '', _relative(delta, norm), largest, size, delta, norm)


def _relative(delta: float, norm: float) -> float:
    return 0.0 if delta == 0 else delta / norm if norm else math.inf


class _Change(NamedTuple):
    """Of a block of a leaf: whether all bits are equal, the moments of a, and those of abs(b - a)."""

    same: bool = True
    a: Moments = Moments()
    delta: Moments = Moments()

    def merged(self, other: _Change) -> _Change:
        return _Change(self.same and other.same, self.a.merged(other.a), self.delta.merged(other.delta))

    def on(self, leaf: LeafDiff) -> LeafDiff:
        """A difference with its values."""
        moved, norm = self.delta.finished(), self.a.finished().norm
        largest = math.nan if moved.nan else math.inf if moved.inf else max(0.0, self.delta.max)
        delta = moved.norm if math.isfinite(largest) else largest
        values = {'relative': _relative(delta, norm), 'largest': largest, 'delta': delta, 'norm': norm}
        return dataclasses.replace(leaf, size=self.a.size, **values)


def diff(
    a: str | os.PathLike[str] | CheckpointView,
    b: str | os.PathLike[str] | CheckpointView,
    *,
    values: bool = True,
    sample_bytes: int | None = None,
    progress: Progress | None = None,
) -> CheckpointDiff:
    """Compares two checkpoints, leaf by leaf.

    Args:
      a: the first checkpoint: a path as for ``open_checkpoint``, or a view, which may be a part of a checkpoint.
      b: the second one, in the same or another format.
      values: False compares only names, shapes and dtypes, and reads no array.
      sample_bytes: about how many bytes of each side to compare, spread evenly over the leaves; None compares all of them.
      progress: called with (bytes compared, bytes to compare).

    Raises:
      CheckpointNotFoundError, FormatError: see ``open_checkpoint``.
    """
    first, second = (view if isinstance(view, CheckpointView) else open_checkpoint(view) for view in (a, b))
    before, after = ({info.name: info for info in view.infos()} for view in (first, second))
    found = {name: _compare_facts(name, before.get(name), after.get(name)) for name in {**before, **after}}
    arrays = [before[name] for name, leaf in found.items() if leaf is None or leaf.what == 'dtype'] if values else []
    arrays = [info for info in arrays if info.dtype]
    meter = Meter(progress, bytes_in(arrays, sample_bytes))
    with first.in_one() as one, second.in_one() as other:

        def change_of(block: Block) -> _Change:
            a, b = (np.asarray(view[block.leaf.name][block.index]) for view in (one, other))
            return functools.reduce(_Change.merged, map(_change_of_piece, pieces_of(a), pieces_of(b)), _Change())

        changes = sums_by_leaf(arrays, change_of, _Change.merged, meter, sample_bytes)
    differing: list[LeafDiff] = []
    for name, by_facts in found.items():
        change = changes.get(name, _Change())
        if by_facts is None and change.same:
            continue
        leaf = by_facts or LeafDiff(name, 'values', _text(before[name]), _text(after[name]))
        differing.append(change.on(leaf) if name in changes else leaf)
    return CheckpointDiff(first.path, second.path, tuple(differing), len(found) - len(differing))


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


def _change_of_piece(a: np.ndarray, b: np.ndarray) -> _Change:
    if a.dtype == b.dtype and a.tobytes() == b.tobytes():
        return _Change(True, moments_of_piece(a))
    wide, other = _wide(a), _wide(b)
    with np.errstate(invalid='ignore', over='ignore'):
        delta = np.abs(other - wide)
    # NaN on both sides, or the same infinity, counts as equal.
    delta[(np.isnan(wide) & np.isnan(other)) | (wide == other)] = 0.0
    return _Change(False, moments_of_piece(wide), moments_of_piece(delta))


def _wide(block: np.ndarray) -> np.ndarray:
    return block.astype(np.complex128 if block.dtype.kind == 'c' else np.float64)
