"""Determines the architecture of a T5 from the names and shapes of its arrays or tensors.

A few names determine the candidate. Then the arrays of this model (``names.pairs_of``) are compared with all that exist, and one
error lists those that are missing, unexpected or of another shape.

Names and shapes do not determine everything: LongT5's local attention has T5's names in T5X, and the activation, the distance
of the last bucket and the capacity of experts are values of the model's configuration.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from t5ckpt.convert.huggingface.names import (
    EMBEDDERS,
    LOCAL,
    PREFIXES,
    SELF,
    TRANSIENT_GLOBAL,
    Layout,
    Pair,
    T5Model,
    pairs_of,
)
from t5ckpt.core.text import counted, lines, listed, some_of
from t5ckpt.errors import LeafProblem, TreeMismatchError, UnsupportedFormatError, near_names

Shapes = Mapping[str, tuple[int, ...]]

_TOWERS = ('encoder', 'decoder')
_SHOWN = 20
# More layers or experts than any model has; limits the work for hostile names and shapes.
_MAX_COUNT = 10_000


def model_of_leaves(shapes: Shapes, where: str, attention: str = '') -> tuple[T5Model, Layout]:
    """The model and its layout, from the arrays in T5X.

    Args:
      shapes: of all leaves of the checkpoint; those outside the parameters are ignored.
      where: the checkpoint, for errors.
      attention: of the encoder, if the caller knows it, because LOCAL has the same names as SELF.

    Raises:
      UnsupportedFormatError: Hugging Face has no class for the model; with the names that do not match.
      TreeMismatchError: with every difference between the model's arrays and the leaves of its scope.
    """
    prefix = next((p for p in PREFIXES if any(name.startswith(f'{p}encoder/') for name in shapes)), None)
    if prefix is None:
        raise UnsupportedFormatError(
            'not a T5: no leaf is named target/encoder/... or params/encoder/..., and Hugging Face has no class for a decoder '
            f'without an encoder; the leaves are {_few(shapes)}. `t5ckpt convert to-safetensors` writes any tree under its '
            'own names.'
        )
    inner = {name[len(prefix) :]: shape for name, shape in shapes.items() if name.startswith(prefix)}
    scanned = any(name.startswith('encoder/encoder/') for name in inner)
    queries = [len(shape) for name, shape in inner.items() if re.fullmatch(r'encoder/\w+/attention/query/kernel', name)]
    embedder = next((name for name in EMBEDDERS if f'{name}/embedding' in inner), EMBEDDERS[0])
    layout = Layout(prefix, scanned, queries[:1] == [3 + scanned], embedder)
    special = TRANSIENT_GLOBAL if any('/T5LayerNorm_0/' in name for name in inner) else SELF
    model = T5Model(
        {},
        {tower: _leaf_layers(inner, tower, scanned) for tower in _TOWERS},
        gated=any('/wi_0/' in name for name in inner),
        tied='decoder/logits_dense/kernel' not in inner,
        relpos_per_layer=any(re.fullmatch(r'\w+/\w+/relpos_bias/rel_embedding', name) for name in inner),
        attention=attention or special,
        sparse=_sparse(inner, r'(\w+)/layers_(\d+)/mlp/router/.*'),
    )
    own = {name: shape for name, shape in shapes.items() if name.startswith(prefix)}
    return _fitted(model, layout, own, where, lambda pair: ((pair.leaf,), pair.axes)), layout


def _leaf_layers(inner: Shapes, tower: str, scanned: bool) -> int:
    if not scanned:
        return _count(inner, rf'{tower}/layers_(\d+)/.*')
    norms = [shape for name, shape in inner.items() if re.fullmatch(rf'{tower}/{tower}/pre_mlp_layer_norm/scale', name)]
    return _bounded(max((size for shape in norms for size in shape[1:2]), default=0), 'layers')


def model_of_tensors(shapes: Shapes, where: str, model_type: str) -> T5Model:
    """The model, from the tensors in Hugging Face.

    Args:
      shapes: of all tensors.
      where: the model, for errors.
      model_type: in the configuration; UMT5 with one layer has the same names as T5.

    Raises:
      UnsupportedFormatError: it is not a T5 with an encoder.
      TreeMismatchError: with every difference between the model's tensors and the existing ones.
    """
    first = r'encoder\.block\.0\.layer\.0\.(\w+)\.q\.weight'
    attention = next((m[1] for name in shapes if (m := re.fullmatch(first, name))), SELF)
    if attention not in (SELF, LOCAL, TRANSIENT_GLOBAL):
        raise UnsupportedFormatError(f'the encoder has the attention {attention}, which no T5 in T5X has.')
    model = T5Model(
        {},
        {tower: _count(shapes, rf'{tower}\.block\.(\d+)\..*') for tower in _TOWERS},
        gated=any('.wi_0.' in name for name in shapes),
        tied='lm_head.weight' not in shapes,
        relpos_per_layer=model_type == 'umt5',
        attention=attention,
        sparse=_sparse(shapes, r'(\w+)\.block\.(\d+)\..*\.router\.classifier\.weight'),
    )
    return _fitted(model, Layout(), shapes, where, lambda pair: (pair.tensors, pair.tensor_axes))


def _fitted(
    model: T5Model,
    layout: Layout,
    shapes: Shapes,
    where: str,
    side: Callable[[Pair], tuple[Sequence[str], Sequence[str]]],
) -> T5Model:
    """The model with the sizes of its axes, each from the first array that has it; ``side`` gives a pair's names and axes.

    Raises:
      UnsupportedFormatError: no array has one of the sizes.
      TreeMismatchError: with every difference between the model's arrays and the existing ones.
    """
    # Of the experts, the first one names a tensor; an encoder has at least one layer.
    layers = {**model.layers, 'encoder': max(1, model.layers['encoder'])}
    places = list(map(side, pairs_of(dataclasses.replace(model, sizes={'e': 1}, layers=layers), layout)))
    sizes: dict[str, int] = {}
    for names, axes in places:
        if len(shape := shapes.get(names[0], ())) == len(axes):
            sizes = dict(zip(axes, shape, strict=True)) | sizes
    if {'hk', 'h'} <= sizes.keys():
        sizes['k'] = sizes['hk'] // max(1, sizes['h'])
    letters = 'vdfhkb' + ('e' if model.sparse else '')
    for names, axes in places:
        if {*letters} & {*''.join(axes)} - sizes.keys():
            raise UnsupportedFormatError(
                f'not a T5: no array is named {names[0]}, with {len(axes)} dimensions. The arrays are {_few(shapes)}.'
            )
    _bounded(sizes.get('e', 0), 'experts')
    fitted = dataclasses.replace(model, sizes={letter: sizes[letter] for letter in letters})
    pairs = [(pair, *side(pair)) for pair in pairs_of(fitted, layout)]
    _check({name: pair.shape_of(axes) for pair, names, axes in pairs for name in names}, shapes, where)
    return fitted


def _check(expected: Shapes, existing: Shapes, where: str) -> None:
    problems: list[LeafProblem] = []
    for name, shape in expected.items():
        if name not in existing:
            near = near_names(name, existing) if len(problems) < _SHOWN else []
            problems.append(LeafProblem(name, 'missing', '', str(shape), f'Near: {", ".join(near)}.' if near else ''))
        elif existing[name] != shape:
            problems.append(LeafProblem(name, 'shape', str(existing[name]), str(shape)))
    problems += [LeafProblem(name, 'unexpected', str(existing[name]), '') for name in existing if name not in expected]
    if not problems:
        return
    shown = [f'{where} differs from the T5 that its names suggest in {counted(len(problems), "place")}:']
    shown += listed(problems, ', all of them in .problems')
    shown.append(
        '`t5ckpt convert to-safetensors` and `t5ckpt convert safetensors` convert any tree under its own names.'
    )
    raise TreeMismatchError(lines(*shown), problems)


def _count(names: Iterable[str], pattern: str) -> int:
    """One more than the largest number in the pattern's group; 0 if no name matches."""
    numbers = (int(m[1][:9]) + 1 for name in names if (m := re.fullmatch(pattern, name)))
    return _bounded(max(numbers, default=0), 'layers')


def _bounded(count: int, what: str) -> int:
    if count > _MAX_COUNT:
        raise UnsupportedFormatError(f'{count} {what}: more than any T5 has.')
    return count


def _sparse(names: Iterable[str], pattern: str) -> frozenset[tuple[str, int]]:
    return frozenset((m[1], int(m[2])) for name in names if (m := re.fullmatch(pattern, name)))


def _few(names: Iterable[str]) -> str:
    return some_of(sorted(names), _SHOWN) or 'none'
