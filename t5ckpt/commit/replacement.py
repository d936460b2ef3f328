"""Replaces an old checkpoint, complete or broken, by a new one, where directories can be renamed.

The two directories exchange their names, so the step is always listed. If the storage cannot exchange two names, the old one is
hidden, and the new one is published. After a crash in between, garbage collection publishes it (``commit/removal.end_work``).
"""

from __future__ import annotations

import contextlib
import errno

from t5ckpt.catalog.layouts import ListedStep
from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.markers import HIDE, Marker
from t5ckpt.commit.removal import check_known, check_not_kept, end_work, hide_directory, is_pinned
from t5ckpt.commit.taken_steps import AlreadyCommittedError, locked
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import StorageError, T5CkptError
from t5ckpt.format.names import MANIFEST, step_dir
from t5ckpt.storage import Storage


def put_in_place(storage: Storage, step: int, marker: Marker, clock: Clock, *, is_whole: bool) -> str | None:
    """Replaces the directory of a step by that of the owner of a marker, which announces it.

    A reader that holds or pins the old one in the meantime waits for that.

    Args:
      storage: the run, which can rename.
      step: of both.
      marker: its directory is the new one.
      clock: returns unix seconds.
      is_whole: whether the old one is a complete checkpoint. Then it stays if a reader holds it, or is pinned and the new one
        is not, even if the hold or the pin was set after the save began.

    Returns:
      The new name of the old directory, one of the marker's; None if another process has deleted it.

    Raises:
      StepKeptError: the old one is pinned or held by a reader.
      UnsupportedFormatError: a newer program wrote the old one.
      BeingHiddenError: another process replaces or deletes it.
      AlreadyCommittedError: another process has deleted it, and another writer has saved the step since then.
      StorageError: nothing has changed.
    """
    old = ListedStep(step, step_dir(step))
    with locked(storage, old.name), contextlib.ExitStack() as announced:
        announced.callback(marker.end)
        marker.update(HIDE)
        held = held_steps(storage, clock)
        if storage.kind(old.name) is None:
            publish_step(storage, marker.directory, step)
            return None
        if is_whole:
            even_pinned = is_pinned(storage, marker.directory)
            check_not_kept(storage, old, held, 'replaced', even_pinned=even_pinned, even_waiting=True)
            check_known(storage, old.name)
        if storage.exchange(marker.directory, old.name):
            return marker.directory
        hide_directory(storage, step, marker.aside, clock)
        try:
            publish_step(storage, marker.directory, step)
        except T5CkptError:
            # Unless the new one has the name, and only its rename may not be durable.
            if storage.is_file(join(marker.aside, MANIFEST)):
                with contextlib.suppress(T5CkptError):
                    storage.publish(marker.aside, old.name)
            raise
        return marker.aside


def take_back(storage: Storage, step: int, replaced: str, clock: Clock) -> None:
    """Puts a replaced checkpoint back in the place of the one that was committed, and removes that one.

    Raises:
      StorageError: the disk failed; the step is one of the two.
    """
    marker = Marker(storage, step, clock)
    try:
        storage.publish(replaced, marker.directory)
        put_in_place(storage, step, marker, clock, is_whole=True)
        end_work(storage, step, marker.directory, marker.aside, clock)
    finally:
        marker.remove()


def publish_step(storage: Storage, directory: str, step: int) -> None:
    """Renames a directory to the final one of its step.

    Raises:
      AlreadyCommittedError: another writer has saved the step.
      StorageError: it could not be renamed.
    """
    final = step_dir(step)
    while True:
        try:
            storage.publish(directory, final)
        except StorageError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            if storage.is_file(join(final, MANIFEST)):
                raise AlreadyCommittedError(
                    f'{storage.url(final)} was saved by another writer in the meantime'
                ) from error
            # The step of the other writer may be deleted again.
            if storage.kind(final) is not None:
                raise
        else:
            return
