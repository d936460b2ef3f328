"""Deletion and garbage collection on object stores, which cannot rename.

``commit/write_lease.py`` documents the order of the requests. A write lease without an owner lists a step for garbage collection.
It also removes files that arrive after their save has failed, whether the step has no manifest or that of another save. If
their own manifest arrives as well, the step is complete.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
from collections.abc import Sequence

from t5ckpt.catalog.layouts import ORBAX, has_placeholder, other_layout
from t5ckpt.catalog.run_catalog import BucketListing
from t5ckpt.commit.completion import complete_step
from t5ckpt.commit.lease_owner import COLLECT
from t5ckpt.commit.removal import check_known, is_pinned, keys_below, remove_own_keys
from t5ckpt.commit.step_lease import BeingWrittenError, acquire_lease, acquire_to_hide, has_live_lease
from t5ckpt.commit.write_lease import WriteLease
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import AccessDeniedError, StorageError, T5CkptError
from t5ckpt.format.names import MANIFEST, is_file_checksums, step_dir
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class Hidden:
    """A step that no listing shows and whose files still exist; on object stores, with the lease for their removal.

    On object stores, ``keys`` are these files, relative to ``directory``, as listed after the step was hidden. The directory is
    '' if nothing is left to remove.
    """

    directory: str
    step: int
    lease: WriteLease | None = None
    keys: Sequence[str] = ()


def remove_step(storage: Storage, step: int, lease: WriteLease) -> None:
    """Removes the files of a step without a manifest that T5X or t5ckpt wrote.

    Lists the files before it checks the lease, so those of a process that takes the step over later are not among them.

    Raises:
      StorageError: the lease has expired and another process has taken the step over, or the step now has a manifest.
    """
    directory = step_dir(step)
    keys = keys_below(storage, directory)
    if MANIFEST in keys or not lease.is_ours():
        raise StorageError(errno.EBUSY, f'{storage.url(directory)} was written by another process in the meantime')
    # First, since a writer that goes on looks for its list after its manifest (``by_manifest``).
    lists = set(filter(is_file_checksums, keys))
    storage.delete_files([join(directory, key) for key in sorted(lists)])
    remove_own_keys(storage, directory, [key for key in keys if key not in lists])


def hide_in_bucket(
    storage: Storage, step: int, clock: Clock, *, even_pinned: bool = False, even_waiting: bool = False
) -> Hidden | None:
    """Like ``by_rename.hide_by_rename``, but deletes the manifest.

    Without a manifest, it removes nothing: garbage collection finds the files of a killed deleter by its lease.
    """
    # Only steps of a local directory wait.
    del even_waiting
    key = join(step_dir(step), MANIFEST)
    lease = acquire_to_hide(storage, step, clock)
    # Until the step is hidden, an error changes nothing.
    end = lease.leave
    try:
        if step in lease.read_steps or (not even_pinned and is_pinned(storage, step_dir(step))):
            end()
            return None
        manifest, version = storage.read_with_version(key)
        _check_deletable(storage, step, manifest)
        end = lease.linger
        is_hidden = storage.delete_unchanged(key, version)
        keys = keys_below(storage, step_dir(step)) if is_hidden else []
    except BaseException:
        end()
        raise
    if not is_hidden:
        lease.leave()
        raise StorageError(
            errno.EBUSY, f'{storage.url(step_dir(step))} was replaced by another process in the meantime.'
        )
    # The lease stays until all files are removed.
    return Hidden(step_dir(step), step, lease, keys)


def _check_deletable(storage: Storage, step: int, manifest: bytes) -> None:
    if has_placeholder(manifest):
        raise other_layout(storage.url(step_dir(step)), ORBAX, 'which t5ckpt does not delete', 'Delete it with Orbax.')
    check_known(storage, step_dir(step), manifest=manifest)


def remove_in_bucket(storage: Storage, hidden: Hidden, lease: WriteLease) -> None:
    """Removes the files of a hidden step, unless another process has taken the step over."""
    try:
        if not lease.is_ours():
            lease.close()
            return
        remove_own_keys(storage, hidden.directory, hidden.keys)
    except BaseException:
        lease.close()
        raise
    lease.release()


def collect_in_bucket(storage: Storage, listed: BucketListing, clock: Clock, stale_after: float) -> list[str]:
    """Removes the leftovers of dead writers and deleters; returns the directories that were removed."""
    removed: list[str] = []
    for step in sorted(listed.busy):
        try:
            if _collect_one(storage, listed, step, clock, stale_after):
                removed.append(step_dir(step))
        except T5CkptError as error:
            _log.warning('t5ckpt: could not collect %s: %s', storage.url(step_dir(step)), error)
            if isinstance(error, AccessDeniedError):
                # The lease for each of the other steps would be one more record that may not be deleted.
                break
    return removed


def _collect_one(storage: Storage, listed: BucketListing, step: int, clock: Clock, stale_after: float) -> bool:
    """Removes the files that a dead writer left, under a new lease."""
    leases = [lease for lease in listed.leases.of_writers if lease.step == step]
    if has_live_lease(storage, leases, clock, stale_after):
        return False
    try:
        lease = acquire_lease(storage, step, clock, COLLECT, stale_after=stale_after)
    except BeingWrittenError:
        return False
    try:
        is_committed = storage.is_file(join(step_dir(step), MANIFEST))
        # A reader may need the files of the checkpoint that was replaced.
        is_read = is_committed and step in lease.read_steps
        if not is_committed:
            remove_step(storage, step, lease)
        elif not is_read:
            complete_step(storage, step, lease)
    except BaseException:
        lease.close()
        raise
    if is_read:
        lease.linger()
    else:
        lease.release()
    return not is_committed
