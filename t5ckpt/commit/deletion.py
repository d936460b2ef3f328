"""Deletes a step: it is announced, hidden in one operation, and then removed.

``commit/markers.py`` has the order of the requests. Where directories can be renamed, the rename of the step's hides it, else the
deletion of its manifest.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Generator

from t5ckpt.catalog.layouts import ListedStep, other_layout
from t5ckpt.catalog.listing import inspect_step, listing
from t5ckpt.catalog.locate import no_step
from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.markers import HIDE, Marker
from t5ckpt.commit.removal import (
    check_known,
    check_not_kept,
    check_removable,
    delete_manifest,
    directories_of,
    end_work,
    is_pinned,
    kept_by,
    remove_unnamed,
    rename_aside,
)
from t5ckpt.commit.taken_steps import BeingHiddenError, locked
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import AccessDeniedError, StepKeptError, T5CkptError
from t5ckpt.format.names import MANIFEST, PINNED, step_dir, to_persist_file
from t5ckpt.policies import Decision
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')


def find_step(storage: Storage, step: int) -> ListedStep:
    """The step, in any layout.

    Raises:
      CheckpointNotFoundError: the step does not exist; the message lists the steps.
    """
    found = inspect_step(storage, step)
    if found is not None:
        return found
    if storage.is_file(join(step_dir(step), MANIFEST)):
        return ListedStep(step, step_dir(step))
    raise no_step(storage, step, listing(storage))


def decide_deletion(storage: Storage, step: int, clock: Clock, **even: bool) -> Decision:
    """Decides whether a step may be deleted, with the reason; changes nothing. ``even`` is as for ``removal.kept_by``.

    Raises:
      CheckpointNotFoundError: the step does not exist; the message lists the steps.
      UnsupportedFormatError: the step is in another layout, or of a newer program.
    """
    _check_own(storage, step)
    reason = kept_by(storage, step, held_steps(storage, clock), **even)
    return Decision(step, reason is not None, reason or 'requested')


def check_deletable(storage: Storage, step: int, clock: Clock, **even: bool) -> None:
    """Raises the error that :func:`delete_step` would raise before it changes anything."""
    _check_own(storage, step)
    check_not_kept(storage, step, held_steps(storage, clock), 'deleted', **even)


def _check_own(storage: Storage, step: int) -> None:
    listed = find_step(storage, step)
    if not listed.is_t5x:
        cure = 'Remove it with the program that wrote it.'
        raise other_layout(storage.url(listed.name), listed.layout, 'which t5ckpt does not delete', cure)
    check_known(storage, listed.name)


def delete_step(storage: Storage, step: int, clock: Clock, **even: bool) -> None:
    """Deletes a step in T5X's layout, see :func:`hide`.

    Raises:
      CheckpointNotFoundError: the step does not exist; the message lists the steps.
      UnsupportedFormatError: the step is in another layout, or of a newer program.
      StepKeptError: it is pinned, held by a reader, or waits for its upload; nothing was changed.
      StorageError: the storage failed; the step is unchanged, or is not listed.
    """
    check_deletable(storage, step, clock, **even)
    hide(storage, step, clock, **even)()


@contextlib.contextmanager
def announced(
    storage: Storage, step: int, clock: Clock, directories: Collection[str] = ()
) -> Generator[tuple[Marker, Collection[int]]]:
    """Yields a marker, and the steps that readers hold, after readers can see that a step is about to be hidden or changed.

    A reader that holds or pins the step in the meantime finds the marker and waits, see ``commit/holds.py``. The marker of a step
    that was hidden stays.

    Args:
      storage: the run.
      step: its number.
      clock: unix seconds.
      directories: those below the step whose files its removal removes.
    """
    marker = Marker(storage, step, clock, HIDE, directories)
    try:
        yield marker, held_steps(storage, clock)
    finally:
        if not marker.has_hidden:
            marker.remove()


def hide(storage: Storage, step: int, clock: Clock, /, **even: bool) -> Callable[[], None]:
    """Makes a step in T5X's layout invisible, in one atomic operation, after it was announced.

    A crash afterwards leaves files that no listing shows, and that the next save removes.

    Args:
      storage: the run.
      step: its number.
      clock: unix seconds.
      even: as for ``removal.kept_by``. With ``even_waiting``, the upload for which the step waits is dropped.

    Returns:
      Removes the files; logs why it cannot.

    Raises:
      StepKeptError: it is held by a reader, is pinned, or waits for its upload; it is unchanged.
      CheckpointNotFoundError: another process has deleted it.
      UnsupportedFormatError: a newer program wrote it, see ``check_known``; it is unchanged.
      AccessDeniedError: it belongs to another user; it is unchanged.
      StorageError: another process replaces it, or it could not be made invisible; it is unchanged.
    """
    name, manifest, version = step_dir(step), None, None
    if not storage.commits_by_rename:
        manifest, version = storage.read_with_version(join(name, MANIFEST))
    directories = directories_of(manifest or b'')
    with announced(storage, step, clock, directories) as (marker, held), locked(storage, name):
        check_known(storage, name, manifest=manifest)
        check_removable(storage, name)
        check_not_kept(storage, step, held, 'deleted', **even)
        marker.check()
        if manifest is None:
            storage.publish(name, marker.aside)
            marker.has_hidden = True
        else:
            # Readers wait for a request that may still arrive.
            marker.has_hidden = True
            try:
                delete_manifest(storage, name, version)
            except (AccessDeniedError, BeingHiddenError):
                marker.has_hidden = False
                raise
            if even.get('even_pinned'):
                storage.delete_file(join(name, PINNED))
    marker.end()
    return functools.partial(_remove, storage, step, marker, directories, clock, **even)


def _remove(
    storage: Storage, step: int, marker: Marker, directories: Collection[str], clock: Clock, **even: bool
) -> None:
    """Removes the files of a hidden step."""
    try:
        if not marker.aside:
            remove_unnamed(storage, step, directories)
        else:
            if even.get('even_waiting'):
                storage.delete_file(to_persist_file(step))
            end_work(storage, step, marker.directory, marker.aside, clock)
    except T5CkptError as error:
        where = storage.url(step_dir(step))
        _log.warning('t5ckpt: could not remove %s, the next save will try again: %s', where, error)
    finally:
        (marker.remove if marker.aside else marker.release)()


def remove_pin(storage: Storage, step: int, clock: Clock) -> None:
    """Removes the pin of a step without a manifest in a bucket, which was written after the deletion."""
    directory = step_dir(step)
    if is_pinned(storage, directory):
        # A program that pins a later save of the step sees this, and looks for its pin again.
        with announced(storage, step, clock) as (marker, _):
            if not storage.is_file(join(directory, MANIFEST)):
                marker.check()
                storage.delete_file(join(directory, PINNED))


def rename_damaged(storage: Storage, step: int, clock: Clock) -> str:
    """Renames a damaged step, so that no listing shows it, after it was announced.

    Returns:
      The new name, under which its files stay.

    Raises:
      StepKeptError: it is pinned or held by a reader, is in another layout, or the storage cannot rename.
      CheckpointNotFoundError: another process has deleted it.
      StorageError: it could not be renamed.
    """
    listed = find_step(storage, step)
    name = listed.name
    if not (storage.commits_by_rename and listed.is_t5x):
        raise StepKeptError(f'{storage.url(name)} cannot be renamed.')
    with announced(storage, step, clock) as (marker, held), locked(storage, name):
        check_not_kept(storage, step, held, 'renamed', even_waiting=True)
        marker.check()
        return rename_aside(storage, name, step, 'damaged', clock())


def try_to_rename_damaged(storage: Storage, step: int, clock: Clock) -> None:
    """Renames a damaged step, see :func:`rename_damaged`, and logs the new name, or why it stays."""
    where = storage.url(step_dir(step))
    try:
        aside = rename_damaged(storage, step, clock)
    except T5CkptError as error:
        _log.warning('t5ckpt: %s is not renamed, so that step cannot be saved there again: %s', where, error)
    else:
        _log.error('t5ckpt: %s cannot be restored and was renamed to %s', where, storage.url(aside))
