"""What to keep. Policies are pure: they look at facts about steps and decide, and never touch storage.

A policy returns a decision for every step, with its reason in words, so that a dry run shows exactly what a trainer
would do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

__all__ = ['Decision', 'KeepAll', 'KeepLatest', 'KeepPolicy', 'StepInfo', 'doomed_steps']


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """What a policy may know of a complete checkpoint."""

    step: int
    pinned: bool = False


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether a step stays, and why."""

    step: int
    keep: bool
    reason: str


class KeepPolicy(Protocol):
    """Decides which of the complete checkpoints stay."""

    def choose(self, infos: Sequence[StepInfo]) -> list[Decision]:
        """One decision per step, in the order given."""
        ...


@dataclasses.dataclass(frozen=True)
class KeepAll:
    """Keeps every checkpoint."""

    def choose(self, infos: Sequence[StepInfo]) -> list[Decision]:
        """One decision per step."""
        return [Decision(info.step, True, 'all are kept') for info in infos]


@dataclasses.dataclass(frozen=True)
class KeepLatest:
    """Keeps the ``count`` largest steps; pinned ones stay besides and take no slot."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f'keep must be at least 1 checkpoint, got {self.count}; None keeps all.')

    def choose(self, infos: Sequence[StepInfo]) -> list[Decision]:
        """One decision per step."""
        free = sorted(info.step for info in infos if not info.pinned)
        latest = set(free[-self.count :])
        return [_latest_decision(info, info.step in latest, self.count) for info in infos]


def _latest_decision(info: StepInfo, is_latest: bool, count: int) -> Decision:
    if info.pinned:
        return Decision(info.step, True, 'pinned')
    if is_latest:
        return Decision(info.step, True, f'one of the latest {count}')
    return Decision(info.step, False, f'older than the latest {count}')


def doomed_steps(policy: KeepPolicy, infos: Sequence[StepInfo], just_saved: int | None) -> list[Decision]:
    """The decisions that delete, after the rules that no policy can break.

    A pinned step and the step just saved stay, whatever the policy says; the latter matters after a rollback, when the
    new step is smaller than the old ones.
    """
    pinned = {info.step for info in infos if info.pinned}
    return [
        decision
        for decision in policy.choose(infos)
        if not decision.keep and decision.step != just_saved and decision.step not in pinned
    ]
