"""Finding out which T5 it is, from names and shapes alone.

Two ways in, one for each side, and one check behind both: the arrays that such a model has are listed
(``names.pairs_of``) and held against those that are there. So whatever is guessed here from a few names is proved
by all of them, and everything that is missing, too much or of another shape is said in one error.

What no name and no shape can say is not guessed: LongT5's local attention has T5's names in T5X, and the activation, the
distance of the last bucket and the capacity of experts are numbers of the model's configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from t5ckpt.convert.huggingface.names import LOCAL, SELF, TRANSIENT_GLOBAL, Layout, Pair, T5Model, known_leaf
from t5ckpt.core.text import counted, lines
from t5ckpt.errors import LeafProblem, TreeMismatchError, UnsupportedFormatError, near_names

__all__ = ['Shapes', 'check_leaves', 'check_tensors', 'model_of_leaves', 'model_of_tensors']

Shapes = Mapping[str, tuple[int, ...]]

_PREFIXES = ('target/', 'params/', 'target/params/', 'params/params/', '')
_TOWERS = ('encoder', 'decoder')
_SHOWN = 20
# More layers or experts than any model has; a name or a shape that claims more is not believed.
_MAX_COUNT = 10_000


def model_of_leaves(shapes: Shapes, attention: str = '') -> tuple[T5Model, Layout]:
    """The model whose T5X arrays these are.

    Args:
      shapes: of all leaves of the checkpoint; those outside of the parameters are looked over.
      attention: of the encoder, where the caller knows it: LOCAL cannot be told from SELF.

    Raises:
      UnsupportedFormatError: it is no T5 that Hugging Face has a class for; with the names that do not belong.
    """
    prefix = next(
        (p for p in _PREFIXES if any(name.startswith((f'{p}encoder/', f'{p}decoder/')) for name in shapes)), None
    )
    if prefix is None:
        raise UnsupportedFormatError(
            f'no T5: no leaf is named target/encoder/... or params/encoder/..., there are {_few(shapes)}. '
            '`t5ckpt export safetensors` writes any tree under its own names.'
        )
    inner = {name[len(prefix) :]: shape for name, shape in shapes.items() if name.startswith(prefix)}
    unknown = [prefix + name for name in inner if not known_leaf(name)]
    if unknown:
        raise UnsupportedFormatError(
            f"Hugging Face's T5 classes have no place for {len(unknown)} of the arrays: {_few(unknown)}. "
            '`t5ckpt export safetensors` writes any tree under its own names.'
        )
    if not any(name.startswith('encoder/') for name in inner):
        raise UnsupportedFormatError(
            "a decoder without an encoder: Hugging Face has no T5 class for it. '`t5ckpt export safetensors` writes "
            'any tree under its own names.'
        )
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
    """The model whose tensors these are.

    Args:
      shapes: of all tensors.
      model_type: the configuration's; UMT5's single layer cannot be told from T5's.

    Raises:
      UnsupportedFormatError: it is no T5 with an encoder.
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
        raise UnsupportedFormatError(f'the encoder attends with {attention}, which no T5 in T5X has.')
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
    """Holds a model's arrays against those that are there below ``prefix``.

    Raises:
      TreeMismatchError: with every difference.
    """
    found = {name: shape for name, shape in shapes.items() if name.startswith(prefix)}
    _check({pair.leaf: pair.shape for pair in pairs}, found, where)


def check_tensors(pairs: Iterable[Pair], shapes: Shapes, where: str) -> None:
    """Holds a model's tensors against those that are there.

    Raises:
      TreeMismatchError: with every difference.
    """
    _check({name: pair.tensor_shape for pair in pairs for name in pair.tensors}, shapes, where)


def _check(expected: Shapes, found: Shapes, where: str) -> None:
    problems: list[LeafProblem] = []
    for name, shape in expected.items():
        if name not in found:
            near = near_names(name, found) if len(problems) < _SHOWN else []
            problems.append(LeafProblem(name, 'missing', '', str(shape), f'Near: {", ".join(near)}.' if near else ''))
        elif found[name] != shape:
            problems.append(LeafProblem(name, 'shape', str(found[name]), str(shape)))
    problems += [LeafProblem(name, 'unexpected', str(found[name]), '') for name in found if name not in expected]
    if not problems:
        return
    shown = [f'{where} is no T5 that both sides know, in {counted(len(problems), "place")}:']
    shown += [f'  {problem}' for problem in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        shown.append(f'  ... and {len(problems) - _SHOWN} more, all of them in .problems')
    shown.append('`t5ckpt export safetensors` and `t5ckpt import safetensors` take any tree, under its own names.')
    raise TreeMismatchError(lines(*shown), problems)


def _find(shapes: Shapes, pattern: str, ranks: Sequence[int]) -> tuple[int, ...]:
    """The shape of the first name that matches.

    Raises:
      UnsupportedFormatError: none does, or it has another rank.
    """
    compiled = re.compile(pattern)
    name = next((name for name in shapes if compiled.fullmatch(name)), None)
    if name is None:
        readable = re.sub(r'\\(.)', r'\1', pattern.replace(r'\w+', '*'))
        raise UnsupportedFormatError(f'no T5: nothing is named {readable}. There are {_few(shapes)}.')
    if len(shapes[name]) not in ranks:
        raise UnsupportedFormatError(f'{name}: shape {shapes[name]}, a T5 has {min(ranks)} dimensions there.')
    return shapes[name]


def _count(names: Iterable[str], pattern: str) -> int:
    """One more than the largest number that the pattern's group takes; 0 where nothing matches."""
    compiled = re.compile(pattern)
    largest = max((int(m[1][:9]) + 1 for m in map(compiled.fullmatch, names) if m is not None), default=0)
    return _bounded(largest, 'layers or experts')


def _bounded(count: int, what: str) -> int:
    if count > _MAX_COUNT:
        raise UnsupportedFormatError(f'{count} {what}: no T5 has so many.')
    return count


def _sparse(names: Iterable[str], pattern: str) -> frozenset[tuple[str, int]]:
    compiled = re.compile(pattern)
    return frozenset((m[1], int(m[2])) for m in map(compiled.fullmatch, names) if m is not None)


def _few(names: Iterable[str]) -> str:
    shown = sorted(names)
    more = f' and {len(shown) - _SHOWN} more' if len(shown) > _SHOWN else ''
    return (', '.join(shown[:_SHOWN]) or 'none') + more
