"""Durations reported to JAX's monitoring."""

from __future__ import annotations

from t5ckpt.core.loaded import loaded

__all__ = ['READ_EVENT', 'WRITE_EVENT', 'record_duration']


# T5X's names (t5x/checkpoints.py), so that a dashboard made for T5X goes on working.
WRITE_EVENT = '/jax/checkpoint/write/durations_sec'


READ_EVENT = '/jax/checkpoint/read/durations_sec'


def record_duration(event: str, seconds: float) -> None:
    """Tells jax.monitoring how long a save or restore took, where JAX is in use."""
    jax = loaded('jax')
    if jax is not None:
        jax.monitoring.record_event_duration_secs(event, seconds)
