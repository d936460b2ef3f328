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
from collections.abc import Collection, Mapping
from typing import Any

from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import Path
from t5ckpt.core.text import CURE_OF_DAMAGE, finite_json
from t5ckpt.errors import CorruptCheckpointError, FormatError, UnsupportedFormatError
from t5ckpt.format.checksum import digest
from t5ckpt.format.decoding import decoding
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.names import MANIFEST, generation_of, without_generation
from t5ckpt.tree.leaf_table import MAX_DEPTH

FORMAT = 1
_VALUES = {
    'empty': {'dict', 'list', 'tuple'},
    'python': {'bool', 'complex', 'float', 'int'},
    'keys': None,
    'text': None,
    'stored': None,
}
"""From a field of :class:`TreeFacts` to the texts that are its values, or None for any."""
_TYPES: Mapping[str, tuple[type, ...]] = {
    'created_unix': (int, float),
    **dict.fromkeys(('bytes', 'devices', 'files', 'step'), (int,)),
    **dict.fromkeys(('positions_in', 'save'), (str,)),
    **dict.fromkeys(('custom_metadata', 'digests', 'keep', 'metrics', 'writer'), (dict,)),
}
"""From a field of :class:`Facts` to the types of its value in JSON."""
_HEAD = re.compile(rb'\{\n "checksum": "([0-9a-f]{16})",\n')

_Object = Mapping[str, Any]


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a JSON object, which has text for NaN and infinities; other values are left out."""
    numbers = {name: float(value) if value in ('nan', 'inf', '-inf') else value for name, value in values.items()}
    return {
        name: value
        for name, value in numbers.items()
        if isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 1000)
    }


@dataclasses.dataclass(frozen=True)
class TreeFacts:
    """Facts of the tree, by path; ``stored`` by the array's location, because renaming transforms change paths."""

    empty: Mapping[Path, str] = dataclasses.field(default_factory=dict)
    python: Mapping[Path, str] = dataclasses.field(default_factory=dict)
    keys: Mapping[Path, str] = dataclasses.field(default_factory=dict)
    text: Mapping[Path, str] = dataclasses.field(default_factory=dict)
    stored: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Facts:
    """The decoded facts of a checkpoint. A field that is not recorded is None or empty.

    Attributes:
      tree: facts of the tree, which the manifest does not have.
      knows_tree: whether ``tree`` is known; not if a copy had no facts to take it from, so typed PRNG keys are not recorded. In
        the file, ``{"facts": "unknown"}``.
      writer: the process that wrote them: name and version of the program, host, pid, and what identifies a process on its
        machine.
      step: of the checkpoint.
      created_unix: the time of the save, in unix seconds.
      bytes, files: the size and number of the files in the arrays' directories.
      digests: {file: [bytes, xxh3-64 hex]} of the manifest without the facts, and of the file checksums, integrity.*.json.
      positions_in: the ``generation_dir`` of the save, with the states of data iterators; '' for the step's directory. In the
        text, the names in ``digests`` and ``tree.stored`` are relative to it, except the manifest's.
      save: for a copy with other names, see :func:`save_id`; else None.
      metrics: those passed to ``save``.
      devices: the largest number of devices of a leaf, if above one; a restore compares it with its template, to detect lost
        shardings.
      custom_metadata: the argument of ``save``, a JSON object.
      keep: the keep policy of the save, see ``keep_policy.policy_of``; for display.
    """

    tree: TreeFacts = dataclasses.field(default_factory=TreeFacts)
    knows_tree: bool = True
    writer: _Object = dataclasses.field(default_factory=dict)
    step: int | None = None
    created_unix: float | None = None
    bytes: int | None = None
    files: int | None = None
    digests: FileChecksums = dataclasses.field(default_factory=FileChecksums)
    positions_in: str = ''
    save: str | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    devices: int | None = None
    custom_metadata: _Object = dataclasses.field(default_factory=dict)
    keep: _Object = dataclasses.field(default_factory=dict)

    @property
    def program(self) -> str:
        """The program that wrote the checkpoint, such as ``'t5ckpt 0.1.0'``; '' if unknown."""
        return ' '.join(str(self.writer[key]) for key in ('name', 'version') if key in self.writer)


NO_FACTS = Facts(knows_tree=False)
"""Those of a checkpoint that records none."""


def encode_facts(facts: Facts) -> bytes:
    """The bytes of the facts."""
    in_json = dataclasses.replace(
        facts,
        digests=FileChecksums({without_generation(name): entry for name, entry in facts.digests.items()}),
        metrics=finite_json(facts.metrics),
    )
    tree = {field: [*getattr(facts.tree, field).items()] for field in _VALUES}
    tree['stored'] = [(without_generation(location), dtype) for location, dtype in tree['stored']]
    contents = {field: value for field in _TYPES if (value := getattr(in_json, field)) not in (None, {}, '')}
    contents |= {'format': FORMAT, 'tree': tree} | ({} if facts.knows_tree else {'facts': 'unknown'})
    text = (json.dumps(contents, indent=1, sort_keys=True) + '\n').encode()
    return b'{\n "checksum": "%s",\n%s' % (digest(text).encode(), text.removeprefix(b'{\n'))


def decode_facts(data: bytes, where: str) -> Facts:
    """Decodes the bytes of the facts; fields that this program does not know are left out.

    Raises:
      CorruptCheckpointError: the checksum does not match, or a field has the wrong type.
      UnsupportedFormatError: a newer version of t5ckpt wrote it, in another format.
    """
    head = _HEAD.match(data)
    if head is None or digest(b'{\n' + data[head.end() :]).encode() != head[1]:
        raise CorruptCheckpointError(
            f'{where} is damaged or was edited: it does not match its own checksum. {CURE_OF_DAMAGE}'
        )
    with decoding(where):
        contents = json.loads(data)
        version = contents.get('format', FORMAT)
        if version > FORMAT:
            raise UnsupportedFormatError(
                f'it has facts of version {version}, and this program knows versions up to {FORMAT}. Update t5ckpt.'
            )
        return _facts_of(contents)


def _facts_of(contents: Mapping[str, Any]) -> Facts:
    """The facts; raises TypeError for a value of another type, or out of range."""
    fields = {field: contents[field] for field in _TYPES if field in contents}
    for field, value in fields.items():
        types, limit = _TYPES[field], 10**11 if field == 'created_unix' else 2**63
        if type(value) not in types or (int in types and not 0 <= value < limit):
            raise TypeError(f'{field} is {value!r:.40}')
    fields['metrics'] = numbers_of(fields.get('metrics', {}))
    directory = fields['positions_in'] = generation_of(fields.get('positions_in', ''))

    def located(name: str) -> str:
        # In the earlier layout, names had the directory of the save, and no field named it.
        return name if name == MANIFEST or generation_of(name) else join(directory, name)

    digests = FileChecksums.parse(fields.get('digests', {}))
    fields['digests'] = FileChecksums({located(name): entry for name, entry in digests.items()})
    tree = contents.get('tree', {})
    by_path = {field: _by_path(tree.get(field, []), allowed) for field, allowed in _VALUES.items()}
    stored = {located(join(*path)): dtype for path, dtype in by_path.pop('stored').items()}
    return Facts(TreeFacts(**by_path, stored=stored), 'facts' not in contents, **fields)


def _by_path(entries: Any, allowed: Collection[str] | None) -> dict[Path, str]:
    found = {(path,) if isinstance(path, str) else tuple(path): value for path, value in entries}
    for path, value in found.items():
        is_text = {*map(type, (*path, value))} == {str}
        if not 0 < len(path) <= MAX_DEPTH or not is_text or (allowed is not None and value not in allowed):
            raise TypeError(f'the facts of a leaf are {path!r:.80}: {value!r:.40}')
    return found


def save_id(facts: bytes) -> str:
    """Identifies the save by the facts of a checkpoint: a copy with other names has that of its original in its own."""
    try:
        return decode_facts(facts, '').save or digest(facts)
    except FormatError:
        return digest(facts)
