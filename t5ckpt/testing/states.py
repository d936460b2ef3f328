"""Small states with all kinds of leaves that a checkpoint must hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class SimpleTrainState:
    """T5X's train-state protocol over nested dicts."""

    def __init__(self, state: Mapping[str, Any]):
        """Takes the state dict."""
        self._state = dict(state)

    @property
    def step(self) -> Any:
        """The leaf ``state/step``."""
        return self._state['state']['step']

    def state_dict(self) -> Mapping[str, Any]:
        """The nested dicts."""
        return self._state

    def restore_state(self, state_dict: Mapping[str, Any]) -> SimpleTrainState:
        """A new state with these values."""
        return SimpleTrainState(state_dict)


def t5x_state(step: int = 0, seed: int = 0, width: int = 64) -> SimpleTrainState:
    """An Adafactor-shaped T5X state of numpy arrays: kernels with factored slots, a scale with a full one."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    kernels = {'kernel': normal(width, 2 * width)}
    slots = {'v_row': normal(width), 'v_col': normal(2 * width), 'v': normal(1), 'm': normal(1)}
    scale_slots = {'v_row': normal(1), 'v_col': normal(1), 'v': normal(width), 'm': normal(1)}
    return SimpleTrainState(
        {
            'target': {'mlp': kernels, 'norm': {'scale': normal(width)}},
            'state': {
                'step': np.int32(step),
                'param_states': {'mlp': {'kernel': slots}, 'norm': {'scale': scale_slots}},
            },
        }
    )


def mixed_state(seed: int = 0) -> dict[str, Any]:
    """A pytree with large and small arrays, None, empty containers, Python numbers and text."""
    rng = np.random.default_rng(seed)
    return {
        'params': {'w': rng.standard_normal((96, 128), dtype=np.float32), 'b': rng.standard_normal(7)},
        'count': 3,
        'rate': 0.5,
        'done': False,
        'none': None,
        'empty': {},
        'list': [np.zeros((0, 3)), (), np.arange(9000, dtype=np.int16)],
        'note': 'text',
        'step': np.int32(seed),
    }
