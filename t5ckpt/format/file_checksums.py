"""The books of a checkpoint: which files it has, how long they are, and their checksums. No files are touched here.

Every process lists what it wrote in ``integrity.<process>.json``; ``t5ckpt.json`` lists the manifest and those lists, and
carries a checksum of itself. From there a chain leads to every byte of the checkpoint:

    t5ckpt.json ──> checkpoint, integrity.0.json, integrity.1.json, ... ──> chunk files, .zarray, iterator files

A checksum finds accidents: bits that rotted, a copy that was cut off, files of another step. It is no signature: who can
write the checkpoint can write the books.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from t5ckpt.core.keys import is_inside
from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.format.checksum import ALGORITHM

__all__ = ['FileChecksums', 'decode_ledger', 'encode_ledger', 'ledger_entries']

FileChecksums = dict[str, tuple[int, str]]
"""File, relative to the checkpoint's directory, to (bytes, xxh3-64 hex)."""

_HEX = re.compile('[0-9a-f]{16}')
_CURE = 'Restore an older step, or copy the checkpoint again.'


def encode_ledger(files: Mapping[str, tuple[int, str]]) -> bytes:
    """The bytes of one process's list: ``{'algorithm': 'xxh3_64', 'files': {file: [bytes, hex]}}``."""
    entries = {name: list(entry) for name, entry in sorted(files.items())}
    return json.dumps({'algorithm': ALGORITHM, 'files': entries}, separators=(',', ':')).encode()


def decode_ledger(data: bytes, where: str) -> FileChecksums:
    """Decodes such a list.

    Raises:
      CorruptCheckpointError: not JSON, another algorithm, or a name that leads outside the checkpoint.
    """
    try:
        contents = json.loads(data)
        algorithm, files = contents['algorithm'], contents['files']
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptCheckpointError(
            f'{where} does not decode ({type(error).__name__}: {error!s:.120}). {_CURE}'
        ) from error
    if algorithm != ALGORITHM:
        raise CorruptCheckpointError(
            f'{where} has checksums of {algorithm!r:.40}, this reader knows {ALGORITHM}. {_CURE}'
        )
    return ledger_entries(files, where)


def ledger_entries(files: Any, where: str) -> FileChecksums:
    """Checks a map from file to [bytes, hex], as it was found in JSON.

    Raises:
      CorruptCheckpointError: it is something else, or names a file outside the checkpoint.
    """
    if not isinstance(files, Mapping):
        raise CorruptCheckpointError(f'{where} lists no files but {type(files).__name__}. {_CURE}')
    entries: FileChecksums = {}
    for name, entry in files.items():
        match entry:
            case [int(size), str(text)] if size >= 0 and _HEX.fullmatch(text) and is_inside(name):
                entries[name] = (int(size), text)
            case _:
                raise CorruptCheckpointError(f'{where} has the entry {name!r:.120}: {entry!r:.80}. {_CURE}')
    return entries
