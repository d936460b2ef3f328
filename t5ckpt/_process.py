"""Which process this is, among how many.

Asking never starts JAX: a program that has not imported it is one process.
"""

from __future__ import annotations

import sys

from t5ckpt.errors import UnsupportedTopologyError

__all__ = ['process_count', 'process_index', 'require_one_process']


def process_count() -> int:
    """The number of JAX processes of this job."""
    jax = sys.modules.get('jax')
    return 1 if jax is None else int(jax.process_count())


def process_index() -> int:
    """The index of this process."""
    jax = sys.modules.get('jax')
    return 0 if jax is None else int(jax.process_index())


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
