"""Deletion and garbage collection on object stores, where nothing can be renamed.

``commit/write_lease.py`` has the order of the requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import time
from collections.abc import Callable, Collection, Sequence

from t5ckpt.catalog.step_index import Index, ensured_index, mark_step
from t5ckpt.commit.removal import check_known, keys_below, remove_own_keys
from t5ckpt.commit.write_lease import AlreadyCommittedError, WriteLease, acquire_lease, read_owner
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import CheckpointNotFoundError, StorageError, T5CkptError, UnsupportedFormatError
from t5ckpt.format.names import MANIFEST, busy_marker, step_dir, step_marker
from t5ckpt.storage import Storage

__all__ = ['Hidden', 'collect_in_place', 'hide_in_place', 'remove_in_place', 'remove_step']

_RIVAL_SECONDS, _RIVAL_POLL_SECONDS = 5.0, 0.1
_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class Hidden:
    """A step that no listing shows and whose files are still there; in place, with the lease under which they go.

    ``keys`` are those files, relative to ``directory``, as they were listed after it was hidden in place.
    """

    directory: str
    step: int
    lease: WriteLease | None = None
    keys: Sequence[str] = ()


def remove_step(storage: Storage, step: int) -> None:
    """Removes the files of a step that T5X or t5ckpt wrote, the manifest first; the caller has the write lease."""
    directory = step_dir(step)
    _delete_manifest(storage, join(directory, MANIFEST))
    storage.delete_file(step_marker(step))
    remove_own_keys(storage, directory, keys_below(storage, directory))


def _delete_manifest(storage: Storage, key: str) -> None:
    try:
        storage.delete_file(key)
    except StorageError:
        # The reply may have been lost; while the manifest is there, so is the checkpoint.
        if storage.is_file(key):
            raise


def hide_in_place(
    storage: Storage,
    step: int,
    clock: Clock,
    is_wanted: Callable[[Collection[str]], bool],
    index: Index | None = None,
) -> Hidden | None:
    """Makes a checkpoint invisible; with ``is_wanted``, asked afterwards with the files that it has, it comes back.

    With the markers as they were just listed, ``index``, one request less is needed.

    Returns:
      What :func:`remove_in_place` is to remove, or None where it came back.

    Raises:
      CheckpointNotFoundError: it is gone; another process has deleted it.
      UnsupportedFormatError: a newer program wrote it, see ``check_known``.
      StorageError: it is being written by somebody, or the store refused, and it is there whole.
    """
    key = join(step_dir(step), MANIFEST)
    lease = _taken_to_hide(storage, step, clock, index)
    try:
        try:
            manifest = storage.read(key)
        except CheckpointNotFoundError:
            # Its deleter may have been killed over it, so it is removed here, too.
            remove_step(storage, step)
            lease.release()
            raise
        try:
            check_known(storage, step_dir(step), manifest=manifest, has_known_sidecar=True)
        except UnsupportedFormatError:
            lease.release()
            raise
        _delete_manifest(storage, key)
        keys = keys_below(storage, step_dir(step))
        if not is_wanted(keys):
            storage.delete_file(step_marker(step))
            # The lease stays until all of it is gone.
            return Hidden(step_dir(step), step, lease, keys)
        _bring_back(storage, key, manifest, lease)
    except BaseException:
        lease.close()
        raise
    lease.release()
    return None


def _bring_back(storage: Storage, key: str, manifest: bytes, lease: WriteLease) -> None:
    if not lease.is_ours():
        # Two deleters took it in the same moment, and the other one may be removing its arrays.
        raise CheckpointNotFoundError(f'{storage.url(key)}: another process has deleted it')
    storage.write(key, manifest)


def remove_in_place(storage: Storage, hidden: Hidden, lease: WriteLease, clock: Clock) -> None:
    """Removes what ``hide_in_place`` made invisible, unless another process does, or has written a checkpoint there."""
    try:
        keys = hidden.keys
        if not lease.is_ours():
            lease.close()
            try:
                lease = acquire_lease(storage, hidden.step, clock)
            except AlreadyCommittedError:
                return
            if storage.is_file(join(hidden.directory, MANIFEST)):
                lease.release()
                return
            keys = keys_below(storage, hidden.directory)
        # Its marker went when it was hidden.
        remove_own_keys(storage, hidden.directory, keys)
    except BaseException:
        lease.close()
        raise
    lease.release()


def _taken_to_hide(storage: Storage, step: int, clock: Clock, index: Index | None) -> WriteLease:
    """Acquires the lease of a step to hide it. Waits for another deleter, which needs few requests to hide it."""
    key = join(step_dir(step), MANIFEST)
    deadline = time.monotonic() + _RIVAL_SECONDS
    while True:
        try:
            return acquire_lease(storage, step, clock, index)
        except AlreadyCommittedError as error:
            index = None
            if not storage.is_file(key):
                raise CheckpointNotFoundError(f'{storage.url(key)}: another process has deleted it') from error
            if time.monotonic() > deadline:
                raise StorageError(errno.EBUSY, str(error)) from error
            time.sleep(_RIVAL_POLL_SECONDS)


def collect_in_place(storage: Storage, index: Index, clock: Clock, stale_after: float) -> tuple[list[str], Index]:
    """Finishes or removes the leftovers of dead writers and deleters, and writes missing steps markers.

    Returns:
      The directories that were removed, and the index.
    """
    removed: list[str] = []
    for step in sorted(index.busy):
        try:
            if _collect_one(storage, step, clock(), stale_after):
                removed.append(step_dir(step))
        except T5CkptError as error:
            _log.warning('t5ckpt: could not collect %s: %s', storage.url(step_dir(step)), error)
    if not index.is_complete:
        index = ensured_index(storage)
    return removed, index if not index.busy else dataclasses.replace(index, is_fresh=False)


def _collect_one(storage: Storage, step: int, now: float, stale_after: float) -> bool:
    lock = storage.try_lock(step_dir(step))
    if lock is None:
        return False
    with contextlib.closing(lock):
        owner = read_owner(storage, busy_marker(step))
        if owner is None or not owner.is_dead(now, stale_after):
            return False
        is_committed = storage.is_file(join(step_dir(step), MANIFEST))
        if is_committed:
            mark_step(storage, step)
        else:
            remove_step(storage, step)
        storage.delete_file(busy_marker(step))
        return not is_committed
