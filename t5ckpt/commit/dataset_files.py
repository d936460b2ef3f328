"""Removes the data-iterator files of older steps (T5X's ``keep_dataset_checkpoints``); their arrays stay.

On an object store this runs under the write lease of the step. So a deleter of the step waits, no file is written while it
removes the files, and the leftovers of a crash have a lease.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Generator, Sequence

from t5ckpt.commit.lease_owner import MEND
from t5ckpt.commit.removal import is_pinned
from t5ckpt.commit.write_lease import StepTakenError, acquire_lease
from t5ckpt.core.arguments import integer
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import CheckpointNotFoundError, T5CkptError
from t5ckpt.format.names import DATASET_REMOVED, MANIFEST, TRAIN_DS_PREFIX, step_dir
from t5ckpt.storage import Storage

__all__ = ['dataset_count', 'remove_old_datasets']

_log = logging.getLogger('t5ckpt')


def remove_old_datasets(
    storage: Storage, steps: Sequence[int], keep: int, just_saved: int | None, clock: Clock
) -> None:
    """Removes the iterator files of all but the latest ``keep`` steps that have some; not of pinned steps, as in T5X.

    Args:
      storage: the run.
      steps: the complete steps in T5X's layout, ascending.
      keep: the number of steps that keep their files.
      just_saved: the step that was just saved, which keeps its files.
      clock: returns unix seconds.
    """
    files = {step: storage.names(step_dir(step), f'{TRAIN_DS_PREFIX}-') for step in steps}
    having = [step for step, names in files.items() if names]
    for step in having[:-keep]:
        if step == just_saved or is_pinned(storage, step_dir(step)):
            continue
        try:
            with _leased(storage, step, clock) as is_there:
                if is_there:
                    _remove(storage, step, files[step])
        except (StepTakenError, CheckpointNotFoundError):
            # Another process deletes the step or its iterator files.
            continue
        except T5CkptError as error:
            _log.warning('t5ckpt: could not delete the iterator state of step %d: %s', step, error)


@contextlib.contextmanager
def _leased(storage: Storage, step: int, clock: Clock) -> Generator[bool]:
    """Takes the step's write lease on an object store; yields whether the step exists."""
    if storage.renames:
        yield True
        return
    lease = acquire_lease(storage, step, clock, MEND)
    try:
        yield storage.is_file(join(step_dir(step), MANIFEST))
    finally:
        lease.release()


def _remove(storage: Storage, step: int, names: Collection[str]) -> None:
    # First, so that a verification does not report the missing files as damage.
    storage.write(join(step_dir(step), DATASET_REMOVED), b'')
    for name in names:
        key = join(step_dir(step), name)
        # Some iterators write directories.
        remove = storage.delete_tree if storage.kind(key) == 'dir' else storage.delete_file
        remove(key)


def dataset_count(keep: int | None) -> int | None:
    """Checks ``keep_dataset_checkpoints``.

    Raises:
      ValueError: it is not an integer of at least 1.
    """
    return None if keep is None else integer('keep_dataset_checkpoints', keep, 1, 'None keeps all.')
