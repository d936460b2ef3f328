"""Deletes a step: it is announced, hidden in one operation, and then removed.

``commit/markers.py`` has the order of the requests. Where directories can be renamed, the rename of the step's hides it, else the
deletion of its manifest.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Generator

from t5ckpt.catalog.layouts import LEVANTER, ORBAX, ListedStep, has_placeholder, orbax_marks, other_layout
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
    hide_directory,
    is_pinned,
    kept_by,
    remove_unnamed,
    rename_aside,
    unless_renameless,
)
from t5ckpt.commit.taken_steps import BeingHiddenError, locked
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import AccessDeniedError, StepKeptError, T5CkptError
from t5ckpt.format.names import (
    DAMAGED_MANIFEST,
    MANIFEST,
    PINNED,
    step_dir,
    to_persist_file,
)
from t5ckpt.policies import Decision
from t5ckpt.storage import Storage

_Announcement = tuple[dict[int, Marker], Collection[int]]
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


def check_deletable(storage: Storage, step: int, clock: Clock, **even: bool) -> ListedStep:
    """Raises the error that :func:`delete_step` would raise before it changes anything; returns the step."""
    listed = find_step(storage, step)
    if not listed.is_t5x:
        cure = f'Remove it with the program that wrote it, or with t5ckpt rm {storage.url()}@{step}.'
        raise other_layout(storage.url(listed.name), listed.layout, 'which this call does not delete', cure)
    check_known(storage, listed.name)
    check_not_kept(storage, listed, held_steps(storage, clock), 'deleted', **even)
    return listed


def delete_step(storage: Storage, step: int, clock: Clock, **even: bool) -> None:
    """Deletes a step in T5X's layout, see :func:`hide`.

    Raises:
      CheckpointNotFoundError: the step does not exist; the message lists the steps.
      UnsupportedFormatError: the step is in another layout, or of a newer program.
      StepKeptError: it is pinned, held by a reader, or waits for its upload; nothing was changed.
      StorageError: the storage failed; the step is unchanged, or is not listed.
    """
    hide(storage, check_deletable(storage, step, clock, **even), clock, **even)()


@contextlib.contextmanager
def announced(
    storage: Storage, steps: Collection[int], clock: Clock, directories: Collection[str] = ()
) -> Generator[_Announcement]:
    """Yields markers, and the steps that readers hold, after readers can see that some steps are about to be hidden or changed.

    A reader that holds or pins one of them in the meantime finds the marker and waits, see ``commit/holds.py``.

    Args:
      storage: the run.
      steps: its steps. The markers of those that were hidden are taken out, the others are removed.
      clock: unix seconds.
      directories: those below the step whose files its removal removes.
    """
    markers: dict[int, Marker] = {}
    try:
        for step in steps:
            markers[step] = Marker(storage, step, clock, HIDE, directories)
        yield markers, held_steps(storage, clock) if markers else ()
    finally:
        for marker in markers.values():
            marker.remove()


def hide(
    storage: Storage,
    listed: ListedStep,
    clock: Clock,
    announcement: _Announcement = ({}, ()),
    /,
    **even: bool,
) -> Callable[[], None]:
    """Makes a step invisible, in one atomic operation, after it was announced.

    A crash afterwards leaves files that no listing shows. The next save removes those of a step in T5X's layout.

    Args:
      storage: the run.
      listed: the step, in any layout.
      clock: unix seconds.
      announcement: of several steps, where directories can be renamed; this one is announced if it has no step.
      even: as for ``removal.kept_by``. With ``even_waiting``, the upload for which the step waits is dropped.

    Returns:
      Removes the files; logs why it cannot those of a step in T5X's layout.

    Raises:
      StepKeptError: it is held by a reader, is pinned, or waits for its upload; it is unchanged.
      CheckpointNotFoundError: another process has deleted it.
      UnsupportedFormatError: a newer program wrote it, see ``check_known``; it is unchanged.
      AccessDeniedError: it belongs to another user; it is unchanged.
      StorageError: another process replaces it, or it could not be made invisible; it is unchanged.
    """
    name, in_bucket = listed.name, listed.is_t5x and not storage.commits_by_rename
    manifest, version = storage.read_with_version(join(name, MANIFEST)) if in_bucket else (b'', None)
    if has_placeholder(manifest):
        raise other_layout(storage.url(name), ORBAX, 'which t5ckpt does not delete', 'Delete it with Orbax.')
    if in_bucket:
        check_known(storage, name, manifest=manifest)
    directories = directories_of(manifest)
    with contextlib.ExitStack() as stack:
        markers, held = announcement
        if not markers:
            markers, held = stack.enter_context(announced(storage, [listed.step], clock, directories))
        stack.enter_context(locked(storage, name))
        if listed.is_t5x and not in_bucket:
            check_known(storage, name)
        check_removable(storage, name)
        check_not_kept(storage, listed, held, 'deleted', **even)
        marker = markers[listed.step]
        marker.check()
        if in_bucket:
            # Readers wait for a request that may still arrive.
            del markers[listed.step]
            try:
                delete_manifest(storage, name, version)
            except (AccessDeniedError, BeingHiddenError):
                marker.remove()
                raise
            if even.get('even_pinned'):
                storage.delete_file(join(name, PINNED))
        elif listed.is_t5x:
            hide_directory(storage, listed.step, marker.aside, clock)
        elif marker.aside and storage.kind(name) != 'file':
            storage.publish(name, marker.aside)
        else:
            storage.delete_files([name, join(name, MANIFEST), join(name, LEVANTER), *orbax_marks(name)])
        markers.pop(listed.step, None)
    marker.end()
    return functools.partial(_remove, storage, listed, marker, directories, clock, **even)


def _remove(
    storage: Storage, listed: ListedStep, marker: Marker, directories: Collection[str], clock: Clock, **even: bool
) -> None:
    """Removes the files of a hidden step."""
    try:
        if not listed.is_t5x:
            storage.delete_tree(marker.aside or listed.name)
        elif not marker.aside:
            remove_unnamed(storage, listed.step, directories)
        else:
            if even.get('even_waiting'):
                storage.delete_file(to_persist_file(listed.step))
            end_work(storage, listed.step, marker.directory, marker.aside, clock)
    except T5CkptError as error:
        if not listed.is_t5x:
            raise
        where = storage.url(listed.name)
        _log.warning('t5ckpt: could not remove %s, the next save will try again: %s', where, error)
    finally:
        (marker.remove if marker.aside else marker.release)()


def remove_pin(storage: Storage, step: int, clock: Clock) -> None:
    """Removes the pin of a step without a manifest in a bucket, which was written after the deletion."""
    directory = step_dir(step)
    if is_pinned(storage, directory):
        # A program that pins a later save of the step sees this, and looks for its pin again.
        with announced(storage, [step], clock) as (markers, _):
            if not storage.is_file(join(directory, MANIFEST)):
                markers[step].check()
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
    with announced(storage, [step], clock) as (markers, held), locked(storage, name):
        check_not_kept(storage, listed, held, 'renamed', even_waiting=True)
        markers[step].check()
        with unless_renameless():
            return rename_aside(storage, name, step, 'damaged', clock())
        # Such a layer renames files.
        storage.publish(join(name, MANIFEST), join(name, DAMAGED_MANIFEST))
        return join(name, DAMAGED_MANIFEST)


def try_to_rename_damaged(storage: Storage, step: int, clock: Clock) -> None:
    """Renames a damaged step, see :func:`rename_damaged`, and logs the new name, or why it stays."""
    where = storage.url(step_dir(step))
    try:
        aside = rename_damaged(storage, step, clock)
    except T5CkptError as error:
        _log.warning('t5ckpt: %s is not renamed, so that step cannot be saved there again: %s', where, error)
    else:
        _log.error('t5ckpt: %s cannot be restored and was renamed to %s', where, storage.url(aside))
