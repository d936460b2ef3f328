"""Reads the metrics, the time of the save and the custom metadata of a step of Orbax.

Notes: reads two small files of a step, and at most two of its run. Does not load TensorStore.
"""

from __future__ import annotations

from t5ckpt.core.keys import join
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.format.facts import Facts
from t5ckpt.format.names import parse_prefixed_step
from t5ckpt.format.orbax import LEGACY_RUN_METADATA, METRICS, RUN_METADATA, STEP_METADATA, orbax_facts, orbax_object
from t5ckpt.storage import Storage

_MAX_BYTES = 16 * 2**20


def read_orbax_facts(storage: Storage, directory: str, *, of_run: bool = False) -> Facts:
    """The metrics, the time and the custom metadata of a step, as facts of format 0.

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
    files = [_read(storage, join(step, name)) for name in (STEP_METADATA, METRICS)]
    run = legacy = None
    if of_run and step:
        above = step.rpartition('/')[0]
        run = _read(storage, join(above, RUN_METADATA))
        legacy = _read(storage, join(above, LEGACY_RUN_METADATA)) if run is None else None
    metadata, metrics = ({} if file is None else orbax_object(*file) for file in files)
    custom = {} if legacy is None else orbax_object(*legacy)
    if run is not None:
        custom = orbax_object(*run).get('custom_metadata')
    return orbax_facts(metadata, metrics, custom if isinstance(custom, dict) else {})


def _read(storage: Storage, key: str) -> tuple[bytes, str] | None:
    """A file, and its URL for messages."""
    try:
        return storage.read_range(key, 0, _MAX_BYTES), storage.url(key)
    except CheckpointNotFoundError:
        return None
