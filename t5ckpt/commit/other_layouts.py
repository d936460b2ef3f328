"""Steps in the layouts of Orbax and Flax in a run: their facts, and their deletion by hand (``t5ckpt rm``).

No keep policy deletes them: the program that wrote them has a policy of its own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence

from t5ckpt.catalog.layouts import FLAX, ORBAX, PADDED, ListedStep
from t5ckpt.catalog.orbax_facts import read_orbax_facts
from t5ckpt.commit.removal import rename_aside
from t5ckpt.commit.step_facts import known_facts
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import T5CkptError
from t5ckpt.format.facts import NO_FACTS, Facts
from t5ckpt.format.names import PINNED
from t5ckpt.policies import StepInfo
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')


def infos_of_others(
    storage: Storage, steps: Sequence[ListedStep], leased: Collection[int], given: Mapping[str, Mapping[int, float]]
) -> list[StepInfo]:
    """The facts about steps in other layouts.

    Args:
      storage: the run.
      steps: in other layouts than T5X's.
      leased: those with a read lease.
      given: the metrics from the metric source, by name and step. Those that were saved with a step take precedence.

    Returns:
      The facts. The time is that of the save in Orbax's metadata, else that of the directory. Metrics that cannot be read are
      logged and left out.
    """
    times = {entry.name: entry.mtime for entry in storage.entries()} if steps else {}
    infos: list[StepInfo] = []
    for listed in steps:
        try:
            saved = _saved_facts(storage, listed)
        except T5CkptError as error:
            _log.warning('t5ckpt: %s: its metrics are not read: %s', storage.url(listed.name), error)
            saved = NO_FACTS
        created = times.get(listed.name) if saved.created_unix is None else saved.created_unix
        metrics = {name: values[listed.step] for name, values in given.items() if listed.step in values}
        pinned = has_pin(storage, listed)
        infos.append(
            StepInfo(listed.step, pinned, listed.step in leased, created or None, {**metrics, **saved.metrics})
        )
    return infos


def _saved_facts(storage: Storage, listed_step: ListedStep) -> Facts:
    if listed_step.layout == ORBAX:
        return read_orbax_facts(storage, listed_step.name)
    return known_facts(storage, listed_step.name) if listed_step.layout == PADDED else NO_FACTS


def has_pin(storage: Storage, listed_step: ListedStep) -> bool:
    """Whether a user has put the file of a pin into the step."""
    return listed_step.layout != FLAX and storage.is_file(join(listed_step.name, PINNED))


def delete_other(storage: Storage, listed_step: ListedStep, clock: Clock) -> None:
    """Deletes all files of a step. Where directories can be renamed, no listing shows it from the first moment on.

    Raises:
      CheckpointNotFoundError: another process has deleted it.
      StorageError: it could not be deleted.
    """
    name = listed_step.name
    if storage.kind(name) == 'file':
        storage.delete_file(name)
        return
    if not storage.commits_by_rename:
        storage.delete_tree(name)
        return
    # Garbage collection leaves a directory that is locked.
    lock = storage.try_lock(name)
    with contextlib.nullcontext() if lock is None else contextlib.closing(lock):
        storage.delete_tree(rename_aside(storage, name, listed_step.step, 'deleted', clock()))
