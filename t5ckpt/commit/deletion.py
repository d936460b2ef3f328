"""Deletes a checkpoint: hidden first, in one operation, then removed."""

from __future__ import annotations

import contextlib
import logging

from t5ckpt.catalog.layouts import other_layout
from t5ckpt.catalog.listing import waiting_steps
from t5ckpt.catalog.pin_file import pin_reason
from t5ckpt.commit.announcement import announced, lock_directory
from t5ckpt.commit.bucket_deletion import Hidden, remove_unnamed
from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.other_layouts import step_in_other_layout
from t5ckpt.commit.removal import (
    check_known,
    check_not_kept,
    is_pinned,
    kept_error,
    remove_checkpoint,
    rename_aside,
    unless_renameless,
)
from t5ckpt.commit.strategy import strategy_of
from t5ckpt.commit.taken_steps import BeingHiddenError
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import StepKeptError, T5CkptError
from t5ckpt.format.names import DAMAGED_MANIFEST, MANIFEST, step_dir, to_persist_file
from t5ckpt.policies import HELD, WAITS, Decision
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')


def remove_hidden(storage: Storage, hidden: Hidden, clock: Clock) -> None:
    """Removes the files of a hidden step, unless garbage collection is removing them."""
    if not hidden.directory:
        return
    if not storage.commits_by_rename:
        remove_unnamed(storage, hidden.step, hidden.directories)
        return
    with contextlib.suppress(BeingHiddenError):
        lock = lock_directory(storage, hidden.directory)
        if lock is not None:
            with contextlib.closing(lock):
                remove_checkpoint(storage, hidden.directory, hidden.step, clock())


def decide_deletion(
    storage: Storage, step: int, clock: Clock, *, even_pinned: bool = False, even_waiting: bool = False
) -> Decision:
    """Decides whether a step may be deleted, with the reason; changes nothing.

    Raises:
      CheckpointNotFoundError: the step does not exist; the message lists the steps.
      UnsupportedFormatError: the step is in another layout, or of a newer program.
    """
    directory = step_dir(step)
    other = step_in_other_layout(storage, step)
    if other is not None:
        cure = f'Remove it with the program that wrote it, or with t5ckpt rm {storage.url()}@{step}.'
        raise other_layout(storage.url(other.name), other.layout, 'which this call does not delete', cure)
    check_known(storage, directory)
    if not even_pinned and is_pinned(storage, directory):
        return Decision(step, True, pin_reason(storage, directory))
    if step in held_steps(storage, clock):
        return Decision(step, True, HELD)
    if not even_waiting and step in waiting_steps(storage):
        return Decision(step, True, WAITS)
    return Decision(step, False, 'requested')


def check_deletable(
    storage: Storage, step: int, clock: Clock, *, even_pinned: bool = False, even_waiting: bool = False
) -> None:
    """Raises the error that :func:`delete_step` would raise before it changes anything."""
    decision = decide_deletion(storage, step, clock, even_pinned=even_pinned, even_waiting=even_waiting)
    if decision.keep:
        raise kept_error(storage, step, decision.reason, 'deleted')


def delete_step(
    storage: Storage, step: int, clock: Clock, *, even_pinned: bool = False, even_waiting: bool = False
) -> None:
    """Deletes one step: makes it invisible in one atomic operation, and then removes it.

    A crash in between leaves files that no listing shows and the next save removes. With ``even_waiting``, the upload for which
    the step waits is dropped.

    Raises:
      CheckpointNotFoundError: the step does not exist; the message lists the steps.
      StepKeptError: it is pinned, held by a reader, or waits for its upload; nothing was changed.
      StorageError: the storage failed; the step is unchanged, or is not listed.
    """
    flags = {'even_pinned': even_pinned, 'even_waiting': even_waiting}
    decided = decide_deletion(storage, step, clock, **flags)
    hidden = None if decided.keep else strategy_of(storage).hide(storage, step, clock, **flags)
    if hidden is None:
        # It may have been pinned or held since the decision.
        decided = decide_deletion(storage, step, clock, **flags)
        raise kept_error(storage, step, decided.reason if decided.keep else HELD, 'deleted')
    try:
        if even_waiting and step in waiting_steps(storage):
            storage.delete_file(to_persist_file(step))
        remove_hidden(storage, hidden, clock)
    except T5CkptError as error:
        where = storage.url(hidden.directory)
        _log.warning('t5ckpt: could not remove %s, the next save will try again: %s', where, error)


def rename_damaged(storage: Storage, step: int, clock: Clock) -> str:
    """Renames a damaged step, so that no listing shows it, after it was announced.

    Returns:
      The new name, under which its files stay.

    Raises:
      StepKeptError: it is pinned or held by a reader, or the storage cannot rename.
      CheckpointNotFoundError: another process has deleted it.
      StorageError: it could not be renamed.
    """
    if not storage.commits_by_rename:
        raise StepKeptError(f'{storage.url(step_dir(step))} cannot be renamed on this storage.')
    with announced(storage, step, clock) as held:
        check_not_kept(storage, step, held, 'renamed')
        with unless_renameless():
            return rename_aside(storage, step_dir(step), step, 'damaged', clock())
        # Such a layer renames files.
        aside = join(step_dir(step), DAMAGED_MANIFEST)
        storage.publish(join(step_dir(step), MANIFEST), aside)
        return aside


def stays_text(storage: Storage, name: str) -> str:
    """The log line of a damaged step that keeps its name."""
    return f't5ckpt: {storage.url(name)} is not renamed, so that step cannot be saved there again'


def try_to_rename_damaged(storage: Storage, step: int, clock: Clock) -> None:
    """Renames a damaged step, see :func:`rename_damaged`, and logs the new name, or why it stays."""
    where = storage.url(step_dir(step))
    try:
        aside = rename_damaged(storage, step, clock)
    except StepKeptError as error:
        _log.warning('%s: %s', stays_text(storage, step_dir(step)), error)
    except T5CkptError as error:
        _log.warning('t5ckpt: could not rename %s: %s', where, error)
    else:
        _log.error('t5ckpt: %s cannot be restored and was renamed to %s', where, storage.url(aside))
