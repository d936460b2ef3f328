"""Removes the data-iterator files of older steps (T5X's ``keep_dataset_checkpoints``); their arrays stay.

It is announced as a deletion is, so a held step keeps its files.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from t5ckpt.catalog.listing import waiting_steps
from t5ckpt.commit.announcement import announced
from t5ckpt.commit.bucket_deletion import directories_of
from t5ckpt.commit.removal import check_not_kept, is_pinned
from t5ckpt.commit.taken_steps import StepTakenError
from t5ckpt.core.arguments import integer
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import CheckpointNotFoundError, StepKeptError, T5CkptError
from t5ckpt.format.names import (
    DATASET_REMOVED,
    MANIFEST,
    TRAIN_DS_PREFIX,
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
    """Removes the files.

    Raises:
      StepKeptError: a reader holds the step, or it was pinned in the meantime.
      StepTakenError: another process replaces or deletes the step.
      CheckpointNotFoundError: it is gone.
    """
    directory = step_dir(step)
    with announced(storage, step, clock) as held:
        check_not_kept(storage, step, held, 'stripped of its iterator state')
        # Those of the save first: T5X's names find the rest after a crash.
        for name in sorted(directories_of(storage.read(join(directory, MANIFEST))), reverse=True):
            parent = join(directory, name)
            _remove_positions(storage, parent, storage.names(parent, TRAIN_DS_PREFIX))


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
