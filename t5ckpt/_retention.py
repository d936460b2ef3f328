"""Carrying out a keep policy after a save."""

from __future__ import annotations

import logging

from t5ckpt._commit import delete_checkpoint
from t5ckpt._layout import DATASET_REMOVED, PINNED, TRAIN_DS_PREFIX, join, step_dir
from t5ckpt._types import Clock
from t5ckpt.errors import T5CkptError
from t5ckpt.policies import Decision, KeepPolicy, StepInfo, doomed_steps
from t5ckpt.steps import steps_in
from t5ckpt.storage import Storage

__all__ = ['apply_policy', 'remove_old_datasets', 'step_infos']

_log = logging.getLogger('t5ckpt')


def step_infos(storage: Storage) -> list[StepInfo]:
    """The facts that a policy sees, ascending by step."""
    return [StepInfo(step, storage.kind(join(step_dir(step), PINNED)) == 'file') for step in steps_in(storage)]


def apply_policy(storage: Storage, policy: KeepPolicy, just_saved: int, clock: Clock) -> list[Decision]:
    """Deletes what the policy lets go; one failed deletion is logged and does not stop the rest.

    Returns:
      The decisions that were carried out.
    """
    carried_out: list[Decision] = []
    for decision in doomed_steps(policy, step_infos(storage), just_saved):
        try:
            delete_checkpoint(storage, decision.step, clock)
        except T5CkptError as error:
            _log.warning('t5ckpt: could not delete step %d: %s', decision.step, error)
            continue
        _log.info('t5ckpt: deleted step %d: %s', decision.step, decision.reason)
        carried_out.append(decision)
    return carried_out


def remove_old_datasets(storage: Storage, keep: int | None, just_saved: int) -> list[int]:
    """Removes the data-iterator files of all but the ``keep`` latest steps that have some; arrays stay (T5X)."""
    if keep is None or keep < 1:
        return []
    having = [step for step in steps_in(storage) if _dataset_files(storage, step)]
    removed = [step for step in having[:-keep] if step != just_saved]
    for step in removed:
        try:
            # First: from then on it is no damage that some of them are missing.
            storage.write(join(step_dir(step), DATASET_REMOVED), b'')
            for name in _dataset_files(storage, step):
                storage.delete_file(join(step_dir(step), name))
        except T5CkptError as error:
            _log.warning('t5ckpt: could not delete the iterator state of step %d: %s', step, error)
    return removed


def _dataset_files(storage: Storage, step: int) -> list[str]:
    return [entry.name for entry in storage.entries(step_dir(step)) if entry.name.startswith(f'{TRAIN_DS_PREFIX}-')]
