"""Decodes the JSON files in which a step of Orbax has its metrics, its times and the user's metadata.

    metrics/metrics                 the metrics that were passed to ``CheckpointManager.save``, of every version since 2022
    _CHECKPOINT_METADATA            times, custom metadata and, in versions to come, metrics; since 0.6
    <run>/metadata/_ROOT_METADATA   the custom metadata of the run, below ``custom_metadata``
    <run>/metadata/metadata         the same in older versions, without the outer object

Source: ``checkpoint_manager.py``, ``_src/metadata/checkpoint.py`` and ``step_metadata_serialization.py`` of Orbax 0.12.8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.format.sidecar import Sidecar, as_number

_MAX_DEPTH = 20
_LATEST_UNIX = 10**11


def orbax_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      CorruptCheckpointError: it does not decode.
    """
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f'{where} does not decode ({error!s:.120}).') from error
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f'{where} does not decode: expected an object, got {type(found).__name__}.')
    return found


def orbax_sidecar(metadata: Mapping[str, Any], metrics: Mapping[str, Any], run: Mapping[str, Any]) -> Sidecar:
    """The contents of these files as a sidecar of format 0, which no file holds.

    Args:
      metadata: of the step.
      metrics: those of the item; numbers in nested objects are named ``outer/inner``.
      run: the custom metadata of the run, which that of the step overrides key by key.
    """
    nanoseconds = (metadata.get(f'{name}_timestamp_nsecs') for name in ('commit', 'init'))
    times = [each / 10**9 for each in nanoseconds if isinstance(each, int) and 0 < each < _LATEST_UNIX * 10**9]
    return Sidecar(
        format=0,
        created_unix=round(times[0], 3) if times else None,
        metrics=_numbers(_object(metadata, 'metrics')) | _numbers(metrics),
        custom_metadata={**run, **_object(metadata, 'custom_metadata')},
    )


def _object(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = fields.get(name)
    return found if isinstance(found, dict) else {}


def _numbers(tree: Mapping[str, Any], depth: int = _MAX_DEPTH) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and depth:
            found |= {f'{name}/{below}': number for below, number in _numbers(value, depth - 1).items()}
        elif (number := as_number(value)) is not None:
            found[name] = number
    return found
