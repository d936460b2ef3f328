"""Policies that decide which checkpoints to keep.

A policy is a pure function: it gets facts about the steps and returns a decision with a reason for each. ``retention_plan`` adds
the rules that no policy can override. A trainer carries out this plan, and ``t5ckpt prune --dry-run`` prints it. Policies are
joined with ``|``: a step is kept if any of them keeps it.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from t5ckpt.core.arguments import (
    MAX,
    MODES,
    check_flags,
    check_joined_policies,
    check_word,
    given_steps,
    integer,
    is_doubtful,
    number,
    set_fields,
)
from t5ckpt.core.call_site import warn_caller
from t5ckpt.core.text import shown
from t5ckpt.errors import MetricModeWarning

__all__ = [
    'HELD',
    'WAITS',
    'Decision',
    'KeepAll',
    'KeepAny',
    'KeepBest',
    'KeepEvery',
    'KeepEveryHours',
    'KeepLatest',
    'KeepPolicy',
    'KeepSteps',
    'StepInfo',
    'best_mode',
    'check_metric_name',
    'retention_plan',
]


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """The facts about a complete checkpoint that a policy gets.

    Attributes:
      step: its step.
      pinned: whether it is pinned, so that retention never deletes it.
      held: whether a reader holds it.
      waits: whether it waits for its upload from a local directory.
      created_unix: when it was saved, in unix seconds; None if unknown.
      metrics: by name, as passed to ``save`` or found by the checkpointer's metric source.
    """

    step: int
    pinned: bool = False
    held: bool = False
    created_unix: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    waits: bool = False


HELD = 'held by a reader'
"""The reason for a step that a reader holds."""
WAITS = 'waits for its upload'
"""The reason for a step of a local directory that is not in the run's storage yet."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether to keep a step, and the reason.

    ``overruled``: it is kept for another reason than the policy, such as a pin, a hold, an upload for which it waits, or
    files of another or a newer program.
    """

    step: int
    keep: bool
    reason: str
    overruled: bool = False


class KeepPolicy(ABC):
    """Decides which of the complete checkpoints to keep.

    Pinned steps are always kept. They do not count towards the numbers of the policies in this module.
    """

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics that the policy compares; only these are read. Empty by default."""
        return ()

    @abstractmethod
    def choose(self, infos: Sequence[StepInfo]) -> list[Decision]:
        """One decision per step; ``infos`` ascend by step."""

    def __or__(self, other: KeepPolicy) -> KeepPolicy:
        return KeepAny((self, other))


@dataclasses.dataclass(frozen=True)
class KeepAll(KeepPolicy):
    """Keeps every checkpoint."""

    def choose(self, infos: Sequence[StepInfo]) -> list[Decision]:
        """One decision per step."""
        return [Decision(info.step, True, 'all are kept') for info in infos]


@dataclasses.dataclass(frozen=True)
class KeepLatest(KeepPolicy):
    """Keeps the ``count`` largest steps, in addition to pinned ones."""

    count: int

    def __post_init__(self) -> None:
        set_fields(self, count=integer('count', self.count, 1, 'KeepAll() keeps all.'))

    def choose(self, infos: Sequence[StepInfo]) -> list[Decision]:
        """One decision per step."""
        latest = set(sorted(info.step for info in infos if not info.pinned)[-self.count :])
        return [
            Decision(info.step, True, f'one of the latest {self.count}')
            if info.step in latest
            else Decision(info.step, info.pinned, f'older than the latest {self.count}')
            for info in infos
        ]


@dataclasses.dataclass(frozen=True)
class KeepBest(KeepPolicy):
    """Keeps the ``count`` best steps by a metric, and the latest (T5X's SaveBestCheckpointer).

    Of equal values the newer one is better. NaN is worse than any number, and so is an infinity that would be best.

    Attributes:
      count: the number of best steps.
      metric: its name, such as ``'eval/accuracy'``.
      mode: ``'max'`` or ``'min'``. The default warns about a metric such as a loss.
      keep_without_metric: True also keeps steps without the metric; False deletes them first. None is True if this policy
        decides alone, which is T5X's rule, and False if it is joined with others, which then decide on these steps.
      period: its multiples are also kept.
    """

    count: int
    metric: str
    mode: str = MAX
    keep_without_metric: bool | None = None
    period: int | None = None

    def __post_init__(self) -> None:
        set_fields(self, count=integer('count', self.count, 1, 'KeepAll() keeps all.'))
        if self.period is not None:
            set_fields(self, period=integer('period', self.period, 1))
        check_metric_name(self.metric)
        if self.keep_without_metric is not None:
            check_flags(keep_without_metric=self.keep_without_metric)
        set_fields(self, mode=best_mode('mode', self.mode, self.metric))

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metric."""
        return (self.metric,)

    def choose(self, infos: Sequence[StepInfo]) -> list[Decision]:
        """One decision per step."""
        latest = max((info.step for info in infos), default=None)
        best = {info.step for info in sorted(infos, key=self._rank)[-self.count :]}
        kept = {info.step: reason for info in infos if (reason := self._kept(info, latest)) is not None}
        ranked = sorted((info for info in infos if info.step not in kept), key=self._rank)
        worse = {info.step for info in ranked[: max(0, len(ranked) - self.count)]}
        return [
            Decision(info.step, True, kept[info.step])
            if info.step in kept
            else self._ranked(info, info.step not in worse, info.step in best)
            for info in infos
        ]

    def _kept(self, info: StepInfo, latest: int | None) -> str | None:
        """The reason to keep a step without comparing its metric, or None."""
        if info.pinned:
            return 'pinned'
        if info.step == latest:
            return 'latest'
        if self.period is not None and info.step % self.period == 0:
            return f'a multiple of {self.period}'
        if self.keep_without_metric is not False and self.metric not in info.metrics:
            return f'has no {self.metric}'
        return None

    def _rank(self, info: StepInfo) -> tuple[bool, float, int]:
        """A sort key, larger for better steps. A step without the metric is as good as the worst number (T5X)."""
        value = info.metrics.get(self.metric)
        if value is None:
            return True, -math.inf, info.step
        signed = value if self.mode == 'max' else -value
        return (False, -math.inf, info.step) if math.isnan(value) or signed == math.inf else (True, signed, info.step)

    def _ranked(self, info: StepInfo, keep: bool, is_best: bool) -> Decision:
        value = info.metrics.get(self.metric)
        metric = f'has no {self.metric}' if value is None else f'{self.metric} {value:g}'
        if keep and (value is None or not math.isfinite(value)):
            return Decision(info.step, True, f'{metric}, ranked last of {self.count} ({self.mode})')
        # The latest step, for one, takes none of the places.
        rank = f'{"among" if keep else "not among"} the best {self.count}{" of the others" if keep and not is_best else ""}'
        return Decision(info.step, keep, f'{metric}, {rank} ({self.mode})')


def compared_metrics(policy: KeepPolicy) -> list[tuple[str, str]]:
    """(metric, mode) of each part of a policy that compares steps."""
    if isinstance(policy, KeepAny):
        return list(dict.fromkeys(pair for part in policy.policies for pair in compared_metrics(part)))
    return [(policy.metric, policy.mode)] if isinstance(policy, KeepBest) else []


def best_of(infos: Sequence[StepInfo], metric: str, mode: str) -> int | None:
    """The step with the best finite value of a metric, the newest of several. None without values."""
    sign = 1 if mode == 'max' else -1
    values = {info.step: info.metrics.get(metric, math.nan) for info in infos}
    ranked = [(sign * value, step) for step, value in values.items() if math.isfinite(value)]
    return max(ranked)[1] if ranked else None


@dataclasses.dataclass(frozen=True)
class KeepEvery(KeepPolicy):
    """Keeps the multiples of ``steps``, including 0."""

    steps: int

    def __post_init__(self) -> None:
        set_fields(self, steps=integer('steps', self.steps, 1))

    def choose(self, infos: Sequence[StepInfo]) -> list[Decision]:
        """One decision per step."""
        return [
            Decision(info.step, True, f'a multiple of {self.steps}')
            if info.step % self.steps == 0
            else Decision(info.step, False, f'not a multiple of {self.steps}')
            for info in infos
        ]


@dataclasses.dataclass(frozen=True)
class KeepEveryHours(KeepPolicy):
    """Keeps the first step, and then each one that was saved at least ``hours`` after the previous one that is kept.

    Steps whose time is unknown are kept.
    """

    hours: float

    def __post_init__(self) -> None:
        set_fields(self, hours=number('hours', self.hours))

    def choose(self, infos: Sequence[StepInfo]) -> list[Decision]:
        """One decision per step."""
        decisions: list[Decision] = []
        last: StepInfo | None = None
        for info in infos:
            if info.created_unix is None:
                decisions.append(Decision(info.step, True, 'the time of its save is unknown'))
                continue
            before = None if last is None else last.created_unix
            if last is None or before is None or info.created_unix >= before + self.hours * 3600:
                why = 'the first' if last is None else f'{self.hours:g} h or more after step {last.step}'
                decisions.append(Decision(info.step, True, why))
                last = info
            else:
                decisions.append(Decision(info.step, False, f'less than {self.hours:g} h after step {last.step}'))
        return decisions


@dataclasses.dataclass(frozen=True)
class KeepSteps(KeepPolicy):
    """Keeps the given steps."""

    steps: Collection[int]

    def __post_init__(self) -> None:
        set_fields(self, steps=given_steps(self.steps))

    def choose(self, infos: Sequence[StepInfo]) -> list[Decision]:
        """One decision per step."""
        return [
            Decision(info.step, True, 'one of the given steps')
            if info.step in self.steps
            else Decision(info.step, False, 'not one of the given steps')
            for info in infos
        ]


@dataclasses.dataclass(frozen=True)
class KeepAny(KeepPolicy):
    """Keeps the steps that any of the policies keeps."""

    policies: tuple[KeepPolicy, ...]

    def __post_init__(self) -> None:
        check_joined_policies(self.policies, KeepPolicy, 'KeepAny')

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics of all policies."""
        return tuple(sorted({name for policy in self.policies for name in policy.metric_names}))

    def choose(self, infos: Sequence[StepInfo]) -> list[Decision]:
        """One decision per step, with the reasons of all policies that made it."""
        decisions: dict[int, list[Decision]] = {info.step: [] for info in infos}
        for policy in map(_as_part, self.policies) if len(self.policies) > 1 else self.policies:
            for decision in policy.choose(infos):
                decisions.setdefault(decision.step, []).append(decision)
        return [_joined(info.step, decisions[info.step]) for info in infos]


def _as_part(policy: KeepPolicy) -> KeepPolicy:
    """Sets the default of ``keep_without_metric`` for a KeepBest that is joined with other policies."""
    if isinstance(policy, KeepBest) and policy.keep_without_metric is None:
        return dataclasses.replace(policy, keep_without_metric=False)
    return policy


def _joined(step: int, decisions: Sequence[Decision]) -> Decision:
    keep = any(decision.keep for decision in decisions)
    reasons = dict.fromkeys(decision.reason for decision in decisions if decision.keep == keep)
    return Decision(step, keep, '; '.join(reasons))


def check_metric_name(name: Any) -> None:
    """Raises ValueError unless ``name`` is a non-empty string."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"metric must be a name such as 'eval/accuracy', got {shown(name)}.")


def best_mode(option: str, mode: str, metric: str) -> str:
    """Checks which values of a metric are the best; warns if that is the default, and the metric seems to be a loss.

    Raises:
      ValueError: neither 'max' nor 'min'.
    """
    check_word(option, mode, MODES)
    if is_doubtful(mode, metric):
        text = (
            f"low values of {metric!r} seem to be good, but {option}='max', the default, ranks the highest value first. Pass "
            f"{option}='min', or {option}='max' to confirm."
        )
        warn_caller(MetricModeWarning(text))
    return str(mode)


def retention_plan(policy: KeepPolicy, infos: Sequence[StepInfo], just_saved: int | None = None) -> list[Decision]:
    """Applies a policy, and the rules that no policy can override; returns one decision per step.

    Keeps steps that are pinned, held by a reader or wait for their upload, the latest step, and the step just saved, which may be
    another one after a rollback. Steps without a decision of the policy are kept.

    Args:
      policy: decides on the other steps.
      infos: the complete steps, in any order.
      just_saved: the step whose save carries out the plan, if any.
    """
    ordered = sorted(infos, key=lambda info: info.step)
    decisions = {decision.step: decision for decision in policy.choose(ordered)}
    latest = ordered[-1].step if ordered else None
    plan: list[Decision] = []
    for info in ordered:
        decision = decisions.get(info.step, Decision(info.step, True, 'the policy returned no decision'))
        rules = {
            'pinned': info.pinned,
            HELD: info.held,
            WAITS: info.waits,
            'latest': info.step == latest,
            'just saved': info.step == just_saved,
        }
        rule = next((reason for reason, holds in rules.items() if holds), None)
        is_ruled = rule is not None and (info.pinned or not decision.keep)
        overruled = is_ruled and (info.pinned or info.held or info.waits)
        plan.append(Decision(info.step, True, str(rule), overruled) if is_ruled else decision)
    return plan
