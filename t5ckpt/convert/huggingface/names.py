"""Maps the arrays of a T5 in T5X to the tensors in Hugging Face, with their axes.

Works on names and shapes, without files and values. The table below denotes axes by letters, so that ``d hk`` and ``hk d`` are
transposes of each other:

    v vocabulary   d model   f feed-forward   h heads   k of a head   b buckets   e experts   l layers

``hk`` is one merged axis; T5X may also have ``h k`` as two axes (split heads). A scanned T5X model has one array for all layers
of a tower, with ``l`` at axis 1, and experts are stacked at axis 0. Hugging Face has a tensor for each layer and expert.

T5X's names are those of its networks (t5x/examples/t5, scalable_t5) and of Flaxformer's (LongT5, Switch). Hugging Face's names
are those of transformers (models/t5, umt5, longt5, switch_transformers).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LAYOUT_KEY = 't5ckpt'
"""The key in a file's metadata that describes T5X's layout of the arrays, for a later import."""
PREFIXES = ('target/', 'params/', 'target/params/', 'params/params/', '')
"""The prefixes of all leaves of a model that a layout may have."""
EMBEDDERS = ('token_embedder', 'encoder/token_embedder')
"""The scopes of the token embedding that a layout may have."""
SELF, LOCAL, TRANSIENT_GLOBAL = 'SelfAttention', 'LocalSelfAttention', 'TransientGlobalSelfAttention'


@dataclasses.dataclass(frozen=True)
class T5Model:
    """The architecture of a T5, as far as names and shapes determine it.

    Attributes:
      sizes: by letter, except ``l``; ``e`` only in a model with experts.
      layers: the numbers of layers of 'encoder' and 'decoder'; 0 without a decoder.
      gated: wi_0 and wi_1 instead of wi.
      tied: the logits are computed with the embedding, scaled by d**-0.5, and not with a separate matrix.
      relpos_per_layer: one table of position biases per layer, as in UMT5, instead of one per tower.
      attention: the class of the encoder's attention: SELF, LOCAL or TRANSIENT_GLOBAL.
      sparse: (tower, layer) of the layers with experts.
    """

    sizes: Mapping[str, int]
    layers: Mapping[str, int]
    gated: bool = False
    tied: bool = True
    relpos_per_layer: bool = False
    attention: str = SELF
    sparse: frozenset[tuple[str, int]] = frozenset()


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of the arrays in T5X, which the tensors do not determine.

    Attributes:
      prefix: of all leaves: 'target/' in T5X.
      scanned: one array for all layers of a tower.
      split_heads: heads have a separate axis.
      embedder: the scope of the token embedding, which is inside the encoder in some models without a decoder.
    """

    prefix: str = 'target/'
    scanned: bool = False
    split_heads: bool = False
    embedder: str = 'token_embedder'


@dataclasses.dataclass(frozen=True)
class Pair:
    """One T5X array and the tensors that hold its values.

    Attributes:
      leaf: the name in T5X.
      axes: of the array, each of one letter or of two merged ones.
      tensors: the names in Hugging Face: one, or one for each index of ``stack``.
      tensor_axes: of each tensor.
      stack: the letter of the axis along which the tensors are stacked in the array, or ''.
      sizes: by letter.
    """

    leaf: str
    axes: tuple[str, ...]
    tensors: tuple[str, ...]
    tensor_axes: tuple[str, ...]
    stack: str
    sizes: Mapping[str, int]

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.shape_of(self.axes)

    @functools.cached_property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each tensor."""
        return self.shape_of(self.tensor_axes)

    @functools.cached_property
    def row_axis(self) -> int:
        """The array's axis that corresponds to the tensors' first axis, so that a slice of it is a range of their rows."""
        return next(i for i, axis in enumerate(self.axes) if axis[0] == self.tensor_axes[0][0])

    @property
    def rows_per_index(self) -> int:
        """The rows of a tensor for one index of ``row_axis``: more than one with split heads."""
        return self.tensor_shape[0] // self.shape[self.row_axis]

    def to_tensors(self, array: np.ndarray) -> list[np.ndarray]:
        """The rows of each tensor, from the array or a slice of it along ``row_axis``; views where possible."""
        parts = [array] if not self.stack else list(np.moveaxis(array, self.axes.index(self.stack), 0))
        return [part.transpose(self._order).reshape(-1, *self.tensor_shape[1:]) for part in parts]

    def from_tensors(self, tensors: Sequence[Any], box: tuple[slice, ...]) -> np.ndarray:
        """A box of the array, from all tensors; only the rows and columns of the tensors that it needs are read."""
        if not self.stack:
            return self._from_tensor(tensors[0], box)
        axis = self.axes.index(self.stack)
        rest = (*box[:axis], *box[axis + 1 :])
        return np.stack([self._from_tensor(tensor, rest) for tensor in tensors[box[axis]]], axis)

    def shape_of(self, axes: Sequence[str]) -> tuple[int, ...]:
        """The sizes of axes."""
        return tuple(math.prod(self.sizes[letter] for letter in axis) for axis in axes)

    @functools.cached_property
    def _array_axes(self) -> list[str]:
        """The axes of the array without ``stack``."""
        return [axis for axis in self.axes if axis != self.stack]

    @functools.cached_property
    def _split_axes(self) -> list[list[str]]:
        """For each axis of a tensor, the axes of the array that it merges."""
        return [[axis] if axis in self._array_axes else list(axis) for axis in self.tensor_axes]

    @functools.cached_property
    def _order(self) -> list[int]:
        """The permutation from the axes of the array, without ``stack``, to those of a tensor, split as in the array."""
        return [self._array_axes.index(axis) for axes in self._split_axes for axis in axes]

    def _from_tensor(self, tensor: Any, box: tuple[slice, ...]) -> np.ndarray:
        """A box of the array without ``stack``, from one tensor."""
        cut = dict(zip(self._array_axes, box, strict=True))
        index: list[slice] = []
        shape: list[int] = []
        for first, *inner in self._split_axes:
            start, stop, _ = cut[first].indices(self.shape_of([first])[0])
            width = math.prod(self.shape_of(inner))
            index.append(slice(start * width, stop * width))
            shape += [stop - start, *self.shape_of(inner)]
            cut[first] = slice(None)
        values = np.asarray(tensor[tuple(index)]).reshape(shape).transpose(np.argsort(self._order))
        return values[tuple(cut[axis] for axis in self._array_axes)]


# --- the table -------------------------------------------------------------------------------------------------------

_VECTOR = ('d', 'd')
_BIAS = ('h b', 'b h')


@dataclasses.dataclass(frozen=True)
class _Row:
    """A row of the table: the names relative to a layer or to the root, and the axes in T5X and in Hugging Face."""

    leaf: str
    tensor: str
    axes: tuple[str, str]
    stack: str = ''


def _attention_rows(leaf: str, tensor: str) -> list[_Row]:
    inward = [_Row(f'{leaf}/{a}/kernel', f'{tensor}.{b}.weight', ('d hk', 'hk d')) for a, b in _INWARD]
    return [*inward, _Row(f'{leaf}/out/kernel', f'{tensor}.o.weight', ('hk d', 'd hk'))]


_INWARD = (('query', 'q'), ('key', 'k'), ('value', 'v'))


def _feed_forward_rows(model: T5Model, number: int, sparse: bool) -> list[_Row]:
    """The rows of a feed-forward layer. In Hugging Face's Switch, dense layers are ``mlp`` instead of ``DenseReluDense``."""
    inner = f'layer.{number}.' + ('mlp' if model.sparse else 'DenseReluDense')
    names = ('wi_0', 'wi_1') if model.gated else ('wi',)
    if not sparse:
        rows = [_Row(f'mlp/{name}/kernel', f'{inner}.{name}.weight', ('d f', 'f d')) for name in names]
        return [*rows, _Row('mlp/wo/kernel', f'{inner}.wo.weight', ('f d', 'd f'))]
    expert = f'{inner}.experts.expert_{{e}}'
    rows = [_Row(f'mlp/expert/{name}/kernel', f'{expert}.{name}.weight', ('e d f', 'f d'), 'e') for name in names]
    return [
        *rows,
        _Row('mlp/expert/wo/kernel', f'{expert}.wo.weight', ('e f d', 'd f'), 'e'),
        _Row('mlp/router/router_weights/w/kernel', f'{inner}.router.classifier.weight', ('d e', 'e d')),
    ]


def _layer_rows(model: T5Model, tower: str, sparse: bool) -> list[_Row]:
    attention = model.attention if tower == 'encoder' else SELF
    name, last = ('attention', 1) if tower == 'encoder' else ('self_attention', 2)
    rows = [_Row(f'pre_{name}_layer_norm/scale', 'layer.0.layer_norm.weight', _VECTOR)]
    rows += _attention_rows(name, f'layer.0.{attention}')
    if model.relpos_per_layer:
        rows.append(_Row('relpos_bias/rel_embedding', f'layer.0.{attention}.relative_attention_bias.weight', _BIAS))
    if attention == TRANSIENT_GLOBAL:
        rows.append(_Row(f'{name}/T5LayerNorm_0/scale', f'layer.0.{attention}.global_input_layer_norm.weight', _VECTOR))
    if tower == 'decoder':
        rows.append(_Row('pre_cross_attention_layer_norm/scale', 'layer.1.layer_norm.weight', _VECTOR))
        rows += _attention_rows('encoder_decoder_attention', 'layer.1.EncDecAttention')
    rows.append(_Row('pre_mlp_layer_norm/scale', f'layer.{last}.layer_norm.weight', _VECTOR))
    return rows + _feed_forward_rows(model, last, sparse)


def _tower_rows(model: T5Model, tower: str) -> list[_Row]:
    """The rows that a tower has once."""
    attention = model.attention if tower == 'encoder' else SELF
    first = f'{tower}.block.0.layer.0.{attention}'
    rows = [_Row(f'{tower}/{tower}_norm/scale', f'{tower}.final_layer_norm.weight', _VECTOR)]
    if not model.relpos_per_layer:
        rows.append(_Row(f'{tower}/relpos_bias/rel_embedding', f'{first}.relative_attention_bias.weight', _BIAS))
    if attention == TRANSIENT_GLOBAL:
        rows.append(
            _Row(f'{tower}/side_relpos_bias/rel_embedding', f'{first}.global_relative_attention_bias.weight', _BIAS)
        )
    return rows


def pairs_of(model: T5Model, layout: Layout) -> list[Pair]:
    """All arrays of a model with their tensors; each array and each tensor occurs once."""
    rows = [_Row(f'{layout.embedder}/embedding', 'shared.weight', ('v d', 'v d'))]
    if not model.tied:
        rows.append(_Row('decoder/logits_dense/kernel', 'lm_head.weight', ('d v', 'v d')))
    pairs = [_pair(row, layout, model.sizes) for row in rows]
    for tower, count in model.layers.items():
        if count == 0:
            continue
        pairs += [_pair(row, layout, model.sizes) for row in _tower_rows(model, tower)]
        if layout.scanned:
            sizes = {**model.sizes, 'l': count}
            pairs += [_scanned(row, tower, layout, sizes) for row in _layer_rows(model, tower, sparse=False)]
            continue
        for i in range(count):
            for row in _layer_rows(model, tower, (tower, i) in model.sparse):
                below = dataclasses.replace(
                    row, leaf=f'{tower}/layers_{i}/{row.leaf}', tensor=f'{tower}.block.{i}.{row.tensor}'
                )
                pairs.append(_pair(below, layout, model.sizes))
    return pairs


def _pair(row: _Row, layout: Layout, sizes: Mapping[str, int]) -> Pair:
    names = [row.tensor.format(e=e) for e in range(sizes['e'])] if row.stack else [row.tensor]
    return Pair(
        layout.prefix + row.leaf, _axes(row, layout), tuple(names), tuple(row.axes[1].split()), row.stack, sizes
    )


def _scanned(row: _Row, tower: str, layout: Layout, sizes: Mapping[str, int]) -> Pair:
    first, *rest = _axes(row, layout)
    names = tuple(f'{tower}.block.{i}.{row.tensor}' for i in range(sizes['l']))
    leaf = f'{layout.prefix}{tower}/{tower}/{row.leaf}'
    return Pair(leaf, (first, 'l', *rest), names, tuple(row.axes[1].split()), 'l', sizes)


def _axes(row: _Row, layout: Layout) -> tuple[str, ...]:
    text = row.axes[0].replace('hk', 'h k') if layout.split_heads else row.axes[0]
    return tuple(text.split())
