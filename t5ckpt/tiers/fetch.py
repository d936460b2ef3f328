"""Copies files of a step from the run's storage to a part in a local directory, several at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence

from t5ckpt.catalog.locate import Located
from t5ckpt.commit.transfer import IN_FLIGHT_BYTES, in_flight
from t5ckpt.core.keys import join, parents_of
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
      target_error: of a write to the local directory, after which a copy failed; None without one.
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
        self.target_error: StorageError | None = None

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
        with self._noting_error():
            for parent in parents_of(names):
                self._target.make_dir(join(self._directory, parent))
        sizes = {name: self._checksums.get(name, (0,))[0] for name in names}
        for _ in in_flight(sizes, self._copy, _WORKERS, lambda _: check(), budget_bytes=self._budget_bytes):
            pass

    @contextlib.contextmanager
    def _noting_error(self) -> Generator[None]:
        try:
            yield
        except StorageError as error:
            self.target_error = error
            raise

    def _copy(self, name: str) -> None:
        data = self._files.read(join(self._generation, name))
        entry = entry_of(data)
        self._checksums.check(name, entry, self._source.storage.url(join(self._source.directory, name)))
        with self._noting_error():
            self._target.write(join(self._directory, name), data)
        self.entries[name] = entry
