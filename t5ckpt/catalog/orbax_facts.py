"""Reads what a step of Orbax records beside its arrays: metrics, the time of the save, custom metadata.

Notes: reads two small files of a step, and at most two of its run. Does not load TensorStore.
"""

from __future__ import annotations

from typing import Any

from t5ckpt.core.keys import join
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.format.names import parse_prefixed_step
from t5ckpt.format.orbax import LEGACY_RUN_METADATA, METRICS, RUN_METADATA, STEP_METADATA, orbax_object, orbax_sidecar
from t5ckpt.format.sidecar import Sidecar
from t5ckpt.storage import Storage

_MAX_BYTES = 16 * 2**20


def read_orbax_facts(storage: Storage, directory: str, *, of_run: bool = False) -> Sidecar:
    """The metrics, the time and the custom metadata of a step, as a sidecar of format 0.

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
    metadata = _object(storage, join(step, STEP_METADATA))
    metrics = _object(storage, join(step, METRICS))
    return orbax_sidecar(metadata or {}, metrics or {}, _of_run(storage, step) if of_run and step else {})


def _of_run(storage: Storage, step: str) -> dict[str, Any]:
    run = step.rpartition('/')[0]
    found = _object(storage, join(run, RUN_METADATA))
    if found is None:
        return _object(storage, join(run, LEGACY_RUN_METADATA)) or {}
    custom = found.get('custom_metadata')
    return custom if isinstance(custom, dict) else {}


def _object(storage: Storage, key: str) -> dict[str, Any] | None:
    try:
        data = storage.read_range(key, 0, _MAX_BYTES)
    except CheckpointNotFoundError:
        return None
    return orbax_object(data, storage.url(key))
