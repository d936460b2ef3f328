"""Determines the architecture of a T5 from the names and shapes of its arrays or tensors.

A few names determine the candidate. Then the arrays of this model (``names.pairs_of``) are compared with all that exist, and one
error lists those that are missing, unexpected or of another shape.

Names and shapes do not determine everything: LongT5's local attention has T5's names in T5X, and the activation, the distance
of the last bucket and the capacity of experts are values of the model's configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from t5ckpt.convert.huggingface.names import LOCAL, SELF, TRANSIENT_GLOBAL, Layout, Pair, T5Model
from t5ckpt.core.text import counted, lines, listed, some_of
from t5ckpt.errors import LeafProblem, TreeMismatchError, UnsupportedFormatError, near_names

Shapes = Mapping[str, tuple[int, ...]]

_PREFIXES = ('target/', 'params/', 'target/params/', 'params/params/', '')
_TOWERS = ('encoder', 'decoder')
_SHOWN = 20
# More layers or experts than any model has; limits the work for hostile names and shapes.
_MAX_COUNT = 10_000


def model_of_leaves(shapes: Shapes, attention: str = '') -> tuple[T5Model, Layout]:
    """The model and its layout, from the arrays in T5X.

    Args:
      shapes: of all leaves of the checkpoint; those outside the parameters are ignored.
      attention: of the encoder, if the caller knows it, because LOCAL has the same names as SELF.

    Raises:
      UnsupportedFormatError: Hugging Face has no class for the model; with the names that do not match.
    """
    prefix = next((p for p in _PREFIXES if any(name.startswith(f'{p}encoder/') for name in shapes)), None)
    if prefix is None:
        raise UnsupportedFormatError(
            'not a T5: no leaf is named target/encoder/... or params/encoder/..., and Hugging Face has no class for a decoder '
            f'without an encoder; the leaves are {_few(shapes)}. `t5ckpt convert to-safetensors` writes any tree under its '
            'own names.'
        )
    inner = {name[len(prefix) :]: shape for name, shape in shapes.items() if name.startswith(prefix)}
    return _leaf_probe(inner, attention, prefix)


def _leaf_probe(inner: Shapes, attention: str, prefix: str) -> tuple[T5Model, Layout]:
    scanned = any(name.startswith('encoder/encoder/') for name in inner)
    query = _find(inner, r'encoder/\w+/attention/query/kernel', (2 + scanned, 3 + scanned))
    bias = _find(inner, r'encoder/(\w+/)?relpos_bias/rel_embedding', (2, 3))
    embedder = 'token_embedder' if 'token_embedder/embedding' in inner else 'encoder/token_embedder'
    embedding = _find(inner, f'{embedder}/embedding', (2,))
    wide = _find(inner, r'encoder/\w+/mlp/(expert/)?wi(_0)?/kernel', (2, 3))
    sizes = {'v': embedding[0], 'd': embedding[1], 'f': wide[-1], 'h': bias[0], 'b': bias[-1]}
    sizes['k'] = math.prod(query[1 + scanned :]) // max(1, bias[0])
    if any('/expert/' in name for name in inner):
        sizes['e'] = _bounded(_find(inner, r'\w+/\w+/mlp/expert/wo/kernel', (3,))[0], 'experts')
    if attention == '':
        attention = TRANSIENT_GLOBAL if any('/T5LayerNorm_0/' in name for name in inner) else SELF
    model = T5Model(
        sizes,
        {tower: _leaf_layers(inner, tower, scanned) for tower in _TOWERS},
        gated=any('/wi_0/' in name for name in inner),
        tied='decoder/logits_dense/kernel' not in inner,
        relpos_per_layer=any(re.fullmatch(r'\w+/\w+/relpos_bias/rel_embedding', name) for name in inner),
        attention=attention,
        sparse=_sparse(inner, r'(\w+)/layers_(\d+)/mlp/router/.*'),
    )
    return model, Layout(prefix, scanned, len(query) == 3 + scanned, embedder)


def _leaf_layers(inner: Shapes, tower: str, scanned: bool) -> int:
    if not any(name.startswith(f'{tower}/') for name in inner):
        return 0
    if not scanned:
        return _count(inner, rf'{tower}/layers_(\d+)/.*')
    name = 'pre_attention_layer_norm' if tower == 'encoder' else 'pre_self_attention_layer_norm'
    return _bounded(_find(inner, f'{tower}/{tower}/{name}/scale', (2,))[1], 'layers')


def model_of_tensors(shapes: Shapes, model_type: str) -> T5Model:
    """The model, from the tensors in Hugging Face.

    Args:
      shapes: of all tensors.
      model_type: in the configuration; UMT5 with one layer has the same names as T5.

    Raises:
      UnsupportedFormatError: it is not a T5 with an encoder.
    """
    first = r'encoder\.block\.0\.layer\.0\.(\w+)'
    query = _find(shapes, rf'{first}\.q\.weight', (2,))
    bias = _find(shapes, rf'{first}\.relative_attention_bias\.weight', (2,))
    embedding = _find(shapes, r'shared\.weight', (2,))
    wide = r'encoder\.block\.\d+\.layer\.1\.(DenseReluDense|mlp|mlp\.experts\.expert_0)\.wi(_0)?\.weight'
    sizes = {'v': embedding[0], 'd': embedding[1], 'f': _find(shapes, wide, (2,))[0], 'h': bias[1], 'b': bias[0]}
    sizes['k'] = query[0] // max(1, bias[1])
    experts = _count(shapes, r'.*\.mlp\.experts\.expert_(\d+)\.wo\.weight')
    if experts:
        sizes['e'] = experts
    attention = next(m[1] for name in shapes for m in [re.fullmatch(rf'{first}\.q\.weight', name)] if m is not None)
    if attention not in (SELF, LOCAL, TRANSIENT_GLOBAL):
        raise UnsupportedFormatError(f'the encoder has the attention {attention}, which no T5 in T5X has.')
    return T5Model(
        sizes,
        {tower: _count(shapes, rf'{tower}\.block\.(\d+)\..*') for tower in _TOWERS},
        gated=any('.wi_0.' in name for name in shapes),
        tied='lm_head.weight' not in shapes,
        relpos_per_layer=model_type == 'umt5',
        attention=attention,
        sparse=_sparse(shapes, r'(\w+)\.block\.(\d+)\..*\.router\.classifier\.weight'),
    )


def check_leaves(pairs: Iterable[Pair], shapes: Shapes, prefix: str, where: str) -> None:
    """Raises TreeMismatchError with every difference between a model's arrays and the leaves under ``prefix``."""
    leaves = {name: shape for name, shape in shapes.items() if name.startswith(prefix)}
    _check({pair.leaf: pair.shape for pair in pairs}, leaves, where)


def check_tensors(pairs: Iterable[Pair], shapes: Shapes, where: str) -> None:
    """Raises TreeMismatchError with every difference between a model's tensors and the existing ones."""
    _check({name: pair.tensor_shape for pair in pairs for name in pair.tensors}, shapes, where)


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


def _find(shapes: Shapes, pattern: str, ranks: Sequence[int]) -> tuple[int, ...]:
    """The shape of the first name that matches.

    Raises:
      UnsupportedFormatError: no name matches, or the shape has another rank.
    """
    name = next((name for name in shapes if re.fullmatch(pattern, name)), None)
    if name is None:
        readable = re.sub(r'\\(.)', r'\1', pattern.replace(r'\w+', '*'))
        raise UnsupportedFormatError(f'not a T5: no array is named {readable}. The arrays are {_few(shapes)}.')
    if len(shapes[name]) not in ranks:
        raise UnsupportedFormatError(f'{name} has the shape {shapes[name]}, but {min(ranks)} dimensions in a T5.')
    return shapes[name]


def _count(names: Iterable[str], pattern: str) -> int:
    """One more than the largest number in the pattern's group; 0 if no name matches."""
    numbers = (int(m[1][:9]) + 1 for name in names if (m := re.fullmatch(pattern, name)))
    return _bounded(max(numbers, default=0), 'layers or experts')


def _bounded(count: int, what: str) -> int:
    if count > _MAX_COUNT:
        raise UnsupportedFormatError(f'{count} {what}: more than any T5 has.')
    return count


def _sparse(names: Iterable[str], pattern: str) -> frozenset[tuple[str, int]]:
    return frozenset((m[1], int(m[2])) for name in names if (m := re.fullmatch(pattern, name)))


def _few(names: Iterable[str]) -> str:
    return some_of(sorted(names), _SHOWN) or 'none'
