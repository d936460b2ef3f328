"""Holds and pins, which keep a step from being deleted.

The hold of a reader is a file whose name has the step, the expiry and the duration, see ``format/names.py``. It is in the run's
directory or, on object stores, in ``.t5ckpt/``. A reader writes it and then looks for markers, a deleter writes its marker and
then looks for holds, so the later of the two sees the other (``commit/markers.py``). A reader that sees a deleter waits until it
has decided. So a held step is never hidden, and a deleter that is killed leaves it in place. A hold that remains after a crash
expires.

A pin is the file ``PINNED`` (T5X's name) in the directory of the step.

    pin      [is the manifest there?], +PINNED, [no deleter?], [is the manifest there?], [is the pin there?]

A deleter writes its marker and then looks for the file before it hides the step. One that was stopped in between may still hide
the step, so a pin does not count until that deleter has ended.

On object stores a pin killed after its write may leave the file behind, in a step that was deleted meanwhile. A save of the step
removes the file then, because nothing is pinned where no manifest is, and the pin looks for its file last. Garbage collection
removes it, too, under the marker of the deletion.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
from collections.abc import Generator, Iterable

from t5ckpt.catalog.listing import has_step
from t5ckpt.catalog.pin_file import NO_REASON, pin_text
from t5ckpt.commit.markers import CLOCK_SECONDS, announcement_directory, is_about_to_hide, run_clock
from t5ckpt.commit.taken_steps import BeingHiddenError, attempts
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import AccessDeniedError, CheckpointNotFoundError, StorageError
from t5ckpt.format.names import HOLD_PREFIX, MANIFEST, PINNED, Hold, hold_file, parse_hold, parse_step_dir, step_dir
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')
# A deleter hides a step, or gives up, within a few requests.
_DELETER_SECONDS = 5.0


@contextlib.contextmanager
def hold(storage: Storage, step: int, seconds: float, clock: Clock) -> Generator[bool]:
    """Holds a step for at most ``seconds``; yields False if the step was deleted before.

    Raises:
      AccessDeniedError: the run may be read and not be written.
    """
    file = hold_file(step, int(clock() + seconds) + 1, int(seconds) + 1, secrets.token_hex(8))
    name = join(announcement_directory(storage), file)
    try:
        storage.write(name, b'')
    except AccessDeniedError as error:
        raise AccessDeniedError(
            error.errno,
            f'{storage.url(name)}: step {step} cannot be kept from deletion: {error} Without permission to write to the run, '
            'leave hold_seconds out; a keep policy may then delete the step while it is read.',
        ) from error
    is_there = False
    try:
        with contextlib.suppress(BeingHiddenError):
            is_there = outlives_deleters(storage, step, clock)
        yield is_there
    finally:
        try:
            storage.delete_file(name)
        except StorageError as error:
            # The work with the step is done, or has an error of its own.
            _log.warning('t5ckpt: step %d is kept from deletion for up to %.0f s more: %s', step, seconds, error)


def outlives_deleters(storage: Storage, step: int, clock: Clock) -> bool:
    """Returns whether a step exists when no process is about to hide it.

    Call it after the hold or the pin was written, which a later deleter finds.

    Raises:
      BeingHiddenError: a deleter has not decided after some seconds.
    """
    now = run_clock(storage, clock)
    for _ in attempts(_DELETER_SECONDS):
        is_decided = not is_about_to_hide(storage, step, now)
        is_there = has_step(storage, step)
        if is_decided or not is_there:
            return is_there
    raise BeingHiddenError(
        errno.EBUSY,
        f'{storage.url(step_dir(step))} was not pinned: a process is about to delete it. Try again when that process has ended, '
        'or, if it was killed on another machine, when its marker is two hours old.',
    )


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
        # An error if the bucket does not exist.
        storage.kind('')
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
            is_there = step is None or outlives_deleters(storage, step, clock)
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


def held_steps(storage: Storage, clock: Clock, holds: Iterable[Hold] | None = None) -> set[int]:
    """Returns the steps with a hold that has not expired, among some holds or all of the run."""
    now = run_clock(storage, clock)
    if holds is None:
        holds = filter(None, map(parse_hold, storage.names(announcement_directory(storage), HOLD_PREFIX)))
    return {each.step for each in holds if expiry(storage, each) >= now()}


def expiry(storage: Storage, file: Hold) -> float:
    """The time at which a hold expires, by :func:`~t5ckpt.commit.markers.run_clock`."""
    # A reader writes its file once.
    written = storage.modified(join(announcement_directory(storage), file.name))
    return file.until + CLOCK_SECONDS if written is None else written + file.seconds
