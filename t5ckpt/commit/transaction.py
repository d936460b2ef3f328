"""The write of one checkpoint: its directory, its files, and an atomic commit or a rollback.

    with Transaction(storage, step, clock) as work:
        storage.write(join(work.directory, name), data)
        work.commit(manifest, facts, directories)

A marker names the directory before it is created (``commit/markers.py``), and garbage collection removes what a crash leaves.

Where directories can be renamed, the files are written in ``checkpoint_<step>.tmp-<number>``. The commit writes the manifest,
fsyncs every directory, renames, and fsyncs the parent. An overwrite exchanges the names of the two directories, so the step is
always listed. If the storage cannot exchange two names, the old one is hidden, and the new one is published. After a crash in
between, garbage collection publishes it (``commit/removal.end_work``).

On object stores all files of a save or a copy but the manifest are in a directory of their own,
``checkpoint_<step>/t5ckpt-<nonce>/``, which the manifest names, so T5X reads them as well. So no request of another writer,
however late, writes or deletes a file of this one but the manifest. The commit is one write of the manifest, which fails if the
step has another one than at the beginning. The old files are removed afterwards. T5X reads positions of data iterators under
names of its own. They are copied there after the commit, by the writer or, if it was killed, by garbage collection; t5ckpt does
not read these copies. ``storage/bucket.py`` documents which stores check the condition.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from t5ckpt.catalog.layouts import ListedStep
from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.markers import HIDE, HORIZON_SECONDS, Marker, RunListing
from t5ckpt.commit.occupancy import is_remnant, occupant_of
from t5ckpt.commit.removal import (
    check_known,
    check_not_kept,
    copy_positions,
    directories_of,
    end_work,
    hide_directory,
    move_aside,
    remove_unnamed,
)
from t5ckpt.commit.taken_steps import StepTakenError, attempts, locked
from t5ckpt.commit.writers import writer_facts
from t5ckpt.core.arguments import check_flags
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    FormatError,
    NotDurableError,
    SaveFailedError,
    StepKeptError,
    StorageError,
    T5CkptError,
    UnsupportedFormatError,
)
from t5ckpt.format.facts import Facts
from t5ckpt.format.file_checksums import FileChecksums, FileEntry, entry_of
from t5ckpt.format.manifest import file_with_facts
from t5ckpt.format.names import MANIFEST, PINNED, file_checksums_name, parse_prefixed_step, step_dir
from t5ckpt.format.relocation import relocated_facts, relocated_manifest
from t5ckpt.reading.contents import check_opens
from t5ckpt.storage import Storage

_REFUSED_SECONDS = 3.0
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


def write_checksums(storage: Storage, directory: str, process: int, files: Mapping[str, FileEntry]) -> FileEntry:
    """Writes the file checksums of a process into the directory of a checkpoint; returns the entry of that file."""
    data = FileChecksums(files).encode()
    storage.write(join(directory, file_checksums_name(process)), data)
    return entry_of(data)


class Transaction:
    """One checkpoint that is being written, with a marker.

    Leaving its ``with`` block removes what was replaced or, without a commit, what was written.

    Attributes:
      storage: the run.
      step: of the checkpoint.
      directory: where the files are written: a temporary directory, or that of the step.
      generation: the subdirectory of ``directory`` with all files but the manifest; '' for ``directory`` itself.
      positions: set before the commit: the files of data iterators, relative to the generation.
      keeps_files: whether leaving the block removes nothing, since a commit may still arrive, may not be durable, or may be taken
        back.
    """

    def __init__(
        self,
        storage: Storage,
        step: int,
        clock: Clock,
        *,
        overwrite: bool = False,
        seconds: float = HORIZON_SECONDS,
        listed: RunListing | None = None,
        is_shared: bool = False,
        replaced: str = '',
    ):
        """Writes the marker, and makes the directory. The caller runs garbage collection before.

        Args:
          storage: the run.
          step: to write.
          clock: unix seconds.
          overwrite: whether it replaces a complete checkpoint of the step that exists now.
          seconds: the horizon of the write, see ``commit/markers.py``.
          listed: what the garbage collection of the caller has listed.
          is_shared: whether other processes write into its directory.
          replaced: a directory that is written already.

        Raises:
          StepTakenError: the step is complete, and is not replaced.
          UnsupportedFormatError: the files that exist cannot be replaced.
        """
        check_flags(overwrite=overwrite)
        storage.make_dir('')
        self.storage = storage
        self.step = step
        self.positions: Collection[str] = ()
        self._clock = clock
        self._is_shared = is_shared
        self._final = step_dir(step)
        self._key = join(self._final, MANIFEST)
        # Of the manifest to replace in a bucket, if there is one, and whether the step is a complete checkpoint.
        self._version: Any = None
        self._overwrites = False
        # Those below the step in a bucket with the files that it replaces: of that checkpoint, or of one that T5X did not finish.
        self._old = set[str]()
        self._is_committed = False
        self.keeps_files = False
        self._marker = Marker(storage, step, clock, seconds=seconds, is_shared=is_shared)
        self.directory, self.generation = self._final, self._marker.directory
        try:
            if storage.commits_by_rename:
                self.directory, self.generation = self._marker.directory, ''
                self._overwrites = overwrite and storage.is_file(self._key)
                if replaced:
                    storage.publish(replaced, self.directory)
                else:
                    storage.make_dir(self.directory)
            # Files that have arrived since then have names of their own, and a manifest is not replaced.
            elif listed is None or step in map(parse_prefixed_step, listed.names):
                self._find_old(overwrite)
        except BaseException:
            self._marker.remove()
            raise

    def _find_old(self, overwrite: bool) -> None:
        """Notes what the save replaces in a bucket: a complete checkpoint, or a broken one."""
        try:
            # Before the contents are checked, so a manifest that arrives later is not replaced.
            manifest, self._version = self.storage.read_with_version(self._key)
        except CheckpointNotFoundError:
            manifest = b''
        self._overwrites = self._is_complete(overwrite)
        self._check_compared()
        self._old = directories_of(manifest)

    def _is_complete(self, overwrite: bool) -> bool:
        """Whether the step is complete; raises an error if it is not to be replaced, or is in another layout."""
        occupant = occupant_of(self.storage, self.step)
        if occupant is not None and not (overwrite and occupant.is_t5x):
            raise self._already_committed(occupant.name, 'saved')
        return occupant is not None

    def _already_committed(self, key: str, change: str) -> StepTakenError:
        return StepTakenError(f'{self.storage.url(key)} was {change} by another writer in the meantime')

    def _check_compared(self) -> None:
        url = self.storage.url()
        if self._overwrites and not self.storage.compares_versions:
            raise UnsupportedFormatError(
                f'{url}/{self._final} is not replaced: this server does not compare versions, so a reader could find parts of '
                f'both. Delete the step first: t5ckpt rm {url}@{self.step}'
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, where: object) -> None:
        """Removes what was replaced or, without a commit, what was written; a failure leaves that to garbage collection."""
        storage, marker, is_committed = self.storage, self._marker, self._is_committed
        if is_committed and self.keeps_files:
            return
        # After other errors, a request of this write may arrive later; of a save that was given up, one of another process.
        certain = (StepTakenError, StepKeptError, AccessDeniedError, *(() if self._is_shared else (SaveFailedError,)))
        has_ended = is_committed or isinstance(error, certain)
        try:
            try:
                if is_committed and self._old and not self._overwrites:
                    # Of a step that is gone. A program that pins this one waits for the end of the announcement.
                    storage.delete_file(join(self._final, PINNED))
            finally:
                # First: the removal may fail.
                if has_ended or not self.keeps_files:
                    marker.end()
            if not self.keeps_files:
                if storage.commits_by_rename:
                    end_work(storage, self.step, marker.directory, marker.aside, self._clock)
                elif not is_committed:
                    storage.delete_tree(join(self.directory, self.generation))
                elif self._old:
                    remove_unnamed(storage, self.step, self._old)
                else:
                    copy_positions(storage, self._final, [join(self.generation, name) for name in self.positions])
                removes_files = is_committed and self._old
                if (has_ended and not removes_files) or (storage.commits_by_rename and not self._is_shared):
                    marker.remove()
        except T5CkptError as failure:
            where = storage.url(self._final)
            _log.warning('t5ckpt: %s is left to garbage collection: %s', where, failure)
        finally:
            marker.release()

    def facts(self, base: Facts, files: Mapping[str, FileEntry]) -> Facts:
        """Returns the facts of what was written.

        Args:
          base: the other fields, such as the facts of the tree, the metrics, and the bytes and the number of the arrays' files.
          files: the manifest and the files with the file checksums.
        """
        return dataclasses.replace(
            base,
            writer=writer_facts(),
            created_unix=round(self._clock(), 3) if base.created_unix is None else base.created_unix,
            step=self.step,
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

    def commit(self, manifest: bytes, facts: bytes | None, directories: Sequence[str]) -> None:
        """Makes the written directory the checkpoint of its step.

        Args:
          manifest: the file's bytes.
          facts: the bytes of the facts; None for a copy of a checkpoint without any.
          directories: the written directories, relative to that of the checkpoint.

        Raises:
          SaveFailedError: a reader would reject the manifest or the facts; nothing became visible.
          StepTakenError: another process has written, replaced or deleted the step; nothing became visible.
          StepKeptError: the step is pinned or held by a reader.
          NotDurableError: it is visible, but may be gone after a power cut.
          StorageError: nothing became visible.
        """
        try:
            check_opens(self.storage, self.directory, manifest, facts)
        except FormatError as error:
            where = self.storage.url(self._final)
            raise SaveFailedError(
                f'{where}: nothing is committed, because it could not be opened again: {error}'
            ) from error
        data = file_with_facts(manifest, facts)
        if self.storage.commits_by_rename:
            self.storage.sync_tree(self.directory, directories)
            # The last: a directory with a manifest is whole, also after a power cut.
            self.storage.write(join(self.directory, MANIFEST), data)
        self._publish(data)

    def _publish(self, data: bytes) -> None:
        """Makes the step visible, and announces before if it replaces another one; ``data`` is that of the manifest."""
        storage, marker, by_rename = self.storage, self._marker, self.storage.commits_by_rename
        with locked(storage, self._final):
            kind = storage.kind(self._final) if by_rename else None
            found = storage.version(self._final) if kind == 'dir' else None
            if kind is not None and not self._overwrites:
                self._is_complete(overwrite=False)
            if kind == 'dir' or self._old:
                # A reader that holds or pins the step from now on waits until it is replaced.
                marker.update(HIDE, self._old)
            if self._overwrites:
                old = ListedStep(self.step, self._final)
                check_not_kept(storage, old, held_steps(storage, self._clock), 'replaced', even_waiting=True)
            marker.check()
            if not by_rename:
                self._put(data)
            else:
                try:
                    self._rename(kind, found)
                except NotDurableError:
                    # After a power cut, either name may be that of the old checkpoint.
                    self.keeps_files = True
                    raise
                finally:
                    marker.end()
        self._is_committed, self.keeps_files = True, False

    def _rename(self, kind: str | None, found: Any) -> None:
        """Renames the directory to that of its step, which was of this kind and had this version.

        Raises:
          UnsupportedFormatError: a newer program wrote the old one.
          StepTakenError: another writer has saved the step.
          StorageError: nothing has changed.
        """
        storage, final, aside = self.storage, self._final, self._marker.aside
        if kind == 'file':
            move_aside(storage, final, self.step, self._clock(), ())
        # Another process may have deleted it before the announcement.
        elif kind == 'dir' and storage.kind(final) is not None:
            if self._overwrites:
                check_known(storage, final)
            if self._exchange(found):
                return
            hide_directory(storage, self.step, aside, self._clock)
        while True:
            try:
                storage.publish(self.directory, final)
            except StorageError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    if storage.is_file(self._key):
                        raise self._already_committed(final, 'saved') from error
                    # The step of the other writer may be deleted again.
                    if storage.kind(final) is None:
                        continue
                # Unless the new one has the name, and only its rename may not be durable.
                with contextlib.suppress(T5CkptError):
                    if storage.is_file(join(aside, MANIFEST)):
                        storage.publish(aside, final)
                raise
            else:
                return

    def _exchange(self, found: Any) -> bool:
        """Exchanges the names of the directory and of its step, which had this version; False where the storage cannot."""
        storage, is_found = self.storage, False
        if not storage.exchange(self.directory, self._final):
            return False
        try:
            # Where locks do not work, another writer may have replaced a broken one meanwhile.
            is_found = self._overwrites or storage.version(self.directory) == found
        finally:
            if not is_found:
                storage.exchange(self.directory, self._final)
        if not is_found:
            raise self._already_committed(self._final, 'saved')
        return True

    def _put(self, data: bytes) -> None:
        """Writes the manifest, unless the step has that of another writer.

        The manifest that the write expects may have been removed: a program has deleted the step, or a writer has removed its
        manifest again. Then the next attempt expects none. A manifest whose files were collected counts as removed, because its
        writer removes it.

        Raises:
          UnsupportedFormatError: the server does not compare versions, as the marker has shown, and the step is to be replaced.
          StepTakenError: the step has the manifest of another writer.
          StorageError: the manifest could not be written, or a server or proxy refuses every write.
        """
        self._check_compared()
        written = None
        for _ in attempts(_REFUSED_SECONDS):
            # The manifest may have arrived, or arrive after an error or an interrupt, and needs its arrays then.
            self.keeps_files = True
            written = self.storage.replace(self._key, data, self._version)
            self.keeps_files = written is not None
            if written is not None:
                break
            try:
                current, self._version = self.storage.read_with_version(self._key)
            except CheckpointNotFoundError:
                self._version = None
            else:
                if self._overwrites or not is_remnant(self.storage, self._final, current):
                    change = 'replaced or deleted' if self._overwrites else 'saved'
                    raise self._already_committed(self._key, change)
        else:
            raise StorageError(
                errno.EIO,
                f'{self.storage.url(self._key)}: the storage reports that this object exists, but it does not. Check the logs '
                'of the server or proxy, then save again.',
            )
        if self._marker.may_be_collected:
            self.storage.delete_unchanged(self._key, written)
            self.keeps_files = False
            self._marker.check()

    @property
    def replaced(self) -> str | None:
        """The directory of the checkpoint that a commit has replaced; None without one."""
        names = self._marker.aside, self._marker.directory
        return next((name for name in names if self.storage.kind(name) is not None), None)

    @classmethod
    def take_back(cls, storage: Storage, step: int, replaced: str, clock: Clock) -> None:
        """Puts a replaced checkpoint back in the place of the one that was committed, and removes that one.

        Raises:
          StepKeptError: the one that was committed is pinned or held by a reader.
          StorageError: the disk failed; the step is one of the two.
        """
        with cls(storage, step, clock, overwrite=True, replaced=replaced) as work:
            work.keeps_files = True
            work._publish(b'')
