"""The files of a part while a restore reads them, and adds those that it lacks."""

from __future__ import annotations

import logging

from t5ckpt.core.keys import join, parents_of
from t5ckpt.errors import CheckpointNotFoundError, NotADirectoryStorageError, StorageError
from t5ckpt.format.file_checksums import FileChecksums, FileEntry, entry_of
from t5ckpt.format.names import COPIES, step_dir
from t5ckpt.format.zarray import ZARRAY, zarray_bytes
from t5ckpt.storage import is_disk_error
from t5ckpt.tiers.local_reads import LocalReads
from t5ckpt.tiers.part import Part

_log = logging.getLogger('t5ckpt')
# A disk that fails cannot read any of the thousands of files of a step.
_LOGGED_FILES = 5


class PartFiles:
    """The files of the part of this process.

    Attributes:
      entries: the checksums of all files, also of those that no longer exist.
      there: the names of those that exist and count as readable.
      brought: the names of those that came from elsewhere.
      has_lost: whether a file that existed is damaged, gone or cannot be read.
    """

    def __init__(self, part: Part, reads: LocalReads):
        """Reads nothing."""
        self.entries: dict[str, FileEntry] = dict(part.checksums)
        self.there = set(part.there)
        self.brought = set[str]()
        self.has_lost = False
        self._part = part
        self._reads = reads
        self._storage, self._directory = part.storage, step_dir(part.step)

    def url(self) -> str:
        """The directory, for errors."""
        return self._storage.url(self._directory)

    def positions(self, prefix: str) -> list[str]:
        """The names of the positions of data iterators with a prefix."""
        return sorted(name for name in self.there if name.startswith(prefix))

    def read(self, name: str) -> bytes | None:
        """The bytes of a file of the part. None if it is damaged, and was deleted; is gone; or the disk cannot read it.

        Raises:
          StorageError: another error, such as too many open files, which says nothing about the file.
        """
        key = join(self._directory, name)
        try:
            data = self._reads.repeated(lambda: self._storage.read(key))
        except (CheckpointNotFoundError, NotADirectoryStorageError):
            _log.warning('t5ckpt: %s no longer exists', self._storage.url(key))
        except StorageError as error:
            if not is_disk_error(error):
                raise
            unreadable = self._reads.unreadable[self._part.step]
            unreadable.add(name)
            level = logging.WARNING if len(unreadable) <= _LOGGED_FILES else logging.DEBUG
            url = self._storage.url(key)
            _log.log(level, 't5ckpt: %s cannot be read, and counts as missing in this restore: %s', url, error)
        else:
            if entry_of(data) == self.entries[name]:
                return data
            _log.warning('t5ckpt: %s is damaged and was deleted', self._storage.url(key))
            self._storage.delete_file(key)
        self.there.discard(name)
        self.has_lost = True
        return None

    def write(self, name: str, entry: FileEntry, data: bytes) -> None:
        """Writes a file that came from elsewhere."""
        key = join(self._directory, name)
        self._storage.make_dir(key.rpartition('/')[0])
        self._storage.write(key, data)
        self.note_brought(name, entry)

    def note_brought(self, name: str, entry: FileEntry) -> None:
        """Takes a file that was written here."""
        self.entries[name] = entry
        self._reads.unreadable[self._part.step].discard(name)
        self.there.add(name)
        self.brought.add(name)

    def write_metadata(self) -> None:
        """Writes the metadata of the arrays of which chunks came from elsewhere."""
        missing = {parent for parent in parents_of(self.brought) if join(parent, ZARRAY) not in self.there}
        for name, entry in self._part.write_metadata(missing).items():
            self.note_brought(name, entry)

    def replace_unreadable_metadata(self) -> None:
        """Writes the metadata that the disk cannot read again, from the manifest; the reader of an array needs it."""
        unreadable = {name for name in self._reads.unreadable[self._part.step] if name.endswith(f'/{ZARRAY}')}
        for location, array in self._part.arrays().items() if unreadable else ():
            name, data = join(location, ZARRAY), zarray_bytes(array)
            if name in unreadable and entry_of(data) == self.entries.get(name):
                self.write(name, self.entries[name], data)

    def record(self) -> None:
        """Writes the checksums of the files that came from elsewhere."""
        listed = {name for entries in self._part.lists.values() for name in entries}
        copies = {name: entry for name, entry in self.entries.items() if name not in listed}
        self._storage.write(join(self._directory, COPIES), FileChecksums(copies).encode())
