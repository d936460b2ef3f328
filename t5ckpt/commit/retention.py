"""Deletes the steps that the keep policy does not keep, after each save or, with a local tier, after each upload.

``policies.retention_plan`` decides: it is a pure function from the facts of the steps to decisions. This module gathers the
facts, and carries the decisions out: it hides each step in one atomic operation, and then removes the files. A crash in between
leaves a directory that no listing shows and that garbage collection removes. A deletion that fails is logged and does not stop
the others.

The policy decides only about steps in T5X's layout. A step of Orbax or Flax stays, and is not counted among the latest or the
best. A step that cannot be inspected stays and is logged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Protocol

from t5ckpt.catalog.layouts import ORBAX, ListedStep, Listing, number_of, one_a_step
from t5ckpt.catalog.listing import listing, newest, read_facts, steps_in, waiting_steps
from t5ckpt.catalog.locate import no_checkpoint
from t5ckpt.catalog.orbax_facts import read_orbax_facts
from t5ckpt.catalog.run_catalog import BucketListing, inspected
from t5ckpt.commit.deletion import announced, find_step, hide
from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.removal import check_known, check_not_kept, directories_of
from t5ckpt.commit.taken_steps import locked
from t5ckpt.core.arguments import integer
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock, MetricSource
from t5ckpt.core.text import did_you_mean
from t5ckpt.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    FormatError,
    NotADirectoryStorageError,
    StepKeptError,
    T5CkptError,
    UnsupportedFormatError,
)
from t5ckpt.format.facts import NO_FACTS, Facts, decode_facts
from t5ckpt.format.keep_policy import policy_of
from t5ckpt.format.names import DATASET_REMOVED, MANIFEST, PINNED, TRAIN_DS_PREFIX, Hold, step_dir
from t5ckpt.policies import WAITS, Decision, KeepAll, KeepPolicy, StepInfo, retention_plan
from t5ckpt.storage import Storage

_UNREADABLE = 'unreadable: '
_log = logging.getLogger('t5ckpt')


class RunFacts(Protocol):
    """The steps of a run and their facts; see :class:`Retention` for the methods."""

    @property
    def may_be_away(self) -> bool:
        """Whether saves do not need the storage of these steps."""
        ...

    @property
    def policy(self) -> KeepPolicy:
        """The keep policy of the run."""
        ...

    def steps(self) -> list[int]:
        """The complete steps, ascending."""
        ...

    def infos(self, names: Collection[str] | None = None) -> list[StepInfo]:
        """The facts of the steps, ascending."""
        ...

    def metrics_at(self, step: int | None) -> Mapping[str, float]:
        """The metrics of a step; None takes the latest."""
        ...


class Retention:
    """Applies the keep policy of one checkpointer, in process 0.

    Attributes:
      policy: the keep policy.
      keep_datasets: how many steps keep the states of data iterators; None for all.
      decided: the steps about which the policy decides, as of the latest plan.
      listed: what the garbage collection of the save has listed on an object store; used once.
    """

    may_be_away = False

    def __init__(
        self,
        storage: Storage,
        policy: KeepPolicy,
        clock: Clock,
        keep_datasets: int | None = None,
        source: MetricSource | None = None,
    ):
        """See ``Checkpointer`` for the parameters."""
        self.policy = policy
        self.keep_datasets = keep_datasets
        self.decided: Sequence[StepInfo] = ()
        self.listed: BucketListing | None = None
        self._storage = storage
        self._clock = clock
        self._source = source
        # The time of the save and the metrics, by name. They never change for a complete step.
        self._facts: dict[str, tuple[float | None, Mapping[str, float]]] = {}
        self._logged: set[tuple[int | None, str]] = set()
        self._latest = -1

    def steps(self) -> list[int]:
        """The complete steps, ascending, in any layout."""
        return steps_in(self._storage)

    def infos(self, names: Collection[str] | None = None) -> list[StepInfo]:
        """The facts that a policy takes, ascending by step, in any layout; ``names`` replaces the policy's metric names."""
        return self._infos_of(listing(self._storage).steps, names)

    def _infos_of(
        self,
        steps: Sequence[ListedStep],
        names: Collection[str] | None = None,
        *,
        holds: Sequence[Hold] | None = None,
        own: int | None = None,
    ) -> list[StepInfo]:
        storage = self._storage
        names = self.policy.metric_names if names is None else names
        held, waiting = held_steps(storage, self._clock, holds), waiting_steps(storage)
        # No policy deletes its own step.
        others = [each for each in steps if each.step != own]
        pins = storage.are_files([join(each.name, PINNED) for each in others])
        pinned = {each.step for each, is_pinned in zip(others, pins, strict=True) if is_pinned}
        facts = {each.name: self._facts.get(each.name) or self._read_facts(each) for each in steps}
        self._facts |= facts
        numbers = [each.step for each in steps]
        given = {} if self._source is None else {name: self._source.by_step(name, numbers) for name in names}
        infos: list[StepInfo] = []
        for each in steps:
            step, (created, saved) = each.step, facts[each.name]
            metrics = {name: values[step] for name, values in given.items() if step in values} | {**saved}
            infos.append(StepInfo(step, step in pinned, step in held, created, metrics, step in waiting))
        return infos

    def _read_facts(self, listed: ListedStep) -> tuple[float | None, Mapping[str, float]]:
        facts = facts_of(self._storage, listed)
        # T5X writes no facts, and the manifest last.
        written = self._storage.modified(join(listed.directory, listed.manifest))
        return written if facts.created_unix is None else facts.created_unix, facts.metrics

    def note_saved(self, step: int, facts: Facts) -> None:
        """Stores the facts of a checkpoint that this process has just committed."""
        self._facts[step_dir(step)] = facts.created_unix, facts.metrics
        self._latest = max(self._latest, step)

    def is_surely_new(self, step: int) -> bool:
        """Whether a step is larger than the latest that this process saved, so that no check for it is needed.

        True only on object stores, where ``begin`` detects steps that another process has written since.
        """
        return not self._storage.commits_by_rename and 0 <= self._latest < step

    def metrics_at(self, step: int | None) -> Mapping[str, float]:
        """The metrics of a step; None takes the latest, in any layout.

        Raises:
          CheckpointNotFoundError: there is no such step.
        """
        found = newest(self._storage) if step is None else find_step(self._storage, step)
        if found is None:
            raise no_checkpoint(self._storage)
        return self._infos_of([found])[0].metrics

    def plan(self) -> list[Decision]:
        """Decides for each step whether it stays, ascending."""
        return [self._known_or_kept(decision) for decision in self._plan(None)]

    def _known_or_kept(self, decision: Decision) -> Decision:
        try:
            if not decision.keep:
                check_known(self._storage, step_dir(decision.step))
        except UnsupportedFormatError as error:
            return Decision(decision.step, True, str(error), overruled=True)
        return decision

    def _plan(self, just_saved: int | None) -> list[Decision]:
        """As :meth:`plan`. The deletion itself refuses a step of a newer program, so its manifest is not read twice."""
        listed, self.listed = self.listed, None
        if listed is None or just_saved is None:
            found, holds = listing(self._storage), None
        else:
            # The next save finds the steps that another process has saved since, and hiding looks for holds again.
            found, holds = inspected(self._storage, listed.names), listed.announcements.holds
            own = ListedStep(just_saved, step_dir(just_saved))
            found = dataclasses.replace(found, steps=tuple(one_a_step([*found.steps, own])))
        undecided = _undecided(self._storage, found)
        self.decided = self._infos_of(
            [each for each in found.steps if each.step not in undecided], holds=holds, own=just_saved
        )
        stay = [Decision(step, True, reason, overruled=True) for step, reason in undecided.items()]
        plan = retention_plan(self.policy, self.decided, just_saved)
        return sorted([*plan, *stay], key=lambda decision: decision.step)

    def carry_out(self, just_saved: int | None = None, *, confirmed: Collection[int] | None = None) -> list[int]:
        """Plans again, hides the steps that the policy does not keep, and removes their files.

        Args:
          just_saved: the step of the save that this follows.
          confirmed: the steps that may go; None allows all of them. Of the others, nothing is logged.

        Returns:
          The steps that were deleted.
        """
        if isinstance(self.policy, KeepAll) and self.keep_datasets is None:
            return []
        plan = [each for each in self._plan(just_saved) if confirmed is None or each.step in confirmed]
        for decision in plan:
            self._log_stay(decision)
        doomed = [each for each in plan if not each.keep]
        deleted: list[int] = []
        batch = [each.step for each in doomed if self._storage.commits_by_rename]
        with contextlib.ExitStack() as removals, announced(self._storage, batch, self._clock) as announcement:
            for each in doomed:
                with self._logging_failure(each.step):
                    listed = ListedStep(each.step, step_dir(each.step))
                    removals.callback(hide(self._storage, listed, self._clock, announcement))
                    deleted.append(each.step)
                    _log.info('t5ckpt: deleted step %d of %s: %s', each.step, self._storage.url(), each.reason)
        if self.keep_datasets is not None:
            having = [
                info
                for info in self.decided
                if info.step not in deleted and self._storage.names(step_dir(info.step), TRAIN_DS_PREFIX)
            ]
            for info in having[: -self.keep_datasets]:
                if not (info.pinned or info.waits or info.step == just_saved):
                    with self._logging_failure(info.step, 'the iterator state of '):
                        remove_positions(self._storage, info.step, self._clock)
        return deleted

    @contextlib.contextmanager
    def _logging_failure(self, step: int, what: str = '') -> Generator[None]:
        """Logs why a step, or something of it, was not deleted.

        Raises:
          AccessDeniedError: an object store may refuse all deletions: each attempt would leave a marker that may not be deleted.
        """
        try:
            yield
        except CheckpointNotFoundError:
            # Another process has deleted it.
            pass
        except (StepKeptError, UnsupportedFormatError) as error:
            self._log_stay(Decision(step, True, str(error), overruled=True))
        except T5CkptError as error:
            if isinstance(error, AccessDeniedError) and not self._storage.commits_by_rename:
                raise
            _log.warning('t5ckpt: could not delete %sstep %d: %s', what, step, error)

    def _log_stay(self, decision: Decision) -> None:
        """Logs once that a step is kept for another reason than the policy.

        Of the steps that wait for their upload only the first is logged, since each of them waits while uploads are slow.
        """
        key = None if decision.reason == WAITS else decision.step, decision.reason
        if decision.overruled and key not in self._logged:
            self._logged.add(key)
            level = logging.WARNING if decision.reason.startswith(_UNREADABLE) else logging.INFO
            text = 't5ckpt: step %d is kept regardless of the keep policy: %s'
            _log.log(level, text, decision.step, decision.reason)


def _undecided(storage: Storage, found: Listing) -> dict[int, str]:
    """The steps about which no policy decides, with the reason."""
    root = storage.local_path('')
    paths = {} if root is None else {os.path.join(os.path.realpath(root), each.name): each.step for each in found.steps}
    linked = {os.path.realpath(path) for path in paths if os.path.islink(path)}
    return {
        **{each.step: f'in the layout of {each.layout}' for each in found.steps if not each.is_t5x},
        **{step: 'another step is a link to it' for path, step in paths.items() if path in linked},
        **{number_of(name): f'{_UNREADABLE}{error}' for name, error in found.unreadable.items()},
    }


def remove_positions(storage: Storage, step: int, clock: Clock) -> None:
    """Removes the files of data iterators of a step (T5X's ``keep_dataset_checkpoints``); its arrays stay.

    It is announced as a deletion is, so a held step keeps its files.

    Raises:
      StepKeptError: a reader holds the step, it is pinned, or it waits for its upload.
      StepTakenError: another process replaces or deletes the step.
      CheckpointNotFoundError: it is gone.
    """
    directory = step_dir(step)
    with announced(storage, [step], clock) as (_, held), locked(storage, directory):
        check_not_kept(storage, ListedStep(step, directory), held, 'stripped of its iterator state')
        # Those of the save first: T5X's names find the rest after a crash.
        for name in sorted(directories_of(storage.read(join(directory, MANIFEST))), reverse=True):
            parent = join(directory, name)
            positions = storage.names(parent, TRAIN_DS_PREFIX)
            if positions:
                # First, so that a verification does not report the missing files as damage.
                storage.write(join(parent, DATASET_REMOVED), b'')
            for position in positions:
                key = join(parent, position)
                # Some iterators write directories.
                remove = storage.delete_tree if storage.kind(key) == 'dir' else storage.delete_file
                remove(key)


def dataset_count(keep: int | None) -> int | None:
    """Checks ``keep_dataset_checkpoints``.

    Raises:
      ValueError: it is not an integer of at least 1.
    """
    return None if keep is None else integer('keep_dataset_checkpoints', keep, 1, 'None keeps all.')


def facts_of(storage: Storage, listed: ListedStep) -> Facts:
    """A step's facts, in any layout; ``NO_FACTS`` if there are none, or they are damaged, which is logged."""
    if not listed.directory:
        return NO_FACTS
    try:
        if listed.layout == ORBAX:
            return read_orbax_facts(storage, listed.name)
        return decode_facts(read_facts(storage, listed.name), storage.url(join(listed.name, MANIFEST)))
    except (FileNotFoundError, UnsupportedFormatError):
        # A deletion says that the step is of a newer program.
        return NO_FACTS
    except (FormatError, NotADirectoryStorageError) as error:
        _log.warning('t5ckpt: %s: its metrics are not read: %s', storage.url(listed.name), error)
        return NO_FACTS


def recorded_policy(storage: Storage) -> KeepPolicy | None:
    """The keep policy in the facts of the latest step in T5X's layout; None if it is not recorded."""
    steps = [each for each in listing(storage).steps if each.is_t5x]
    return policy_of(facts_of(storage, steps[-1]).keep) if steps else None


def missing_from_all(infos: Sequence[StepInfo], metric: str) -> str | None:
    """The message for a metric that no step has, with the existing ones; None if a step has it or the run is empty."""
    metrics = sorted({name for info in infos for name in info.metrics})
    if not infos or metric in metrics:
        return None
    return (
        f'no step has the metric {metric!r}; there are: {", ".join(metrics) or "none"}.{did_you_mean(metric, metrics)}'
    )
