"""The commit on storage that cannot rename: one write of the manifest, which fails if the step has another one by then.

All files of a save or a copy but the manifest are in a directory of their own, ``checkpoint_<step>/t5ckpt-<nonce>/``, which
the manifest names, so T5X reads them as well. So no request of another writer, however late, writes or deletes a file of this
one but the manifest. Several writers may save a step at once: the first manifest to arrive commits, with all of its
files, and the other writers find that the step exists.

An overwrite replaces the manifest in one write. The step is the old checkpoint before it, and the new one after it; nothing is
put back. The old files are removed afterwards. T5X reads positions of data iterators under names of its own. They are copied
there after the commit, by the writer or, if it was killed, by garbage collection; t5ckpt does not read these copies.

``commit/markers.py`` has the order of the requests, and what happens to the files of a writer that was killed or stopped.
``storage/bucket.py`` documents which stores check the condition.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from typing import Any, Self

from t5ckpt.catalog.layouts import ListedStep, other_layout
from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.markers import HIDE, Marker
from t5ckpt.commit.occupancy import is_remnant, occupant_of
from t5ckpt.commit.removal import check_not_kept, copy_positions, directories_of, remove_unnamed
from t5ckpt.commit.taken_steps import AlreadyCommittedError, attempts
from t5ckpt.commit.transaction import Transaction, TransactionOptions
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    StorageError,
    T5CkptError,
    UnsupportedFormatError,
)
from t5ckpt.format.manifest import file_with_facts
from t5ckpt.format.names import MANIFEST, PINNED, parse_prefixed_step, step_dir
from t5ckpt.storage import Storage

_REFUSED_SECONDS = 3.0
_log = logging.getLogger('t5ckpt')


class ManifestTransaction(Transaction):
    """Writes a checkpoint in the directory of its step."""

    def __init__(self, storage: Storage, step: int, clock: Clock, options: TransactionOptions):
        """Writes the marker."""
        super().__init__(storage, step, step_dir(step), clock, options)
        self._marker = Marker(storage, step, clock, seconds=options.seconds)
        self.generation = self._marker.directory
        self._key = join(self.directory, MANIFEST)
        # Of the manifest to replace, if there is one, and whether it is that of a complete checkpoint.
        self._version: Any = None
        self._overwrites = False
        # Those below the step with the files that it replaces: of that checkpoint, or of one that T5X did not finish.
        self._old = set[str]()

    @classmethod
    def open(cls, storage: Storage, step: int, clock: Clock, options: TransactionOptions) -> Self:
        """Calls ``may_replace`` if the step is complete."""
        work = cls(storage, step, clock, options)
        try:
            # Files that have arrived since then have names of their own, and a manifest is not replaced.
            if options.listed is None or step in map(parse_prefixed_step, options.listed.names):
                work._find_old(options.may_replace)
        except BaseException:
            work._marker.remove()
            raise
        return work

    def _find_old(self, may_replace: Callable[[], bool]) -> None:
        """Notes what the save replaces: a complete checkpoint, or a broken one."""
        storage = self.storage
        try:
            # Before the contents are checked, so a manifest that arrives later is not replaced.
            manifest, self._version = storage.read_with_version(self._key)
        except CheckpointNotFoundError:
            manifest = b''
        occupant = occupant_of(storage, self.step)
        if occupant is not None and not occupant.is_t5x:
            cure = 'Move it away, or write to another directory.'
            raise other_layout(storage.url(occupant.name), occupant.layout, 'which is not replaced', cure)
        if occupant is not None and not may_replace():
            raise _already_committed(storage, occupant.name, 'saved')
        self._overwrites = occupant is not None
        self._check_compared()
        self._old = directories_of(manifest)

    def _check_compared(self) -> None:
        url = self.storage.url()
        if self._overwrites and not self.storage.compares_versions:
            raise UnsupportedFormatError(
                f'{url}/{self.directory} is not replaced: this server does not compare versions, so a reader could find parts of '
                f'both. Delete the step first: t5ckpt rm {url}@{self.step}'
            )

    def _commit(self, manifest: bytes, facts: bytes | None, directories: Sequence[str]) -> None:
        del directories
        if self._old:
            # A reader that holds the step from now on waits until the manifest is replaced.
            self._marker.update(HIDE, self._old)
            self._check_compared()
        if self._overwrites:
            old = ListedStep(self.step, self.directory)
            check_not_kept(self.storage, old, held_steps(self.storage, self._clock), 'replaced')
        self._marker.check()
        version = self._put(file_with_facts(manifest, facts))
        if self._marker.may_be_collected:
            self.storage.delete_unchanged(self._key, version)
            self._keeps_files = False
            self._marker.check()
        self._finish()

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
            # The manifest may have arrived, or arrive after an error or an interrupt, and needs its arrays then.
            self._keeps_files = True
            try:
                written = self.storage.replace(self._key, manifest, version)
            except AccessDeniedError:
                # Readers would wait for this write.
                self._marker.end()
                raise
            self._keeps_files = written is not None
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

    def _finish(self) -> None:
        """Removes what was replaced. A failure leaves that to garbage collection."""
        try:
            if self._old:
                try:
                    if not self._overwrites:
                        # Of a step that is gone. A program that pins this one waits for the end of the announcement.
                        self.storage.delete_file(join(self.directory, PINNED))
                finally:
                    self._marker.end()
                remove_unnamed(self.storage, self.step, self._old)
            else:
                copy_positions(self.storage, self.directory, [join(self.generation, name) for name in self.positions])
                self._marker.remove()
        except T5CkptError as error:
            where = self.storage.url(self.directory)
            _log.warning(
                't5ckpt: %s is saved, but not completed, which is left to garbage collection: %s', where, error
            )

    def _remove(self) -> None:
        # First: the removal may fail.
        self._marker.end()
        self.storage.delete_tree(join(self.directory, self.generation))
        if not self._may_arrive:
            self._marker.remove()


def _already_committed(storage: Storage, key: str, change: str) -> AlreadyCommittedError:
    return AlreadyCommittedError(f'{storage.url(key)} was {change} by another writer in the meantime')
