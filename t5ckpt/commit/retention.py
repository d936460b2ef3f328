"""Deletes the steps that the keep policy does not keep, after each save or, with a local tier, after each upload.

``policies.retention_plan`` decides: it is a pure function from the facts of the steps to decisions. This module gathers the facts
(``commit/prunable_steps.py``), and ``commit/pruning.py`` carries the decisions out.

The policy decides only about steps in T5X's layout. A step of Orbax or Flax stays, and is not counted among the latest or the
best. A step that cannot be inspected stays and is logged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from t5ckpt.catalog.layouts import ListedStep
from t5ckpt.catalog.listing import listing, steps_in
from t5ckpt.catalog.run_catalog import BucketListing
from t5ckpt.commit.dataset_files import remove_old_datasets
from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.other_layouts import infos_of_others
from t5ckpt.commit.prunable_steps import StayLog
from t5ckpt.commit.pruning import Pruning
from t5ckpt.commit.removal import check_known
from t5ckpt.commit.step_facts import MetricCoverage, StepFacts, known_facts
from t5ckpt.commit.strategy import strategy_of
from t5ckpt.core.interrupt_safe_event import InterruptSafeEvent
from t5ckpt.core.protocols import Clock, MetricSource
from t5ckpt.errors import CheckpointNotFoundError, UnsupportedFormatError
from t5ckpt.format.facts import Facts
from t5ckpt.format.keep_policy import policy_of
from t5ckpt.format.names import parse_prefixed_step, step_dir
from t5ckpt.policies import Decision, KeepAll, KeepPolicy, StepInfo, retention_plan
from t5ckpt.storage import Storage


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

    def infos_in_any_layout(self, names: Collection[str] | None = None) -> list[StepInfo]:
        """The facts of the steps, ascending."""
        ...

    def metrics_at(self, step: int | None) -> Mapping[str, float]:
        """The metrics of a step; None takes the latest."""
        ...


class Retention:
    """Applies the keep policy of one checkpointer, in process 0, and caches the facts of the steps."""

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
        self._storage = storage
        self._clock = clock
        self._source = source
        self._facts = StepFacts(storage, source)
        self._coverage = MetricCoverage()
        self._remover: InterruptSafeEvent | None = None
        self._latest: int | None = None
        self._stay_log = StayLog(storage)
        self._steps = strategy_of(storage).prunable_steps(storage, clock, self._facts, self._stay_log)

    def steps(self) -> list[int]:
        """The complete steps, ascending, in any layout."""
        return steps_in(self._storage)

    def undecided(self) -> list[Decision]:
        """The steps about which the policy does not decide, with the reason why each stays."""
        run_listing = listing(self._storage)
        written = [
            Decision(listed_step.step, True, f'in the layout of {listed_step.layout}')
            for listed_step in run_listing.steps
            if not listed_step.is_t5x
        ]
        unreadable = [
            Decision(parse_prefixed_step(name) or 0, True, f'unreadable: {error}')
            for name, error in run_listing.unreadable.items()
        ]
        return sorted([*written, *unreadable], key=lambda decision: decision.step)

    def infos(self, names: Collection[str] | None = None) -> list[StepInfo]:
        """The facts that the policy takes, ascending by step; ``names`` replaces the policy's metric names."""
        return self._steps.infos(self.policy.metric_names if names is None else names, None)

    def infos_in_any_layout(self, names: Collection[str] | None = None) -> list[StepInfo]:
        """:meth:`infos`, and the facts of the steps in other layouts, about which the policy may not decide."""
        other_steps = [listed_step for listed_step in listing(self._storage).steps if not listed_step.is_t5x]
        infos = [*self.infos(names), *self._infos_of(other_steps, names)]
        return sorted(infos, key=lambda info: info.step)

    def note_listing(self, listed: BucketListing | None) -> None:
        """Stores what garbage collection listed on an object store, for the retention after this save.

        The next :meth:`carry_out` uses it, once. Without it, that call lists again, which costs requests.
        """
        self._steps.listed = listed

    def note_saved(self, step: int, facts: Facts) -> None:
        """Stores the facts of a checkpoint that this process has just committed."""
        self._facts.note_saved(step, facts)
        self._latest = step if self._latest is None else max(self._latest, step)

    def is_surely_new(self, step: int) -> bool:
        """Whether a step is larger than the latest that this process saved, so that no check for it is needed.

        True only on object stores, where ``begin`` detects steps that another process has written since.
        """
        return not self._storage.commits_by_rename and self._latest is not None and step > self._latest

    def metrics_at(self, step: int | None) -> Mapping[str, float]:
        """The metrics of a step; None takes the latest, in any layout.

        Raises:
          CheckpointNotFoundError: there is no such step.
        """
        infos = {info.step: info for info in self.infos_in_any_layout()}
        wanted = max(infos, default=None) if step is None else step
        if wanted in infos:
            return infos[wanted].metrics
        shown = ', '.join(map(str, list(infos)[-10:])) or 'none'
        asked = 'step' if wanted is None else f'step {wanted}'
        raise CheckpointNotFoundError(f'{self._storage.url()}: there is no {asked}; complete steps are: {shown}.')

    def recorded_policy(self) -> KeepPolicy | None:
        """The keep policy in the facts of the latest step; None if it is not recorded."""
        steps = self._steps.prunable(listing(self._storage).steps)
        return policy_of(known_facts(self._storage, step_dir(steps[-1])).keep) if steps else None

    def plan(self) -> list[Decision]:
        """Decides for each step whether it stays."""
        _, plan = self._decide(self.infos(), set(), None)
        return [self._known_or_kept(decision) for decision in plan]

    def _decide(
        self, infos: list[StepInfo], unchecked: set[int], just_saved: int | None
    ) -> tuple[list[StepInfo], list[Decision]]:
        """Applies the policy; returns the facts of the existing steps in T5X's layout, and all decisions.

        The ``unchecked`` steps may not exist. If the policy would keep a step that does not exist, it decides again without it.
        """
        while True:
            plan = retention_plan(self.policy, infos, just_saved)
            kept = unchecked.intersection(decision.step for decision in plan if decision.keep)
            gone = self._steps.gone(kept) if kept else set[int]()
            if not gone:
                return infos, plan
            unchecked = unchecked - kept
            infos = [info for info in infos if info.step not in gone]

    def _infos_of(self, other_steps: Sequence[ListedStep], names: Collection[str] | None = None) -> list[StepInfo]:
        if not other_steps:
            return []
        names = self.policy.metric_names if names is None else names
        steps = [listed_step.step for listed_step in other_steps]
        given = {} if self._source is None else {name: self._source.by_step(name, steps) for name in names}
        return infos_of_others(self._storage, other_steps, held_steps(self._storage, self._clock), given)

    def _known_or_kept(self, decision: Decision) -> Decision:
        try:
            if not decision.keep:
                check_known(self._storage, step_dir(decision.step))
        except UnsupportedFormatError as error:
            return Decision(decision.step, True, str(error), overruled=True)
        return decision

    def missing_metrics(self, step: int, metrics: Mapping[str, float]) -> dict[str, tuple[int, Collection[str]]]:
        """The metrics that the policy uses and a step does not have: by name, the step and the metrics that it has.

        Args:
          step: the step that is about to be saved.
          metrics: its metrics. With a metric source, earlier steps are checked instead, as of the latest save.
        """
        if self._source is not None:
            return self._coverage.missing()
        return {name: (step, tuple(metrics)) for name in self.policy.metric_names if name not in metrics}

    def carry_out(self, just_saved: int | None = None, *, confirmed: Collection[int] | None = None) -> list[Decision]:
        """Plans again, hides the steps that the policy does not keep, and starts to remove their files.

        Args:
          just_saved: the step of the save that this follows.
          confirmed: the steps that may go; None allows all of them.

        Returns:
          The decisions that were carried out.
        """
        plan: list[Decision] = []
        if not isinstance(self.policy, KeepAll):
            infos, unchecked = self._steps.listed_infos(self.policy.metric_names, just_saved)
            infos, plan = self._decide(infos, unchecked, just_saved)
            self._coverage.record(infos, self.policy.metric_names, just_saved)
        pruning = Pruning(self._storage, self._clock, self._steps, self._stay_log)
        try:
            pruning.hide_steps(plan, confirmed)
            if self.keep_datasets is not None:
                steps = self._steps.prunable(listing(self._storage).steps)
                remove_old_datasets(self._storage, steps, self.keep_datasets, just_saved, self._clock)
        finally:
            self.wait()
            self._remover = pruning.start_removal()
        return pruning.done

    def wait(self) -> None:
        """Waits until the files of hidden steps are removed."""
        if self._remover is not None:
            self._remover.wait()
            self._remover = None
