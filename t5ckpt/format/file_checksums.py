"""The file checksums of a checkpoint: each file with its length and its xxh3-64. No files are read or written here.

Every process writes the checksums of its files to ``integrity.<process>.json``. ``t5ckpt.json`` has those of the manifest
and of these lists, and a checksum of itself, so every byte of the checkpoint can be verified:

    t5ckpt.json ──> checkpoint, integrity.0.json, integrity.1.json, ... ──> chunk files, .zarray, iterator files

A checksum detects accidents: flipped bits, a truncated copy, files of another step. It is not a signature: whoever can
write the checkpoint can write its checksums.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from t5ckpt.core.keys import is_inside
from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.checksum import ALGORITHM, digest
from t5ckpt.format.chunk_grid import ChunkGrid
from t5ckpt.format.names import is_file_checksums
from t5ckpt.format.sidecar import Sidecar

__all__ = ['FileChecksums', 'FileEntry', 'entry_of']

FileEntry = tuple[int, str]
"""A file's bytes and the xxh3-64 of its contents, in hex."""

_HEX = re.compile('[0-9a-f]{16}')
_CURE = 'Restore an older step, or copy the checkpoint again.'


def entry_of(data: bytes) -> FileEntry:
    """The entry of a file with these contents."""
    return len(data), digest(data)


class FileChecksums(Mapping[str, FileEntry]):
    """File, relative to the checkpoint's directory, to its entry. Immutable."""

    def __init__(self, entries: dict[str, FileEntry] | None = None):
        """Takes the entries of files; the dict is not copied and must not change anymore."""
        self._entries: dict[str, FileEntry] = {} if entries is None else entries
        # Looked up once for each chunk that is read: the dict's own method is faster than that of Mapping.
        self.get = self._entries.get

    @classmethod
    def decode(cls, data: bytes, where: str) -> FileChecksums:
        """Decodes the file of one process.

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
        return cls.from_json(files, where)

    @classmethod
    def recorded_by(cls, sidecar: Sidecar, where: str) -> FileChecksums:
        """The checksums that a sidecar records: of the manifest, and of the file checksums of the processes.

        Raises:
          CorruptCheckpointError: as :meth:`from_json`.
        """
        return cls.from_json(sidecar.extra.get('digests', {}), where)

    @classmethod
    def from_json(cls, files: Any, where: str) -> FileChecksums:
        """Checks a map from file to [bytes, hex], as it was found in JSON.

        Raises:
          CorruptCheckpointError: it is something else, or names a file outside the checkpoint.
        """
        if not isinstance(files, Mapping):
            raise CorruptCheckpointError(f'{where} has no file checksums but {type(files).__name__}. {_CURE}')
        entries: dict[str, FileEntry] = {}
        for name, entry in files.items():
            match entry:
                case [int(size), str(text)] if size >= 0 and _HEX.fullmatch(text) and is_inside(name):
                    entries[name] = (int(size), text)
                case _:
                    raise CorruptCheckpointError(f'{where} has the entry {name!r:.120}: {entry!r:.80}. {_CURE}')
        return cls(entries)

    def encode(self) -> bytes:
        """The bytes of the file of one process: ``{'algorithm': 'xxh3_64', 'files': {file: [bytes, hex]}}``."""
        files = dict(sorted(self.to_json().items()))
        return json.dumps({'algorithm': ALGORITHM, 'files': files}, separators=(',', ':')).encode()

    def to_json(self) -> dict[str, list[Any]]:
        """The entries as the sidecar records them, see :meth:`recorded_by`."""
        return {name: list(entry) for name, entry in self._entries.items()}

    # --- several processes --------------------------------------------------------------------------------------------

    @property
    def lists(self) -> list[str]:
        """Of what a sidecar records: the files that hold the checksums of the processes."""
        return [name for name in self._entries if is_file_checksums(name)]

    def read_lists(self, lists: Mapping[str, bytes], where: Callable[[str], str]) -> FileChecksums:
        """The checksums of all processes, where these are what a sidecar records.

        Args:
          lists: contents by name; of names that the sidecar does not record nothing is used.
          where: from a name to the path for an error.

        Raises:
          CorruptCheckpointError: one differs from its checksum, or does not decode.
        """
        merged: dict[str, FileEntry] = {}
        for name in self.lists:
            if name in lists:
                self.check(name, entry_of(lists[name]), where(name))
                merged |= FileChecksums.decode(lists[name], where(name))
        return FileChecksums(merged)

    def merged(self, other: Mapping[str, FileEntry]) -> FileChecksums:
        """These files and others; where both have one, it is the entry of ``other``."""
        return FileChecksums(self._entries | dict(other))

    # --- lookup -------------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> FileEntry:
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def below(self, prefix: str) -> list[str]:
        """The files whose names begin with ``prefix``."""
        return [name for name in self._entries if name.startswith(prefix)]

    def has_array(self, array: StoredArray) -> bool:
        """Whether every file of an array is here; the checksums of one of several processes may be lost."""
        chunks = array.metadata.get('chunks', ())
        if f'{array.location}/.zarray' not in self or len(chunks) != len(array.shape):
            return False
        # Other writers may name the chunks with slashes, which only the .zarray says.
        grids = [ChunkGrid(array.shape, tuple(chunks), separator) for separator in ('.', '/')]
        return any(
            grid.num_chunks <= len(self) and all(f'{array.location}/{grid.key(index)}' in self for index in grid)
            for grid in grids
        )

    # --- checks -------------------------------------------------------------------------------------------------------

    def matches(self, name: str, found: FileEntry) -> bool:
        """Whether a file is as recorded; True for one of which nothing is recorded."""
        return self.get(name, found) == found

    def check(self, name: str, found: FileEntry, where: str, cure: str = _CURE) -> None:
        """Compares a file with what is recorded of it, if anything is.

        Args:
          name: the file.
          found: its entry, see :func:`entry_of`.
          where: its path, or its leaf and its name, for the error.
          cure: what to do about it.

        Raises:
          CorruptCheckpointError: it differs.
        """
        if not self.matches(name, found):
            size, text = self._entries[name]
            raise CorruptCheckpointError(
                f'{where} is damaged: {found[0]:,} bytes with xxh3-64 {found[1]}, recorded are {size:,} bytes with '
                f'{text}. {cure}'
            )
