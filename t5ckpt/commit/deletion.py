"""Deletes a checkpoint: hidden first, in one operation, then removed."""

from __future__ import annotations

import contextlib
import functools
import logging

from t5ckpt.catalog.layouts import inspect_name, other_layout
from t5ckpt.catalog.listing import listing, waiting_steps
from t5ckpt.catalog.locate import no_step
from t5ckpt.catalog.pin_file import pin_reason
from t5ckpt.commit.in_place import Hidden, hide_in_place, remove_in_place
from t5ckpt.commit.read_lease import leased_steps
from t5ckpt.commit.removal import (
    check_known,
    check_not_kept,
    check_removable,
    is_pinned,
    kept_error,
    remove_checkpoint,
    renamed,
    renamed_for_deletion,
    renamed_for_replacement,
)
from t5ckpt.commit.step_lease import acquire_to_hide
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import StorageError, T5CkptError
from t5ckpt.format.names import MANIFEST, PINNED, aside_dir, parse_leftover, step_dir, to_persist_file
from t5ckpt.policies import HELD, WAITS, Decision
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')


def hide_checkpoint(
    storage: Storage, step: int, clock: Clock, *, even_pinned: bool = False, even_waiting: bool = False
) -> Hidden | None:
    """Makes a step invisible, in one atomic operation, under the write lease of the step.

    A reader that leases the step in the meantime finds the write lease and waits, see ``commit/read_lease.py``. A pin that is
    set in the meantime is found afterwards, and the step is made visible again, except with ``even_pinned``. A step that waits
    for its upload is kept, except with ``even_waiting``.

    A step of a newer program is refused, see ``check_known``. On an object store only the manifest is read, and the caller
    checks the sidecar.

    Returns:
      The argument of :func:`remove_hidden`; None if the step has a read lease, is pinned, or waits for its upload.

    Raises:
      CheckpointNotFoundError: another process has deleted it.
      UnsupportedFormatError: a newer program wrote it; it is unchanged.
      StorageError: it could not be made invisible, and is unchanged.
    """
    if not storage.commits_by_rename:
        # Deleting the manifest hides the step in one operation, as the rename below does.
        return hide_in_place(storage, step, clock, lambda keys: PINNED in keys and not even_pinned)
    check_known(storage, step_dir(step))
    check_removable(storage, step_dir(step))
    lease = acquire_to_hide(storage, step, clock)
    try:
        if step in lease.read_steps or (not even_pinned and is_pinned(storage, step_dir(step))):
            return None
        if not even_waiting and step in waiting_steps(storage):
            return None
        _drop_replacements(storage, step, clock)
        doomed = renamed_for_deletion(storage, step_dir(step), step, clock)
        if even_pinned or not is_pinned(storage, doomed):
            return Hidden(doomed, step)
        try:
            storage.publish(doomed, step_dir(step))
        except StorageError:
            # A writer has written the step. Garbage collection brings back a pinned checkpoint with this name.
            renamed_for_replacement(storage, doomed, step, clock)
            raise
        return None
    finally:
        lease.release()


def _drop_replacements(storage: Storage, step: int, clock: Clock) -> None:
    """Renames the leftovers of killed replacements, so that garbage collection does not restore them after the deletion."""
    for entry in storage.entries():
        leftover = parse_leftover(entry.name)
        if leftover is None or leftover.state != 'replaced' or leftover.step != step:
            continue
        lock = storage.try_lock(entry.name)
        if lock is None:
            # Its writer is alive and will publish it as the step.
            continue
        with contextlib.closing(lock):
            if lock.is_held and not is_pinned(storage, entry.name):
                renamed_for_deletion(storage, entry.name, step, clock)


def remove_hidden(storage: Storage, hidden: Hidden, clock: Clock) -> None:
    """Removes the files of a hidden step, unless garbage collection is removing them."""
    if not hidden.directory:
        return
    if hidden.lease is not None:
        remove_in_place(storage, hidden, hidden.lease)
        return
    lock = storage.try_lock(hidden.directory)
    if lock is None:
        return
    try:
        remove_checkpoint(storage, hidden.directory, hidden.step, clock)
    finally:
        lock.close()


def decide_deletion(
    storage: Storage, step: int, clock: Clock, *, even_pinned: bool = False, even_waiting: bool = False
) -> Decision:
    """Decides whether a step may be deleted, with the reason; changes nothing.

    Raises:
      CheckpointNotFoundError: the step does not exist; the message lists the steps.
      UnsupportedFormatError: the step is in another layout, or of a newer program.
    """
    directory = step_dir(step)
    found = inspect_name(storage, directory)
    if not (found.is_t5x if found is not None else storage.is_file(join(directory, MANIFEST))):
        steps = [found] if found is not None else listing(storage).steps
        for each in steps:
            if each.step == step and not each.is_t5x:
                cure = 'Remove it with the program that wrote it.'
                raise other_layout(storage.url(each.name), each.layout, 'which t5ckpt does not delete', cure)
        raise no_step(storage, step, steps, 'Pass one of them.')
    check_known(storage, directory)
    if not even_pinned and is_pinned(storage, directory):
        return Decision(step, True, pin_reason(storage, directory))
    if step in leased_steps(storage, clock):
        return Decision(step, True, HELD)
    if not even_waiting and step in waiting_steps(storage):
        return Decision(step, True, WAITS)
    return Decision(step, False, 'requested')


def delete_step(
    storage: Storage, step: int, clock: Clock, *, even_pinned: bool = False, even_waiting: bool = False
) -> None:
    """Deletes one step: makes it invisible in one atomic operation, and then removes it.

    A crash in between leaves files that no listing shows and the next save removes. With ``even_waiting``, the upload for which
    the step waits is dropped.

    Raises:
      CheckpointNotFoundError: the step does not exist; the message lists the steps.
      StepKeptError: it is pinned, has a read lease, or waits for its upload; nothing was changed.
      StorageError: the storage failed; the step is unchanged, or is not listed.
    """
    flags = {'even_pinned': even_pinned, 'even_waiting': even_waiting}
    found = decide_deletion(storage, step, clock, **flags)
    hidden = None
    if not found.keep:
        hidden = hide_checkpoint(storage, step, clock, **flags)
    if hidden is None:
        if not found.keep:
            # It was pinned or leased since the decision.
            found = decide_deletion(storage, step, clock, **flags)
        raise kept_error(storage, step, found.reason if found.keep else HELD, 'deleted')
    try:
        if even_waiting and storage.commits_by_rename:
            storage.delete_file(to_persist_file(step))
        remove_hidden(storage, hidden, clock)
    except T5CkptError as error:
        where = storage.url(hidden.directory)
        _log.warning('t5ckpt: could not remove %s, the next save will try again: %s', where, error)


def rename_damaged(storage: Storage, step: int, clock: Clock) -> str:
    """Renames a damaged step, so that no listing shows it, under its write lease. Only where a rename commits.

    Returns:
      The new name, under which its files stay.

    Raises:
      StepKeptError: it is pinned, or a reader holds it.
      CheckpointNotFoundError: another process has deleted it.
      StorageError: it could not be renamed.
    """
    lease = acquire_to_hide(storage, step, clock)
    try:
        check_not_kept(storage, step, lease.read_steps, 'renamed')
        return renamed(storage, step_dir(step), functools.partial(aside_dir, step, 'damaged'), clock)
    finally:
        lease.release()
