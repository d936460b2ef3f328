"""What to keep. Policies are pure: they look at facts about steps and decide, and never touch storage.

A policy returns a decision with a reason for every step. ``retention_plan`` adds the rules that no policy can override. A
trainer carries out this plan, and ``t5ckpt prune --dry-run`` prints it. Policies are joined with ``|``: a step stays if any of
them keeps it.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from t5ckpt.core.arguments import check_policies, given_steps, integer, number, set_fields

__all__ = [
    'HELD',
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
    'check_metric_mode',
    'check_metric_name',
    'fields_of',
    'policy_of',
    'retention_plan',
]


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """What a policy may know of a complete checkpoint.

    Attributes:
      step: its step.
      pinned: whether it is marked as never to be deleted.
      held: whether a reader asks that it not be deleted now.
      created_unix: when it was saved, in unix seconds; None where nobody knows.
      metrics: by name, as given to save or as found by the checkpointer's metric source.
    """

    step: int
    pinned: bool = False
    held: bool = False
    created_unix: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])


HELD = 'held by a reader'
"""The reason of a step that a reader keeps."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether a step stays, and why; ``overruled`` where a pin or a reader keeps it, whatever the policy says."""

    step: int
    keep: bool
    reason: str
    overruled: bool = False


class KeepPolicy(ABC):
    """Decides which of the complete checkpoints stay.

    A pinned step stays whatever a policy says, and the policies here give it no slot.
    """

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics it looks at; only these are searched for. None, unless it says so."""
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
    """Keeps the ``count`` largest steps; pinned steps stay in addition and take no slot."""

    count: int

    def __post_init__(self) -> None:
        set_fields(self, count=integer('keep', self.count, 1, 'None keeps all.'))

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
    """Keeps the ``count`` best steps by a metric, and always the latest (T5X's SaveBestCheckpointer).

    Of equal values the newer is better; NaN is worse than anything.

    Attributes:
      count: how many.
      metric: its name, ``'eval/accuracy'``.
      mode: ``'max'`` or ``'min'``.
      keep_without_metric: True: steps without the metric stay, and take no slot. False: they go first. None: as True where
        this policy decides alone, which is T5X's rule; as False where it is joined with others, which then decide on them.
      period: steps that it divides stay, and take no slot.
    """

    count: int
    metric: str
    mode: str = 'max'
    keep_without_metric: bool | None = None
    period: int | None = None

    def __post_init__(self) -> None:
        set_fields(self, count=integer('keep', self.count, 1, 'None keeps all.'))
        if self.period is not None:
            set_fields(self, period=integer('the period', self.period, 1))
        check_metric_name(self.metric)
        check_metric_mode(self.mode)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metric."""
        return (self.metric,)

    def choose(self, infos: Sequence[StepInfo]) -> list[Decision]:
        """One decision per step."""
        latest = max((info.step for info in infos), default=None)
        kept = {info.step: reason for info in infos if (reason := self._kept(info, latest)) is not None}
        ranked = sorted((info for info in infos if info.step not in kept), key=self._rank)
        worse = {info.step for info in ranked[: max(0, len(ranked) - self.count)]}
        return [
            Decision(info.step, True, kept[info.step]) if info.step in kept else self._ranked(info, info.step in worse)
            for info in infos
        ]

    def _kept(self, info: StepInfo, latest: int | None) -> str | None:
        """Why a step stays without being compared, or None."""
        if info.pinned:
            return 'pinned'
        if info.step == latest:
            return 'the latest'
        if self.period is not None and info.step % self.period == 0:
            return f'a multiple of {self.period}'
        if self.keep_without_metric is not False and self.metric not in info.metrics:
            return f'has no {self.metric}'
        return None

    def _rank(self, info: StepInfo) -> tuple[bool, float, int]:
        """The better, the larger. A step without the metric is as good as the worst number there is (T5X)."""
        value = info.metrics.get(self.metric)
        if value is None:
            return True, -math.inf, info.step
        if math.isnan(value):
            return False, -math.inf, info.step
        return True, value if self.mode == 'max' else -value, info.step

    def _ranked(self, info: StepInfo, is_worse: bool) -> Decision:
        value = info.metrics.get(self.metric)
        held = f'has no {self.metric}' if value is None else f'{self.metric} {value:g}'
        place = 'not among' if is_worse else 'among'
        return Decision(info.step, not is_worse, f'{held}, {place} the best {self.count} ({self.mode})')


@dataclasses.dataclass(frozen=True)
class KeepEvery(KeepPolicy):
    """Keeps the steps that ``steps`` divides; 0 is one of them."""

    steps: int

    def __post_init__(self) -> None:
        set_fields(self, steps=integer('the period', self.steps, 1))

    def choose(self, infos: Sequence[StepInfo]) -> list[Decision]:
        """One decision per step."""
        return [
            Decision(info.step, True, f'a multiple of {self.steps}')
            if info.step % self.steps == 0
            else Decision(info.step, False, f'no multiple of {self.steps}')
            for info in infos
        ]


@dataclasses.dataclass(frozen=True)
class KeepEveryHours(KeepPolicy):
    """Keeps the first step, and then each that was saved at least ``hours`` after the one kept before it.

    A step whose time nobody knows stays.
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
                decisions.append(Decision(info.step, True, 'nobody knows when it was saved'))
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
            else Decision(info.step, False, 'none of the given steps')
            for info in infos
        ]


@dataclasses.dataclass(frozen=True)
class KeepAny(KeepPolicy):
    """Keeps what any of the policies keeps."""

    policies: tuple[KeepPolicy, ...]

    def __post_init__(self) -> None:
        check_policies(self.policies, KeepPolicy, 'KeepAny')

    @property
    def metric_names(self) -> tuple[str, ...]:
        """What all of them look at."""
        return tuple(sorted({name for policy in self.policies for name in policy.metric_names}))

    def choose(self, infos: Sequence[StepInfo]) -> list[Decision]:
        """One decision per step, with the reasons of all that decided so."""
        said: dict[int, list[Decision]] = {info.step: [] for info in infos}
        for policy in map(_as_part, self.policies) if len(self.policies) > 1 else self.policies:
            for decision in policy.choose(infos):
                said.setdefault(decision.step, []).append(decision)
        return [_joined(info.step, said[info.step]) for info in infos]


def _as_part(policy: KeepPolicy) -> KeepPolicy:
    """A policy as it counts among others: a step that KeepBest cannot judge stays only if another policy keeps it."""
    if isinstance(policy, KeepBest) and policy.keep_without_metric is None:
        return dataclasses.replace(policy, keep_without_metric=False)
    return policy


def _joined(step: int, decisions: Sequence[Decision]) -> Decision:
    keep = any(decision.keep for decision in decisions)
    reasons = dict.fromkeys(decision.reason for decision in decisions if decision.keep == keep)
    return Decision(step, keep, '; '.join(reasons))


def check_metric_name(name: Any) -> None:
    """Raises ValueError unless it is the name of a metric."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"metric must be a name such as 'eval/accuracy', got {name!r:.80}.")


def check_metric_mode(mode: str) -> None:
    """Raises ValueError unless ``mode`` is 'max' or 'min'."""
    if mode not in ('max', 'min'):
        raise ValueError(f"metric_mode is 'max' or 'min', got {mode!r}.")


def retention_plan(policy: KeepPolicy, infos: Sequence[StepInfo], just_saved: int | None = None) -> list[Decision]:
    """What stays and what goes, each with its reason, after the rules that no policy can break.

    Pinned and held steps stay, and so do the latest and the step just saved, which after a rollback are two. A step of
    which the policy says nothing stays.

    Args:
      policy: decides the rest.
      infos: the complete steps, in any order.
      just_saved: the step whose save carries out the plan, if one does.
    """
    ordered = sorted(infos, key=lambda info: info.step)
    said = {decision.step: decision for decision in policy.choose(ordered)}
    latest = ordered[-1].step if ordered else None
    plan: list[Decision] = []
    for info in ordered:
        decision = said.get(info.step, Decision(info.step, True, 'the policy says nothing of it'))
        rules = {
            'pinned': info.pinned,
            HELD: info.held,
            'the latest': info.step == latest,
            'just saved': info.step == just_saved,
        }
        rule = next((reason for reason, holds in rules.items() if holds), None)
        is_ruled = rule is not None and (info.pinned or not decision.keep)
        overruled = is_ruled and (info.pinned or info.held)
        plan.append(Decision(info.step, True, str(rule), overruled) if is_ruled else decision)
    return plan


# --- to and from a sidecar -------------------------------------------------------------------------------------------

_KINDS: Mapping[str, type[Any]] = {
    kind.__name__: kind for kind in (KeepAll, KeepLatest, KeepBest, KeepEvery, KeepEveryHours, KeepSteps)
}


def fields_of(policy: KeepPolicy) -> dict[str, Any] | None:
    """A policy in JSON's types; None for one that is not of this module, or is joined with such."""
    if isinstance(policy, KeepAny):
        parts = [fields_of(part) for part in policy.policies]
        return None if None in parts else {'keep': 'KeepAny', 'policies': parts}
    kind = _KINDS.get(type(policy).__name__)
    if kind is not type(policy):
        return None
    fields = dict(vars(policy))
    if isinstance(policy, KeepSteps):
        fields['steps'] = sorted(policy.steps)
    return {'keep': kind.__name__, **fields}


def policy_of(fields: Any, depth: int = 4) -> KeepPolicy | None:
    """The policy that :func:`fields_of` described; None for what is no such description, or is joined deeper."""
    if not isinstance(fields, Mapping) or depth == 0:
        return None
    rest = {str(name): value for name, value in fields.items() if name != 'keep'}
    parts = rest.get('policies')
    if fields.get('keep') == 'KeepAny':
        policies = [policy_of(part, depth - 1) for part in parts] if isinstance(parts, list) else []
        known = tuple(policy for policy in policies if policy is not None)
        return KeepAny(known) if known and len(known) == len(policies) else None
    kind = _KINDS.get(str(fields.get('keep')))
    if kind is None or not all(_is_of_its_type(kind, name, value) for name, value in rest.items()):
        return None
    try:
        return kind(**rest)
    except (TypeError, ValueError):
        return None


def _is_of_its_type(kind: type[Any], name: str, value: Any) -> bool:
    match name:
        case 'metric' | 'mode':
            return isinstance(value, str)
        case 'steps' if kind is KeepSteps:
            return isinstance(value, list) and all(type(step) is int for step in value)
        case 'hours':
            return type(value) in (int, float) and 0 < value < 10**9
        case 'keep_without_metric':
            return value is None or isinstance(value, bool)
        case _:
            return type(value) is int or (name == 'period' and value is None)
