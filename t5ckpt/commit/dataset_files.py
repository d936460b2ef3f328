"""Removes the data-iterator files of older steps (T5X's ``keep_dataset_checkpoints``); their arrays stay.

This runs under the write lease of the step, as a deletion does, so a step with a read lease keeps its files. A deleter of the
step waits, no file is written while it removes the files, and the leftovers of a crash have a lease.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from t5ckpt.catalog.listing import waiting_steps
from t5ckpt.commit.lease_owner import REPLACE
from t5ckpt.commit.removal import check_not_kept, is_pinned
from t5ckpt.commit.step_lease import StepTakenError, acquire_lease
from t5ckpt.core.arguments import integer
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import CheckpointNotFoundError, StepKeptError, StorageError, T5CkptError
from t5ckpt.format.names import (
    DATASET_REMOVED,
    GENERATION_PREFIX,
    MANIFEST,
    TRAIN_DS_PREFIX,
    generation_of,
    step_dir,
)
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')


def remove_old_datasets(
    storage: Storage, steps: Sequence[int], keep: int, just_saved: int | None, clock: Clock
) -> None:
    """Removes the iterator files of all but the latest ``keep`` steps that have some.

    Pinned steps also keep their files, as in T5X, and so do steps that wait for their upload.

    Args:
      storage: the run.
      steps: the complete steps in T5X's layout, ascending.
      keep: the number of steps that keep their files.
      just_saved: the step that was just saved, which keeps its files.
      clock: returns unix seconds.
    """
    files = {step: storage.names(step_dir(step), TRAIN_DS_PREFIX) for step in steps}
    having = [step for step, names in files.items() if names]
    waiting = waiting_steps(storage)
    for step in having[:-keep]:
        if step == just_saved or step in waiting or is_pinned(storage, step_dir(step)):
            continue
        try:
            _remove(storage, step, clock)
        except StepKeptError as error:
            _log.info('t5ckpt: %s', error)
        except (StepTakenError, CheckpointNotFoundError):
            # Another process deletes the step or its iterator files.
            continue
        except T5CkptError as error:
            _log.warning('t5ckpt: could not delete the iterator state of step %d: %s', step, error)


def _remove(storage: Storage, step: int, clock: Clock) -> None:
    """Removes the files, under the write lease of the step.

    Raises:
      StepKeptError: the step has a read lease, or it was pinned in the meantime.
      StepTakenError: another process is writing or deleting the step.
      CheckpointNotFoundError: it is gone.
    """
    directory = step_dir(step)
    lease = acquire_lease(storage, step, clock, REPLACE)
    try:
        check_not_kept(storage, step, lease.read_steps, 'stripped of its iterator state')
        if not storage.is_file(join(directory, MANIFEST)):
            return
        # Those of the save first: T5X's names find the rest after a crash.
        generations = [name for name in storage.names(directory, GENERATION_PREFIX) if generation_of(name)]
        for parent in (*(join(directory, name) for name in generations), directory):
            _remove_positions(storage, parent, storage.names(parent, TRAIN_DS_PREFIX))
    except StorageError:
        # The request may arrive after the step is deleted, and leave a file in it.
        lease.linger()
        raise
    finally:
        lease.leave()


def _remove_positions(storage: Storage, directory: str, names: Collection[str]) -> None:
    if names:
        # First, so that a verification does not report the missing files as damage.
        storage.write(join(directory, DATASET_REMOVED), b'')
    for name in names:
        key = join(directory, name)
        # Some iterators write directories.
        remove = storage.delete_tree if storage.kind(key) == 'dir' else storage.delete_file
        remove(key)


def dataset_count(keep: int | None) -> int | None:
    """Checks ``keep_dataset_checkpoints``.

    Raises:
      ValueError: it is not an integer of at least 1.
    """
    return None if keep is None else integer('keep_dataset_checkpoints', keep, 1, 'None keeps all.')
