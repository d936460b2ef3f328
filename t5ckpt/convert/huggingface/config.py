"""``config.json`` of a T5: what the weights say, and what they cannot say.

Sizes follow from shapes. The rest are defaults of transformers that hold for the public models, and what the caller
gives overrides them: UL2 has ``gated-silu``, LongT5's local attention has T5's names, Switch has a capacity.

Four traps in transformers, as of 4.57 and 5.23:

- ``tie_word_embeddings`` decides not only whose weights the logits have, but whether the decoder's output is multiplied
  by d_model**-0.5. T5X does both or neither, so the flag is always written.
- Version 5 keeps the flag's meaning for T5, LongT5 and Switch (``scale_decoder_outputs``), loses it for mT5, which is
  never scaled, and for UMT5, which is always scaled, also with logits of its own. mT5 with tied logits is therefore
  refused. For UMT5 the caller writes a second final norm, larger by sqrt(d_model), for version 5 to load.
- With logits of their own, LongT5 and Switch in version 4 load an embedding for each tower, by its own name.
- Switch puts experts into layers ``i % step == 1``, Flaxformer where ``i % step == step - 1``: the same for every second
  layer or all, else there is no such class.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from t5ckpt.convert.huggingface.names import LOCAL, SELF, TRANSIENT_GLOBAL, T5Model
from t5ckpt.core.text import lines
from t5ckpt.errors import FormatError, UnsupportedFormatError
from t5ckpt.reading.contained_open import read_source

__all__ = [
    'attention_of',
    'check_config',
    'config_of',
    'logits_are_tied',
    'needs_embed_tokens',
    'needs_larger_norm',
    'read_config',
]

_CLASSES = {
    't5': 'T5',
    'mt5': 'MT5',
    'umt5': 'UMT5',
    'longt5': 'LongT5',
    'switch_transformers': 'SwitchTransformers',
}
_ATTENTION = {'local': LOCAL, 'transient-global': TRANSIENT_GLOBAL}
# Not in the weights; the values are transformers' and those of T5X's networks.
_DEFAULTS: dict[str, Any] = {
    'decoder_start_token_id': 0,
    'dropout_rate': 0.1,
    'eos_token_id': 1,
    'initializer_factor': 1.0,
    'layer_norm_epsilon': 1e-6,
    'pad_token_id': 0,
    'relative_attention_max_distance': 128,
    'use_cache': True,
}


# The index of a model of thousands of tensors is a configuration, too.
_MAX_BYTES = 100_000_000


def read_config(config: str | os.PathLike[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    """A configuration from a mapping, a JSON text that begins with '{', or a file's path; {} for None.

    Raises:
      FormatError: not JSON, or no object.
    """
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    text = os.fspath(config)
    where = 'the configuration given'
    if not text.lstrip().startswith('{'):
        where = text
        try:
            text = read_source(text, _MAX_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise FormatError(f'{where}: no configuration can be read there ({error}).') from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f'{where} is not JSON ({error!s:.120}).') from error
    if not isinstance(value, dict):
        raise FormatError(f'{where} is JSON of {type(value).__name__}, a configuration is an object.')
    return value


def attention_of(config: Mapping[str, Any]) -> str:
    """The encoder's attention that a configuration names, or '' where it names none.

    Raises:
      UnsupportedFormatError: one that LongT5 does not have.
    """
    if config.get('model_type') != 'longt5':
        return ''
    name = config.get('encoder_attention_type', 'local')
    if name not in _ATTENTION:
        raise UnsupportedFormatError(f'encoder_attention_type {name!r}: LongT5 has {sorted(_ATTENTION)}.')
    return _ATTENTION[name]


def config_of(model: T5Model, given: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a model, with what is given over the defaults.

    Raises:
      UnsupportedFormatError: what is given contradicts the weights, or there is no class for the model.
    """
    given = _normalised(given)
    sizes, shape = model.sizes, _from_weights(model)
    check_config(model, given)
    if given.get('model_type') == 'mt5' and model.tied and model.layers['decoder']:
        raise UnsupportedFormatError(
            'tied logits in an mt5: version 5 of transformers does not scale them, T5X does. Take model_type t5.'
        )
    defaults = dict(_DEFAULTS)
    if 'e' in sizes:
        defaults['dense_act_fn'] = 'relu'
    else:
        defaults['feed_forward_proj'] = 'gated-gelu' if model.gated else 'relu'
    config = defaults | given | shape
    config.setdefault('model_type', _model_type(model))
    kind = _CLASSES[config['model_type']]
    config['architectures'] = [f'{kind}ForConditionalGeneration' if model.layers['decoder'] else f'{kind}EncoderModel']
    return dict(sorted(config.items()))


# Follow from the export itself; whatever a given file says of them was true of other files.
_REWRITTEN = (
    'architectures',
    'configuration_files',
    'dtype',
    'torch_dtype',
    'transformers_version',
    'transformers_weights',
)


def _normalised(given: Mapping[str, Any]) -> dict[str, Any]:
    config = {key: value for key, value in given.items() if key not in _REWRITTEN}
    # What version 5 writes instead of a false tie_word_embeddings.
    scaled = config.pop('scale_decoder_outputs', None)
    return config if scaled is None else config | {'tie_word_embeddings': bool(scaled)}


def _from_weights(model: T5Model) -> dict[str, Any]:
    """What follows from names and shapes."""
    sizes, layers = model.sizes, model.layers
    config: dict[str, Any] = {
        'd_ff': sizes['f'],
        'd_kv': sizes['k'],
        'd_model': sizes['d'],
        'num_heads': sizes['h'],
        'num_layers': layers['encoder'],
        'relative_attention_num_buckets': sizes['b'],
        'vocab_size': sizes['v'],
    }
    if layers['decoder']:
        config |= {
            'is_encoder_decoder': True,
            'num_decoder_layers': layers['decoder'],
            'tie_word_embeddings': model.tied,
        }
    if 'e' in sizes:
        config['num_experts'] = sizes['e']
        config |= {f'num_sparse_{tower}_layers': _sparse_layers(model, tower) for tower in layers if layers[tower]}
    if model.attention != SELF:
        config['encoder_attention_type'] = next(name for name, kind in _ATTENTION.items() if kind == model.attention)
    return config


def _model_type(model: T5Model) -> str:
    if model.relpos_per_layer:
        return 'umt5'
    if model.sparse:
        return 'switch_transformers'
    return 't5' if model.attention == SELF else 'longt5'


def check_config(model: T5Model, config: Mapping[str, Any]) -> None:
    """Holds a configuration against the weights; what it does not say is not missed.

    Raises:
      UnsupportedFormatError: with every contradiction, or because there is no class for the model.
    """
    expected = _from_weights(model)
    plain = _model_type(model)
    types = ('t5', 'mt5') if plain == 't5' else (plain,)
    wrong = [
        f'{key}: configuration {config[key]!r}, weights {value!r}'
        for key, value in expected.items()
        if key in config and config[key] != value and (key != 'num_decoder_layers' or config[key] is not None)
    ]
    if config.get('model_type', plain) not in types:
        wrong.append(f'model_type: configuration {config["model_type"]!r}, weights {plain!r}')
    gated = str(config.get('feed_forward_proj', 'gated' if model.gated else '')).startswith('gated')
    if gated != model.gated and 'e' not in model.sizes:
        wrong.append(f'feed_forward_proj: configuration {config["feed_forward_proj"]!r}, weights gated: {model.gated}')
    if wrong:
        raise UnsupportedFormatError(lines('the configuration contradicts the weights:', *wrong, between='\n  '))
    combined = [
        name
        for name, there in (
            ('experts', bool(model.sparse)),
            ('a bias table for each layer (UMT5)', model.relpos_per_layer),
            (f'{model.attention} (LongT5)', model.attention != SELF),
        )
        if there
    ]
    if len(combined) > 1:
        raise UnsupportedFormatError(f'{" and ".join(combined)}: Hugging Face has no class with both.')
    if model.sparse and model.gated:
        raise UnsupportedFormatError("gated experts (mlp/.../wi_0): Hugging Face's Switch has none.")


def _sparse_layers(model: T5Model, tower: str) -> int:
    """How many layers of a tower have experts, checked against where transformers puts them."""
    layers = model.layers[tower]
    found = sorted(i for name, i in model.sparse if name == tower)
    # With none, its step is the number of layers, and layer 1 gets experts.
    step = layers // max(1, len(found))
    if found != [i for i in range(layers) if i % step == 1 or step == 1]:
        raise UnsupportedFormatError(
            f"{tower}: the layers {found} of {layers} have experts; Hugging Face's Switch can have them in all layers, or "
            'in every n-th from layer 1 on.'
        )
    return len(found)


def needs_larger_norm(model: T5Model, config: Mapping[str, Any]) -> bool:
    """Whether version 5 of transformers scales the logits where it should not."""
    return config['model_type'] == 'umt5' and not model.tied and model.layers['decoder'] > 0


def needs_embed_tokens(model: T5Model, config: Mapping[str, Any]) -> bool:
    """Whether version 4 of transformers looks for the embedding under its towers' names, too, and makes one up if not."""
    untied = not model.tied and model.layers['decoder'] > 0
    return config['model_type'] in ('longt5', 'switch_transformers') and untied


def logits_are_tied(config: Mapping[str, Any], has_head: bool, same: bool) -> bool:
    """Whether T5X's logits are to be those of the embedding, which it then scales by d_model**-0.5.

    Args:
      config: of the model that is read.
      has_head: there is an ``lm_head.weight``; where there is none, the logits are the embedding's.
      same: it is the embedding again.

    Raises:
      UnsupportedFormatError: a head of its own, and the configuration does not say that it is not scaled.
    """
    flag = config.get('tie_word_embeddings', config.get('model_type') != 'mt5')
    scaled = bool(config.get('scale_decoder_outputs', flag))
    if not scaled:
        return False
    if config.get('model_type') == 'mt5':
        raise UnsupportedFormatError(
            'an mt5 with tied logits: version 4 of transformers scales them by d_model**-0.5, version 5 does not. Pass a '
            'configuration with {"model_type": "t5"} if it was trained with the former, {"tie_word_embeddings": false} '
            'if with the latter.'
        )
    if not has_head or same:
        return True
    raise UnsupportedFormatError(
        'there is an lm_head.weight, but the configuration has no tie_word_embeddings=false: whether transformers uses it '
        'and scales the logits by d_model**-0.5 depends on its version. Pass a configuration with '
        '{"tie_word_embeddings": false} if the model was trained with logits of its own.'
    )
