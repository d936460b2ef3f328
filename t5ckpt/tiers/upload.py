"""One upload: copies a step from the local directory to the run's storage, with its checksums, and the manifest last.

``tiers/intents.py`` decides which steps are uploaded, and ``tiers/queue.py`` when.

The facts of both tiers say of which save they are.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Generator

from t5ckpt.catalog.layouts import ListedStep
from t5ckpt.catalog.listing import has_step, read_facts
from t5ckpt.commit.occupancy import occupant_of
from t5ckpt.errors import (
    CheckpointNotFoundError,
    FormatError,
    StepKeptError,
    StorageError,
)
from t5ckpt.format.facts import save_id
from t5ckpt.format.names import step_dir
from t5ckpt.storage import Storage
from t5ckpt.tiers.part import save_in, save_of

_log = logging.getLogger('t5ckpt')
Copy = Callable[[bool], int]


class NotUploadableError(Exception):
    """A step that no later attempt can upload; the message has the reason.

    Attributes:
      is_failure: whether a wait for all uploads raises it; not if the step was deleted.
    """

    is_failure = True


class UnreadableStepError(StorageError):
    """A file of the local step cannot be read. A later attempt may succeed, if the disk has failed for a moment."""


def upload(local: Storage, run: Storage, step: int, copy: Copy, *, overwrite: bool) -> int:
    """Uploads a step.

    Args:
      local: the local directory.
      run: the run's storage.
      step: the step.
      copy: copies the files, and commits; called with whether a checkpoint is replaced, returns the bytes.
      overwrite: whether a complete checkpoint of the step, of another save, is replaced.

    Returns:
      The bytes that were copied; 0 if the run has this save already.

    Raises:
      NotUploadableError: the local step is damaged or gone, or the run has this step of another save.
      UnreadableStepError: a local file cannot be read.
      StepTakenError: another process has written, replaced or deleted the step.
      StorageError: the run's storage failed.
    """
    while True:
        save = save_of(local, step)
        try:
            return _upload_once(local, run, step, copy, overwrite=overwrite)
        except CheckpointNotFoundError as error:
            # After each overwrite during the upload, it begins again.
            if save_of(local, step) in ('', save):
                raise _not_found(local, run, step, error) from error


def _upload_once(local: Storage, run: Storage, step: int, copy: Copy, *, overwrite: bool) -> int:
    """As :func:`upload`, and raises CheckpointNotFoundError if the local step is overwritten meanwhile."""
    try:
        save = _save(local, step)
        occupant = occupant_of(run, step)
        if occupant is not None and occupant.is_t5x and save_in(run, step) == save:
            return 0
        if occupant is not None and not (overwrite and occupant.is_t5x):
            raise NotUploadableError(f'{run.url(occupant.name)} exists, {_kind_and_cure(occupant)}')
        return copy(overwrite)
    except (FormatError, StepKeptError) as error:
        raise NotUploadableError(str(error)) from error


def _save(local: Storage, step: int) -> str:
    with reading(local, step):
        return save_id(read_facts(local, step_dir(step)))


@contextlib.contextmanager
def reading(local: Storage, step: int) -> Generator[None]:
    """Raises UnreadableStepError for a file of a local step that cannot be read, to distinguish it from an error of the run."""
    try:
        yield
    except StorageError as error:
        text = f'{local.url(step_dir(step))} cannot be read: {error}'
        raise UnreadableStepError(error.errno or errno.EIO, text) from error


def _kind_and_cure(occupant: ListedStep) -> str:
    if not occupant.is_t5x:
        return f'in the layout of {occupant.layout}. Remove it with the program that wrote it'
    return (
        'of another save. To replace it, save the step with overwrite=True, or delete it before the save (t5ckpt rm --tier '
        'persistent)'
    )


def _not_found(local: Storage, run: Storage, step: int, error: CheckpointNotFoundError) -> Exception:
    """The error of an upload to which one of the two storages has answered that something does not exist."""
    if has_step(local, step) and save_of(local, step):
        return StorageError(errno.ENOENT, f'{run.url()} does not accept step {step}: {error}')
    return NotUploadableError(f'{local.url()} no longer has the step: {error}')
