"""Encodes and decodes the facts of a checkpoint: the information that T5X's manifest cannot hold.

They are the text of a JSON object, under ``t5ckpt`` in the manifest (``format/manifest.py``), or in the earlier layout in the
file ``t5ckpt.json`` next to it. Real T5X ignores both. A checkpoint without them is read as T5X reads it.

Their fields are those of :class:`Facts`, in the types of JSON; the first is

    checksum   xxh3-64 hex of the text without this line

and ``tree`` is an object of lists

    empty   [[path, 'dict'|'list'|'tuple'], ...]    empty containers, which T5X cannot load
    python  [[path, 'int'|'float'|'bool'|'complex'], ...]   leaves that were Python numbers
    keys    [[path, impl], ...]                     typed PRNG keys, stored as their uint32 data
    text    [[path, string], ...]                   strings
    stored  [[array directory, dtype], ...]         arrays with another dtype on disk (format/dtypes.py)

Paths are lists of strings, because a key may contain '/'.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import Path
from t5ckpt.core.text import CURE_OF_DAMAGE, finite_json
from t5ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from t5ckpt.format.checksum import digest
from t5ckpt.format.names import generation_of, without_generation
from t5ckpt.tree.leaf_table import MAX_DEPTH

FORMAT = 1
_CONTAINERS = {'dict', 'list', 'tuple'}
_NUMBERS = {'bool', 'complex', 'float', 'int'}
_HEAD = re.compile(rb'\{\n "checksum": "([0-9a-f]{16})",\n')

_Object = Mapping[str, Any]


def _object(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def as_number(value: Any) -> float | None:
    """A number of JSON, which has text for NaN and infinities; None for anything else."""
    if value in ('nan', 'inf', '-inf'):
        return float(value)
    is_number = isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 1000)
    return value if is_number else None


def _time(value: Any) -> float | None:
    unix = as_number(value)
    return float(unix) if unix is not None and 0 <= unix < 10**11 else None


def _metrics(value: Any) -> dict[str, float] | None:
    """The metrics that are numbers."""
    numbers = {name: as_number(number) for name, number in (_object(value) or {}).items()}
    return {name: number for name, number in numbers.items() if number is not None} or None


_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    'format': lambda value: _count(value) or None,
    'created_unix': _time,
    'metrics': _metrics,
    'facts': lambda value: value if value == 'unknown' else None,
    'positions_in': lambda value: value if isinstance(value, str) and generation_of(value) == value else None,
    'save': lambda value: value if isinstance(value, str) else None,
    **dict.fromkeys(('step', 'bytes', 'files', 'devices'), _count),
    **dict.fromkeys(('writer', 'digests', 'custom_metadata', 'keep', 'source'), _object),
}
"""From a field's key to the function that returns its value, or None if that is not usable."""
_ATTRIBUTES = {'facts': 'completeness'}
"""From a field's key to its attribute, if they differ."""


@dataclasses.dataclass(frozen=True)
class TreeFacts:
    """Facts of the tree, by path; ``stored`` by the array's directory, because renaming transforms change paths."""

    empty: Mapping[Path, str] = dataclasses.field(default_factory=dict[Path, str])
    python: Mapping[Path, str] = dataclasses.field(default_factory=dict[Path, str])
    keys: Mapping[Path, str] = dataclasses.field(default_factory=dict[Path, str])
    text: Mapping[Path, str] = dataclasses.field(default_factory=dict[Path, str])
    stored: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    def below(self, directory: str) -> TreeFacts:
        """The facts with the names that the arrays have in a ``generation_dir``, or without one in ''."""
        stored = {join(directory, without_generation(name)): dtype for name, dtype in self.stored.items()}
        return dataclasses.replace(self, stored=stored)


@dataclasses.dataclass(frozen=True)
class Facts:
    """The decoded facts of a checkpoint. A field that is not recorded, or not usable, is None or empty.

    Attributes:
      tree: facts of the tree, which the manifest does not have.
      format: ``FORMAT``; more in facts of a newer program, 0 in ``NO_FACTS``.
      writer: the process that wrote them: name and version of the program, host, pid, and what identifies a process on its
        machine. In an unfinished directory also the seconds of its horizon (``commit/markers.py``).
      step: of the checkpoint.
      created_unix: the time of the save, in unix seconds.
      bytes, files: the size and number of the files in the arrays' directories.
      digests: {file: [bytes, xxh3-64 hex]} of the manifest without the facts, and of the file checksums, integrity.*.json.
        Parsed by :meth:`FileChecksums.recorded_by`, because steps are also listed and deleted whose checksums are damaged.
      positions_in: the directory below the step's with the states of data iterators; None for the step's.
      save: for a copy with other names, see :func:`save_id`; else None.
      metrics: those passed to ``save``.
      devices: the largest number of devices of a leaf, if above one; a restore compares it with its template, to detect lost
        shardings.
      custom_metadata: the argument of ``save``, a JSON object.
      keep: the keep policy of the save, see ``keep_policy.policy_of``; for display.
      completeness: ``'unknown'`` if a copy had no facts to take ``tree`` from: typed PRNG keys are then not recorded.
        Its key on disk is ``facts``.
      source: of a conversion or of a copy with changes.
      other: fields that this program does not know, and values that are not usable. :func:`encode_facts` writes them again.
    """

    tree: TreeFacts = dataclasses.field(default_factory=TreeFacts)
    format: int = FORMAT
    writer: _Object = dataclasses.field(default_factory=dict[str, Any])
    step: int | None = None
    created_unix: float | None = None
    bytes: int | None = None
    files: int | None = None
    digests: _Object = dataclasses.field(default_factory=dict[str, Any])
    positions_in: str | None = None
    save: str | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    devices: int | None = None
    custom_metadata: _Object = dataclasses.field(default_factory=dict[str, Any])
    keep: _Object = dataclasses.field(default_factory=dict[str, Any])
    completeness: str | None = None
    source: _Object = dataclasses.field(default_factory=dict[str, Any])
    other: _Object = dataclasses.field(default_factory=dict[str, Any])

    @property
    def program(self) -> str:
        """The program that wrote the checkpoint, such as ``'t5ckpt 0.1.0'``; '' if unknown."""
        return ' '.join(str(self.writer[key]) for key in ('name', 'version') if key in self.writer)

    def recorded(self, field: str) -> Any:
        """The recorded value of a field, for an error about a value that is not usable."""
        return self.other.get(field, getattr(self, field))


NO_FACTS = Facts(format=0)
"""Those of a checkpoint that records none."""


def encode_facts(facts: Facts) -> bytes:
    """The bytes of the facts."""
    tree: dict[str, Any] = {
        field: [[list(path), value] for path, value in getattr(facts.tree, field).items()]
        for field in ('empty', 'python', 'keys', 'text')
    }
    tree['stored'] = [[directory, dtype] for directory, dtype in facts.tree.stored.items()]
    fields = {key: value for key in _PARSERS if (value := getattr(facts, _ATTRIBUTES.get(key, key))) not in (None, {})}
    if 'metrics' in fields:
        fields['metrics'] = finite_json(fields['metrics'])
    contents = {**facts.other, **fields, 'tree': tree}
    text = (json.dumps(contents, indent=1, sort_keys=True, allow_nan=True) + '\n').encode()
    return b'{\n "checksum": "%s",\n%s' % (digest(text).encode(), text.removeprefix(b'{\n'))


def decode_facts(data: bytes, where: str) -> Facts:
    """Decodes the bytes of the facts.

    Raises:
      CorruptCheckpointError: the checksum does not match, or ``tree`` has the wrong type.
      UnsupportedFormatError: a newer version of t5ckpt wrote it, in a format that does not decode.
    """
    head = _HEAD.match(data)
    if head is None or digest(b'{\n' + data[head.end() :]).encode() != head[1]:
        raise CorruptCheckpointError(
            f'{where} is damaged or was edited: it does not match its own checksum. {CURE_OF_DAMAGE}'
        )
    try:
        contents = json.loads(data)
        del contents['checksum']
        tree = contents.pop('tree', {})
        by_path = {
            field: {_path(path): _text(value, allowed) for path, value in tree.get(field, [])}
            for field, allowed in (('empty', _CONTAINERS), ('python', _NUMBERS), ('keys', None), ('text', None))
        }
        stored = {_text(directory): _text(dtype) for directory, dtype in tree.get('stored', [])}
        tree_facts = TreeFacts(**by_path, stored=stored)
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError) as error:
        newer = newer_format(data)
        if newer is not None:
            text = f'{where} has format {newer}, and this version of t5ckpt reads {FORMAT}. Upgrade it.'
            raise UnsupportedFormatError(text) from error
        raise CorruptCheckpointError(
            f'{where} does not decode ({type(error).__name__}: {error!s:.120}). {CURE_OF_DAMAGE}'
        ) from error
    parsed = {key: parse(contents[key]) for key, parse in _PARSERS.items() if key in contents}
    fields = {_ATTRIBUTES.get(key, key): value for key, value in parsed.items() if value is not None}
    return Facts(tree_facts, **fields, other={key: value for key, value in contents.items() if parsed.get(key) is None})


def save_id(facts: bytes) -> str:
    """Identifies the save by the facts of a checkpoint: a copy with other names has that of its original in its own."""
    try:
        return decode_facts(facts, '').save or digest(facts)
    except (CorruptCheckpointError, UnsupportedFormatError):
        return digest(facts)


def newer_format(data: bytes) -> int | None:
    """The format of facts if it is newer than this program's, else None."""
    try:
        version = json.loads(data)['format']
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return version if isinstance(version, int) and version > FORMAT else None


def _path(value: Any) -> Path:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_DEPTH:
        raise TypeError(f'expected a list of up to {MAX_DEPTH} keys, got {value!r:.40}')
    return tuple(map(_text, value))


def _text(value: Any, allowed: Collection[str] | None = None) -> str:
    if not isinstance(value, str) or (allowed is not None and value not in allowed):
        raise TypeError(f'expected {"a string" if allowed is None else sorted(allowed)}, got {value!r:.40}')
    return value
