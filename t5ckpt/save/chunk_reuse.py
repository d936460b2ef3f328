"""Links or copies the chunk files of unchanged arrays from the previous checkpoint instead of writing them.

A chunk is linked in one of three cases:

- The chunk has no codec, and its xxh3-64 and size equal those of the file of the same name in the previous checkpoint.
  This also finds frozen weights that passed through a donating step, and works after a restart.
- The chunk has a codec, and the xxh3-64 of its values equals that of the values that this process encoded for the
  previous checkpoint, which used the same codec. Then it is not encoded.
- The chunk has a codec, and its encoded bytes equal those in the previous checkpoint, as after a restart.

An object store copies a chunk on the server, if its values have the xxh3-64 and the codec that this process wrote before, and its
object still has the version (ETag, generation) of that write. The server compares the version, and no byte is sent. If the copy
fails, the chunk is uploaded. The first save of a process uploads all chunks.

Every checkpoint stays complete and can be deleted independently: a file is removed with its last link. TensorStore writes
by rename and never into an existing file, so no save changes the chunks of another checkpoint. Where a link cannot be
made (another device, a store without links, too many links, a missing file or one of another size), the chunk is written.

The checksum of a file is verified before it is linked; a damaged chunk is written again. A file whose inode, size and times
are unchanged since this process wrote it is not read again. Linked checkpoints share one copy of the data: a sector that
fails later damages all of them. Each checkpoint records the checksum, so each detects the damage.
``reuse_unchanged=False`` writes every chunk in every save.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from t5ckpt.catalog.listing import listing, read_facts
from t5ckpt.core.keys import join
from t5ckpt.errors import T5CkptError
from t5ckpt.format.checksum import digest
from t5ckpt.format.file_checksums import FileChecksums, FileEntry
from t5ckpt.format.names import file_checksums_name, step_dir
from t5ckpt.storage import Storage


@dataclasses.dataclass(frozen=True)
class PreviousCheckpoint:
    """A committed checkpoint whose chunks can be linked.

    Attributes:
      directory: its directory in the same storage; in an object store, that of its arrays.
      checksums: file to (bytes, xxh3-64 hex).
      facts_checksum: of its facts; differs once another checkpoint has replaced this one.
      file_versions: by file, from when its checksum was last verified; see ``Storage.stamp``. In an object store, of its write.
      values: for chunks with a codec, file to the xxh3-64 of the values before encoding.
      codecs: array directory to the codec, if this process wrote the checkpoint.
    """

    directory: str
    checksums: Mapping[str, FileEntry]
    facts_checksum: str = ''
    file_versions: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    values: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    codecs: Mapping[str, Any] | None = None

    def codec(self, storage: Storage, location: str) -> Any:
        """The codec of an array; None without one, or if the array is not there."""
        if self.codecs is not None:
            return self.codecs.get(location)
        try:
            return json.loads(storage.read(join(self.directory, location, '.zarray')))['compressor']
        except (T5CkptError, ValueError, LookupError, TypeError):
            return None

    def link(self, storage: Storage, key: str, entry: tuple[int, str], target: str) -> Any:
        """Links or copies one file to ``target`` if it still matches its checksum, so that damage is not copied.

        A file that is unchanged since this process wrote or read it is not read again.

        Returns:
          The version of a copy, True for a link; None if the file has to be written.
        """
        source, version = join(self.directory, key), self.file_versions.get(key)
        if not storage.links:
            return None if version is None else storage.copy_unchanged(source, target, version)
        try:
            is_known = version is not None and version == storage.stamp(source)
            if not is_known and (storage.size(source) != entry[0] or digest(storage.read(source)) != entry[1]):
                return None
        except T5CkptError:
            # Deleted in the meantime, or unreadable: the chunk is written.
            return None
        return storage.link(source, target) or None

    def is_there(self, storage: Storage) -> bool:
        """Whether the directory still holds this checkpoint, and not a later save of the same step."""
        if storage.copies:
            # The directory has a name of its own, and the server compares the version of each file.
            return True
        try:
            return digest(read_facts(storage, self.directory)) == self.facts_checksum
        except T5CkptError:
            return False


class ReusedChunks:
    """The chunks that one save links or copies from the previous checkpoint. Safe from any thread.

    Attributes:
      storage, directory: of the new checkpoint.
      previous: the checkpoint to take chunks from, in the same storage; None takes none.
      files: the files that were linked or copied, with their size and checksum.
      values: of the chunks that may be found by their values, see ``PreviousCheckpoint``.
      versions: of the files in an object store.
    """

    def __init__(self, storage: Storage, directory: str, previous: PreviousCheckpoint | None):
        """Links nothing yet."""
        self.files: dict[str, FileEntry] = {}
        self.values: dict[str, str] = {}
        self.versions: dict[str, Any] = {}
        self.storage, self.directory, self.previous = storage, directory, previous

    def last_codec(self, location: str) -> Any:
        """The codec that the previous checkpoint has for the array in a directory; None without one."""
        return None if self.previous is None else self.previous.codec(self.storage, location)

    def link(self, key: str, entry: FileEntry) -> bool:
        """Links or copies a file with this size and checksum; returns whether it is done."""
        previous = self.previous
        version = None if previous is None else previous.link(self.storage, key, entry, join(self.directory, key))
        if previous is None or version is None:
            return False
        self.files[key], self.versions[key] = entry, version
        if key in previous.values:
            self.values[key] = previous.values[key]
        return True

    def link_equal(self, key: str, entry: FileEntry) -> bool:
        """Links or copies the file of this name if it has this size and checksum."""
        return self.previous is not None and self.previous.checksums.get(key) == entry and self.link(key, entry)

    def link_values(self, location: str, key: str, data: np.ndarray, codec: Any) -> bool:
        """Links or copies the file of a chunk of the array at a location, if it has these values and this codec."""
        self.values[key] = digest(data)
        previous = self.previous
        entry = None if previous is None else previous.checksums.get(key)
        if previous is None or entry is None or previous.values.get(key) != self.values[key]:
            return False
        return previous.codec(self.storage, location) == codec and self.link(key, entry)


def find_previous(storage: Storage) -> PreviousCheckpoint | None:
    """The latest checkpoint on storage, for the first save of a process; None where it has no checksums."""
    steps = [listed.step for listed in listing(storage) if listed.is_t5x] if storage.is_file_system else []
    if not steps:
        return None
    directory = step_dir(steps[-1])
    key = join(directory, file_checksums_name(0))
    try:
        checksums = FileChecksums.decode(storage.read(key), storage.url(key))
        return PreviousCheckpoint(directory, checksums, digest(read_facts(storage, directory)))
    except T5CkptError:
        # Written by T5X, or damaged: nothing can be linked, so all chunks are written.
        return None
