"""Finds the best step of a run, for ``t5ckpt best`` and for ``run@best``."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import click

from t5ckpt.commit.retention import Retention, missing_from_all, recorded_policy
from t5ckpt.metrics import TensorBoardMetrics
from t5ckpt.policies import KeepAll, StepInfo, best_of
from t5ckpt.save.best_step import candidates, monitored_metrics
from t5ckpt.storage import Storage


@dataclasses.dataclass(frozen=True)
class Best:
    """The best step, or None if no step has the metric; the metric, the mode, and the value."""

    step: int | None
    metric: str
    mode: str
    value: float | None


def chosen(storage: Storage, metric: str | None, mode: str | None, cure: str | None = None) -> Best:
    """The best step of a run; by default, its keep policy determines metric and mode. ``cure`` explains how to pass them.

    Raises:
      click.UsageError: the policy does not determine them, or the steps have other metrics, but not this one.
    """
    retention = Retention(storage, KeepAll(), time.time, None, TensorBoardMetrics(storage))
    policy = recorded_policy(storage)
    monitored = () if policy is None else monitored_metrics(policy, None)
    pairs = candidates(monitored, metric, mode)
    if len(pairs) != 1:
        infos = _infos_with(retention, metric)
        raise click.UsageError(_undefined(monitored, metric, infos, cure))
    (name, best) = pairs[0]
    infos = _infos_with(retention, name)
    step = best_of(infos, name, best)
    value = next((info.metrics[name] for info in infos if info.step == step), None)
    return Best(step, name, best, value)


def _undefined(
    monitored: Sequence[tuple[str, str]], metric: str | None, infos: Sequence[StepInfo], cure: str | None
) -> str:
    """The error for a metric or a mode that neither the caller nor the keep policy defines."""
    if metric is not None:
        cure = cure or 'Pass --mode max or --mode min.'
        return f'the keep policy of the run does not define whether high or low values of {metric} are best. {cure}'
    existing = ', '.join(sorted({name for info in infos for name in info.metrics})) or 'none'
    compared = ', '.join(f'{name} ({best})' for name, best in monitored) or 'no metric'
    cure = cure or 'Pass METRIC and --mode max or --mode min.'
    return f'the keep policy of the run compares {compared}; the metrics of the steps are: {existing}. {cure}'


def _infos_with(retention: Retention, metric: str | None) -> list[StepInfo]:
    """The facts of the steps; raises click.UsageError if they have other metrics, but not this one."""
    infos = retention.infos(() if metric is None else (metric,))
    missing = None if metric is None else missing_from_all(infos, metric)
    if missing is not None and any(info.metrics for info in infos):
        raise click.UsageError(missing)
    return infos
