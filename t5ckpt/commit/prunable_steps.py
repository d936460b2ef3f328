"""Lists the steps that retention may delete, with their facts and holds, and logs once why a step stays."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from t5ckpt.catalog.bucket_catalog import complete_steps, list_bucket
from t5ckpt.catalog.layouts import ListedStep, one_a_step
from t5ckpt.catalog.listing import listing
from t5ckpt.catalog.run_catalog import BucketListing
from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.step_facts import StepFacts
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.format.names import MANIFEST, parse_prefixed_step, parse_step_dir, step_dir
from t5ckpt.policies import WAITS, Decision, StepInfo
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')


class StayLog:
    """Logs why a step stays, each reason once."""

    def __init__(self, storage: Storage):
        """Takes the run."""
        self._storage = storage
        self._logged: set[tuple[int | None, str]] = set()

    def _is_new(self, step: int | None, reason: str) -> bool:
        is_new = (step, reason) not in self._logged
        self._logged.add((step, reason))
        return is_new

    def log(self, decision: Decision) -> None:
        """Logs that a step is kept for another reason than the policy.

        Of the steps that wait for their upload only the first is logged, since each of them waits while uploads are slow.
        """
        step = None if decision.reason == WAITS else decision.step
        if decision.overruled and self._is_new(step, decision.reason):
            _log.info('t5ckpt: step %d is kept regardless of the keep policy: %s', decision.step, decision.reason)

    def warn(self, step: int, name: str, reason: str, verb: str) -> None:
        """Logs that a step cannot be deleted."""
        if self._is_new(step, reason):
            _log.warning('t5ckpt: %s %s: %s', self._storage.url(name), verb, reason)


class PrunableSteps(ABC):
    """The steps about which a keep policy decides.

    Attributes:
      listed: on object stores, the listing of the save that this retention follows, so that it need not list again.
    """

    def __init__(self, storage: Storage, clock: Clock, facts: StepFacts, stay_log: StayLog):
        """Takes the run, the facts of its steps, and the log."""
        self.listed: BucketListing | None = None
        self._storage = storage
        self._clock = clock
        self._facts = facts
        self._stay_log = stay_log

    def prunable(self, steps: Sequence[ListedStep]) -> list[int]:
        """The steps in T5X's layout; logs that the others stay."""
        for listed_step in steps:
            if not listed_step.is_t5x:
                self._stay_log.log(
                    Decision(listed_step.step, True, f'in the layout of {listed_step.layout}', overruled=True)
                )
        linked = _linked_by(self._storage, steps)
        for step, link in linked.items():
            self._stay_log.log(Decision(step, True, f'step {link} is a link to it', overruled=True))
        return [each.step for each in steps if each.is_t5x and each.step not in linked]

    def infos(self, names: Collection[str], just_saved: int | None) -> list[StepInfo]:
        """The facts of the steps, ascending, with the metrics of these names."""
        return self._facts.infos(*self._with_held(), names, just_saved)

    @abstractmethod
    def _with_held(self) -> tuple[list[int], set[int]]:
        """The steps, and those that a reader holds."""

    @abstractmethod
    def listed_infos(self, names: Collection[str], just_saved: int | None) -> tuple[list[StepInfo], set[int]]:
        """As :meth:`infos`, perhaps with steps that do not exist; also returns the steps to check with :meth:`gone`."""

    def gone(self, steps: Collection[int]) -> set[int]:
        """Those of some steps that do not exist."""
        exist = self._storage.are_files([join(step_dir(step), MANIFEST) for step in sorted(steps)])
        return {step for step, is_there in zip(sorted(steps), exist, strict=True) if not is_there}


def _linked_by(storage: Storage, steps: Sequence[ListedStep]) -> dict[int, int]:
    """The steps that other steps are links to, with the step of the link."""
    paths = {each.step: storage.local_path(each.name) for each in steps}
    links = {os.path.realpath(path): step for step, path in paths.items() if path is not None and os.path.islink(path)}
    targets = {
        os.path.realpath(path): step for step, path in paths.items() if path is not None and not os.path.islink(path)
    }
    return {targets[path]: link for path, link in links.items() if path in targets}


class StepsOnDisk(PrunableSteps):
    """The steps in a listing of the run's directory."""

    def _with_held(self) -> tuple[list[int], set[int]]:
        run_listing = listing(self._storage)
        for name, error in run_listing.unreadable.items():
            self._stay_log.warn(parse_prefixed_step(name) or 0, name, str(error), 'stays, because it cannot be read')
        return self.prunable(run_listing.steps), held_steps(self._storage, self._clock)

    def listed_infos(self, names: Collection[str], just_saved: int | None) -> tuple[list[StepInfo], set[int]]:
        return self.infos(names, just_saved), set()


class StepsInBucket(PrunableSteps):
    """The steps in a listing of an object store.

    The layout of a step does not change, so it is inspected once. Retention deletes no step whose name is not T5X's. A directory
    with another name is inspected once, too.
    """

    def __init__(self, storage: Storage, clock: Clock, facts: StepFacts, stay_log: StayLog):
        """As of the base class."""
        super().__init__(storage, clock, facts, stay_log)
        self._inspected: dict[str, ListedStep] = {}
        self._no_steps = set[str]()

    def _with_held(self) -> tuple[list[int], set[int]]:
        listed = list_bucket(self._storage)
        steps = self.prunable(complete_steps(self._storage, listed.names))
        return steps, held_steps(self._storage, self._clock, listed.announcements.holds)

    def listed_infos(self, names: Collection[str], just_saved: int | None) -> tuple[list[StepInfo], set[int]]:
        """Reads only the manifests of steps that are new to this process, and of those that the policy keeps.

        The listing may be the one of the save, when it began. The next save then finds a step that another process has
        committed since. The holds are listed again before a step is hidden, and hiding a step reads its manifest.
        """
        listed, self.listed = self.listed or list_bucket(self._storage), None
        own = {} if just_saved is None else {step_dir(just_saved): ListedStep(just_saved, step_dir(just_saved))}
        seen = {
            name: step
            for name in listed.names
            if (step := self._inspected.get(name)) is not None and step.step not in listed.busy and name not in own
        }
        skipped = {*seen, *own, *self._no_steps}
        unseen = [name for name in listed.names if name not in skipped]
        new = {step.name: step for step in complete_steps(self._storage, unseen)}
        self._no_steps |= {name for name in unseen if name not in new and parse_step_dir(name) is None}
        self._inspected = seen | new | own
        steps = self.prunable(one_a_step([*self._inspected.values()]))
        held = held_steps(self._storage, self._clock, listed.announcements.holds)
        return self._facts.infos(steps, held, names, just_saved), {step.step for step in seen.values()}
