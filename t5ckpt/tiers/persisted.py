"""Checks after the wait for an upload: whether the run has the step, and whether steps wait of which no upload has begun."""

from __future__ import annotations

from collections.abc import Callable, Collection

from t5ckpt.catalog.listing import has_step
from t5ckpt.core.text import numbered
from t5ckpt.errors import NotPersistedError, StorageError
from t5ckpt.tiers.local_dir import LocalDir
from t5ckpt.tiers.part import save_in, save_of


def check_none_waits(directory: LocalDir, not_begun: Collection[int]) -> None:
    """Raises NotPersistedError if there are steps that wait, and this process uploads nothing."""
    if not_begun:
        wait = 'waits for its' if len(not_begun) == 1 else 'wait for their'
        raise NotPersistedError(
            f'{numbered("step", sorted(not_begun))} {wait} upload to {directory.run.url()}: {_when_begun(directory)}'
        )


def check_in_run(directory: LocalDir, step: int, not_begun: Collection[int], reason: Callable[[int], str]) -> None:
    """Checks that the run has a step, of the same save as the local directory.

    Args:
      directory: the local directory.
      step: the step.
      not_begun: the steps that wait, while this process uploads nothing.
      reason: why another step is not in the run.

    Raises:
      NotPersistedError: it has not.
      StorageError: the run's storage does not answer, and the step does not wait.
    """
    local, run = directory.storage, directory.run
    try:
        is_there = has_step(run, step)
    except StorageError:
        if step not in not_begun:
            raise
        is_there = False
    if not is_there:
        why = f'it waits for its upload: {_when_begun(directory)}' if step in not_begun else reason(step)
        raise NotPersistedError(f'step {step} is not in {run.url()}: {why}')
    save = save_of(local, step)
    if save not in ('', save_in(run, step)):
        raise NotPersistedError(
            f'step {step} in {run.url()} is of another save than in {local.url()}. Save it with overwrite=True.'
        )


def _when_begun(directory: LocalDir) -> str:
    if directory.lock.is_forked:
        return 'the process from which this one was forked uploads it.'
    if directory.read_only:
        return 'a checkpointer with read_only=True uploads nothing.'
    return 'the upload begins with the first restore or save.'
