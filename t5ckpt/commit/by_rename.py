"""The commit on storage that can rename directories.

``checkpoint_<step>.tmp-<unix s>`` is created and locked, and gets a record of its owner. The arrays are written. The commit
writes the manifest, removes the record, fsyncs every directory, renames, and fsyncs the parent. A crash before the rename
leaves a directory that no listing shows and that garbage collection removes. A crash after it leaves the checkpoint. A step is
hidden by a rename, too, before its files are removed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Collection, Sequence
from typing import Any, Self

from t5ckpt.catalog.listing import waiting_steps
from t5ckpt.catalog.run_catalog import BucketListing
from t5ckpt.commit.announcement import announced
from t5ckpt.commit.bucket_deletion import Hidden
from t5ckpt.commit.occupancy import occupant_on_disk
from t5ckpt.commit.removal import (
    check_known,
    check_removable,
    hide_directory,
    is_pinned,
    move_aside,
    remove_checkpoint,
    rename_aside,
)
from t5ckpt.commit.replacement import NotPutBackError, publish_step, put_in_place, remove_replaced
from t5ckpt.commit.taken_steps import AlreadyCommittedError
from t5ckpt.commit.transaction import Transaction, TransactionOptions
from t5ckpt.commit.writers import open_work, writer_facts
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import CheckpointNotFoundError, NotDurableError, StorageError, T5CkptError
from t5ckpt.format.facts import Facts, encode_facts
from t5ckpt.format.manifest import file_with_facts
from t5ckpt.format.names import FACTS_FILE, MANIFEST, aside_dir, parse_leftover, step_dir
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')


class RenameTransaction(Transaction):
    """Writes a checkpoint in a temporary directory, under its lock."""

    def __init__(
        self, storage: Storage, step: int, directory: str, clock: Clock, options: TransactionOptions, lock: Any
    ):
        """Takes the directory and its lock."""
        super().__init__(storage, step, directory, clock, options)
        self._lock = lock
        self._url = storage.url(directory)
        open_work.add(self._url)
        self._may_replace = False

    @classmethod
    def open(
        cls, storage: Storage, step: int, clock: Clock, options: TransactionOptions, listed: BucketListing | None
    ) -> Self:
        """Creates a temporary directory."""
        del listed
        unix = int(clock())
        while True:
            directory = aside_dir(step, 'tmp', unix)
            if storage.make_dir(directory, exclusive=True):
                lock = storage.try_lock(directory)
                if lock is not None:
                    work = cls(storage, step, directory, clock, options, lock)
                    if work._try_to_sign():
                        work._note_whether_it_replaces()
                        return work
            unix += 1

    def _try_to_sign(self) -> bool:
        """Records the writer of a new directory; returns False if it is not that of this writer.

        Until it is locked, garbage collection may remove it, because it is empty, and another writer may use the name and be
        killed. Another host, which does not see the lock, may still remove it after that.
        """
        try:
            if self.storage.entries(self.directory):
                self.keep()
                return False
            # Garbage collection of another machine, which does not see the lock, waits for twice this time.
            writer = writer_facts() | {'seconds': self._options.seconds}
            self.storage.write(join(self.directory, FACTS_FILE), encode_facts(Facts(writer=writer, step=self.step)))
        except CheckpointNotFoundError:
            self.keep()
            return False
        except BaseException:
            self.rollback()
            raise
        return True

    def _note_whether_it_replaces(self) -> None:
        try:
            self._may_replace = self._options.may_replace()
        except BaseException:
            self.rollback()
            raise

    def _commit(self, manifest: bytes, facts: bytes | None, directories: Sequence[str]) -> None:
        storage, final = self.storage, step_dir(self.step)
        storage.write(join(self.directory, MANIFEST), file_with_facts(manifest, facts))
        record = join(self.directory, FACTS_FILE)
        if not storage.is_file(record):
            # A write since then has created the directory again.
            raise StorageError(
                errno.ESTALE,
                f'{storage.url(self.directory)} was removed by another machine, because the save took longer than expected. Save '
                'again.',
            )
        # After the manifest, which names the writer, too.
        storage.delete_file(record)
        storage.sync_tree(self.directory, directories)
        old = self._publish(final)
        self.directory = final
        if self._options.keeps_replaced:
            self.replaced = old
        elif old is not None:
            remove_replaced(self.storage, self.step, old, self._clock)
        self.keep()

    def _publish(self, final: str) -> str | None:
        """Renames the directory to its final name. Returns the new name of a directory that had this name, or None."""
        storage = self.storage
        kind = storage.kind(final)
        occupant = occupant_on_disk(storage, self.step) if kind is not None and not self._may_replace else None
        if occupant is not None:
            raise AlreadyCommittedError(f'{storage.url(occupant.name)} was saved by another writer in the meantime')
        if kind == 'file':
            move_aside(storage, final, self.step, self._clock(), ())
        elif kind == 'dir':
            self.directory = rename_aside(storage, self.directory, self.step, 'replaced', self._clock())
            try:
                return put_in_place(
                    storage,
                    self.step,
                    self.directory,
                    self._clock,
                    is_whole=self._may_replace,
                    keeps_old=self._options.keeps_replaced,
                )
            except (NotDurableError, NotPutBackError) as error:
                # The old checkpoint may have this name.
                self._keeps_files = True
                if isinstance(error, NotDurableError):
                    self.replaced = self.directory
                raise
        publish_step(storage, self.directory, self.step)
        return None

    def keep(self) -> None:
        """Releases the lock and keeps the files."""
        open_work.discard(self._url)
        self._lock.close()

    def _remove(self) -> None:
        remove_checkpoint(self.storage, self._hide(), self.step, self._clock())

    def _hide(self) -> str:
        """Renames the directory, so that garbage collection also removes it if a crash ends its removal. Returns the name."""
        leftover = parse_leftover(self.directory)
        if leftover is not None:
            try:
                return rename_aside(self.storage, self.directory, self.step, 'deleted', leftover.unix)
            except T5CkptError:
                pass
        self.storage.delete_file(join(self.directory, MANIFEST))
        return self.directory


def hide_by_rename(
    storage: Storage, step: int, clock: Clock, *, even_pinned: bool = False, even_waiting: bool = False
) -> Hidden | None:
    """Makes a step invisible, in one atomic operation, after it was announced.

    A reader that holds the step in the meantime finds the announcement and waits, see ``commit/holds.py``. A pin that is
    set in the meantime is found afterwards, and the step is made visible again, except with ``even_pinned``. A step that waits
    for its upload is kept, except with ``even_waiting``.

    Returns:
      The argument of ``remove_hidden``; None if the step is held by a reader, is pinned, or waits for its upload.

    Raises:
      CheckpointNotFoundError: another process has deleted it.
      UnsupportedFormatError: a newer program wrote it, see ``check_known``; it is unchanged.
      AccessDeniedError: it belongs to another user; it is unchanged.
      StorageError: another process replaces it, or it could not be made invisible; it is unchanged.
    """
    with announced(storage, step, clock) as held:
        return hide_announced(storage, step, clock, held, even_pinned=even_pinned, even_waiting=even_waiting)


def hide_announced(
    storage: Storage,
    step: int,
    clock: Clock,
    held: Collection[int],
    *,
    even_pinned: bool = False,
    even_waiting: bool = False,
    has_replacements: bool = True,
) -> Hidden | None:
    """As :func:`hide_by_rename`, for a step that was announced, with the steps that readers hold.

    ``has_replacements`` tells whether killed replacements of the step may exist.
    """
    check_known(storage, step_dir(step))
    check_removable(storage, step_dir(step))
    if step in held or (not even_pinned and is_pinned(storage, step_dir(step))):
        return None
    if not even_waiting and step in waiting_steps(storage):
        return None
    if has_replacements:
        _drop_replacements(storage, step, clock)
    doomed = hide_directory(storage, step, clock)
    if doomed is None:
        return Hidden('', step)
    if even_pinned or not is_pinned(storage, doomed):
        return Hidden(doomed, step)
    try:
        storage.publish(doomed, step_dir(step))
    except StorageError:
        # A writer has written the step. Garbage collection brings back a pinned checkpoint with this name.
        rename_aside(storage, doomed, step, 'replaced', clock())
        raise
    return None


def _drop_replacements(storage: Storage, step: int, clock: Clock) -> None:
    """Renames the leftovers of killed replacements, so that garbage collection does not restore them after the deletion."""
    for entry in storage.entries():
        leftover = parse_leftover(entry.name)
        if leftover is None or (leftover.state, leftover.step) != ('replaced', step):
            continue
        # The writer of one that is locked is alive and will publish it as the step.
        lock = storage.try_lock(leftover.name)
        if lock is None:
            continue
        with contextlib.closing(lock):
            if lock.is_held and not is_pinned(storage, leftover.name):
                rename_aside(storage, leftover.name, step, 'deleted', clock())
