"""Encodes and decodes the sidecar ``t5ckpt.json``, which holds the information that T5X's manifest cannot hold.

The sidecar is a JSON object next to the manifest. Real T5X does not open it. A checkpoint without it is read as T5X reads it.

    checksum   xxh3-64 hex of the file without this line
    format     1
    writer     {name, version, host, pid} of the process that wrote it and, during a save, owns the temporary directory
    step, created_unix, bytes, files       of the checkpoint
    tree       empty   [[path, 'dict'|'list'|'tuple'], ...]    empty containers, which T5X cannot load
               python  [[path, 'int'|'float'|'bool'|'complex'], ...]   leaves that were Python numbers
               keys    [[path, impl], ...]                     typed PRNG keys, stored as their uint32 data
               text    [[path, string], ...]                   strings
               stored  [[array directory, dtype], ...]         arrays with another dtype on disk (format/dtypes.py)
    digests    {file: [bytes, xxh3-64 hex]} of the manifest and of the file checksums, integrity.*.json
    metrics    {name: number}
    devices    the largest number of devices of a leaf, if above one; a restore compares it with its template, to detect lost
               shardings
    custom_metadata    the argument of ``save``, a JSON object
    keep       the keep policy of the save, {'keep': 'KeepLatest', 'count': 3}, for display

Paths are lists of strings, because a key may contain '/'.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from t5ckpt.core.leaf_path import Path
from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.format.checksum import digest

__all__ = [
    'FORMAT',
    'Sidecar',
    'TreeFacts',
    'decode_sidecar',
    'encode_sidecar',
    'metrics_of',
    'newer_format',
    'number_of',
    'time_of',
]

FORMAT = 1
_MAX_DEPTH = 250
_CONTAINERS = {'dict', 'list', 'tuple'}
_NUMBERS = {'bool', 'complex', 'float', 'int'}
_HEAD = re.compile(rb'\{\n "checksum": "([0-9a-f]{16})",\n')
_CURE = 'Remove it and integrity.*.json to read the checkpoint as T5X does, without the information in them.'


@dataclasses.dataclass(frozen=True)
class TreeFacts:
    """Facts of the tree, by path; ``stored`` by the array's directory, because renaming transforms change paths."""

    empty: Mapping[Path, str] = dataclasses.field(default_factory=dict[Path, str])
    python: Mapping[Path, str] = dataclasses.field(default_factory=dict[Path, str])
    keys: Mapping[Path, str] = dataclasses.field(default_factory=dict[Path, str])
    text: Mapping[Path, str] = dataclasses.field(default_factory=dict[Path, str])
    stored: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


@dataclasses.dataclass(frozen=True)
class Sidecar:
    """The contents of the sidecar; ``extra`` holds every field of the format but ``checksum`` and ``tree``."""

    facts: TreeFacts = dataclasses.field(default_factory=TreeFacts)
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


def encode_sidecar(sidecar: Sidecar) -> bytes:
    """The bytes of the sidecar."""
    tree: dict[str, Any] = {
        field: [[list(path), value] for path, value in getattr(sidecar.facts, field).items()]
        for field in ('empty', 'python', 'keys', 'text')
    }
    tree['stored'] = [[directory, dtype] for directory, dtype in sidecar.facts.stored.items()]
    contents = {'format': FORMAT, **sidecar.extra, 'tree': tree}
    text = (json.dumps(contents, indent=1, sort_keys=True, allow_nan=True) + '\n').encode()
    return b'{\n "checksum": "%s",\n%s' % (digest(text).encode(), text.removeprefix(b'{\n'))


def decode_sidecar(data: bytes, where: str) -> Sidecar:
    """Decodes the bytes of the sidecar. In a newer format, unknown fields are ignored.

    Raises:
      CorruptCheckpointError: the checksum does not match, or fields have the wrong type.
    """
    head = _HEAD.match(data)
    if head is None or digest(b'{\n' + data[head.end() :]).encode() != head[1]:
        raise CorruptCheckpointError(f'{where} is damaged or was edited: it does not match its own checksum. {_CURE}')
    try:
        contents = json.loads(data)
        del contents['checksum']
        tree = contents.pop('tree', {})
        by_path = {
            field: {_path(path): _text(value, known) for path, value in tree.get(field, [])}
            for field, known in (('empty', _CONTAINERS), ('python', _NUMBERS), ('keys', None), ('text', None))
        }
        stored = {_text(directory): _text(dtype) for directory, dtype in tree.get('stored', [])}
        return Sidecar(TreeFacts(**by_path, stored=stored), contents)
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError) as error:
        raise CorruptCheckpointError(
            f'{where} does not decode ({type(error).__name__}: {error!s:.120}). {_CURE}'
        ) from error


def newer_format(data: bytes) -> int | None:
    """The format of a sidecar if it is newer than this program's, else None."""
    try:
        found = json.loads(data)['format']
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if isinstance(found, int) and found > FORMAT else None


def _path(value: Any) -> Path:
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_DEPTH:
        raise TypeError(f'expected a list of up to {_MAX_DEPTH} keys, got {value!r:.40}')
    return tuple(map(_text, value))


def _text(value: Any, known: Collection[str] | None = None) -> str:
    if not isinstance(value, str) or (known is not None and value not in known):
        raise TypeError(f'expected {"a string" if known is None else sorted(known)}, got {value!r:.40}')
    return value


def metrics_of(extra: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in a sidecar that are numbers."""
    metrics = extra.get('metrics')
    numbers = {str(name): number_of(value) for name, value in metrics.items()} if isinstance(metrics, Mapping) else {}
    return {name: number for name, number in numbers.items() if number is not None}


def number_of(value: Any) -> float | None:
    """A number in a sidecar of unknown origin; None for any other value, and for huge integers."""
    is_number = isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 1000)
    return float(value) if is_number else None


def time_of(extra: Mapping[str, Any]) -> float | None:
    """The time of the save in unix seconds; None if it is missing or implausible."""
    created = number_of(extra.get('created_unix'))
    return created if created is not None and 0 <= created < 10**11 else None
