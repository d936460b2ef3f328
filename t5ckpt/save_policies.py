"""When to save. Policies are pure: they look at a moment of the training loop and give a reason to save, or None.

They are joined with ``|`` (any of them) and ``&`` (all of them)::

    SaveEvery(1000) | SaveEverySeconds(600) | SaveOnPreemption()
    SaveEvery(100) & SaveOnImprovement('eval/loss', 'min')

In a job of several processes, each asks its own copy about the same moment (``save/schedule.py``), so all get the same answer
without communication. A policy must therefore depend only on the moment.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping

from t5ckpt.core.arguments import check_policies, given_steps, integer, number, set_fields
from t5ckpt.policies import check_metric_mode, check_metric_name

__all__ = [
    'Moment',
    'SaveAll',
    'SaveAny',
    'SaveAt',
    'SaveEvery',
    'SaveEverySeconds',
    'SaveFirst',
    'SaveLast',
    'SaveOnImprovement',
    'SaveOnPreemption',
    'SavePolicy',
    'SaveWhenIdle',
    'YoungDaly',
    'parts_of',
]


@dataclasses.dataclass(frozen=True)
class Moment:
    """What a policy may know, at one call of ``maybe_save``.

    Attributes:
      step: the call's.
      previous_step: of the call before it; None at the first call.
      last_saved_step: the latest step that is saved or being saved; None when the run has none.
      seconds_since_save: seconds since that save was begun, or, before the first one, since the first call.
      preempted: whether a process of the job is preempted, and nothing has been saved since.
      metrics: given in this call.
      best: by metric, the smallest and the largest value among the saved steps, NaN left out.
      blocked_seconds: how long the latest save stopped the loop; None before the first.
      write_seconds: how long it took until it was on storage; None before the first.
      saving: whether a save of this checkpointer is under way.
    """

    step: int
    previous_step: int | None = None
    last_saved_step: int | None = None
    seconds_since_save: float = 0.0
    preempted: bool = False
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    best: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict[str, tuple[float, float]])
    blocked_seconds: float | None = None
    write_seconds: float | None = None
    saving: bool = False


class SavePolicy(ABC):
    """Decides whether a step is to be saved."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics it looks at. None, unless it says so."""
        return ()

    @abstractmethod
    def reason(self, moment: Moment) -> str | None:
        """Why to save now, in words, or None."""

    def __or__(self, other: SavePolicy) -> SavePolicy:
        return SaveAny((self, other))

    def __and__(self, other: SavePolicy) -> SavePolicy:
        return SaveAll((self, other))


def parts_of(policy: SavePolicy | None) -> Iterator[SavePolicy]:
    """The policies that a policy is joined of, or the policy itself."""
    if isinstance(policy, (SaveAny, SaveAll)):
        for part in policy.policies:
            yield from parts_of(part)
    elif policy is not None:
        yield policy


@dataclasses.dataclass(frozen=True)
class SaveEvery(SavePolicy):
    """Saves the steps that ``steps`` divides, 0 included.

    Where a loop does not call at every step, the first call after such a step saves. No step below ``min_step`` is
    saved: with 1, step 0 is not.
    """

    steps: int
    min_step: int = 0

    def __post_init__(self) -> None:
        set_fields(self, steps=integer('the period', self.steps, 1), min_step=integer('min_step', self.min_step))

    def reason(self, moment: Moment) -> str | None:
        """Why to save now."""
        if moment.step < self.min_step:
            return None
        before = moment.step - 1 if moment.previous_step is None else moment.previous_step
        return f'every {self.steps} steps' if moment.step // self.steps > before // self.steps else None


@dataclasses.dataclass(frozen=True)
class SaveAt(SavePolicy):
    """Saves the given steps (T5X's ``checkpoint_steps``)."""

    steps: Collection[int]

    def __post_init__(self) -> None:
        set_fields(self, steps=given_steps(self.steps))

    def reason(self, moment: Moment) -> str | None:
        """Why to save now."""
        return 'one of the given steps' if moment.step in self.steps else None


@dataclasses.dataclass(frozen=True)
class SaveEverySeconds(SavePolicy):
    """Saves when ``seconds`` have passed since the previous save, by the clock of process 0; from ``min_step`` on."""

    seconds: float
    min_step: int = 0

    def __post_init__(self) -> None:
        set_fields(self, seconds=number('seconds', self.seconds), min_step=integer('min_step', self.min_step))

    def reason(self, moment: Moment) -> str | None:
        """Why to save now."""
        if moment.step < self.min_step:
            return None
        return f'every {self.seconds:g} s' if moment.seconds_since_save >= self.seconds else None


@dataclasses.dataclass(frozen=True)
class SaveFirst(SavePolicy):
    """Saves at the first call of a run that has no checkpoint: before hours of work show that the disk refuses."""

    def reason(self, moment: Moment) -> str | None:
        """Why to save now."""
        is_first = moment.previous_step is None and moment.last_saved_step is None
        return 'the first of the run' if is_first else None


@dataclasses.dataclass(frozen=True)
class SaveLast(SavePolicy):
    """Saves at the first call with the given step or a later one: the last step of the run."""

    step: int

    def __post_init__(self) -> None:
        set_fields(self, step=integer('step', self.step))

    def reason(self, moment: Moment) -> str | None:
        """Why to save now."""
        is_new = moment.previous_step is None or moment.previous_step < self.step
        return 'the last of the run' if moment.step >= self.step and is_new else None


@dataclasses.dataclass(frozen=True)
class SaveWhenIdle(SavePolicy):
    """Saves whenever no save is under way, so that as little work as possible is lost; from ``min_step`` on.

    In a job of several processes, process 0's save counts, as of about a second ago.
    """

    min_step: int = 0

    def __post_init__(self) -> None:
        set_fields(self, min_step=integer('min_step', self.min_step))

    def reason(self, moment: Moment) -> str | None:
        """Why to save now."""
        return None if moment.saving or moment.step < self.min_step else 'no save is under way'


@dataclasses.dataclass(frozen=True)
class SaveOnPreemption(SavePolicy):
    """Saves when a process of the job is preempted, see ``PreemptionNotice``."""

    def reason(self, moment: Moment) -> str | None:
        """Why to save now."""
        return 'preempted' if moment.preempted else None


@dataclasses.dataclass(frozen=True)
class SaveOnImprovement(SavePolicy):
    """Saves when a metric is better than in every saved step; NaN never is.

    Attributes:
      metric: its name among the metrics given to ``maybe_save``.
      mode: ``'max'`` or ``'min'``.
      least: by how much it must be better.
      min_step: no step below it is saved.
    """

    metric: str
    mode: str = 'max'
    least: float = 0.0
    min_step: int = 0

    def __post_init__(self) -> None:
        check_metric_name(self.metric)
        check_metric_mode(self.mode)
        set_fields(self, least=number('least', self.least, least=0), min_step=integer('min_step', self.min_step))

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metric."""
        return (self.metric,)

    def reason(self, moment: Moment) -> str | None:
        """Why to save now."""
        value = moment.metrics.get(self.metric)
        if value is None or math.isnan(value) or moment.step < self.min_step:
            return None
        if self.metric not in moment.best:
            return f'{self.metric} {value:g} is the first'
        smallest, largest = moment.best[self.metric]
        best, gain = (largest, value - largest) if self.mode == 'max' else (smallest, smallest - value)
        return f'{self.metric} {value:g} is better than {best:g}' if gain > 0 and gain >= self.least else None


@dataclasses.dataclass(frozen=True)
class YoungDaly(SavePolicy):
    """Saves at the interval that minimizes the time lost to saves and failures together.

    The interval is sqrt(2 * cost of a save * mean time between failures): J. W. Young, A first order approximation to the
    optimum checkpoint interval, CACM 17(9), 1974; J. T. Daly, A higher order estimate of the optimum checkpoint interval
    for restart dumps, FGCS 22(3), 2006, whose further terms vanish where a save is short against the time between
    failures. The cost is what the loop was stopped for, as measured; and saves are never closer than they take to write.

    Attributes:
      mtbf_seconds: mean time between failures of the job: that of one machine divided by their number.
      first_cost_seconds: what a save is taken to cost before one was measured.
      min_step: no step below it is saved.
    """

    mtbf_seconds: float
    first_cost_seconds: float = 10.0
    min_step: int = 0

    def __post_init__(self) -> None:
        seconds = {name: number(name, getattr(self, name)) for name in ('mtbf_seconds', 'first_cost_seconds')}
        set_fields(self, **seconds, min_step=integer('min_step', self.min_step))

    def interval(self, cost_seconds: float | None, write_seconds: float | None) -> float:
        """Seconds from one save to the next."""
        cost = self.first_cost_seconds if cost_seconds is None else cost_seconds
        return max(math.sqrt(2 * cost * self.mtbf_seconds), 0.0 if write_seconds is None else write_seconds)

    def reason(self, moment: Moment) -> str | None:
        """Why to save now."""
        if moment.step < self.min_step:
            return None
        interval = self.interval(moment.blocked_seconds, moment.write_seconds)
        return f'every {interval:.3g} s (Young, Daly)' if moment.seconds_since_save >= interval else None


@dataclasses.dataclass(frozen=True)
class SaveAny(SavePolicy):
    """Saves when any of the policies does."""

    policies: tuple[SavePolicy, ...]

    def __post_init__(self) -> None:
        check_policies(self.policies, SavePolicy, 'SaveAny')

    @property
    def metric_names(self) -> tuple[str, ...]:
        """What all of them look at."""
        return tuple(sorted({name for policy in self.policies for name in policy.metric_names}))

    def reason(self, moment: Moment) -> str | None:
        """Why to save now: all their reasons."""
        reasons = [reason for policy in self.policies if (reason := policy.reason(moment)) is not None]
        return '; '.join(dict.fromkeys(reasons)) if reasons else None


@dataclasses.dataclass(frozen=True)
class SaveAll(SavePolicy):
    """Saves when all of the policies do."""

    policies: tuple[SavePolicy, ...]

    def __post_init__(self) -> None:
        check_policies(self.policies, SavePolicy, 'SaveAll')

    @property
    def metric_names(self) -> tuple[str, ...]:
        """What all of them look at."""
        return tuple(sorted({name for policy in self.policies for name in policy.metric_names}))

    def reason(self, moment: Moment) -> str | None:
        """Why to save now: all their reasons."""
        reasons: list[str] = []
        for policy in self.policies:
            reason = policy.reason(moment)
            if reason is None:
                return None
            reasons.append(reason)
        return '; '.join(dict.fromkeys(reasons)) if reasons else None
