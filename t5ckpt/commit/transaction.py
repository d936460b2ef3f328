"""The write of one checkpoint: its directory, its files, and an atomic commit or a rollback.

    with open_transaction(storage, step, clock, options) as work:
        storage.write(join(work.directory, name), data)
        work.commit(manifest, facts, directories)

``commit/strategy.py`` has this function. It chooses the class: :class:`~t5ckpt.commit.by_rename.RenameTransaction` if
directories can be renamed, else :class:`~t5ckpt.commit.by_manifest.ManifestTransaction`, which commits by the write of the
manifest. ``commit/garbage_collection.py`` removes the leftovers of a crash.
"""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Self

from t5ckpt.catalog.run_catalog import BucketListing
from t5ckpt.commit.markers import HORIZON_SECONDS
from t5ckpt.commit.taken_steps import StepTakenError
from t5ckpt.commit.writers import writer_facts
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import AccessDeniedError, FormatError, SaveFailedError, StepKeptError, T5CkptError
from t5ckpt.format.facts import Facts, encode_facts
from t5ckpt.format.file_checksums import FileChecksums, FileEntry, entry_of
from t5ckpt.format.names import MANIFEST, file_checksums_name, step_dir
from t5ckpt.format.relocation import relocated_facts, relocated_manifest
from t5ckpt.reading.contents import check_opens
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class CommittedCheckpoint:
    """A durable checkpoint.

    Attributes:
      step: of the checkpoint.
      path: its directory, as a path or URL.
      nbytes: bytes of all its files.
      seconds: from the call of save to the commit.
    """

    step: int
    path: str
    nbytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class TransactionOptions:
    """The options of a transaction: what it replaces and keeps.

    Attributes:
      may_replace: returns whether a complete checkpoint of the step may be replaced; called under the lock or with the marker.
      seconds: the horizon of the write, see ``commit/markers.py``.
      listed: what the garbage collection of the caller has listed.
      is_shared: whether other processes write into its directory.
      keeps_replaced: whether the commit keeps the checkpoint that it replaces, until the caller removes it or puts it back; on
        file systems.
    """

    may_replace: Callable[[], bool] = lambda: False
    seconds: float = HORIZON_SECONDS
    listed: BucketListing | None = None
    is_shared: bool = False
    keeps_replaced: bool = False


def write_checksums(storage: Storage, directory: str, process: int, files: Mapping[str, FileEntry]) -> FileEntry:
    """Writes the file checksums of a process into the directory of a checkpoint; returns the entry of that file."""
    data = FileChecksums(files).encode()
    storage.write(join(directory, file_checksums_name(process)), data)
    return entry_of(data)


class Transaction(ABC):
    """One checkpoint that is being written, under a lock or with a marker.

    Leaving its ``with`` block without a commit removes what was written.

    Attributes:
      storage: the run.
      step: of the checkpoint.
      directory: where the files are written: a temporary directory, or that of the step.
      generation: the subdirectory of ``directory`` with all files but the manifest; '' for ``directory`` itself.
      positions: set before the commit: the files of data iterators, relative to the generation.
      replaced: after a commit with ``keeps_replaced``, the directory of the replaced checkpoint; None without one.
    """

    generation = ''

    def __init__(self, storage: Storage, step: int, directory: str, clock: Clock, options: TransactionOptions):
        """Takes the directory, which was made for it."""
        self.storage = storage
        self.step = step
        self.directory = directory
        self.replaced: str | None = None
        self.positions: Collection[str] = ()
        self._clock = clock
        self._options = options
        self._is_committed = False
        # Whether a rollback keeps the files, since another process has the step or the commit may still arrive.
        self._keeps_files = False
        # Whether a request of this write may arrive after the rollback.
        self._may_arrive = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._is_committed:
            return
        self._may_arrive = not isinstance(error, (StepTakenError, StepKeptError, AccessDeniedError))
        self.rollback()

    def facts(self, base: Facts, counts: Mapping[str, int], files: Mapping[str, FileEntry]) -> Facts:
        """Returns the facts of what was written.

        Args:
          base: the fields that do not depend on the files, such as the facts of the tree and the metrics.
          counts: the bytes and the number of the arrays' files.
          files: the manifest and the files with the file checksums.
        """
        return dataclasses.replace(
            base,
            writer=writer_facts(),
            created_unix=round(self._clock(), 3) if base.created_unix is None else base.created_unix,
            step=self.step,
            bytes=counts['bytes'],
            files=counts['files'],
            digests=FileChecksums(files),
            # Also without positions: T5X's names may be of a step that is replaced.
            positions_in=self.generation,
            save=None,
        )

    def relocated(self, manifest: bytes, facts: bytes | None, where: str) -> tuple[bytes, bytes | None]:
        """The manifest and the facts of a copy of a step at ``where``, whose files were written in ``generation``."""
        manifest = relocated_manifest(manifest, self.generation, where)
        if facts is None:
            return manifest, None
        return manifest, relocated_facts(facts, manifest, self.generation, where)

    def commit_with_checksums(
        self,
        manifest: bytes,
        base: Facts,
        counts: Mapping[str, int],
        files: Mapping[str, FileEntry],
        directories: Sequence[str],
    ) -> int:
        """Writes the file checksums of a write by one process, and commits with the facts.

        Args:
          manifest: the file's bytes.
          base: as for :meth:`facts`.
          counts: as for :meth:`facts`.
          files: the other files that were written, relative to the directory of the checkpoint.
          directories: as for :meth:`commit`, with the same errors.

        Returns:
          The bytes of all these files, of the manifest and of the file checksums.
        """
        entry = write_checksums(self.storage, join(self.directory, self.generation), 0, files)
        own_files = {MANIFEST: entry_of(manifest), file_checksums_name(0): entry}
        self.commit(manifest, encode_facts(self.facts(base, counts, own_files)), directories)
        return sum(size for size, _ in (*files.values(), *own_files.values()))

    def commit(self, manifest: bytes, facts: bytes | None, directories: Sequence[str]) -> None:
        """Makes the written directory the checkpoint of its step.

        Args:
          manifest: the file's bytes.
          facts: the bytes of the facts; None for a copy of a checkpoint without any.
          directories: the written directories, relative to that of the checkpoint.

        Raises:
          SaveFailedError: a reader would reject the manifest or the facts; nothing became visible.
          StepTakenError: another process has written, replaced or deleted the step; nothing became visible.
          StorageError: nothing became visible.
        """
        try:
            check_opens(self.storage, self.directory, manifest, facts)
        except FormatError as error:
            where = self.storage.url(step_dir(self.step))
            raise SaveFailedError(
                f'{where}: nothing is committed, because it could not be opened again: {error}'
            ) from error
        self._commit(manifest, facts, directories)
        self._is_committed = True

    def rollback(self) -> None:
        """Removes what was written. A failure is logged, and garbage collection removes it later."""
        try:
            if not self._keeps_files:
                self._remove()
        except T5CkptError as error:
            where = self.storage.url(self.directory)
            _log.warning('t5ckpt: could not remove %s after a failed save: %s', where, error)
        finally:
            # Does nothing if it has ended.
            self.keep()

    def finish(self) -> None:  # noqa: B027
        """Removes what was replaced, after a commit with ``keeps_replaced``."""

    def keep(self) -> None:  # noqa: B027
        """Ends the write without a commit, and leaves the files to garbage collection."""

    @abstractmethod
    def _commit(self, manifest: bytes, facts: bytes | None, directories: Sequence[str]) -> None:
        """See :meth:`commit`."""

    @abstractmethod
    def _remove(self) -> None:
        """See :meth:`rollback`."""
