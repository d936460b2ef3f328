"""One upload: copies a step from the local directory to the run's storage, with its checksums, and the manifest last.

``tiers/intents.py`` decides which steps are uploaded, and ``tiers/queue.py`` when.

The copy has the same bytes, so the manifest and the sidecar of both tiers are equal if and only if they are of one save.
"""

from __future__ import annotations

from collections.abc import Callable

from t5ckpt.catalog.listing import has_step
from t5ckpt.catalog.locate import locate_step
from t5ckpt.commit.deletion import delete_step
from t5ckpt.commit.strategy import strategy_of
from t5ckpt.commit.transfer import Transfer, TransferOptions
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, FormatError, StepKeptError
from t5ckpt.reading.identity import Identity
from t5ckpt.reading.raw_files import read_raw
from t5ckpt.storage import Storage

# An upload is not to take all connections, or the processor, from the training.
_WORKERS = 4
Copy = Callable[[bool], int]


class NotUploadableError(Exception):
    """A step that no later attempt can upload; the message has the reason."""


def is_same_save(first: Storage, second: Storage, step: int) -> bool:
    """Whether both storages have the step, of the same save."""
    raw = [read_raw(locate_step(storage, step)) for storage in (first, second)]
    return raw[0].sidecar is not None and (raw[0].manifest, raw[0].sidecar) == (raw[1].manifest, raw[1].sidecar)


def copy_alone(local: Storage, run: Storage, step: int, pace: Callable[[int], None], clock: Clock) -> Copy:
    """Copies a step of a job of one process, for :func:`upload`; ``pace`` as in ``TransferOptions``."""

    def copy(replaces: bool) -> int:
        source = Identity.now(locate_step(local, step))
        with source.checked_on_failure('uploaded'):
            return Transfer(source, run, step, TransferOptions(_WORKERS, replaces, pace=pace)).run(clock).nbytes

    return copy


def upload(local: Storage, run: Storage, step: int, copy: Copy, clock: Clock, *, overwrite: bool) -> int:
    """Uploads a step, or resumes its upload.

    Args:
      local: the local directory.
      run: the run's storage.
      step: the step.
      copy: copies the files, and commits; called with whether a checkpoint is replaced, returns the bytes.
      clock: unix seconds.
      overwrite: whether a complete checkpoint of the step, of another save, is replaced.

    Returns:
      The bytes that were copied; 0 if the run has this save already.

    Raises:
      NotUploadableError: the local step is damaged or gone, or the run has this step of another save.
      StepTakenError: another process is writing the step.
      StorageError: the storage failed; the next call resumes the upload.
    """
    try:
        locate_step(local, step)
        found = strategy_of(run).occupant(run, step)
        if found is not None and found.is_t5x and is_same_save(local, run, step):
            return 0
        if found is not None and not (overwrite and found.is_t5x):
            raise NotUploadableError(f'{run.url(found.name)} exists, of another save')
        try:
            return copy(overwrite)
        except CheckpointExistsError:
            if found is None:
                raise
            # In a bucket, no single write replaces files with the names of their source. The local step stays until the upload
            # ends.
            delete_step(run, step, clock)
            return copy(False)
    except (FormatError, StepKeptError) as error:
        raise NotUploadableError(str(error)) from error
    except CheckpointNotFoundError as error:
        if has_step(local, step):
            # It was overwritten meanwhile.
            return upload(local, run, step, copy, clock, overwrite=overwrite)
        raise NotUploadableError(f'{local.url()} does not have the step anymore: {error}') from error
