"""Pins a step with the file ``PINNED`` (T5X's name) in its directory, which keeps retention from deleting the step.

    pin      [is the manifest there?], +PINNED, [no deleter?], [is the manifest there?], [is the pin there?]

A deleter writes its marker and then looks for the file before it hides the step; where it renames a directory, also after. One
that was stopped in between may still hide the step, so a pin does not count until that deleter has ended.

On object stores a pin killed after its write may leave the file behind, in a step that was deleted meanwhile. A save of the step
removes the file then, because nothing is pinned where no manifest is, and the pin looks for its file last. Garbage collection
removes it, too, under the marker of the deletion.
"""

from __future__ import annotations

import contextlib
import errno

from t5ckpt.catalog.pin_file import NO_REASON, pin_text
from t5ckpt.commit.holds import outlives_deleters
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import CheckpointNotFoundError, StorageError
from t5ckpt.format.names import MANIFEST, PINNED, parse_step_dir
from t5ckpt.storage import Storage


def pin_in(storage: Storage, directory: str, text: str, clock: Clock) -> None:
    """Pins the checkpoint in a directory.

    Args:
      storage: the run.
      directory: of the checkpoint; a step's, or '' for the storage's root.
      text: the reason, the contents of the file. ``NO_REASON`` keeps the reason that is there.
      clock: unix seconds.

    Raises:
      CheckpointNotFoundError: it is not a checkpoint, or another process deletes it at the same time.
      StorageError: it could not be pinned, or a process that was about to delete it has not decided; nothing was changed.
    """
    manifest, step = join(directory, MANIFEST), parse_step_dir(directory)
    if not storage.is_file(manifest):
        storage.check_reachable(manifest)
        raise CheckpointNotFoundError(
            f'{storage.url(directory).rstrip("/")} is not a checkpoint; pass the directory of a step.'
        )
    if text == NO_REASON:
        text = pin_text(storage, directory) or text
    pin = join(directory, PINNED)
    while True:
        is_new = not storage.is_file(pin)
        try:
            storage.write(pin, text.encode())
            is_there = step is None or _outlives_deleters(storage, directory, step, clock)
        except StorageError:
            if is_new:
                # The error says that nothing was changed.
                with contextlib.suppress(StorageError):
                    storage.delete_file(pin)
            raise
        if not is_there or not storage.is_file(manifest):
            # A deleter was first. Where nothing is renamed it would leave the file behind.
            storage.delete_file(pin)
            raise CheckpointNotFoundError(f'{storage.url(directory)}: another process has deleted it.')
        if storage.is_file(pin):
            return


def _outlives_deleters(storage: Storage, directory: str, step: int, clock: Clock) -> bool:
    # Twice: a deleter that finds the pin after it has hidden the step makes the step visible again.
    for _ in range(2):
        if outlives_deleters(storage, step, clock):
            return True
        if not storage.is_file(join(directory, MANIFEST)):
            return False
    raise StorageError(
        errno.EBUSY,
        f'{storage.url(directory)} was not pinned: a process is about to delete it. Try again when that process has ended.',
    )
