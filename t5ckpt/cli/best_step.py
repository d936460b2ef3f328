"""Which step of a run is the best, for ``t5ckpt best`` and for ``run@best``."""

from __future__ import annotations

import dataclasses
import time

import click

from t5ckpt.commit.retention import Retention
from t5ckpt.commit.step_facts import missing_from_all
from t5ckpt.metrics import TensorBoardMetrics
from t5ckpt.policies import KeepAll
from t5ckpt.save.monitored import best_of, candidates, monitored_metrics
from t5ckpt.storage import Storage

__all__ = ['Best', 'chosen']


@dataclasses.dataclass(frozen=True)
class Best:
    """The best step, or None where no step has the metric; by which metric and mode, and its value."""

    step: int | None
    metric: str
    mode: str
    value: float | None


def chosen(storage: Storage, metric: str | None, mode: str | None) -> Best:
    """The best step of a run; without a metric or a mode, by its keep policy.

    Raises:
      click.UsageError: the policy does not say which, or steps have metrics, but not this one.
    """
    retention = Retention(storage, KeepAll(), time.time, None, TensorBoardMetrics(storage))
    policy = retention.recorded_policy()
    known = () if policy is None else monitored_metrics(policy, None)
    found = candidates(known, metric, mode)
    if len(found) != 1:
        held = ', '.join(f'{name} ({best})' for name, best in known) or 'none'
        raise click.UsageError(
            f'the keep policy of the run does not say which steps are best (metrics that it compares: {held}). Pass METRIC '
            'and --mode max or --mode min.'
        )
    (name, best) = found[0]
    infos = retention.infos((name,))
    missing = missing_from_all(infos, name)
    if missing is not None and any(info.metrics for info in infos):
        raise click.UsageError(missing)
    step = best_of(infos, name, best)
    value = next((info.metrics[name] for info in infos if info.step == step), None)
    return Best(step, name, best, value)
