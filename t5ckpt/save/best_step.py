"""Finds the metric that the policies of a run compare, and the best step by a metric; warns of metrics that a step lacks."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from t5ckpt.commit.retention import Retention, RunFacts, missing_from_all, recorded_policy
from t5ckpt.core.arguments import MODES, check_kind, check_word
from t5ckpt.core.call_site import Notices
from t5ckpt.errors import MissingMetricWarning
from t5ckpt.metrics import TensorBoardMetrics
from t5ckpt.policies import KeepAll, KeepPolicy, StepInfo, best_of, compared_metrics
from t5ckpt.save_policies import SaveOnImprovement, SavePolicy, parts_of
from t5ckpt.storage import Storage


class BestStep(NamedTuple):
    """The best step, or None if no step has a finite value; the metric, the mode, and the value."""

    step: int | None
    metric: str
    mode: str
    value: float | None


def monitored_metrics(keep: KeepPolicy, save: SavePolicy | None) -> tuple[tuple[str, str], ...]:
    """(metric, mode) of each policy that compares steps: those of the keep policy, or else of the save policy."""
    kept = compared_metrics(keep)
    saved = dict.fromkeys((part.metric, part.mode) for part in parts_of(save) if isinstance(part, SaveOnImprovement))
    return tuple(kept or saved)


def best_step_of(
    facts: RunFacts,
    monitored: Sequence[tuple[str, str]],
    metric: str | None,
    mode: str | None,
    awaited: Collection[str] = (),
) -> BestStep:
    """The best step of a run, see ``Checkpointer.best_step``.

    Args:
      facts: of the run.
      monitored: (metric, mode) of its policies.
      metric: the caller's, or None.
      mode: the caller's, or None.
      awaited: metrics that no step needs to have yet.

    Raises:
      ValueError: the policies name no metric, or more than one; or no step has this one.
    """
    check_kind('metric', metric, str, "'eval/accuracy'")
    if mode is not None:
        check_word('mode', mode, MODES)
    pairs = candidates(monitored, metric, mode)
    if len(pairs) != 1:
        if metric is not None:
            # An unknown metric is reported before a missing mode.
            _infos_with(facts, metric)
        name, best = metric or 'eval/loss', mode or 'min'
        compared = ', '.join(f'{each} ({its})' for each, its in monitored) or 'none'
        held = ', '.join(sorted({each for info in facts.infos() for each in info.metrics})) or 'none'
        raise ValueError(
            f'best_step: the policies do not say which steps are best (metrics they compare: {compared}; metrics of the steps: '
            f'{held}). Pass the {"mode" if metric else "metric and the mode"}: best_step({name!r}, {best!r}), '
            f'run@best:{name}:{best}, or {name} with --mode {best}.'
        )
    name, best = pairs[0]
    infos = _infos_with(facts, name, awaited)
    step = best_of(infos, name, best)
    return BestStep(step, name, best, next((info.metrics[name] for info in infos if info.step == step), None))


def best_in(storage: Storage, metric: str | None = None, mode: str | None = None) -> BestStep:
    """The best step of the run in a storage, by default by the metric and the mode of the keep policy of its latest save."""
    policy = recorded_policy(storage) or KeepAll()
    retention = Retention(storage, policy, time.time, source=TensorBoardMetrics(storage))
    return best_step_of(retention, monitored_metrics(policy, None), metric, mode)


def _infos_with(facts: RunFacts, metric: str, awaited: Collection[str] = ()) -> list[StepInfo]:
    """The facts of the steps.

    Raises:
      ValueError: the steps have metrics, but not this one, and it is not awaited.
    """
    infos = facts.infos({metric, *facts.policy.metric_names})
    missing = missing_from_all(infos, metric)
    if missing is not None and metric not in awaited and any(info.metrics for info in infos):
        raise ValueError(f'best_step: {missing} Pass one of these.')
    return infos


def candidates(monitored: Sequence[tuple[str, str]], metric: str | None, mode: str | None) -> list[tuple[str, str]]:
    """The pairs (metric, mode) that agree with the caller's arguments and the policies; one if these determine both."""
    pairs = [pair for pair in monitored if metric in (None, pair[0]) and mode in (None, pair[1])]
    names = sorted({pair[0] for pair in pairs}) if metric is None else [metric]
    modes = sorted({pair[1] for pair in pairs}) if mode is None else [mode]
    return [(name, best) for name in names for best in modes]


def warn_of_missing_metrics(
    notices: Notices, policy: KeepPolicy, infos: Sequence[StepInfo], *, has_source: bool
) -> None:
    """Warns of the metrics that a keep policy compares and no step has.

    Args:
      notices: of the checkpointer.
      policy: the keep policy.
      infos: the step that is about to be saved. With a metric source, all steps: one of them may lack a metric that others have,
        since T5X's training loop saves the first step before any evaluation, and the last step was not evaluated yet.
      has_source: whether there is a metric source.
    """
    if has_source and len(infos) < 3:
        return
    source = 'Pass'
    if has_source:
        source = 'metric_source has not returned it for any step so far. If no evaluator is about to write it, pass'
    found = {name for info in infos for name in info.metrics}
    for name in policy.metric_names:
        if name not in found:
            text = (
                f'step {infos[0].step} has no metric {name!r}, which the keep policy compares; it has: '
                f'{", ".join(infos[0].metrics) or "none"}. {source} metrics={{{name!r}: ...}} to save, or name another metric '
                'in the policy.'
            )
            notices.warn(('keep_policy', name), MissingMetricWarning(text))
