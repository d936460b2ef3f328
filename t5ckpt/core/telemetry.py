"""Durations reported to JAX's monitoring."""

from __future__ import annotations

from t5ckpt.core.loaded import loaded

# T5X's names (t5x/checkpoints.py), so that dashboards made for T5X keep working.
WRITE_EVENT = '/jax/checkpoint/write/durations_sec'


READ_EVENT = '/jax/checkpoint/read/durations_sec'


def record_duration(event: str, seconds: float) -> None:
    """Reports the duration of a save or restore to ``jax.monitoring``, if JAX is imported."""
    jax = loaded('jax')
    if jax is not None:
        jax.monitoring.record_event_duration_secs(event, seconds)
