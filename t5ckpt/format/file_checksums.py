"""The file checksums of a checkpoint: the length and the xxh3-64 of each file. No files are read or written here.

Every process writes the checksums of its files to ``integrity.<process>.json``. The facts in the manifest hold the checksums of
the rest of the manifest, of these lists and of themselves, so that every byte of the checkpoint can be verified:

    facts ──> checkpoint, integrity.0.json, integrity.1.json, ... ──> chunk files, .zarray, iterator files

A checksum detects accidents such as flipped bits, a truncated copy, or files of another step. It is not a signature: anyone with
write access to the checkpoint can also write its checksums.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from t5ckpt.core.keys import is_inside, join
from t5ckpt.core.text import CURE_OF_DAMAGE
from t5ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.checksum import ALGORITHM, digest
from t5ckpt.format.chunk_grid import ChunkGrid
from t5ckpt.format.facts import Facts, decode_facts
from t5ckpt.format.names import generation_of, is_file_checksums, without_generation

FileEntry = tuple[int, str]
"""A file's bytes and the xxh3-64 of its contents, in hex."""

_HEX = re.compile('[0-9a-f]{16}')


def entry_of(data: bytes | memoryview) -> FileEntry:
    """The length and the checksum of a file's contents."""
    return len(data), digest(data)


def counts_of(files: Mapping[str, FileEntry]) -> dict[str, int]:
    """The bytes and the number of the files in the directories of arrays, for the facts."""
    sizes = [size for name, (size, _) in files.items() if '/' in without_generation(name)]
    return {'bytes': sum(sizes), 'files': len(sizes)}


def size_text(nbytes: int, expected: int) -> str:
    """The predicate of a sentence about a file of the wrong size, such as 'has 5 bytes, expected 8'."""
    return f'has {nbytes:,} bytes, expected {expected:,}'


def damaged_text(where: str, entry: FileEntry, expected: FileEntry) -> str:
    """The sentence that a file differs from its recorded entry."""
    return (
        f'{where} is damaged: it has {entry[0]:,} bytes with xxh3-64 {entry[1]}, expected {expected[0]:,} bytes with '
        f'{expected[1]}.'
    )


class FileChecksums(Mapping[str, FileEntry]):
    """An immutable mapping from file names, relative to the checkpoint's directory, to their entries."""

    def __init__(self, entries: dict[str, FileEntry] | None = None):
        """Takes ownership of the entries; the dict is not copied and must not change afterwards."""
        self._entries: dict[str, FileEntry] = {} if entries is None else entries
        # Called for each chunk that is read, and a dict's method is faster than Mapping's.
        self.get = self._entries.get

    @classmethod
    def decode(cls, data: bytes, where: str, generation: str = '') -> FileChecksums:
        """Decodes the file of one process; in a ``generation_dir`` it names the files of this directory, relative to it.

        Raises:
          CorruptCheckpointError: not JSON, or a name that leads outside the checkpoint.
          UnsupportedFormatError: another algorithm.
        """
        try:
            contents = json.loads(data)
            algorithm, files = contents['algorithm'], contents['files']
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CorruptCheckpointError(
                f'{where} does not decode ({type(error).__name__}: {error!s:.120}). {CURE_OF_DAMAGE}'
            ) from error
        if algorithm != ALGORITHM:
            raise UnsupportedFormatError(
                f'{where} has checksums of the algorithm {algorithm!r:.40}; this version of t5ckpt knows {ALGORITHM}. Upgrade it.'
            )
        entries = cls.from_json(files, where)
        return cls({join(generation, without_generation(name)): entry for name, entry in entries.items()})

    @classmethod
    def recorded_by(cls, facts: Facts, where: str) -> FileChecksums:
        """The checksums in the facts: of the manifest and of the processes' lists.

        Raises:
          CorruptCheckpointError: as :meth:`from_json`.
        """
        return cls.from_json(facts.digests, where)

    @classmethod
    def recorded_in(cls, facts: bytes, where: str) -> FileChecksums:
        """As :meth:`recorded_by`, of undecoded facts; raises also as ``decode_facts``."""
        return cls.recorded_by(decode_facts(facts, where), where)

    @classmethod
    def from_json(cls, files: Any, where: str) -> FileChecksums:
        """Parses a decoded JSON object from file to [bytes, hex].

        Raises:
          CorruptCheckpointError: another type, or a name that leads outside the checkpoint.
        """
        if not isinstance(files, Mapping):
            raise CorruptCheckpointError(
                f'{where}: the file checksums are {type(files).__name__}, expected an object. {CURE_OF_DAMAGE}'
            )
        entries: dict[str, FileEntry] = {}
        for name, entry in files.items():
            match entry:
                case [int(size), str(text)] if size >= 0 and _HEX.fullmatch(text) and is_inside(name):
                    entries[name] = (int(size), text)
                case _:
                    raise CorruptCheckpointError(
                        f'{where} has the bad entry {name!r:.120}: {entry!r:.80}. {CURE_OF_DAMAGE}'
                    )
        return cls(entries)

    def encode(self) -> bytes:
        """The contents of one process's file: ``{'algorithm': 'xxh3_64', 'files': {file: [bytes, hex]}}``.

        Its files have the names that they have below its own directory, so a copy of the step has the same list.
        """
        files = dict(sorted((without_generation(name), entry) for name, entry in self._entries.items()))
        return json.dumps({'algorithm': ALGORITHM, 'files': files}, separators=(',', ':')).encode()

    def to_json(self) -> dict[str, list[Any]]:
        """The entries as the facts record them, see :meth:`recorded_by`."""
        return {name: list(entry) for name, entry in self._entries.items()}

    # --- several processes --------------------------------------------------------------------------------------------

    @property
    def lists(self) -> list[str]:
        """The names of the processes' lists, if these are the checksums in the facts."""
        return [name for name in self._entries if is_file_checksums(name)]

    def load_lists(self, read: Callable[[str], bytes | None], where: Callable[[str], str]) -> dict[str, FileChecksums]:
        """Reads, verifies and decodes the processes' lists, by name; ``self`` holds the checksums in the facts.

        Args:
          read: from a list's name to its bytes; None leaves it out.
          where: from a name to the path, for errors.

        Raises:
          CorruptCheckpointError: one differs from its checksum, or does not decode.
        """
        loaded: dict[str, FileChecksums] = {}
        for name in self.lists:
            if (data := read(name)) is not None:
                self.check(name, entry_of(data), where(name))
                loaded[name] = FileChecksums.decode(data, where(name), generation_of(name))
        return loaded

    @classmethod
    def union(cls, parts: Iterable[Mapping[str, FileEntry]]) -> FileChecksums:
        """The entries of several mappings; those of a later one take precedence."""
        entries: dict[str, FileEntry] = {}
        for part in parts:
            entries |= part
        return cls(entries)

    def merged(self, other: Mapping[str, FileEntry]) -> FileChecksums:
        """The union with ``other``, whose entries take precedence."""
        return FileChecksums.union((self, other))

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
        """Whether every file of an array has a checksum. Those of one process may be lost."""
        chunks = array.metadata.get('chunks', ())
        if f'{array.location}/.zarray' not in self or len(chunks) != len(array.shape):
            return False
        # Other writers may use slashes in chunk names, which only the .zarray records.
        grids = [ChunkGrid(array.shape, tuple(chunks), separator) for separator in ('.', '/')]
        return any(
            grid.num_chunks <= len(self) and all(f'{array.location}/{grid.key(index)}' in self for index in grid)
            for grid in grids
        )

    # --- checks -------------------------------------------------------------------------------------------------------

    def matches(self, name: str, entry: FileEntry) -> bool:
        """Whether a file equals its entry; True for a file without one."""
        return self.get(name, entry) == entry

    def check(self, name: str, entry: FileEntry, where: str, cure: str = CURE_OF_DAMAGE) -> None:
        """Compares a file with its recorded entry, if it has one.

        Args:
          name: the file.
          entry: the length and checksum of its contents, see :func:`entry_of`.
          where: its path, or its leaf and its name, for the error.
          cure: the last sentence of the error.

        Raises:
          CorruptCheckpointError: they differ.
        """
        if not self.matches(name, entry):
            raise CorruptCheckpointError(f'{damaged_text(where, entry, self._entries[name])} {cure}')
