"""Copies files of a step from the run's storage to a part in a local directory, several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from t5ckpt.catalog.locate import Located
from t5ckpt.commit.transfer import IN_FLIGHT_BYTES, copy_files
from t5ckpt.core.keys import join
from t5ckpt.errors import StorageError
from t5ckpt.format.file_checksums import FileChecksums, FileEntry, entry_of
from t5ckpt.format.names import TRAIN_DS_PREFIX, generation_of, without_generation
from t5ckpt.reading.checkpoint_files import CheckpointFiles
from t5ckpt.storage import Storage

_WORKERS = 16


class Fetch:
    """The copies of one step's files.

    Attributes:
      entries: of the files that were copied; also after an error.
      source_error: of a read, after which a copy failed; None without one.
    """

    def __init__(
        self,
        source: Located,
        checksums: FileChecksums,
        target: Storage,
        directory: str,
        *,
        budget_bytes: int = IN_FLIGHT_BYTES,
    ):
        """Copies nothing.

        Args:
          source: the step in the run's storage.
          checksums: of its files, as far as they are known.
          target: the local directory, where the files have no ``generation_dir``.
          directory: of the part.
          budget_bytes: for the files in flight.
        """
        self._source, self._files = source, CheckpointFiles.of(source)
        self._generation = next(filter(None, map(generation_of, checksums)), '')
        self._checksums = FileChecksums({without_generation(name): entry for name, entry in checksums.items()})
        self._target, self._directory = target, directory
        self._budget_bytes = min(budget_bytes, IN_FLIGHT_BYTES)
        self.entries: dict[str, FileEntry] = {}
        self.source_error: StorageError | None = None

    def positions(self) -> list[str]:
        """The files with positions of data iterators that the run's storage has."""
        return self._source.storage.names(join(self._source.directory, self._generation), TRAIN_DS_PREFIX)

    def run(self, names: Sequence[str], check: Callable[[], None] = lambda: None) -> None:
        """Copies files; ``check`` is called before each, and may raise.

        Raises:
          CorruptCheckpointError: a file has another checksum.
          CheckpointNotFoundError: a file does not exist.
          StorageError: a file could not be read or written.
        """
        found: dict[str, FileEntry] = {}

        def read(name: str) -> bytes:
            try:
                data = self._files.read(join(self._generation, name))
            except StorageError as error:
                self.source_error = error
                raise
            found[name] = entry_of(data)
            self._checksums.check(name, found[name], self._source.storage.url(join(self._source.directory, name)))
            return data

        sizes = {name: self._checksums.get(name, (0,))[0] for name in names}
        copies = copy_files(read, sizes, self._target, self._directory, _WORKERS, lambda _: check(), self._budget_bytes)
        for name, _ in zip(sizes, copies, strict=True):
            self.entries[name] = found[name]
