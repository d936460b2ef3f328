"""The commit on storage that can rename directories.

A marker names ``checkpoint_<step>.tmp-<number>`` before it is created. The arrays are written. The commit writes the manifest,
fsyncs every directory, renames, and fsyncs the parent. A crash before the rename leaves a directory that no listing shows and
that garbage collection removes. A crash after it leaves the checkpoint. A step is hidden by a rename, too, before its files are
removed.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from typing import Self

from t5ckpt.commit.markers import Marker
from t5ckpt.commit.occupancy import occupant_of
from t5ckpt.commit.removal import end_work, move_aside
from t5ckpt.commit.replacement import publish_step, put_in_place
from t5ckpt.commit.taken_steps import AlreadyCommittedError
from t5ckpt.commit.transaction import Transaction, TransactionOptions
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import NotDurableError, StorageError, T5CkptError
from t5ckpt.format.manifest import file_with_facts
from t5ckpt.format.names import MANIFEST, step_dir
from t5ckpt.storage import Storage
from t5ckpt.storage.base import Lock

_log = logging.getLogger('t5ckpt')


class RenameTransaction(Transaction):
    """Writes a checkpoint in a temporary directory that a marker names."""

    _lock: Lock | None = None
    _may_replace = False

    def __init__(self, storage: Storage, step: int, clock: Clock, options: TransactionOptions):
        """Writes the marker."""
        self._marker = Marker(storage, step, clock, seconds=options.seconds, is_shared=options.is_shared)
        super().__init__(storage, step, self._marker.directory, clock, options)

    @classmethod
    def open(cls, storage: Storage, step: int, clock: Clock, options: TransactionOptions) -> Self:
        """Creates the temporary directory."""
        work = cls(storage, step, clock, options)
        try:
            storage.make_dir(work.directory)
            # A directory that another process has created again is another one.
            # Twice, since an error of the disk looks like a directory that is gone.
            work._lock = storage.try_lock(work.directory) or storage.try_lock(work.directory)
            work._may_replace = options.may_replace()
        except BaseException:
            work.rollback()
            raise
        return work

    def _commit(self, manifest: bytes, facts: bytes | None, directories: Sequence[str]) -> None:
        storage, final = self.storage, step_dir(self.step)
        is_current = self._lock is not None and self._lock.is_current()
        self._close()
        if not is_current:
            raise StorageError(
                errno.ESTALE,
                f'{storage.url(self.directory)} was removed by another machine, because the save took longer than expected. Save '
                'again.',
            )
        storage.sync_tree(self.directory, directories)
        # The last: a directory with a manifest is whole, also after a power cut.
        storage.write(join(self.directory, MANIFEST), file_with_facts(manifest, facts))
        self.replaced = self._publish(final)
        self.directory = final
        if not self._options.keeps_replaced:
            self.finish()

    def _publish(self, final: str) -> str | None:
        """Renames the directory to its final name. Returns the new name of a directory that had this name, or None."""
        storage = self.storage
        kind = storage.kind(final)
        occupant = occupant_of(storage, self.step) if kind is not None and not self._may_replace else None
        if occupant is not None:
            raise AlreadyCommittedError(f'{storage.url(occupant.name)} was saved by another writer in the meantime')
        if kind == 'file':
            move_aside(storage, final, self.step, self._clock(), ())
        elif kind == 'dir':
            try:
                return put_in_place(storage, self.step, self._marker, self._clock, is_whole=self._may_replace)
            except T5CkptError as error:
                # Either name may be that of the old checkpoint.
                self._keeps_files = isinstance(error, NotDurableError) or storage.kind(final) is None
                if self._keeps_files:
                    self.replaced = self._marker.aside if storage.kind(self._marker.aside) else self.directory
                raise
        publish_step(storage, self.directory, self.step)
        return None

    def finish(self) -> None:
        """Removes what was replaced. A failure leaves that to garbage collection."""
        try:
            self._remove()
        except T5CkptError as error:
            where = self.storage.url(self._marker.directory)
            _log.warning('t5ckpt: could not remove %s, the next save will try again: %s', where, error)
        finally:
            self.keep()

    def keep(self) -> None:
        """Leaves the files to garbage collection."""
        self._marker.release()
        self._close()

    def _remove(self) -> None:
        end_work(self.storage, self.step, self._marker.directory, self._marker.aside, self._clock)
        if self.directory != self._marker.directory or not (self._options.is_shared and self._may_arrive):
            self._marker.remove()

    def _close(self) -> None:
        if self._lock is not None:
            self._lock.close()
