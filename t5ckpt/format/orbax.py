"""The names of the files that Orbax writes into a step, and the metadata in them, as facts.

    metrics/metrics                 the metrics that were passed to ``CheckpointManager.save``, of every version since 2022
    _CHECKPOINT_METADATA            times, custom metadata and, in versions to come, metrics; since 0.6
    <run>/metadata/_ROOT_METADATA   the custom metadata of the run, below ``custom_metadata``
    <run>/metadata/metadata         the same in older versions, without the outer object

Source: ``checkpoint_manager.py``, ``_src/metadata/checkpoint.py`` and ``step_metadata_serialization.py`` of Orbax 0.12.8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from t5ckpt.format.decoding import decoding
from t5ckpt.format.facts import Facts, numbers_of
from t5ckpt.tree.leaf_table import flatten_nested

# Files of a step. The last is written at the end where a store cannot rename.
STEP_METADATA = '_CHECKPOINT_METADATA'
METRICS = 'metrics/metrics'
COMMITTED = 'commit_success.txt'
# Files of a run.
RUN_METADATA = 'metadata/_ROOT_METADATA'
# Files of a tree: in the directory of an item, or in the step's directory.
TREE_METADATA = '_METADATA'
STRINGS = '_strings.json'
ARRAY_METADATA = 'array_metadatas'
OCDBT_MANIFEST = 'manifest.ocdbt'
OCDBT_OF_PROCESS = 'ocdbt.process_'
PLACEHOLDER = 'PLACEHOLDER://'
"""In Orbax's older layout, this text and a name replace each array in Flax msgpack."""
# The last two are items of a step.
_ENTRIES = {
    *(STEP_METADATA, TREE_METADATA, STRINGS, ARRAY_METADATA, COMMITTED),
    *('_sharding', 'd', 'default', 'metrics'),
}
DATABASE_FILE = re.compile(r'(ocdbt\.process_[A-Za-z0-9_]+/)?(manifest\.ocdbt|d/[0-9a-f]{32})')
"""A file of an OCDBT database, relative to the tree."""
_LATEST_UNIX = 10**11


def is_orbax_entry(name: str) -> bool:
    """Whether Orbax makes a file or directory of this name at the top of a step or a tree."""
    return name in _ENTRIES or name.startswith((OCDBT_MANIFEST, OCDBT_OF_PROCESS))


def orbax_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      CorruptCheckpointError: it does not decode.
    """
    with decoding(where):
        decoded: Any = json.loads(data)
        if not isinstance(decoded, dict):
            raise TypeError(f'expected an object, got {type(decoded).__name__}')
        return decoded


def orbax_facts(metadata: Mapping[str, Any], metrics: Mapping[str, Any], run: Mapping[str, Any]) -> Facts:
    """The contents of these files as facts, which no file holds.

    Args:
      metadata: of the step.
      metrics: of the item; numbers in nested objects are named ``outer/inner``.
      run: the custom metadata of the run, which the step's metadata overrides key by key.
    """
    nanoseconds = (metadata.get(f'{name}_timestamp_nsecs') for name in ('commit', 'init'))
    times = [value / 10**9 for value in nanoseconds if isinstance(value, int) and 0 < value < _LATEST_UNIX * 10**9]
    objects = {name: value for name, value in metadata.items() if isinstance(value, dict)}
    return Facts(
        knows_tree=False,
        created_unix=round(times[0], 3) if times else None,
        metrics=_numbers(objects.get('metrics', {})) | _numbers(metrics),
        custom_metadata={**run, **objects.get('custom_metadata', {})},
    )


def _numbers(tree: Mapping[str, Any]) -> dict[str, float]:
    try:
        return numbers_of({'/'.join(path): value for path, value in flatten_nested(tree).items()})
    except RecursionError:
        return {}
