"""JAX and other libraries that the program may have imported already; nothing here imports them."""

from __future__ import annotations

import importlib
import sys
from typing import Any

# T5X's names (t5x/checkpoints.py), so that dashboards made for T5X keep working.
WRITE_EVENT = '/jax/checkpoint/write/durations_sec'
READ_EVENT = '/jax/checkpoint/read/durations_sec'


def loaded(name: str) -> Any:
    """Returns a module that the program has imported, or None; imports nothing.

    While another thread imports the module, waits for that thread, because the module lacks most of its names until then.
    """
    return importlib.import_module(name) if sys.modules.get(name) is not None else None


def record_duration(event: str, seconds: float) -> None:
    """Reports the duration of a save or restore to ``jax.monitoring``, if JAX is imported."""
    jax = loaded('jax')
    if jax is not None:
        jax.monitoring.record_event_duration_secs(event, seconds)
