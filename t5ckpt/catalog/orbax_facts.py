"""Reads the metrics, the time of the save and the custom metadata of a step of Orbax.

Notes: reads two small files of a step, and one of its run. Does not load TensorStore.
"""

from __future__ import annotations

from typing import Any

from t5ckpt.core.keys import join
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.format.facts import Facts
from t5ckpt.format.names import parse_prefixed_step
from t5ckpt.format.orbax import METRICS, RUN_METADATA, STEP_METADATA, orbax_facts, orbax_object
from t5ckpt.storage import Storage

_MAX_BYTES = 16 * 2**20


def read_orbax_facts(storage: Storage, directory: str, *, of_run: bool = False) -> Facts:
    """The metrics, the time and the custom metadata of a step, as facts.

    Args:
      storage: contains the step.
      directory: of the step, or of an item in it.
      of_run: also reads the custom metadata of the run.

    Raises:
      CorruptCheckpointError: a file does not decode.
      StorageError: a file cannot be read.
    """
    step = directory
    if directory and parse_prefixed_step(directory.rpartition('/')[2]) is None:
        step = directory.rpartition('/')[0]
    metadata, metrics = (_object(storage, join(step, name)) for name in (STEP_METADATA, METRICS))
    of_all = _object(storage, join(step.rpartition('/')[0], RUN_METADATA)) if of_run and step else {}
    custom = of_all.get('custom_metadata')
    return orbax_facts(metadata, metrics, custom if isinstance(custom, dict) else {})


def _object(storage: Storage, key: str) -> dict[str, Any]:
    """A file of JSON; empty if it does not exist."""
    try:
        return orbax_object(storage.read(key, 0, _MAX_BYTES), storage.url(key))
    except CheckpointNotFoundError:
        return {}
