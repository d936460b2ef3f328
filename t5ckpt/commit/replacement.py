"""Replaces an old checkpoint, complete or broken, by a new one.

The new one is renamed to ``checkpoint_<step>.replaced-<unix seconds>`` and then exchanged with the old one, so the step is always
listed. If the storage cannot exchange two names, the old one is renamed likewise, and the new one is published. After a crash,
garbage collection restores the first complete one if the step is missing, and removes the others.
"""

from __future__ import annotations

import errno
import logging

from t5ckpt.commit.announcement import announced
from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.removal import check_known, hide_directory, is_pinned, kept_error, remove_checkpoint, rename_aside
from t5ckpt.commit.taken_steps import AlreadyCommittedError
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import StorageError, T5CkptError
from t5ckpt.format.manifest import is_whole as is_whole_manifest
from t5ckpt.format.names import MANIFEST, Leftover, step_dir
from t5ckpt.policies import HELD
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')


class NotPutBackError(StorageError):
    """The second exchange failed, so the old checkpoint, which is kept, has the temporary name of the new one."""


def put_in_place(
    storage: Storage, step: int, directory: str, clock: Clock, *, is_whole: bool, keeps_old: bool = False
) -> str | None:
    """Replaces the directory of a step by a new one, after it was announced.

    A reader that holds the old one in the meantime waits for that. A pin that is set in the meantime is found
    afterwards.

    Args:
      storage: the run, which can rename.
      step: of both.
      directory: the new directory, under its name in the state ``'replaced'``.
      clock: returns unix seconds.
      is_whole: whether the old one is a complete checkpoint. Then it stays if a reader holds it, or is pinned and the new one
        is not, even if the hold or the pin was set after the save began.
      keeps_old: whether the old one keeps a name in the state ``'replaced'``, under which :func:`take_back` finds it.

    Returns:
      The new name of the old directory, to be removed; None if another process has deleted it.

    Raises:
      StepKeptError: the old one is pinned or held by a reader.
      UnsupportedFormatError: a newer program wrote the old one.
      BeingHiddenError: another process replaces or deletes it.
      AlreadyCommittedError: another process has deleted it, and another writer has saved the step since then.
      StorageError: nothing has changed.
    """
    final = step_dir(step)
    is_new_pinned = is_pinned(storage, directory)

    def check_pin(old: str) -> None:
        if is_whole and not is_new_pinned and is_pinned(storage, old):
            raise kept_error(storage, step, 'pinned', 'replaced')

    # The lock of the old directory lasts until it has its new name, so garbage collection ignores it.
    with announced(storage, step, clock) as held:
        if storage.kind(final) is None:
            publish_step(storage, directory, step)
            return None
        if is_whole and step in held:
            raise kept_error(storage, step, HELD, 'replaced')
        check_pin(final)
        if is_whole:
            check_known(storage, final)
        if storage.exchange(directory, final):
            try:
                check_pin(directory)
            except T5CkptError as error:
                _exchange_back(storage, directory, final, error)
                raise
            return directory if keeps_old else _rename_for_deletion(storage, step, directory, clock())
        old = hide_directory(storage, step, clock, 'replaced' if is_whole else 'deleted')
        if old is None:
            publish_step(storage, directory, step)
            return None
        try:
            check_pin(old)
            publish_step(storage, directory, step)
        except AlreadyCommittedError:
            _rename_for_deletion(storage, step, old, clock())
            raise
        except T5CkptError:
            if is_whole:
                storage.publish(old, final)
            raise
        return old if keeps_old else _rename_for_deletion(storage, step, old, clock())


def remove_replaced(storage: Storage, step: int, directory: str, clock: Clock) -> None:
    """Removes the directory of a replaced checkpoint. The new one is committed, so a failure is only logged."""
    try:
        remove_checkpoint(storage, _rename_for_deletion(storage, step, directory, clock()), step, clock())
    except T5CkptError as error:
        _log.warning('t5ckpt: could not remove %s, the next save will try again: %s', storage.url(directory), error)


def take_back(storage: Storage, step: int, replaced: str, clock: Clock) -> None:
    """Puts a replaced checkpoint back in the place of the one that was committed, and removes that one.

    Raises:
      StorageError: the disk failed; the step is one of the two.
    """
    failed = put_in_place(storage, step, replaced, clock, is_whole=True)
    if failed is not None:
        remove_replaced(storage, step, failed, clock)


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


def _exchange_back(storage: Storage, directory: str, final: str, error: T5CkptError) -> None:
    try:
        storage.exchange(directory, final)
    except StorageError as second:
        text = f'{error} The old checkpoint is in {storage.url(directory)} and could not be put back: {second}'
        raise NotPutBackError(second.errno, text) from second


def _rename_for_deletion(storage: Storage, step: int, name: str, unix: float) -> str:
    """Renames the old checkpoint to a name that garbage collection removes. Returns that name, or the old one after an error."""
    try:
        return rename_aside(storage, name, step, 'deleted', unix)
    except T5CkptError:
        return name


def is_still_kept(storage: Storage, leftover: Leftover, clock: Clock) -> bool:
    """Returns whether a replaced checkpoint must not be removed; the caller holds the lock of its directory.

    A pinned one has this name if a writer failed to undo its exchange. It is exchanged with the new one now. Nothing changes
    while a reader holds the step.
    """
    final = step_dir(leftover.step)
    if is_pinned(storage, leftover.name) and not is_pinned(storage, final):
        if storage.exchange(leftover.name, final):
            _log.warning('t5ckpt: brought back %s, which is pinned, from %s', storage.url(final), leftover.name)
        else:
            _log.warning('t5ckpt: %s stays, because it is pinned. Move it away', storage.url(leftover.name))
        return True
    return leftover.step in held_steps(storage, clock)


def put_back(storage: Storage, leftover: Leftover) -> bool:
    """Restores the name of a replaced checkpoint if the step is missing; the caller holds the lock of its directory."""
    final, manifest = step_dir(leftover.step), join(leftover.name, MANIFEST)
    if storage.is_file(join(final, MANIFEST)) or not storage.is_file(manifest):
        return False
    if not is_whole_manifest(storage.read(manifest)):
        return False
    if storage.kind(final) == 'dir':
        # Its writer died while it removed the old one, or before it replaced a broken one.
        remove_checkpoint(storage, final, leftover.step, leftover.unix)
    elif storage.kind(final) is not None:
        return False
    storage.publish(leftover.name, final)
    _log.warning('t5ckpt: brought back %s, which a writer that died was about to replace', storage.url(final))
    return True
