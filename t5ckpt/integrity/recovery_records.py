"""Reads the usable records of a damaged checkpoint: its manifest, its facts and its file checksums.

Damaged file checksums verify nothing. If the files reproduce the list whose checksum the manifest records, all of them are
intact and the list is rebuilt.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from t5ckpt.catalog.facts_files import facts_file
from t5ckpt.catalog.locate import Located
from t5ckpt.core.keys import is_inside
from t5ckpt.core.text import CURE_OF_DAMAGE, Lines, lines, listed, some_of
from t5ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatError, StorageError, T5CkptError
from t5ckpt.format.array_spec import StoredArray, StoredLeaf
from t5ckpt.format.facts import decode_facts
from t5ckpt.format.file_checksums import FileChecksums, FileEntry, entry_of
from t5ckpt.format.manifest import Manifest, decode_manifest, split_facts
from t5ckpt.format.names import (
    MANIFEST,
    PINNED,
    generation_of,
    is_facts_file,
    is_file_checksums,
    is_position,
    is_removal_mark,
    positions_for_t5x,
)
from t5ckpt.format.zarray import ZARRAY, rebuilt_zarray
from t5ckpt.integrity.report import Damage, VerifyReport
from t5ckpt.reading.checkpoint_files import CheckpointFiles, in_threads

Source = tuple[bytes, bytes, float]
"""The bytes of the manifest and of the facts, and the manifest's modification time, if the storage has it."""


def source_of(located: Located) -> Source:
    """The contents that identify a checkpoint, to detect that it was replaced.

    Raises:
      CheckpointNotFoundError: the manifest does not exist.
    """
    files = CheckpointFiles.at(located.storage, located.directory)
    entries = {entry.name: entry for entry in located.storage.entries(located.directory)}
    written = entries[located.manifest].mtime if located.manifest in entries else 0.0
    manifest, facts = split_facts(files.read(located.manifest))
    return manifest, _read(files, facts_file(manifest, entries)) if facts is None else facts, written


class RecoveryRecords:
    """The manifest, the facts and the file checksums.

    Attributes:
      source: the bytes of manifest and facts.
      manifest: decoded.
      facts: None for a checkpoint of another program.
      had_checksums: whether t5ckpt wrote file checksums.
      unusable_lists: files with file checksums (``integrity.*.json``) that are missing or damaged.
      intact: the checksums of the other lists.
      checksums: these; the checksums of all files after :meth:`reconstruct` has returned True.
    """

    def __init__(self, located: Located, report: VerifyReport):
        """Takes the checkpoint and the report of a full verification.

        Raises:
          CorruptCheckpointError: a damage cannot be repaired.
        """
        self._located = located
        self._files = CheckpointFiles.at(located.storage, located.directory)
        wrong = {damage.file for damage in report.damages}
        _refuse(located, [damage for damage in report.damages if _is_unrecoverable(damage, located.manifest)])
        self.source = source_of(located)
        self.manifest: Manifest = decode_manifest(self.source[0], located.url)
        raw = self.source[1]
        self.facts = decode_facts(raw, located.url) if raw else None
        self.had_checksums = self.facts is not None
        recorded = FileChecksums() if self.facts is None else FileChecksums.recorded_by(self.facts, located.url)
        lists = set(recorded.lists)
        self.unusable_lists = lists & wrong
        self.intact = FileChecksums.union(
            FileChecksums.decode(self._files.read(name), name, generation_of(name))
            for name in sorted(lists - self.unusable_lists)
        )
        self.checksums = self.intact

    def zarrays(self, leaves: Mapping[str, StoredLeaf], damages: Sequence[Damage]) -> dict[str, bytes]:
        """The damaged ``.zarray`` files that can be rebuilt from the manifest: their new bytes, by name."""
        new_bytes: dict[str, bytes] = {}
        for damage in damages:
            rebuilt = self._zarray(leaves[damage.leaf].array) if damage.leaf in leaves else None
            if rebuilt is not None and damage.file in {rebuilt[0], rebuilt[0].removesuffix(f'/{ZARRAY}')}:
                new_bytes[rebuilt[0]] = rebuilt[1]
        return new_bytes

    def _zarray(self, array: StoredArray) -> tuple[str, bytes] | None:
        name, data = f'{array.location}/{ZARRAY}', rebuilt_zarray(array)
        if data is None:
            return None
        if name in self.checksums:
            return (name, data) if self.checksums.matches(name, entry_of(data)) else None
        # A readable file with other metadata is not damaged: the array may be a different one.
        return None if _json(_read(self._files, name)) is not None else (name, data)

    def reconstruct(self, zarrays: Mapping[str, bytes]) -> bool:
        """Whether file checksums verify all files; rebuilds a damaged list from the files first, if possible.

        Raises:
          StorageError: a file cannot be read.
        """
        if self.facts is None or not self.unusable_lists:
            return self.facts is not None
        recorded = FileChecksums.recorded_by(self.facts, self._located.url)
        if len(self.unusable_lists) != 1 or not self.unusable_lists <= recorded.keys():
            return False
        files = files_of(self._located)
        known = {*self.checksums, *positions_for_t5x(files)}
        names = [name for name in files if name not in known and not is_own(name)]
        entries: dict[str, FileEntry] = {
            name: entry_of(data) for name, data in zarrays.items() if name not in self.checksums
        }
        for name, entry in in_threads([name for name in names if name not in zarrays], self._files.digest):
            if isinstance(entry, StorageError):
                raise entry
            if isinstance(entry, T5CkptError):
                return False
            entries[name] = entry
        rebuilt = FileChecksums(entries)
        (name,) = self.unusable_lists
        if not recorded.matches(name, entry_of(rebuilt.encode())):
            return False
        self.checksums = self.checksums.merged(rebuilt)
        return True

    def unverified(self, leaves: Mapping[str, StoredLeaf], is_verified: bool) -> list[str]:
        """The leaves, and the files of data iterators, that have no file checksums."""
        names = sorted(name for name, leaf in leaves.items() if not self.checksums.has_array(leaf.array))
        # If all lists are intact, an iterator's file without a checksum does not belong to the checkpoint.
        files = [] if is_verified else files_of(self._located)
        known = {*self.checksums, *positions_for_t5x(files)}
        return names + [file for file in files if is_position(file) and file not in known]

    def notes(self, unverified: Sequence[str], zarrays: Iterable[str]) -> list[str]:
        """The caveats of a repair without file checksums for all files."""
        notes: list[str] = []
        rebuilt = sorted(name for name in zarrays if name not in self.checksums)
        if rebuilt:
            notes.append(f'{", ".join(rebuilt[:3])}: rebuilt as T5X and t5ckpt write it; no checksum verifies it')
        if unverified and self.had_checksums:
            notes.append(f'no checksum verifies {some_of(unverified, 5)}: taken as they are')
        return notes


def _read(files: CheckpointFiles, name: str) -> bytes:
    """A file's bytes; empty if the file does not exist or is not a regular file."""
    try:
        return files.read(name)
    except (CheckpointNotFoundError, FormatError):
        return b''


def _json(data: bytes) -> Mapping[str, Any] | None:
    """The object in a JSON file; None if it does not decode."""
    try:
        decoded = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return decoded if isinstance(decoded, Mapping) else None


def is_own(name: str) -> bool:
    """Whether a file is metadata of the checkpoint, and not of an array or an iterator."""
    return name in {MANIFEST, PINNED} or is_removal_mark(name) or is_file_checksums(name) or is_facts_file(name)


def files_of(located: Located) -> list[str]:
    """All files of the checkpoint, without the partial files and locks of an interrupted write."""
    names = [key.removeprefix(f'{located.directory}/') for key, _ in located.storage.walk(located.directory)]
    return [name for name in names if not name.endswith(('.__partial', '.__lock')) and is_inside(name)]


def below(names: Iterable[str], locations: Collection[str]) -> set[str]:
    """The files that are at or below one of the locations."""
    return {
        name for name in names if any(name == location or name.startswith(f'{location}/') for location in locations)
    }


def unrecoverable_text(damages: Sequence[Damage]) -> Lines:
    """The damages that cannot be repaired, as text."""
    return lines('cannot be repaired:', *listed(damages))


def _is_unrecoverable(damage: Damage, manifest: str) -> bool:
    return (
        damage.file == manifest
        or is_facts_file(damage.file)
        or damage.kind in {'contradiction', 'unsafe', 'unreadable'}
    )


def _refuse(located: Located, damages: Sequence[Damage]) -> None:
    if damages:
        raise CorruptCheckpointError(
            lines(
                lines(located.url, unrecoverable_text(damages), between=': '),
                f'{CURE_OF_DAMAGE} Nothing was written.',
            )
        )
