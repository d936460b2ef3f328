"""Steps in the layouts of Orbax and Flax in a run: their facts, and their deletion by hand (``t5ckpt rm``).

No keep policy deletes them: the program that wrote them has a policy of its own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence

from t5ckpt.catalog.layouts import FLAX, LEVANTER, ORBAX, PADDED, ListedStep, inspect_name, orbax_marks
from t5ckpt.catalog.listing import listing
from t5ckpt.catalog.locate import no_step
from t5ckpt.catalog.orbax_facts import read_orbax_facts
from t5ckpt.catalog.pin_file import pin_reason
from t5ckpt.commit.announcement import announced
from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.removal import kept_error, rename_aside
from t5ckpt.commit.step_facts import known_facts
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import T5CkptError
from t5ckpt.format.facts import NO_FACTS, Facts
from t5ckpt.format.names import MANIFEST, PINNED, step_dir
from t5ckpt.policies import HELD, Decision, StepInfo
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')


def infos_of_others(
    storage: Storage, steps: Sequence[ListedStep], held: Collection[int], given: Mapping[str, Mapping[int, float]]
) -> list[StepInfo]:
    """The facts about steps in other layouts.

    Args:
      storage: the run.
      steps: in other layouts than T5X's.
      held: those that a reader holds.
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
        pinned = _has_pin(storage, listed)
        infos.append(StepInfo(listed.step, pinned, listed.step in held, created or None, {**metrics, **saved.metrics}))
    return infos


def _saved_facts(storage: Storage, listed_step: ListedStep) -> Facts:
    if listed_step.layout == ORBAX:
        return read_orbax_facts(storage, listed_step.name)
    return known_facts(storage, listed_step.name) if listed_step.layout == PADDED else NO_FACTS


def _has_pin(storage: Storage, listed_step: ListedStep) -> bool:
    """Whether a user has put the file of a pin into the step."""
    return listed_step.layout != FLAX and storage.is_file(join(listed_step.name, PINNED))


def step_in_other_layout(storage: Storage, step: int) -> ListedStep | None:
    """The step, if it is in another layout.

    Raises:
      CheckpointNotFoundError: the step does not exist; the message lists the steps.
    """
    occupant = inspect_name(storage, step_dir(step))
    if occupant.is_t5x if occupant is not None else storage.is_file(join(step_dir(step), MANIFEST)):
        return None
    steps = [occupant] if occupant else listing(storage).steps
    other = next((listed for listed in steps if listed.step == step and not listed.is_t5x), None)
    if other is None:
        raise no_step(storage, step, steps, 'Pass one of them.')
    return other


def decide_other(storage: Storage, other: ListedStep, clock: Clock, *, even_pinned: bool) -> Decision:
    """Decides whether a step in another layout may be deleted, with the reason; changes nothing."""
    if not even_pinned and _has_pin(storage, other):
        return Decision(other.step, True, pin_reason(storage, other.name))
    if other.step in held_steps(storage, clock):
        return Decision(other.step, True, HELD)
    return Decision(other.step, False, f'requested; in the layout of {other.layout}, and deleted with all files')


def delete_other(storage: Storage, other: ListedStep, clock: Clock) -> None:
    """Hides a step in another layout, and removes all of its files.

    Where no directory can be renamed, a crash may leave files that no listing shows.

    Raises:
      StepKeptError: a reader holds it; nothing was changed.
      CheckpointNotFoundError: another process has deleted it.
      StorageError: another process replaces or deletes it, or the storage failed.
    """
    name = other.name
    with announced(storage, other.step, clock) as held:
        if other.step in held:
            raise kept_error(storage, other.step, HELD, 'deleted')
        if storage.kind(name) == 'file':
            storage.delete_file(name)
        elif storage.commits_by_rename:
            # Garbage collection leaves a directory that is locked.
            lock = storage.try_lock(name)
            with contextlib.nullcontext() if lock is None else contextlib.closing(lock):
                storage.delete_tree(rename_aside(storage, name, other.step, 'deleted', clock()))
        else:
            storage.delete_files([join(name, MANIFEST), join(name, LEVANTER), *orbax_marks(name)])
            storage.delete_tree(name)
