"""Links or copies the files of unchanged arrays from the previous checkpoint instead of writing them.

A file is linked in one of two cases:

- Its xxh3-64 and size equal those of the file of the same name in the previous checkpoint. This also finds frozen weights that
  passed through a donating step, and works after a restart.
- The xxh3-64 of its values and the codec equal those of the chunk that this process encoded for the previous checkpoint. Then it
  is not encoded.

An object store copies the file on the server, if the object still has the version (ETag, generation) of this process's write. The
server compares the version, and no byte is sent. If the copy fails, the chunk is uploaded. The first save of a process uploads
all chunks.

Every checkpoint stays complete and can be deleted independently: a file is removed with its last link. No save writes into an
existing file. Where a link cannot be made (another device, a store without links, too many links, a missing file or one of
another size), the chunk is written.

The checksum of a file is verified before it is linked; a damaged chunk is written again. A file whose inode, size and times
are unchanged since this process wrote it is not read again. Linked checkpoints share one copy of the data: a sector that
fails later damages all of them. Each checkpoint records the checksum, so each detects the damage.
``reuse_unchanged=False`` writes every chunk in every save.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from t5ckpt.catalog.listing import listing, read_facts
from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import Path
from t5ckpt.errors import T5CkptError
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.checksum import digest
from t5ckpt.format.file_checksums import FileChecksums, FileEntry, entry_of
from t5ckpt.format.names import file_checksums_name, step_dir
from t5ckpt.storage import Storage


@dataclasses.dataclass
class WrittenArrays:
    """The arrays of a checkpoint, as a process has written them. Those of a committed one can be linked in the next save.

    Attributes:
      directory: of the arrays in the storage.
      checksums: file to (bytes, xxh3-64 hex).
      facts_checksum: of the facts; differs once another checkpoint has replaced this one.
      arrays: the stored arrays by leaf, with the codec that was used.
      linked_bytes: how many bytes were linked from the previous checkpoint.
      file_versions: by file, from when its checksum was last verified; see ``Storage.write_chunk``.
      values: file to the xxh3-64 of the values before encoding, or without a codec of their beginning, and the codec.
      codecs: array directory to the codec.
      is_own: whether a save of this process wrote it; otherwise only the checksums are known.
    """

    directory: str
    checksums: dict[str, FileEntry] = dataclasses.field(default_factory=dict[str, FileEntry])
    facts_checksum: str = ''
    arrays: dict[Path, StoredArray] = dataclasses.field(default_factory=dict[Path, StoredArray])
    linked_bytes: int = 0
    file_versions: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    values: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    codecs: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    is_own: bool = True

    def codec(self, storage: Storage, location: str) -> Any:
        """The codec of an array; None without one, or if the array is not there."""
        if self.is_own:
            return self.codecs.get(location)
        try:
            return json.loads(storage.read(join(self.directory, location, '.zarray')))['compressor']
        except (T5CkptError, ValueError, LookupError, TypeError):
            return None

    def link(self, storage: Storage, key: str, entry: FileEntry, target: str) -> Any:
        """Links or copies one file to ``target`` if it still matches its checksum, so that damage is not copied.

        A file that is unchanged since this process wrote or read it is not read again.

        Returns:
          The version of the new file; None if it has to be written.
        """
        source, version = join(self.directory, key), self.file_versions.get(key)
        if not storage.links:
            return None if version is None else storage.copy_unchanged(source, target, version)
        try:
            is_known = version is not None and version == storage.stamp(source)
            if not is_known and (storage.size(source) != entry[0] or entry_of(storage.read(source)) != entry):
                return None
        except T5CkptError:
            # Deleted in the meantime, or unreadable: the chunk is written.
            return None
        return storage.stamp(target) if storage.link(source, target) else None

    def note_committed(self, storage: Storage, directory: str, facts_checksum: str) -> None:
        """Makes it the arrays of a committed checkpoint, in its final directory."""
        self.directory, self.facts_checksum = directory, facts_checksum
        if storage.links:
            versions = self.file_versions.items()
            self.file_versions = {key: storage.stamp(join(directory, key), version) for key, version in versions}

    def is_there(self, storage: Storage) -> bool:
        """Whether the directory still holds this checkpoint, and not a later save of the same step."""
        if storage.copies:
            # The directory has a name of its own, and the server compares the version of each file.
            return True
        try:
            return digest(read_facts(storage, self.directory)) == self.facts_checksum
        except T5CkptError:
            return False


def find_previous(storage: Storage) -> WrittenArrays | None:
    """The latest checkpoint on storage, for the first save of a process; None where it has no checksums."""
    steps = [listed.step for listed in listing(storage) if listed.is_t5x] if storage.is_file_system else []
    if not steps:
        return None
    directory = step_dir(steps[-1])
    key = join(directory, file_checksums_name(0))
    try:
        checksums = FileChecksums.decode(storage.read(key), storage.url(key))
        return WrittenArrays(directory, dict(checksums), digest(read_facts(storage, directory)), is_own=False)
    except T5CkptError:
        # Written by T5X, or damaged: nothing can be linked, so all chunks are written.
        return None
