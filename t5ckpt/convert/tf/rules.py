"""Translates Mesh-TensorFlow's names of a T5 to T5X's.

The result equals T5X's (t5x/checkpoint_importer.py), for T5, T5 1.1, mT5, ByT5 and decoders without encoder:

    shared/embedding                                        token_embedder/embedding
    encoder/embedding                                       encoder/token_embedder/embedding
    encoder/block_003/layer_000/SelfAttention/q             encoder/layers_3/attention/query/kernel
    decoder/block_003/layer_001/EncDecAttention/o           decoder/layers_3/encoder_decoder_attention/out/kernel
    decoder/block_003/layer_002/DenseReluDense/wi_0/kernel  decoder/layers_3/mlp/wi_0/kernel
    decoder/block_003/layer_002/rms_norm/scale              decoder/layers_3/pre_mlp_layer_norm/scale
    .../layer_000/SelfAttention/relative_attention_bias     encoder/relpos_bias/rel_embedding, or in every layer
    decoder/final_layer_norm/scale, decoder/logits/kernel   decoder/decoder_norm/scale, decoder/logits_dense/kernel
    transformer/...                                         decoder/...
    <any of these>_slot_vr                                  state/param_states/<its new name>/v_row

Adafactor in Flax has ``m``, ``v``, ``v_row`` and ``v_col`` for every parameter. TensorFlow has only those that it uses; the
others become zeros of shape (1,).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from t5ckpt.core.text import lines, listed
from t5ckpt.errors import MissingLeaves, UnsupportedFormatError
from t5ckpt.lazy import LazyArray
from t5ckpt.translate import CheckpointTranslator, Rule, Translation

STEP = 'state/step'
PARAM_STATES = 'state/param_states/'
_TARGET = 'target/'

T5_RULES = CheckpointTranslator()
"""The rules for T5, T5 1.1, mT5 and ByT5."""

_SLOT = r'(_slot_(?:m|v|vc|vr))?'
_TOWER = r'(encoder|decoder|transformer)'
_BLOCK = rf'{_TOWER}/block_(\d+)/layer_(\d+)'
_SLOTS = {'_slot_m': 'm', '_slot_v': 'v', '_slot_vc': 'v_col', '_slot_vr': 'v_row'}
_PROJECTIONS = {'q': 'query', 'k': 'key', 'v': 'value', 'o': 'out'}
_SUBLAYERS = {
    'encoder': ('attention', 'mlp'),
    'decoder': ('self_attention', 'cross_attention', 'mlp'),
    'transformer': ('self_attention', 'mlp'),
}


def _tower(tower: str) -> str:
    return 'decoder' if tower == 'transformer' else tower


def _layer(tower: str, block: str) -> str:
    return f'{_tower(tower)}/layers_{int(block)}'


def _attention(tower: str, block: str, _: str, kind: str, projection: str) -> str:
    name = 'self_attention' if kind == 'SelfAttention' else 'encoder_decoder_attention'
    name = 'attention' if tower == 'encoder' else name
    return f'{_layer(tower, block)}/{name}/{_PROJECTIONS[projection]}/kernel'


def _norm(tower: str, block: str, layer: str) -> str:
    sublayers = _SUBLAYERS[tower]
    if int(layer) >= len(sublayers):
        raise UnsupportedFormatError(
            f'{tower}/block_{block}/layer_{layer}: a block of the {tower} has {len(sublayers)} layers, but this one has the '
            f'number {int(layer)}.'
        )
    return f'{_layer(tower, block)}/pre_{sublayers[int(layer)]}_layer_norm/scale'


# From a pattern to the name of the parameter, made of the pattern's groups.
_PARAMETERS: Mapping[str, Callable[..., str]] = {
    'shared/embedding': lambda: 'token_embedder/embedding',
    f'{_TOWER}/embedding': lambda tower: f'{_tower(tower)}/token_embedder/embedding',
    f'{_BLOCK}/SelfAttention/relative_attention_bias': (
        lambda tower, block, _: f'{_layer(tower, block)}/relpos_bias/rel_embedding'
    ),
    f'{_BLOCK}/(SelfAttention|EncDecAttention)/([qkvo])': _attention,
    rf'{_BLOCK}/DenseReluDense/(wi|wi_\d+|wo)/kernel': (
        lambda tower, block, _, name: f'{_layer(tower, block)}/mlp/{name}/kernel'
    ),
    f'{_BLOCK}/(?:layer|rms)_norm/scale': _norm,
    f'{_TOWER}/(?:final_layer|rms)_norm/scale': lambda tower: f'{_tower(tower)}/{_tower(tower)}_norm/scale',
    '(?:decoder|transformer)/logits/kernel': lambda: 'decoder/logits_dense/kernel',
}


def _renaming(new_name: Callable[..., str]) -> Rule:
    """The rule for a parameter and its slots; the last group of its pattern is the slot."""

    def rename(_: Any, __: str, value: Any, *groups: str | None) -> tuple[str, Any]:
        *parts, slot = groups
        name = new_name(*parts)
        return (f'{_TARGET}{name}' if slot is None else f'{PARAM_STATES}{name}/{_SLOTS[slot]}'), value

    return rename


for _pattern, _new_name in _PARAMETERS.items():
    T5_RULES.add(_pattern + _SLOT)(_renaming(_new_name))


@T5_RULES.add('global_step')
def _step(_: Any, key: str, value: Any) -> tuple[str, Any]:
    step = np.asarray(value.get() if isinstance(value, LazyArray) else value)
    if step.shape != () or not 0 <= int(step) <= np.iinfo(np.int32).max:
        raise UnsupportedFormatError(f'{key}: {step!r:.60} is not a step that T5X can hold (a 32-bit integer).')
    return STEP, np.int32(step)


# --- rules for several names ------------------------------------------------------------------------------------------


def with_shared_relpos(translation: Translation) -> Translation:
    """Renames relative position biases that only the first layer has: all layers share them."""
    layers = [int(match[1]) for name in translation.leaves if (match := re.search(r'layers_(\d+)/relpos_bias', name))]
    if max(layers, default=0) > 0:
        return translation

    def shared(name: str) -> str:
        return re.sub(r'layers_\d+/relpos_bias', 'relpos_bias', name)

    return dataclasses.replace(
        translation,
        leaves={shared(name): value for name, value in translation.leaves.items()},
        mapped={old: shared(new) for old, new in translation.mapped.items()},
    )


def with_all_slots(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The slots of Flax's Adafactor that TensorFlow's lacks, by name."""
    added: dict[str, Any] = {}
    for name in leaves:
        if not name.startswith(_TARGET):
            continue
        base = f'{PARAM_STATES}{name.removeprefix(_TARGET)}'
        wanted = {'m'}
        if f'{base}/v' in leaves:
            wanted |= {'v_row', 'v_col'}
        elif f'{base}/v_row' in leaves:
            wanted.add('v')
        added |= {f'{base}/{slot}': np.zeros((1,), np.float32) for slot in sorted(wanted)}
    return {name: value for name, value in added.items() if name not in leaves}


def check_complete(leaves: Iterable[str]) -> None:
    """Raises MissingLeaves with all layers, parts of layers and slots of parameters that are missing in a T5."""
    missing = [*_missing_in_layers(leaves), *_missing_slots(leaves)]
    if missing:
        raise MissingLeaves(lines('the checkpoint is not a complete T5:', *listed(missing)))


def _missing_in_layers(leaves: Iterable[str]) -> list[str]:
    towers: dict[str, dict[int, set[str]]] = {}
    for name in leaves:
        match = re.fullmatch(r'target/(\w+)/layers_(\d+)/(?!relpos_bias)(.*)', name)
        if match is not None:
            towers.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
    missing: list[str] = []
    for tower, layers in towers.items():
        parts = set.union(*layers.values())
        for number in range(max(layers) + 1):
            held = layers.get(number)
            if held is None:
                missing.append(
                    f'target/{tower}/layers_{number}: the whole layer is missing, {len(layers)} others exist'
                )
            else:
                missing += [
                    f'target/{tower}/layers_{number}/{part}: missing, but other layers have it' for part in parts - held
                ]
    return sorted(missing)


def _missing_slots(leaves: Iterable[str]) -> list[str]:
    slots: dict[str, set[str]] = {}
    for name in leaves:
        if name.startswith(PARAM_STATES):
            base, _, slot = name.removeprefix(PARAM_STATES).rpartition('/')
            slots.setdefault(base, set()).add(slot)
    parameters = {name.removeprefix(_TARGET) for name in leaves if name.startswith(_TARGET)}
    missing = [f'{_TARGET}{base}: missing, but its slots exist' for base in sorted(slots.keys() - parameters)]
    for base in sorted(parameters) if slots else ():
        held = slots.get(base, set())
        if 'v' not in held and not {'v_row', 'v_col'} <= held:
            text = (
                'the slots of this parameter are missing, but others have them; leave the optimizer out to ignore them'
            )
            missing.append(f'{PARAM_STATES}{base}: {text}')
    return missing
