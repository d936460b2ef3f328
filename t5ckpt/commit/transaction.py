"""The commit: makes a temporary directory a visible checkpoint, in one atomic step.

File systems: ``begin`` makes ``checkpoint_<step>.tmp-<unix s>``, takes its owner's lock and writes the owner's
sidecar; the arrays are written; ``commit`` writes the sidecar and, last, the manifest, fsyncs every directory, renames,
and fsyncs the parent. A crash before the rename leaves a directory that no listing shows and that garbage collection
removes; a crash after it leaves the checkpoint.

Stores without rename: the same, in ``checkpoint_<step>`` itself; the manifest's write is the commit, see
``commit/write_lease.py``.

Delete: rename to ``checkpoint_<step>.deleted-<unix s>``, then remove. What a crash leaves,
``commit/garbage_collection.py`` removes.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t5ckpt.catalog.layouts import other_layout
from t5ckpt.catalog.step_index import Index, mark_step
from t5ckpt.commit.in_place import remove_step
from t5ckpt.commit.lease_owner import process_facts
from t5ckpt.commit.occupancy import listed_elsewhere, occupant
from t5ckpt.commit.removal import (
    move_aside,
    remove_checkpoint,
    renamed_for_deletion,
    renamed_for_replacement,
)
from t5ckpt.commit.replacement import NotPutBackError, put_in_place
from t5ckpt.commit.swap import Swap
from t5ckpt.commit.write_lease import (
    AlreadyCommittedError,
    BeingWrittenError,
    WriteLease,
    acquire_lease,
    sidecar_record,
)
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    FormatError,
    SaveFailedError,
    StorageError,
    T5CkptError,
)
from t5ckpt.format.names import MANIFEST, SIDECAR, parse_leftover, step_dir, tmp_dir
from t5ckpt.reading.contents import check_opens
from t5ckpt.storage import Storage

__all__ = [
    'CommittedCheckpoint',
    'Workspace',
    'begin',
    'commit',
    'release',
    'rollback',
    'take_lease',
    'writer_facts',
]

_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class CommittedCheckpoint:
    """A checkpoint that is on storage, durably.

    Attributes:
      step: its step.
      path: its directory, as a user would write it.
      nbytes: bytes of all its files.
      seconds: from the call of save to the commit.
    """

    step: int
    path: str
    nbytes: int
    seconds: float


@dataclasses.dataclass
class Workspace:
    """A directory that is being written, and its lock or lease.

    Attributes:
      storage: the run.
      step: of the checkpoint.
      directory: temporary, or that of the step on an object store.
      dir_lock: the lock of a temporary directory, and its write lease once there is one.
      replaces: whether the commit may replace a complete checkpoint of the step.
      lease: the write lease of a step on an object store.
      swap: there, the overwrite of a complete checkpoint.
      keep_files: whether a rollback must leave the files: another process has the step, or the commit may still arrive.
    """

    storage: Storage
    step: int
    directory: str
    dir_lock: Any = None
    replaces: bool = False
    lease: WriteLease | None = None
    keep_files: bool = False
    swap: Swap | None = None

    @property
    def generation(self) -> str:
        """The directory, in that of the checkpoint, of the arrays and file checksums; '' if they lie in that itself."""
        return '' if self.swap is None else self.swap.generation


def writer_facts(version: str) -> dict[str, Any]:
    """Returns the facts of this writer, for the sidecar and for the garbage collection of other processes."""
    return {'name': 't5ckpt', 'version': version, 'host': socket.gethostname(), 'pid': os.getpid(), **process_facts()}


def take_lease(work: Workspace, clock: Clock, writer: Mapping[str, Any]) -> None:
    """Writes the write lease into the directory and renews it until it is closed."""
    key = join(work.directory, SIDECAR)
    work.dir_lock = WriteLease(work.storage, key, clock, work.dir_lock, sidecar_record(writer, work.step))
    work.dir_lock.start()


def begin(
    storage: Storage,
    step: int,
    clock: Clock,
    writer: Mapping[str, Any],
    index: Index | None = None,
    may_replace: Callable[[], bool] = lambda: False,
) -> Workspace:
    """Makes the directory that a save writes into, and locks it.

    The caller collects garbage before, which returns ``index``. On object stores that also writes missing steps markers, which
    no listing looks for after the marker of this step exists. ``may_replace`` is asked there under the write lease: whether a
    complete checkpoint of the step is to be replaced.
    """
    storage.make_dir('')
    if not storage.renames:
        found = listed_elsewhere(storage, step, () if index is None else index.others)
        if found is not None:
            cure = 'Move it away, or write to another directory.'
            raise other_layout(storage.url(found.name), found.layout, 'which is not replaced', cure)
        return _begin_in_place(storage, step, clock, index, may_replace)
    unix = int(clock())
    while True:
        directory = tmp_dir(step, unix)
        if storage.make_dir(directory, exclusive=True):
            lock = storage.try_lock(directory)
            if lock is not None:
                work = Workspace(storage, step, directory, lock)
                if _has_lease(work, clock, writer):
                    return work
        unix += 1


def _has_lease(work: Workspace, clock: Clock, writer: Mapping[str, Any]) -> bool:
    """Takes the write lease. Returns False where another host, which does not see the lock, removed the empty directory."""
    try:
        take_lease(work, clock, writer)
    except CheckpointNotFoundError:
        release(work)
        return False
    except BaseException:
        rollback(work)
        raise
    return True


def _begin_in_place(
    storage: Storage, step: int, clock: Clock, index: Index | None, may_replace: Callable[[], bool]
) -> Workspace:
    lease = acquire_lease(storage, step, clock, index=index)
    work = Workspace(storage, step, step_dir(step), lease=lease)
    try:
        has_leftovers = bool(storage.names(step_dir(step), ''))
        if has_leftovers:
            work.swap = _swap_of(storage, step, lease, may_replace)
    except BaseException:
        # Nothing was written, and garbage collection must not remove the files of others.
        lease.release()
        raise
    if has_leftovers and work.swap is None:
        try:
            remove_step(storage, step)
        except BaseException:
            lease.close()
            raise
    return work


def _swap_of(storage: Storage, step: int, lease: WriteLease, may_replace: Callable[[], bool]) -> Swap | None:
    """The overwrite of a complete step that is there; None where what is there is broken.

    Raises:
      AlreadyCommittedError: it is complete and is not to be replaced.
    """
    found = occupant(storage, step)
    if found is None:
        return None
    if not (found.is_t5x and may_replace()):
        raise AlreadyCommittedError(f'{storage.url(found.name)} was saved by another writer in the meantime')
    return Swap(storage, step, lease)


def commit(work: Workspace, manifest: bytes, sidecar: bytes | None, directories: Sequence[str], clock: Clock) -> str:
    """Makes a written directory the checkpoint of its step.

    Args:
      work: where everything was written.
      manifest: the file's bytes.
      sidecar: likewise; None for a copy of what has none.
      directories: that were written, relative to the checkpoint's.
      clock: unix seconds.

    Returns:
      The directory's name.

    Raises:
      SaveFailedError: a reader would reject the manifest or the sidecar; nothing became visible.
      StorageError: nothing became visible; call :func:`rollback`.
    """
    storage, final = work.storage, step_dir(work.step)
    try:
        check_opens(storage, work.directory, manifest, sidecar)
    except FormatError as error:
        raise SaveFailedError(
            f'{storage.url(final)}: nothing is committed, because it could not be opened again: {error}'
        ) from error
    if work.swap is not None and work.lease is not None and sidecar is not None:
        work.swap.commit(manifest, sidecar, clock)
        work.lease.release()
        return final
    if sidecar is None:
        storage.delete_file(join(work.directory, SIDECAR))
    else:
        storage.write(join(work.directory, SIDECAR), sidecar)
    if work.lease is not None:
        _commit_in_place(work, work.lease, manifest)
        return final
    storage.write(join(work.directory, MANIFEST), manifest)
    storage.sync_tree(work.directory, directories)
    old = _publish(work, final, clock)
    work.directory = final
    if old is not None:
        _remove_leftover(work, old, clock)
    work.dir_lock.close()
    return final


def _commit_in_place(work: Workspace, lease: WriteLease, manifest: bytes) -> None:
    storage = work.storage
    if not lease.is_ours():
        work.keep_files = True
        raise BeingWrittenError(
            f'{storage.url(work.directory)} was taken over by another writer, since the write lease of this one expired'
        )
    try:
        storage.write(join(work.directory, MANIFEST), manifest)
    except AccessDeniedError:
        raise
    except StorageError:
        # The manifest may still arrive, and needs its arrays then.
        work.keep_files = True
        raise
    try:
        mark_step(storage, work.step)
    except T5CkptError as error:
        # The step is listed all the same, since its write lease stays.
        _log.warning('t5ckpt: the marker of step %d is left to the next save: %s', work.step, error)
        lease.close()
    else:
        lease.release()


def _publish(work: Workspace, final: str, clock: Clock) -> str | None:
    """Renames the directory to its final name. Returns the new name of a directory that stood there, or None."""
    storage = work.storage
    standing = storage.kind(final)
    if standing is not None:
        _check_replaceable(work)
    if standing == 'file':
        move_aside(storage, final, work.step, clock, ())
    elif standing == 'dir':
        work.directory = renamed_for_replacement(storage, work.directory, work.step, clock)
        try:
            return put_in_place(storage, work.step, work.directory, clock, is_whole=work.replaces)
        except NotPutBackError:
            work.keep_files = True
            raise
    try:
        storage.publish(work.directory, final)
    except StorageError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY) and storage.kind(join(final, MANIFEST)) == 'file':
            raise AlreadyCommittedError(f'{storage.url(final)} was saved by another writer in the meantime') from error
        raise
    return None


def _check_replaceable(work: Workspace) -> None:
    """Checks that what stands at the final name is broken, or is to be replaced.

    Raises:
      AlreadyCommittedError: it is a complete step.
    """
    found = None if work.replaces else occupant(work.storage, work.step)
    if found is not None:
        raise AlreadyCommittedError(f'{work.storage.url(found.name)} was saved by another writer in the meantime')


def _remove_leftover(work: Workspace, name: str, clock: Clock) -> None:
    """Removes a directory that no listing shows. The checkpoint is committed, so a failure is only logged."""
    try:
        remove_checkpoint(work.storage, name, work.step, clock)
    except T5CkptError as error:
        _log.warning('t5ckpt: could not remove %s, the next save will try again: %s', work.storage.url(name), error)


def release(work: Workspace) -> None:
    """Releases the lock and the lease and keeps the files, for a resumed write or for garbage collection."""
    if work.lease is not None:
        work.lease.close()
    if work.dir_lock is not None:
        work.dir_lock.close()


def rollback(work: Workspace) -> None:
    """Removes the files of a failed save. A failure is logged, and garbage collection removes them later."""
    storage = work.storage
    try:
        if work.keep_files or (work.swap is not None and work.swap.is_unknown):
            return
        if work.swap is not None and work.lease is not None:
            work.swap.abandon()
            work.lease.release()
        elif work.lease is not None:
            # A save writes its manifest last, so one that is there is another writer's; so is a step with another lease.
            # Such a step stays listed by the lease's marker, until the next garbage collection gives it its own.
            if work.lease.is_ours() and not storage.is_file(join(work.directory, MANIFEST)):
                remove_step(storage, work.step)
                work.lease.release()
        else:
            leftover = _out_of_the_way(work)
            remove_checkpoint(storage, leftover, work.step, time.time)
    except T5CkptError as error:
        _log.warning('t5ckpt: could not remove %s after a failed save: %s', storage.url(work.directory), error)
    finally:
        release(work)


def _out_of_the_way(work: Workspace) -> str:
    """Gives the directory a name that garbage collection removes, even when the directory is half deleted. Returns the name."""
    leftover = parse_leftover(work.directory)
    if leftover is not None:
        try:
            return renamed_for_deletion(work.storage, work.directory, work.step, lambda: leftover.unix)
        except T5CkptError:
            pass
    work.storage.delete_file(join(work.directory, MANIFEST))
    return work.directory
