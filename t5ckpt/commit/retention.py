"""Deletes the steps that the keep policy does not keep, after each save or, with a local tier, after each upload.

``policies.retention_plan`` decides: it is a pure function from the facts of the steps to decisions. This module gathers the
facts, and carries the decisions out: it hides each step in one atomic operation, and then removes the files. A crash in between
leaves a directory that no listing shows and that garbage collection removes. A deletion that fails is logged and does not stop
the others.

The policy decides only about steps in T5X's layout. A step of Orbax or Flax stays, and is not counted among the latest or the
best. A step that cannot be inspected, or whose facts cannot be read, stays and is logged.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any, Protocol

from t5ckpt.catalog.layouts import ListedStep, inspected, readable
from t5ckpt.catalog.listing import dataset_steps_in, facts_of, listing, newest, steps_in, waiting_steps
from t5ckpt.catalog.locate import no_checkpoint
from t5ckpt.commit.deletion import announced, find_step, hide
from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.markers import RunListing
from t5ckpt.commit.removal import check_not_kept, directories_of
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
    StorageError,
    T5CkptError,
    UnsupportedFormatError,
)
from t5ckpt.format.facts import Facts, encode_facts
from t5ckpt.format.keep_policy import policy_of
from t5ckpt.format.manifest import decode_manifest, facts_range
from t5ckpt.format.names import DATASET_REMOVED, MANIFEST, PINNED, TRAIN_DS_PREFIX, Hold, step_dir
from t5ckpt.policies import WAITS, Decision, KeepAll, KeepPolicy, StepInfo, retention_plan
from t5ckpt.storage import Storage

_UNREADABLE = 'unreadable: '
# The beginning of the facts, with their checksum.
_CHECKSUM_BYTES = 32
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

    def latest(self) -> int | None:
        """The largest step, or None."""
        ...

    def dataset_steps(self) -> list[int]:
        """The steps with states of data iterators, ascending."""
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
      listed: what the garbage collection of the save has listed; used once.
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
        self.listed: RunListing | None = None
        self._storage = storage
        self._clock = clock
        self._source = source
        # By the checksum of the facts or, without facts on a disk, the version of the manifest, so that those of a step that
        # another program has saved again are read again.
        self._facts: dict[Any, tuple[float | None, Mapping[str, float]]] = {}
        # The largest step that was saved, and the checksum of its facts.
        self._saved = -1, b''
        self._logged: set[tuple[int | None, str]] = set()

    def steps(self) -> list[int]:
        """The complete steps, ascending, in any layout."""
        return steps_in(self._storage)

    def latest(self) -> int | None:
        """The largest step, in any layout, or None."""
        found = newest(self._storage)
        return None if found is None else found.step

    def dataset_steps(self) -> list[int]:
        """The steps with states of data iterators, ascending."""
        return dataset_steps_in(self._storage)

    def infos(self, names: Collection[str] | None = None) -> list[StepInfo]:
        """The facts that a policy takes, ascending by step, in any layout; ``names`` replaces the policy's metric names.

        Facts that cannot be read are logged.
        """
        infos, failed = self._infos_of(listing(self._storage), names)
        self._log_failed(failed)
        return infos

    def _log_failed(self, failed: Mapping[int, str]) -> None:
        for step, reason in failed.items():
            self._log_once(step, f': its metrics are not read: {reason}')

    def _infos_of(
        self,
        steps: Sequence[ListedStep],
        names: Collection[str] | None = None,
        *,
        holds: Sequence[Hold] | None = None,
        own: int | None = None,
    ) -> tuple[list[StepInfo], dict[int, str]]:
        """The facts of the steps that could be inspected, and why those of some cannot be read.

        Raises:
          StorageError: an object store failed.
        """
        facts: dict[int, tuple[float | None, Mapping[str, float]]] = {}
        failed: dict[int, str] = {}
        for each in steps:
            try:
                facts[each.step] = self._facts_of(each)
            except T5CkptError as error:
                if isinstance(error, StorageError) and not self._storage.commits_by_rename:
                    raise
                failed[each.step] = f'{_UNREADABLE}{error}'
        steps = [each for each in steps if each.error is None]
        storage = self._storage
        names = self.policy.metric_names if names is None else names
        held, waiting = held_steps(storage, self._clock, holds), waiting_steps(storage)
        # No policy deletes its own step.
        others = [each for each in steps if each.step != own]
        pins = storage.are_files([join(each.name, PINNED) for each in others])
        pinned = {each.step for each, is_pinned in zip(others, pins, strict=True) if is_pinned}
        numbers = [each.step for each in steps]
        given = {} if self._source is None else {name: self._source.by_step(name, numbers) for name in names}
        infos: list[StepInfo] = []
        for each in steps:
            step, (created, saved) = each.step, facts.get(each.step, (None, {}))
            # T5X writes no facts, and the manifest last.
            if created is None:
                created = storage.modified(join(each.directory, each.manifest))
            metrics = {name: values[step] for name, values in given.items() if step in values} | {**saved}
            infos.append(StepInfo(step, step in pinned, step in held, created, metrics, step in waiting))
        return infos, failed

    def _facts_of(self, listed: ListedStep) -> tuple[float | None, Mapping[str, float]]:
        """The time of the save, and the metrics."""
        found = facts_range(listed.head)
        checksum: Any = b'' if found is None else listed.head[found[0] : found[0] + _CHECKSUM_BYTES]
        if listed.step == self._saved[0] and not listed.head and listed.error is None:
            checksum = self._saved[1]
        storage, key = self._storage, join(listed.name, MANIFEST)
        is_on_disk = storage.commits_by_rename and listed.is_t5x
        if not checksum and is_on_disk:
            # T5X writes no facts.
            checksum = storage.version(key)
        known = self._facts.get(checksum)
        if known is None:
            facts = facts_of(storage, listed)
            if is_on_disk:
                # A step that is cut off is none of the latest or the best. In a bucket, a PUT cannot be cut off.
                decode_manifest(storage.read(key), storage.url(key))
            known = facts.created_unix, facts.metrics
            if checksum:
                self._facts[checksum] = known
        return known

    def note_saved(self, step: int, facts: Facts) -> None:
        """Stores the facts of a checkpoint that this process has just committed."""
        checksum = encode_facts(facts)[:_CHECKSUM_BYTES]
        self._facts[checksum] = facts.created_unix, facts.metrics
        if step >= self._saved[0]:
            self._saved = step, checksum

    def is_surely_new(self, step: int) -> bool:
        """Whether a step is larger than the latest that this process saved, so that no check for it is needed.

        True only on object stores, where ``begin`` detects steps that another process has written since.
        """
        return not self._storage.commits_by_rename and 0 <= self._saved[0] < step

    def metrics_at(self, step: int | None) -> Mapping[str, float]:
        """The metrics of a step; None takes the latest, in any layout.

        Raises:
          CheckpointNotFoundError: there is no such step.
        """
        found = newest(self._storage) if step is None else find_step(self._storage, step)
        if found is None:
            raise no_checkpoint(self._storage)
        infos, failed = self._infos_of([readable(found)])
        self._log_failed(failed)
        return infos[0].metrics

    def plan(self) -> list[Decision]:
        """Decides for each step whether it stays, ascending."""
        return self._plan(None)

    def _plan(self, just_saved: int | None) -> list[Decision]:
        """As :meth:`plan`."""
        listed, self.listed = self.listed, None
        if listed is None or just_saved is None or self._storage.commits_by_rename:
            steps, holds = listing(self._storage), None
        else:
            # The next save finds the steps that another process has saved since, and hiding looks for holds again.
            steps, holds = inspected(self._storage, listed.names), listed.holds
            own = ListedStep(just_saved, step_dir(just_saved))
            steps = sorted([own, *(each for each in steps if each.step != just_saved)], key=lambda each: each.step)
        undecided = _undecided(self._storage, steps)
        infos, failed = self._infos_of(
            [each for each in steps if each.step not in undecided], holds=holds, own=just_saved
        )
        undecided |= failed
        self.decided = [info for info in infos if info.step not in failed]
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
        if decision.overruled:
            self._log_once(decision.step, f' is kept regardless of the keep policy: {decision.reason}')

    def _log_once(self, step: int, text: str) -> None:
        key = None if text.endswith(WAITS) else step, text
        if key not in self._logged:
            self._logged.add(key)
            _log.log(logging.WARNING if _UNREADABLE in text else logging.INFO, 't5ckpt: step %d%s', step, text)


def _undecided(storage: Storage, steps: Sequence[ListedStep]) -> dict[int, str]:
    """The steps about which no policy decides, with the reason."""
    root = storage.local_path('')
    paths = {} if root is None else {os.path.join(os.path.realpath(root), each.name): each.step for each in steps}
    linked = {os.path.realpath(path) for path in paths if os.path.islink(path)}
    return {
        **{each.step: f'in the layout of {each.layout}' for each in steps if not each.is_t5x and each.error is None},
        **{step: 'another step is a link to it' for path, step in paths.items() if path in linked},
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
    with announced(storage, [step], clock) as (markers, held), locked(storage, directory):
        check_not_kept(storage, ListedStep(step, directory), held, 'stripped of its iterator state')
        # Those of the save first: T5X's names find the rest after a crash.
        for name in sorted(directories_of(storage.read(join(directory, MANIFEST))), reverse=True):
            parent = join(directory, name)
            positions = storage.names(parent, TRAIN_DS_PREFIX)
            markers[step].check()
            if positions:
                # First, so that a verification does not report the missing files as damage.
                storage.write(join(parent, DATASET_REMOVED), b'')
            for position in positions:
                key = join(parent, position)
                markers[step].check()
                # Some iterators write directories.
                remove = storage.delete_tree if storage.kind(key) == 'dir' else storage.delete_file
                remove(key)


def dataset_count(keep: int | None) -> int | None:
    """Checks ``keep_dataset_checkpoints``.

    Raises:
      ValueError: it is not an integer of at least 1.
    """
    return None if keep is None else integer('keep_dataset_checkpoints', keep, 1, 'None keeps all.')


def recorded_policy(storage: Storage) -> KeepPolicy | None:
    """The keep policy in the facts of the latest step in T5X's layout; None if it is not recorded, or cannot be read.

    The latter is logged.
    """
    steps = [each for each in listing(storage) if each.is_t5x]
    try:
        return policy_of(facts_of(storage, steps[-1]).keep) if steps else None
    except (FormatError, NotADirectoryStorageError) as error:
        _log.warning('t5ckpt: the keep policy of the latest step cannot be read: %s', error)
        return None


def missing_from_all(infos: Sequence[StepInfo], metric: str) -> str | None:
    """The message for a metric that no step has, with the existing ones; None if a step has it or the run is empty."""
    metrics = sorted({name for info in infos for name in info.metrics})
    if not infos or metric in metrics:
        return None
    return (
        f'no step has the metric {metric!r}; there are: {", ".join(metrics) or "none"}.{did_you_mean(metric, metrics)}'
    )
