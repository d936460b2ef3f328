"""Models of Hugging Face's families, small, with random weights."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

import t5ckpt
from support import t5

VARIANTS = {
    't5': t5.Config(),
    't5_1_1': t5.Config(gated=True, tied=False),
    'byt5': t5.Config(gated=True, tied=False, encoder_layers=4, decoder_layers=1),
    'one_layer': t5.Config(encoder_layers=1, decoder_layers=1),
    'scanned_joined': t5.Config(gated=True, tied=False, scanned=True),
    'scanned_split': t5.Config(scanned=True, split_heads=True),
    'split': t5.Config(split_heads=True),
    'umt5': t5.Config(gated=True, tied=False, relpos_per_layer=True, scanned=True, split_heads=True),
    'umt5_unscanned': t5.Config(gated=True, tied=True, relpos_per_layer=True),
    'switch': t5.Config(experts=4, encoder_layers=4, decoder_layers=2),
    'switch_untied': t5.Config(experts=2, encoder_layers=2, decoder_layers=2, tied=False),
}


def write(path: pathlib.Path, tree: Any, step: int = 7) -> str:
    """A checkpoint of a tree."""
    with t5ckpt.Checkpointer(tree, checkpoints_dir=str(path)) as checkpointer:
        checkpointer.save(tree, step=step)
    return str(path)


def write_t5(path: pathlib.Path, config: t5.Config, **others: Any) -> str:
    """A checkpoint of a T5 with an optimizer's state beside it."""
    slots = {'param_states': {'decoder': {'v': np.ones(3, np.float32)}}, 'step': np.int32(7)}
    return write(path, {'target': t5.init(config), 'state': slots, **others})


def long_t5(transient_global: bool) -> dict[str, Any]:
    """A LongT5: T5's names; with transient global attention, two more."""
    params = t5.init(VARIANTS['t5_1_1'])
    if transient_global:
        encoder = params['encoder']
        encoder['side_relpos_bias'] = {'rel_embedding': np.arange(24, dtype=np.float32).reshape(3, 8)}
        for i in range(3):
            encoder[f'layers_{i}']['attention']['T5LayerNorm_0'] = {'scale': np.full(20, i, np.float32)}
    return {'target': params}
