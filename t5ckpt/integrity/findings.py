"""Collects the damages that a verification finds, each with the leaf, the chunk and the elements that it affects."""

from __future__ import annotations

import dataclasses

from t5ckpt.errors import CheckpointNotFoundError, StorageError, T5CkptError, UnsafeSpecError, UnsupportedFormatError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import ChunkIndex
from t5ckpt.format.file_checksums import FileChecksums, FileEntry, size_text
from t5ckpt.format.zarray import implied_metadata
from t5ckpt.integrity.implied_files import located_in_leaf
from t5ckpt.integrity.report import Damage
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.storage import means_damage

_IMPLIED = 'only t5ckpt opens the array without it, and t5ckpt cp writes it again'


class Findings:
    """The damages that a verification has found so far.

    Attributes:
      damages: in the order in which they were found.
      leaves: name and stored leaf, by the directory of its array.
      checksums: the file checksums of all processes.
    """

    def __init__(self, files: CheckpointFiles):
        """Takes the reader of the checkpoint's files."""
        self._files = files
        self.damages: list[Damage] = []
        self.leaves: dict[str, tuple[str, StoredArray]] = {}
        self.checksums = FileChecksums()

    def differs(self, name: str, recorded: FileEntry, entry: FileEntry) -> None:
        """Adds a file whose size or checksum is not the recorded one; the message names another file with these bytes."""
        if entry[0] != recorded[0]:
            self.size_differs(name, entry[0], recorded[0])
            return
        text = f'xxh3-64 is {entry[1]}, expected {recorded[1]}'
        other = next((file for file, listed in self.checksums.items() if listed == entry and file != name), None)
        offsets = (0, entry[0])
        if other is not None:
            text += f'; these are the bytes of {other}'
        elif (zeros := self._hole(name)) is not None:
            text += f'; the bytes from {zeros[0]:,} to {zeros[1]:,} may be a hole'
        self.add('checksum', name, text, offsets=offsets)

    def _hole(self, name: str) -> tuple[int, int] | None:
        try:
            return self._files.zeros(name)
        except T5CkptError:
            # The file was deleted after its checksum was computed.
            return None

    def size_differs(self, name: str, nbytes: int, recorded: int) -> None:
        """Adds a file of another size than the recorded one."""
        offsets = (min(nbytes, recorded), max(nbytes, recorded))
        how = 'are missing' if nbytes < recorded else 'are additional'
        text = f'{size_text(nbytes, recorded)}: bytes {offsets[0]:,} to {offsets[1]:,} {how}'
        self.add('size', name, text, offsets=offsets)

    def failed(self, name: str, error: T5CkptError, leaf: str = '', chunk_index: ChunkIndex | None = None) -> None:
        """Adds a file that cannot be read or decoded.

        Raises:
          UnsupportedFormatError: t5ckpt does not read the file's format.
          StorageError: an object store failed or refused the request, or this process cannot read the file, so its state is
            unknown. After an error of the disk, such as a bad sector, the other files are still verified.
        """
        if isinstance(error, StorageError) and not (self._files.storage.is_file_system and means_damage(error)):
            raise error
        if isinstance(error, UnsupportedFormatError) and all(damage.file != name for damage in self.damages):
            # It says nothing about the bytes, unless they are damaged.
            raise error
        match error:
            case UnsafeSpecError():
                kind = 'unsafe'
            case CheckpointNotFoundError():
                kind = 'missing'
            case StorageError():
                kind = 'unreadable'
            case _:
                kind = 'undecodable'
        self.damages.append(self._located_in_leaf(Damage(kind, name, str(error), leaf, chunk_index)))

    def add(self, kind: str, name: str, text: str, *, offsets: tuple[int, int] | None = None) -> None:
        """Adds a damage; see ``Damage`` for the kinds."""
        self.damages.append(self._located_in_leaf(Damage(kind, name, text, offsets=offsets)))

    def _located_in_leaf(self, damage: Damage) -> Damage:
        """Adds the leaf, the chunk and the elements of the file."""
        parts = damage.file.split('/')
        for length in range(len(parts), 0, -1):
            location = '/'.join(parts[:length])
            if location in self.leaves:
                name, leaf = self.leaves[location]
                if damage.file in implied_metadata(leaf, self.checksums):
                    damage = dataclasses.replace(damage, text=f'{_IMPLIED}: {damage.text}')
                return located_in_leaf(damage, name, leaf, '/'.join(parts[length:]))
        return damage
