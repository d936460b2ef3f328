"""Deletes a step: it is hidden first, in one operation, and then removed."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Generator

from t5ckpt.catalog.layouts import LEVANTER, ListedStep, orbax_marks, other_layout
from t5ckpt.catalog.listing import inspect_step, listing
from t5ckpt.catalog.locate import no_step
from t5ckpt.commit.announcement import announced
from t5ckpt.commit.bucket_deletion import hide_in_bucket
from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.markers import HIDE, Marker
from t5ckpt.commit.removal import (
    check_known,
    check_not_kept,
    check_removable,
    end_work,
    hide_directory,
    kept_by,
    rename_aside,
    unless_renameless,
)
from t5ckpt.commit.taken_steps import locked
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import StepKeptError, T5CkptError
from t5ckpt.format.names import (
    DAMAGED_MANIFEST,
    MANIFEST,
    step_dir,
    to_persist_file,
)
from t5ckpt.policies import Decision
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')


def find_step(storage: Storage, step: int) -> ListedStep:
    """The step, in any layout.

    Raises:
      CheckpointNotFoundError: the step does not exist; the message lists the steps.
    """
    found = inspect_step(storage, step)
    if found is None:
        raise no_step(storage, step, listing(storage), 'Pass one of them.')
    return found


def decide_deletion(storage: Storage, listed: ListedStep, clock: Clock, **even: bool) -> Decision:
    """Decides whether a step may be deleted, with the reason; changes nothing. ``even`` is as for ``removal.kept_by``.

    Raises:
      UnsupportedFormatError: a newer program wrote it.
    """
    if listed.is_t5x:
        check_known(storage, listed.name)
    reason = kept_by(storage, listed, held_steps(storage, clock), **even)
    requested = (
        'requested' if listed.is_t5x else f'requested; in the layout of {listed.layout}, and deleted with all files'
    )
    return Decision(listed.step, reason is not None, reason or requested)


def check_deletable(storage: Storage, step: int, clock: Clock, **even: bool) -> None:
    """Raises the error that :func:`delete_step` would raise before it changes anything."""
    listed = find_step(storage, step)
    if not listed.is_t5x:
        cure = f'Remove it with the program that wrote it, or with t5ckpt rm {storage.url()}@{step}.'
        raise other_layout(storage.url(listed.name), listed.layout, 'which this call does not delete', cure)
    check_known(storage, listed.name)
    check_not_kept(storage, listed, held_steps(storage, clock), 'deleted', **even)


def delete_step(
    storage: Storage, step: int, clock: Clock, *, even_pinned: bool = False, even_waiting: bool = False
) -> None:
    """Deletes one step: makes it invisible in one atomic operation, and then removes it.

    A crash in between leaves files that no listing shows and the next save removes. With ``even_waiting``, the upload for which
    the step waits is dropped.

    Raises:
      CheckpointNotFoundError: the step does not exist; the message lists the steps.
      UnsupportedFormatError: the step is in another layout, or of a newer program.
      StepKeptError: it is pinned, held by a reader, or waits for its upload; nothing was changed.
      StorageError: the storage failed; the step is unchanged, or is not listed.
    """
    check_deletable(storage, step, clock, even_pinned=even_pinned, even_waiting=even_waiting)
    hide(storage, step, clock, even_pinned=even_pinned, even_waiting=even_waiting)()


def delete_other(storage: Storage, listed: ListedStep, clock: Clock, *, even_pinned: bool = False) -> None:
    """Hides a step in another layout, and removes all of its files.

    Where no directory can be renamed, a crash may leave files that no listing shows.

    Raises:
      StepKeptError: it is pinned, or held by a reader; nothing was changed.
      CheckpointNotFoundError: another process has deleted it.
      StorageError: another process replaces or deletes it, or the storage failed.
    """
    name = listed.name
    # Garbage collection leaves a directory that is locked.
    own = contextlib.nullcontext() if name == step_dir(listed.step) else locked(storage, name)
    with locked(storage, step_dir(listed.step)), own:
        marker = Marker(storage, listed.step, clock, HIDE)
        try:
            check_not_kept(storage, listed, held_steps(storage, clock), 'deleted', even_pinned=even_pinned)
            if storage.kind(name) == 'file':
                storage.delete_file(name)
                return
            if storage.commits_by_rename:
                storage.publish(name, marker.aside)
                name = marker.aside
            else:
                storage.delete_files([join(name, MANIFEST), join(name, LEVANTER), *orbax_marks(name)])
            storage.delete_tree(name)
        finally:
            marker.remove()


def hide(
    storage: Storage, step: int, clock: Clock, *, even_pinned: bool = False, even_waiting: bool = False
) -> Callable[[], None]:
    """Makes a step invisible, in one atomic operation, after it was announced.

    A reader that holds or pins the step in the meantime finds the announcement and waits, see ``commit/holds.py``.

    Returns:
      Removes the files, or logs why it cannot.

    Raises:
      StepKeptError: it is held by a reader, is pinned (without ``even_pinned``), or waits for its upload (without
        ``even_waiting``); it is unchanged.
      CheckpointNotFoundError: another process has deleted it.
      UnsupportedFormatError: a newer program wrote it, see ``check_known``; it is unchanged.
      AccessDeniedError: it belongs to another user; it is unchanged.
      StorageError: another process replaces it, or it could not be made invisible; it is unchanged.
    """
    with hiding(storage, [step], clock, even_pinned=even_pinned, even_waiting=even_waiting) as hide_one:
        return hide_one(step)


@contextlib.contextmanager
def hiding(
    storage: Storage, steps: Collection[int], clock: Clock, *, even_pinned: bool = False, even_waiting: bool = False
) -> Generator[Callable[[int], Callable[[], None]]]:
    """Yields a function that hides each of some steps as :func:`hide`; on a file system with one listing for all."""
    if not storage.commits_by_rename:
        yield lambda step: _removal(storage, step, hide_in_bucket(storage, step, clock, even_pinned=even_pinned))
        return
    markers: dict[int, Marker] = {}

    def hide_one(step: int) -> Callable[[], None]:
        listed = ListedStep(step, step_dir(step))
        with locked(storage, listed.name):
            check_known(storage, listed.name)
            check_removable(storage, listed.name)
            check_not_kept(storage, listed, held, 'deleted', even_pinned=even_pinned, even_waiting=even_waiting)
            hide_directory(storage, step, markers[step].aside, clock)
        marker = markers.pop(step)
        marker.end()
        return _removal(storage, step, functools.partial(_finish, storage, step, marker, clock, even_waiting))

    try:
        for step in steps:
            markers[step] = Marker(storage, step, clock, HIDE)
        held = held_steps(storage, clock)
        yield hide_one
    finally:
        for marker in markers.values():
            marker.remove()


def _removal(storage: Storage, step: int, remove: Callable[[], object]) -> Callable[[], None]:
    def remove_or_log() -> None:
        try:
            remove()
        except T5CkptError as error:
            where = storage.url(step_dir(step))
            _log.warning('t5ckpt: could not remove %s, the next save will try again: %s', where, error)

    return remove_or_log


def _finish(storage: Storage, step: int, marker: Marker, clock: Clock, drops_upload: bool) -> None:
    try:
        if drops_upload:
            storage.delete_file(to_persist_file(step))
        end_work(storage, step, marker.directory, marker.aside, clock)
    finally:
        marker.remove()


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
        check_not_kept(storage, ListedStep(step, step_dir(step)), held, 'renamed', even_waiting=True)
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
