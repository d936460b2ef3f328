"""Policies that decide when to save. A policy is a pure function of a moment of the training loop; it returns a reason, or None.

Policies are joined with ``|`` (any of them) and ``&`` (all of them)::

    SaveEvery(1000) | SaveEverySeconds(600) | SaveOnPreemption()
    SaveEvery(100) & SaveOnImprovement('eval/loss', 'min')

In a job of several processes, each calls its own copy with the same moment (``save/schedule.py``), so all get the same answer
without communication. A policy must therefore depend only on the moment.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping

from t5ckpt.core.arguments import MAX, check_joined_policies, given_steps, integer, number, set_fields
from t5ckpt.policies import best_mode, check_metric_name

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
    'parts_of',
]


@dataclasses.dataclass(frozen=True)
class Moment:
    """The facts that a policy gets at one call of ``maybe_save``.

    Attributes:
      step: of this call.
      previous_step: of the previous call; None at the first call.
      last_saved_step: the latest step that is saved or being saved; None if the run has none.
      seconds_since_save: seconds since that save began, or since the first call if there was no save.
      preempted: whether a process of the job is preempted, and nothing has been saved since.
      metrics: of this call.
      best: the smallest and the largest value among the saved steps, by metric, without NaN.
      saving: whether a save of this checkpointer is running.
    """

    step: int
    previous_step: int | None = None
    last_saved_step: int | None = None
    seconds_since_save: float = 0.0
    preempted: bool = False
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    best: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict[str, tuple[float, float]])
    saving: bool = False


class SavePolicy(ABC):
    """Decides whether a step is to be saved."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics that the policy compares. Empty by default."""
        return ()

    @abstractmethod
    def reason(self, moment: Moment) -> str | None:
        """The reason to save now, as text, or None."""

    def __or__(self, other: SavePolicy) -> SavePolicy:
        return SaveAny((self, other))

    def __and__(self, other: SavePolicy) -> SavePolicy:
        return SaveAll((self, other))


def parts_of(policy: SavePolicy | None) -> Iterator[SavePolicy]:
    """The policies that are joined in a policy, or the policy itself."""
    if isinstance(policy, _Joined):
        for part in policy.policies:
            yield from parts_of(part)
    elif policy is not None:
        yield policy


@dataclasses.dataclass(frozen=True)
class SaveEvery(SavePolicy):
    """Saves the multiples of ``steps``, including 0.

    If a loop does not call at every step, the first call after a multiple saves. Steps below ``min_step`` are not saved: with
    ``min_step=1``, step 0 is not saved.
    """

    steps: int
    min_step: int = 0

    def __post_init__(self) -> None:
        set_fields(self, steps=integer('steps', self.steps, 1), min_step=integer('min_step', self.min_step))

    def reason(self, moment: Moment) -> str | None:
        """The reason to save now, or None."""
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
        """The reason to save now, or None."""
        return 'one of the given steps' if moment.step in self.steps else None


@dataclasses.dataclass(frozen=True)
class SaveEverySeconds(SavePolicy):
    """Saves when ``seconds`` have passed since the previous save, by the clock of process 0; not below ``min_step``."""

    seconds: float
    min_step: int = 0

    def __post_init__(self) -> None:
        set_fields(self, seconds=number('seconds', self.seconds), min_step=integer('min_step', self.min_step))

    def reason(self, moment: Moment) -> str | None:
        """The reason to save now, or None."""
        if moment.step < self.min_step:
            return None
        return f'every {self.seconds:g} s' if moment.seconds_since_save >= self.seconds else None


@dataclasses.dataclass(frozen=True)
class SaveFirst(SavePolicy):
    """Saves at the first call of a run that has no checkpoint, so that a storage error shows at the start of the run."""

    def reason(self, moment: Moment) -> str | None:
        """The reason to save now, or None."""
        is_first = moment.previous_step is None and moment.last_saved_step is None
        return 'the first of the run' if is_first else None


@dataclasses.dataclass(frozen=True)
class SaveLast(SavePolicy):
    """Saves at the first call with the given step or a later one, for the last step of a run."""

    step: int

    def __post_init__(self) -> None:
        set_fields(self, step=integer('step', self.step))

    def reason(self, moment: Moment) -> str | None:
        """The reason to save now, or None."""
        is_new = moment.previous_step is None or moment.previous_step < self.step
        return 'the last of the run' if moment.step >= self.step and is_new else None


@dataclasses.dataclass(frozen=True)
class SaveWhenIdle(SavePolicy):
    """Saves whenever no save is running, so that a failure loses as little work as possible; not below ``min_step``.

    In a job of several processes, the state of process 0 about a second ago decides.
    """

    min_step: int = 0

    def __post_init__(self) -> None:
        set_fields(self, min_step=integer('min_step', self.min_step))

    def reason(self, moment: Moment) -> str | None:
        """The reason to save now, or None."""
        return None if moment.saving or moment.step < self.min_step else 'no save is running'


@dataclasses.dataclass(frozen=True)
class SaveOnPreemption(SavePolicy):
    """Saves when a process of the job is preempted, see ``PreemptionNotice``."""

    def reason(self, moment: Moment) -> str | None:
        """The reason to save now, or None."""
        return 'preempted' if moment.preempted else None


@dataclasses.dataclass(frozen=True)
class SaveOnImprovement(SavePolicy):
    """Saves when a metric is better than in every saved step; NaN and infinities are never better.

    Attributes:
      metric: its name among the metrics passed to ``maybe_save``.
      mode: ``'max'`` or ``'min'``. The default warns about a metric such as a loss.
      least: the minimum improvement.
      min_step: steps below it are not saved.
    """

    metric: str
    mode: str = MAX
    least: float = 0.0
    min_step: int = 0

    def __post_init__(self) -> None:
        check_metric_name(self.metric)
        set_fields(self, mode=best_mode('mode', self.mode, self.metric))
        set_fields(self, least=number('least', self.least, least=0), min_step=integer('min_step', self.min_step))

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metric."""
        return (self.metric,)

    def reason(self, moment: Moment) -> str | None:
        """The reason to save now, or None."""
        value = moment.metrics.get(self.metric)
        if value is None or not math.isfinite(value) or moment.step < self.min_step:
            return None
        if self.metric not in moment.best:
            return f'{self.metric} {value:g} is the first'
        smallest, largest = moment.best[self.metric]
        best, gain = (largest, value - largest) if self.mode == 'max' else (smallest, smallest - value)
        return f'{self.metric} {value:g} is better than {best:g}' if gain > 0 and gain >= self.least else None


@dataclasses.dataclass(frozen=True)
class _Joined(SavePolicy):
    policies: tuple[SavePolicy, ...]

    def __post_init__(self) -> None:
        check_joined_policies(self.policies, SavePolicy, type(self).__name__)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics of all policies."""
        return tuple(sorted({name for policy in self.policies for name in policy.metric_names}))

    def _joined_reasons(self, moment: Moment, least: int) -> str | None:
        """The reasons of the policies; None if fewer than ``least`` of them have one."""
        reasons = [reason for policy in self.policies if (reason := policy.reason(moment)) is not None]
        return '; '.join(dict.fromkeys(reasons)) if len(reasons) >= least else None


class SaveAny(_Joined):
    """Saves when any of the policies does."""

    def reason(self, moment: Moment) -> str | None:
        """The reasons of the policies that have one."""
        return self._joined_reasons(moment, 1)


class SaveAll(_Joined):
    """Saves when all of the policies do."""

    def reason(self, moment: Moment) -> str | None:
        """The reasons of all policies."""
        return self._joined_reasons(moment, len(self.policies))
