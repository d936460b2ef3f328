"""Builds and checks the ``config.json`` of a T5.

The sizes follow from the shapes of the weights. The other values are defaults of transformers that hold for the public models;
the caller can override them: UL2 has ``gated-silu``, LongT5's local attention has T5's names, Switch has a capacity.

Special cases in transformers, as of 4.57, 5.23 and 5.24:

- ``tie_word_embeddings`` determines both the weights of the logits and whether the decoder's output is multiplied by
  d_model**-0.5. T5X does both or neither, so the flag is always written.
- Version 5 keeps the flag's meaning for T5, LongT5 and Switch (``scale_decoder_outputs``). mT5 is never scaled, so mT5 with tied
  logits is refused. UMT5 is always scaled before 5.24, also with separate logits, so the caller writes a second final norm,
  larger by sqrt(d_model), which 5.0 to 5.23 load.
- With separate logits, LongT5 and Switch in version 4 load an embedding for each tower under its own name.
- Switch has experts in layers ``i % step == 1``, Flaxformer in layers ``i % step == step - 1``. These agree if all layers or
  every second one have experts; other models have no class.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from t5ckpt.convert.huggingface.names import LOCAL, SELF, TRANSIENT_GLOBAL, T5Model
from t5ckpt.core.text import lines
from t5ckpt.errors import CheckpointNotFoundError, FormatError, UnsupportedFormatError
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.storage import open_storage, split_path

_CLASSES = {
    't5': 'T5',
    'mt5': 'MT5',
    'umt5': 'UMT5',
    'longt5': 'LongT5',
    'switch_transformers': 'SwitchTransformers',
}
_ATTENTION = {'local': LOCAL, 'transient-global': TRANSIENT_GLOBAL}
# The weights do not determine these; the values are those of transformers and of T5X's networks.
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


_MAX_BYTES = 2**20


def read_config(config: str | os.PathLike[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a configuration from a mapping, a JSON text that begins with '{', or a file's path; {} for None.

    Raises:
      FormatError: the file cannot be read, or is not a JSON object.
    """
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    text = os.fspath(config)
    where = 'the configuration given'
    if not text.lstrip().startswith('{'):
        where = text
        parent, name = split_path(text)
        try:
            text = CheckpointFiles.at(open_storage(parent), '', follow_links=True).read(name, limit=_MAX_BYTES).decode()
        except (CheckpointNotFoundError, UnicodeDecodeError) as error:
            raise FormatError(f'{where}: the configuration cannot be read ({error}).') from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f'{where} is not JSON ({error!s:.120}).') from error
    if not isinstance(value, dict):
        raise FormatError(f'{where} is JSON of {type(value).__name__}, but a configuration is an object.')
    return value


def attention_of(config: Mapping[str, Any]) -> str:
    """The encoder's attention in a configuration, or '' for other models than LongT5.

    Raises:
      UnsupportedFormatError: LongT5 does not have this attention.
    """
    if config.get('model_type') != 'longt5':
        return ''
    name = config.get('encoder_attention_type', 'local')
    if name not in _ATTENTION:
        raise UnsupportedFormatError(f'encoder_attention_type must be one of {sorted(_ATTENTION)}, got {name!r}.')
    return _ATTENTION[name]


def config_of(model: T5Model, given: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a model; ``given`` overrides the defaults.

    Raises:
      UnsupportedFormatError: ``given`` contradicts the weights, or Hugging Face has no class for the model.
    """
    given = _normalised(given)
    sizes, shape = model.sizes, _from_weights(model)
    check_config(model, given)
    if given.get('model_type') == 'mt5' and model.tied and model.layers['decoder']:
        raise UnsupportedFormatError(
            'tied logits in an mt5: T5X scales them, but version 5 of transformers does not. Pass model_type t5.'
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


# The export sets these; values in a given file describe other files.
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
    # Version 5 writes this instead of tie_word_embeddings=false.
    scaled = config.pop('scale_decoder_outputs', None)
    return config if scaled is None else config | {'tie_word_embeddings': bool(scaled)}


def _from_weights(model: T5Model) -> dict[str, Any]:
    """The entries that follow from names and shapes."""
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
    """Compares the entries of a configuration with the weights; entries may be missing.

    Raises:
      UnsupportedFormatError: with every contradiction, or because Hugging Face has no class for the model.
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
        for name, exists in (
            ('experts', bool(model.sparse)),
            ('a bias table for each layer (UMT5)', model.relpos_per_layer),
            (f'{model.attention} (LongT5)', model.attention != SELF),
        )
        if exists
    ]
    if len(combined) > 1:
        raise UnsupportedFormatError(f'the model has {" and ".join(combined)}; Hugging Face has no class with both.')
    if model.sparse and model.gated:
        raise UnsupportedFormatError("the model has gated experts (mlp/.../wi_0); Hugging Face's Switch has none.")


def _sparse_layers(model: T5Model, tower: str) -> int:
    """The number of layers with experts in a tower; raises UnsupportedFormatError for positions that transformers lacks."""
    layers = model.layers[tower]
    sparse = sorted(i for name, i in model.sparse if name == tower)
    # Without experts in this tower, transformers' step is the number of layers, so layer 1 would get experts.
    step = layers // max(1, len(sparse))
    if sparse != [i for i in range(layers) if i % step == 1 or step == 1]:
        raise UnsupportedFormatError(
            f"{tower}: the layers {sparse} of {layers} have experts, but Hugging Face's Switch has them in all layers, or in "
            'every n-th from layer 1 on.'
        )
    return len(sparse)


def needs_larger_norm(model: T5Model, config: Mapping[str, Any]) -> bool:
    """Whether versions 5.0 to 5.23 of transformers scale the logits although T5X does not."""
    return config['model_type'] == 'umt5' and not model.tied and model.layers['decoder'] > 0


def needs_embed_tokens(model: T5Model, config: Mapping[str, Any]) -> bool:
    """Whether version 4 of transformers also loads the embedding under the names of the towers, and else initializes it."""
    untied = not model.tied and model.layers['decoder'] > 0
    return config['model_type'] in ('longt5', 'switch_transformers') and untied


def logits_are_tied(config: Mapping[str, Any], has_head: bool, same: bool) -> bool:
    """Whether T5X has to compute the logits with the embedding, which it then scales by d_model**-0.5.

    Args:
      config: of the model.
      has_head: whether there is an ``lm_head.weight``; without one, the logits are computed with the embedding.
      same: whether ``lm_head.weight`` equals the embedding.

    Raises:
      UnsupportedFormatError: the head differs from the embedding, and the configuration does not exclude the scaling.
    """
    flag = config.get('tie_word_embeddings', config.get('model_type') != 'mt5')
    scaled = bool(config.get('scale_decoder_outputs', flag))
    if not scaled:
        return False
    if config.get('model_type') == 'mt5':
        raise UnsupportedFormatError(
            'an mt5 with tied logits: version 4 of transformers scales them by d_model**-0.5, version 5 does not. Pass a '
            'configuration with {"model_type": "t5"} if the model was trained with version 4, or with '
            '{"tie_word_embeddings": false} if with version 5.'
        )
    if not has_head or same:
        return True
    raise UnsupportedFormatError(
        'the model has an lm_head.weight, but the configuration has no tie_word_embeddings=false, so the use of this weight '
        'and the scaling of the logits by d_model**-0.5 depend on the version of transformers. Pass a configuration with '
        '{"tie_word_embeddings": false} if the model was trained with a separate lm_head.weight.'
    )
