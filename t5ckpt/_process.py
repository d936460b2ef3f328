"""Which process this is, among how many.

Asking never starts JAX: a program that has not imported it is one process.
"""

from __future__ import annotations

import sys

from t5ckpt.errors import UnsupportedTopologyError

__all__ = ['READ_EVENT', 'WRITE_EVENT', 'process_count', 'process_index', 'record_duration', 'require_one_process']


def process_count() -> int:
    """The number of JAX processes of this job."""
    jax = sys.modules.get('jax')
    return 1 if jax is None else int(jax.process_count())


def process_index() -> int:
    """The index of this process."""
    jax = sys.modules.get('jax')
    return 0 if jax is None else int(jax.process_index())


# T5X's names (t5x/checkpoints.py), so that a dashboard made for T5X goes on working.
WRITE_EVENT = '/jax/checkpoint/write/durations_sec'
READ_EVENT = '/jax/checkpoint/read/durations_sec'


def record_duration(event: str, seconds: float) -> None:
    """Tells jax.monitoring how long a save or restore took, where JAX is in use."""
    jax = sys.modules.get('jax')
    if jax is not None:
        jax.monitoring.record_event_duration_secs(event, seconds)


def require_one_process(action: str) -> None:
    """Refuses what would be silently wrong with several processes.

    Raises:
      UnsupportedTopologyError: with the number of processes.
    """
    count = process_count()
    if count > 1:
        raise UnsupportedTopologyError(
            f'{action} runs in one process so far, this job has {count} (this is process {process_index()}). '
            'Gather the state to one process, or write with T5X and read here.'
        )
