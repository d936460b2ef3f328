"""Adds the keep policy's reason to each step of a run. Does not load JAX or TensorStore."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Sequence

from t5ckpt.catalog.listing import waiting_steps
from t5ckpt.catalog.step_summaries import StepSummary
from t5ckpt.commit.holds import held_steps
from t5ckpt.format.keep_policy import policy_of
from t5ckpt.metrics import TensorBoardMetrics
from t5ckpt.policies import WAITS, KeepPolicy, StepInfo, best_of, compared_metrics, retention_plan
from t5ckpt.storage import Storage

GOES = 'deleted by the next save: '
# As in a run that was converted, or that T5X saved.
_NO_POLICY = 'no keep policy is recorded'


def with_reasons(storage: Storage, found: list[StepSummary], policy: KeepPolicy | None = None) -> list[StepSummary]:
    """The summaries with the reasons of the keep policy, or that none is recorded.

    Args:
      storage: the run.
      found: its steps.
      policy: None takes that under which the latest step was saved.
    """
    decided = [entry for entry in found if _is_decided(entry)]
    policy = policy or (policy_of(decided[-1].policy) if decided else None)
    waiting = waiting_steps(storage)
    # Such as a pin.
    kept = {entry.step: entry.kept for entry in decided}
    if policy is not None:
        kept |= _reasons(storage, policy, found, decided, waiting)
    for step, reason in kept.items():
        waits = WAITS if step in waiting and reason != WAITS else ''
        kept[step] = '; '.join(filter(None, [reason, waits])) or _NO_POLICY
    return [dataclasses.replace(entry, kept=kept[entry.step]) if _is_decided(entry) else entry for entry in found]


def _reasons(
    storage: Storage,
    policy: KeepPolicy,
    found: Sequence[StepSummary],
    decided: Sequence[StepSummary],
    waiting: Collection[int],
) -> dict[int, str]:
    """The reasons of a policy, by step; a pinned step has the reason for its pin."""
    steps = [entry.step for entry in decided]
    source, held = TensorBoardMetrics(storage), held_steps(storage, time.time)
    given = {name: source.by_step(name, steps) for name in policy.metric_names}
    infos: list[StepInfo] = []
    for entry in decided:
        metrics = {name: of[entry.step] for name, of in given.items() if entry.step in of} | {**entry.metrics}
        step = entry.step
        infos.append(StepInfo(step, entry.pinned, step in held, entry.created, metrics, step in waiting))
    reasons = {
        each.step: each.reason if each.keep else f'{GOES}{each.reason}' for each in retention_plan(policy, infos)
    } | {entry.step: entry.kept for entry in decided if entry.pinned}
    others = [StepInfo(each.step, metrics=each.metrics) for each in found if each.complete and each.step not in reasons]
    compared = compared_metrics(policy)
    for name, mode in compared:
        best = best_of([*infos, *others], name, mode)
        title = f'best {name}' if compared[1:] else 'best'
        reasons |= {step: f'{title}; {reason}' for step, reason in reasons.items() if step == best}
    return reasons


def named_by_policy(entries: Sequence[StepSummary]) -> tuple[str, ...]:
    """The metrics that the keep policy of the latest step compares."""
    policies = [policy for entry in entries if (policy := policy_of(entry.policy)) is not None]
    return policies[-1].metric_names if policies else ()


def by_policy(entries: Sequence[StepSummary]) -> tuple[list[str], list[str]]:
    """The metrics that the keep policy of the latest step compares, and the others, each in the order of their names."""
    named = named_by_policy(entries)
    names = sorted({name for entry in entries for name in entry.metrics})
    return [name for name in names if name in named], [name for name in names if name not in named]


def _is_decided(entry: StepSummary) -> bool:
    return entry.complete and entry.layout == 't5x' and not entry.reason
