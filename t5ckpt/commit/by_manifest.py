"""The commit on storage that cannot rename: files are written in place, and the write of the manifest is the commit.

``commit/write_lease.py`` documents the order of the requests, ``commit/swap.py`` that of an overwrite.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from t5ckpt.catalog.layouts import other_layout
from t5ckpt.catalog.run_catalog import Index
from t5ckpt.catalog.step_index import ensured_index, mark_step
from t5ckpt.commit.in_place import remove_step
from t5ckpt.commit.occupancy import check_room, listed_elsewhere, occupant
from t5ckpt.commit.swap import Swap, check_swappable
from t5ckpt.commit.transaction import Transaction, resume_text
from t5ckpt.commit.write_lease import AlreadyCommittedError, BeingWrittenError, WriteLease, acquire_lease
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import AccessDeniedError, StorageError, T5CkptError
from t5ckpt.format.names import MANIFEST, SIDECAR, step_dir
from t5ckpt.format.sidecar import Sidecar, encode_sidecar
from t5ckpt.storage import Storage

__all__ = ['ManifestTransaction']

_log = logging.getLogger('t5ckpt')


class ManifestTransaction(Transaction):
    """Writes a checkpoint in the directory of its step, under the write lease of the step."""

    def __init__(self, storage: Storage, step: int, clock: Clock, lease: WriteLease):
        """Takes the lease."""
        super().__init__(storage, step, step_dir(step), clock)
        self._lease = lease
        self._swap: Swap | None = None

    @classmethod
    def begin(
        cls,
        storage: Storage,
        step: int,
        clock: Clock,
        writer: Mapping[str, Any],
        index: Index | None,
        may_replace: Callable[[], bool],
    ) -> Self:
        """Acquires the lease, and removes a broken step; calls ``may_replace`` if the step is complete."""
        del writer
        _check_layout(storage, step, index)
        lease = acquire_lease(storage, step, clock, index=index)
        work = cls(storage, step, clock, lease)
        try:
            has_leftovers = bool(storage.names(work.directory, ''))
            if has_leftovers:
                work._find_swap(may_replace)
        except BaseException:
            # Nothing was written, and garbage collection must not remove the files of others.
            lease.leave()
            raise
        if has_leftovers and work._swap is None:
            try:
                remove_step(storage, step)
            except BaseException:
                lease.close()
                raise
        return work

    @classmethod
    def resume(cls, storage: Storage, step: int, clock: Clock, writer: Mapping[str, Any]) -> Self:
        """Resumes an unfinished step; if it was to have other contents, removes it and writes a new record."""
        _check_layout(storage, step, ensured_index(storage))
        work = cls(storage, step, clock, acquire_lease(storage, step, clock))
        try:
            if resume_text(storage, work.directory) != writer['resume']:
                check_room(storage, step)
                remove_step(storage, step)
                record = Sidecar(writer=writer, step=step)
                storage.write(join(work.directory, SIDECAR), encode_sidecar(record))
        except BaseException:
            work.release()
            raise
        return work

    @classmethod
    def unfinished(cls, storage: Storage, step: int, clock: Clock, writer: Mapping[str, Any]) -> Self | None:
        """An unfinished step is found by :meth:`resume`, under its lease."""
        del storage, step, clock, writer

    @staticmethod
    def check_replaceable(storage: Storage, step: int, *, has_positions: bool) -> None:
        """Checks that one write replaces a complete step, see ``commit/swap.py``."""
        check_swappable(storage, step, has_positions=has_positions)

    def _find_swap(self, may_replace: Callable[[], bool]) -> None:
        found = occupant(self.storage, self.step)
        if found is None:
            return
        if not (found.is_t5x and may_replace()):
            raise AlreadyCommittedError(f'{self.storage.url(found.name)} was saved by another writer in the meantime')
        self._swap = Swap(self.storage, self.step, self._lease)
        self.generation = self._swap.generation

    def _commit(self, manifest: bytes, sidecar: bytes | None, directories: Sequence[str]) -> None:
        del directories
        storage = self.storage
        if self._swap is not None and sidecar is not None:
            self._commit_swap(self._swap, manifest, sidecar)
            return
        self._write_sidecar(sidecar)
        if not self._lease.is_ours():
            self._keeps_files = True
            raise BeingWrittenError(
                f'{storage.url(self.directory)} was taken over by another writer, since the write lease of this one expired'
            )
        try:
            storage.write(join(self.directory, MANIFEST), manifest)
        except AccessDeniedError:
            raise
        except StorageError:
            # The manifest may still arrive, and needs its arrays then.
            self._keeps_files = True
            raise
        try:
            mark_step(storage, self.step)
        except T5CkptError as error:
            # The write lease stays, so the step is listed without a marker.
            _log.warning('t5ckpt: the marker of step %d is left to the next save: %s', self.step, error)
            self._lease.close()
        else:
            self._lease.release()

    def _commit_swap(self, swap: Swap, manifest: bytes, sidecar: bytes) -> None:
        try:
            swap.commit(manifest, sidecar, self._clock)
        finally:
            self._keeps_files = swap.is_unknown
        self._lease.release()

    def release(self) -> None:
        """Releases the lease and keeps the files."""
        self._lease.close()

    def _remove(self) -> None:
        if self._swap is not None:
            self._swap.abandon()
            self._lease.leave()
        # A save writes its manifest last, so an existing manifest belongs to another writer, as does a step with another
        # lease. Such a step stays listed by the lease's marker, until the next garbage collection writes its steps marker.
        elif self._lease.is_ours() and not self.storage.is_file(join(self.directory, MANIFEST)):
            remove_step(self.storage, self.step)
            self._lease.release()


def _check_layout(storage: Storage, step: int, index: Index | None) -> None:
    """Checks that no step of another layout has this number.

    Raises:
      UnsupportedFormatError: such a step exists.
    """
    found = listed_elsewhere(storage, step, () if index is None else index.others)
    if found is not None:
        cure = 'Move it away, or write to another directory.'
        raise other_layout(storage.url(found.name), found.layout, 'which is not replaced', cure)
