"""Reads the metrics, the time of the save and the custom metadata of a step of Orbax.

Notes: reads two small files of a step, and one of its run. Does not load TensorStore.
"""

from __future__ import annotations

from t5ckpt.core.keys import join
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
    keys = [join(step, STEP_METADATA), join(step, METRICS)]
    if of_run and step:
        keys.append(join(step.rpartition('/')[0], RUN_METADATA))
    found = [
        {} if data is None else orbax_object(data, storage.url(key))
        for key, data in zip(keys, storage.heads(keys, _MAX_BYTES), strict=True)
    ]
    custom = found[2].get('custom_metadata') if len(found) > 2 else None
    return orbax_facts(found[0], found[1], custom if isinstance(custom, dict) else {})
