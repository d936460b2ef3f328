"""Adds the keep policy's reason to each step of a run. Does not load JAX or TensorStore."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from t5ckpt.catalog.listing import waiting_steps
from t5ckpt.catalog.step_summaries import StepSummary
from t5ckpt.commit.holds import held_steps
from t5ckpt.format.keep_policy import policy_of
from t5ckpt.metrics import TensorBoardMetrics
from t5ckpt.policies import WAITS, Decision, KeepPolicy, StepInfo, best_of, compared_metrics, retention_plan
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
    complete = [entry for entry in found if _has_policy(entry)]
    policy = policy or (policy_of(complete[-1].policy) if complete else None)
    waiting = waiting_steps(storage)
    if policy is None:
        own = {entry.step: entry.kept for entry in complete}
        none = {step: _and_waits(kept, waits=step in waiting) or _NO_POLICY for step, kept in own.items()}
        return [dataclasses.replace(entry, kept=none[entry.step]) if _has_policy(entry) else entry for entry in found]
    steps = [entry.step for entry in complete]
    seen = TensorBoardMetrics(storage)
    given = {name: seen.by_step(name, steps) for name in policy.metric_names}
    held = held_steps(storage, time.time)
    infos = [
        StepInfo(
            entry.step,
            entry.pinned,
            entry.step in held,
            entry.created,
            {**{name: of[entry.step] for name, of in given.items() if entry.step in of}, **entry.metrics},
            entry.step in waiting,
        )
        for entry in complete
    ]
    plan = {decision.step: decision for decision in retention_plan(policy, infos)}
    kept = {step: _reason(decision, waits=step in waiting) for step, decision in plan.items()}
    # A pinned step has the reason for its pin already.
    kept |= {entry.step: _and_waits(entry.kept, waits=entry.step in waiting) for entry in complete if entry.pinned}
    values = [
        StepInfo(entry.step, metrics=entry.metrics) for entry in found if entry.complete and not _has_policy(entry)
    ]
    compared = compared_metrics(policy)
    for name, mode in compared:
        best = best_of([*infos, *values], name, mode)
        title = f'best {name}' if compared[1:] else 'best'
        kept |= {step: f'{title}; {reason}' for step, reason in kept.items() if step == best}
    return [dataclasses.replace(entry, kept=kept[entry.step]) if _has_policy(entry) else entry for entry in found]


def named_by_policy(entries: Sequence[StepSummary]) -> tuple[str, ...]:
    """The metrics that the keep policy of the latest step compares."""
    policies = [policy for entry in entries if (policy := policy_of(entry.policy)) is not None]
    return policies[-1].metric_names if policies else ()


def by_policy(entries: Sequence[StepSummary]) -> tuple[list[str], list[str]]:
    """The metrics that the keep policy of the latest step compares, and the others, each in the order of their names."""
    named = named_by_policy(entries)
    names = sorted({name for entry in entries for name in entry.metrics})
    return [name for name in names if name in named], [name for name in names if name not in named]


def _has_policy(entry: StepSummary) -> bool:
    return entry.complete and entry.layout == 't5x' and not entry.reason


def _and_waits(reason: str, *, waits: bool) -> str:
    return '; '.join(filter(None, [reason, WAITS if waits else '']))


def _reason(decision: Decision, *, waits: bool) -> str:
    if waits and decision.reason != WAITS:
        return _and_waits(decision.reason, waits=True)
    return decision.reason if decision.keep else f'{GOES}{decision.reason}'
