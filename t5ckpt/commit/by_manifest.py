"""The commit on storage that cannot rename: one write of the manifest, which fails if the step has another one by then.

    [lease], arrays, [is the lease still ours?], manifest if there is none, -lease
    overwrite: ... lease with REPLACE, [no pin? no read lease?], [is the lease still ours?], manifest if it is still
    the old one, lease with SAVE, -other files, -lease

All files of a save or a copy but the manifest are in a directory of their own, ``checkpoint_<step>/t5ckpt-<nonce>/``, and the
manifest has these locations, so T5X reads them as well. So no request of another writer, however late, writes or deletes a file
of this one but the manifest.
T5X reads positions of data iterators under names of its own. They are copied there after the commit, by the writer or, if it was
killed, by garbage collection; t5ckpt does not read these copies.

Several writers may save a step at once. The first manifest to arrive commits, with all of its files, and the other writers find
that the step exists. A writer removes files of others only after its own commit, and not those of a writer that has a record.
Only deletion and garbage collection remove a writer's files without a manifest. A writer that finds its lease expired and its
files gone after the write of its manifest removes the manifest again; it waits for the processes that may remove them. Another
writer that finds such a manifest replaces it.

An overwrite replaces the manifest in one write. The step is the old checkpoint before it, and the new one after it. A reader that
leases or pins the step between the check of the leases and the write waits, as for a deleter. Nothing is put back. A writer that
was stopped in between leaves the old files to garbage collection, which looks for readers again.

A crash leaves files that the manifest does not name. Garbage collection removes them when the step has no read lease.
``commit/write_lease.py`` documents the leases, and ``storage/conditional_writes.py`` which stores check the condition.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from typing import Any, Self

from t5ckpt.catalog.layouts import other_layout
from t5ckpt.catalog.run_catalog import BucketListing
from t5ckpt.commit.completion import complete_step, copy_positions
from t5ckpt.commit.lease_owner import REPLACE, SAVE
from t5ckpt.commit.occupancy import is_remnant, listed_elsewhere, occupant_in_bucket
from t5ckpt.commit.removal import is_pinned, kept_by, kept_error, keys_below
from t5ckpt.commit.step_lease import (
    AlreadyCommittedError,
    BeingWrittenError,
    acquire_lease,
    actions_of_others,
    attempts,
)
from t5ckpt.commit.transaction import Transaction, TransactionOptions
from t5ckpt.commit.write_lease import TAKE_OVER_SECONDS, WriteLease
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import CheckpointNotFoundError, StorageError, T5CkptError
from t5ckpt.format.manifest import file_with_facts
from t5ckpt.format.names import (
    MANIFEST,
    PINNED,
    file_checksums_name,
    generation_dir,
    step_dir,
)
from t5ckpt.storage import Storage

# How long a writer whose lease has expired waits for garbage collection or a deleter.
_COLLECTOR_SECONDS = 3.0
_REFUSED_SECONDS = 3.0
# The actions of processes that remove no files of a writer without a manifest.
_WRITERS = {SAVE, REPLACE}
_log = logging.getLogger('t5ckpt')


class ManifestTransaction(Transaction):
    """Writes a checkpoint in the directory of its step, under the write lease of the step."""

    def __init__(self, storage: Storage, step: int, clock: Clock, lease: WriteLease, options: TransactionOptions):
        """Takes the lease."""
        super().__init__(storage, step, step_dir(step), clock, options)
        self._lease = lease
        self._key = join(self.directory, MANIFEST)
        # Of the manifest to replace, if there is one, and whether it is that of a complete checkpoint.
        self._version: Any = None
        self._overwrites = False
        # Whether the directory has files that do not belong to this write.
        self._has_others = False

    @classmethod
    def open(
        cls, storage: Storage, step: int, clock: Clock, options: TransactionOptions, listed: BucketListing | None
    ) -> Self:
        """Acquires the lease; calls ``may_replace`` if the step is complete."""
        _check_layout(storage, step, listed)
        work = cls(storage, step, clock, acquire_lease(storage, step, clock), options)
        # The record names the directory, so that other writers leave its files.
        work.generation = generation_dir(work._lease.nonce)
        try:
            # Files that have arrived since then have names of their own, and a manifest is not replaced.
            if listed is None or work.directory in listed.names:
                work._find_others(options.may_replace)
        except BaseException:
            work._lease.leave()
            raise
        return work

    def _find_others(self, may_replace: Callable[[], bool]) -> None:
        """Records whether the directory has a complete checkpoint or leftovers. Removes the leftovers with fixed names."""
        storage = self.storage
        # Before the contents are checked, so a manifest that arrives later is not replaced.
        self._version = storage.version(self._key)
        occupant = occupant_in_bucket(storage, self.step)
        if occupant is not None and not (occupant.is_t5x and may_replace()):
            raise _already_committed(storage, occupant.name, 'saved')
        self._has_others, self._overwrites = True, occupant is not None
        if occupant is None:
            self._remove_keys(lambda key: key == PINNED)

    def _remove_keys(self, is_doomed: Callable[[str], bool]) -> None:
        keys = [key for key in keys_below(self.storage, self.directory) if is_doomed(key)]
        self.storage.delete_files([join(self.directory, key) for key in keys])

    def _commit(self, manifest: bytes, facts: bytes | None, directories: Sequence[str]) -> None:
        del directories
        manifest = file_with_facts(manifest, facts)
        last_beat = self._lease.last_beat
        if self._overwrites:
            # A reader that leases the step from now on waits until the manifest is replaced.
            self._lease.update(REPLACE)
            pinned = is_pinned(self.storage, self.directory)
            reason = kept_by(self.storage, self.step, self._clock, pinned=pinned)
            if reason is not None:
                raise kept_error(self.storage, self.step, reason, 'replaced')
        if not self._lease.is_ours():
            raise self._taken_over()
        version = self._put(manifest)
        was_stopped = self._clock() - last_beat > TAKE_OVER_SECONDS
        if was_stopped:
            self._check_not_collected(version)
        self._finish(was_stopped=was_stopped)

    def _put(self, manifest: bytes) -> Any:
        """Writes the manifest, unless the step has that of another writer; returns its version.

        The manifest that the write expects may have been removed: a program has deleted the step, or a writer has removed its
        manifest again. Then the write is repeated, and expects none. A manifest whose files were collected counts as removed,
        because its writer removes it.

        Raises:
          AlreadyCommittedError: the step has the manifest of another writer.
          StorageError: the manifest could not be written, or a server or proxy refuses every write.
        """
        version = self._version
        for _ in attempts(_REFUSED_SECONDS):
            written = self._put_once(manifest, version)
            if written is not None:
                return written
            before = version
            try:
                current, version = self.storage.read_with_version(self._key)
            except CheckpointNotFoundError:
                version = None
            else:
                if version == before or self._overwrites or not is_remnant(self.storage, self.directory, current):
                    change = 'replaced or deleted' if self._overwrites else 'saved'
                    raise _already_committed(self.storage, self._key, change)
        raise StorageError(
            errno.EIO,
            f'{self.storage.url(self._key)}: the storage reports that this object exists, but it does not. Check the logs of '
            'the server or proxy, then save again.',
        )

    def _put_once(self, manifest: bytes, version: Any) -> Any:
        try:
            return self.storage.replace(self._key, manifest, version)
        except StorageError:
            # The manifest may have arrived before a retry that was denied, or may still arrive, and needs its arrays then.
            self._keeps_files = True
            raise

    def _check_not_collected(self, version: Any) -> None:
        """Checks that the files are there, although the lease had expired before the manifest was written.

        Another writer leaves them. Garbage collection leaves them if it finds the manifest; else it removes the list of file
        checksums first.

        Raises:
          BeingWrittenError: they are gone, or may be removed yet. The manifest was removed.
        """
        if self._lease.is_ours():
            return
        name = join(self.directory, self.generation, file_checksums_name(0))
        for _ in attempts(_COLLECTOR_SECONDS):
            removers = actions_of_others(self.storage, self.step, self._lease) - _WRITERS
            if not self.storage.is_file(name):
                break
            if not removers:
                return
        self.storage.delete_unchanged(self._key, version)
        raise self._taken_over()

    def _taken_over(self) -> BeingWrittenError:
        return BeingWrittenError(
            f'{self.storage.url(self.directory)} was taken over by another writer, since the write lease of this one expired'
        )

    def _finish(self, *, was_stopped: bool) -> None:
        """Removes the files of others. A failure leaves that to garbage collection."""
        # A reader did not wait for a writer that seemed to have ended.
        is_done = not (was_stopped and self._overwrites)
        try:
            if self._overwrites:
                self._lease.update(SAVE)
            if self._has_others and is_done:
                complete_step(self.storage, self.step, self._lease)
            elif self.positions and is_done:
                copy_positions(self.storage, self.directory, [join(self.generation, name) for name in self.positions])
        except T5CkptError as error:
            is_done = False
            where = self.storage.url(self.directory)
            _log.warning(
                't5ckpt: %s is saved, but not completed, which is left to garbage collection: %s', where, error
            )
        if is_done:
            self._lease.release()
        else:
            self._lease.linger()

    def keep(self) -> None:
        """Leaves a record that lingers, see ``commit/write_lease.py``: files of this writer may remain, or arrive later."""
        self._lease.linger()

    def _remove(self) -> None:
        self.storage.delete_tree(join(self.directory, self.generation))
        if self._may_arrive or not self._lease.is_ours() or (not self._overwrites and self.storage.is_file(self._key)):
            self.keep()
        else:
            self._lease.leave()


def _already_committed(storage: Storage, key: str, change: str) -> AlreadyCommittedError:
    return AlreadyCommittedError(f'{storage.url(key)} was {change} by another writer in the meantime')


def _check_layout(storage: Storage, step: int, listed: BucketListing | None) -> None:
    """Checks that no step of another layout has this number.

    Raises:
      UnsupportedFormatError: such a step exists.
    """
    elsewhere = listed_elsewhere(storage, step, () if listed is None else listed.names)
    if elsewhere is not None:
        cure = 'Move it away, or write to another directory.'
        raise other_layout(storage.url(elsewhere.name), elsewhere.layout, 'which is not replaced', cure)
