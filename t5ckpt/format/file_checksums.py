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
from collections.abc import Callable
from typing import Any

from t5ckpt.core.keys import is_inside, join
from t5ckpt.core.text import CURE_OF_DAMAGE
from t5ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from t5ckpt.format.checksum import ALGORITHM, digest
from t5ckpt.format.decoding import decoding
from t5ckpt.format.names import generation_of, is_file_checksums, without_generation

FileEntry = tuple[int, str]
"""A file's bytes and the xxh3-64 of its contents, in hex."""

_HEX = re.compile('[0-9a-f]{16}')


def entry_of(data: bytes | memoryview) -> FileEntry:
    """The length and the checksum of a file's contents."""
    return len(data), digest(data)


def size_text(nbytes: int, expected: int) -> str:
    """The predicate of a sentence about a file of the wrong size, such as 'has 5 bytes, expected 8'."""
    return f'has {nbytes:,} bytes, expected {expected:,}'


def damaged_text(where: str, entry: FileEntry, expected: FileEntry) -> str:
    """The sentence that a file differs from its recorded entry."""
    return (
        f'{where} is damaged: it has {entry[0]:,} bytes with xxh3-64 {entry[1]}, expected {expected[0]:,} bytes with '
        f'{expected[1]}.'
    )


class FileChecksums(dict[str, FileEntry]):
    """From the names of files, relative to the checkpoint's directory, to their entries; not changed once it is made."""

    @classmethod
    def decode(cls, data: bytes, where: str, generation: str = '') -> FileChecksums:
        """Decodes the file of one process; in a ``generation_dir`` it names the files of this directory, relative to it.

        Raises:
          CorruptCheckpointError: not JSON, or a name that leads outside the checkpoint.
          UnsupportedFormatError: another algorithm.
        """
        with decoding(where):
            contents = json.loads(data)
            algorithm = contents['algorithm']
            if algorithm != ALGORITHM:
                raise UnsupportedFormatError(
                    f'it has checksums of the algorithm {algorithm!r:.40}; this version of t5ckpt knows {ALGORITHM}. Upgrade it.'
                )
            entries = cls.parse(contents['files'])
        return cls({join(generation, without_generation(name)): entry for name, entry in entries.items()})

    @classmethod
    def parse(cls, files: Any) -> FileChecksums:
        """Parses a decoded JSON object from file to [bytes, hex].

        Raises:
          CorruptCheckpointError: another type, or a name that leads outside the checkpoint.
        """
        if not isinstance(files, dict):
            raise CorruptCheckpointError(
                f'the file checksums are {type(files).__name__}, expected an object. {CURE_OF_DAMAGE}'
            )
        checksums = cls()
        for name, entry in files.items():
            match entry:
                case [int(size), str(text)] if size >= 0 and _HEX.fullmatch(text) and is_inside(name):
                    checksums[name] = (size, text)
                case _:
                    raise CorruptCheckpointError(f'bad entry {name!r:.120}: {entry!r:.80}. {CURE_OF_DAMAGE}')
        return checksums

    def encode(self) -> bytes:
        """The contents of one process's file: ``{'algorithm': 'xxh3_64', 'files': {file: [bytes, hex]}}``.

        Its files have the names that they have below its own directory, so a copy of the step has the same list.
        """
        files = dict(sorted((without_generation(name), entry) for name, entry in self.items()))
        return json.dumps({'algorithm': ALGORITHM, 'files': files}, separators=(',', ':')).encode()

    # --- several processes --------------------------------------------------------------------------------------------

    @property
    def lists(self) -> list[str]:
        """The names of the processes' lists, if these are the checksums in the facts."""
        return [name for name in self if is_file_checksums(name)]

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
            raise CorruptCheckpointError(f'{damaged_text(where, entry, self[name])} {cure}')
