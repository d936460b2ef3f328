"""The metrics that a save policy or a persist policy compares; warns of those that no call passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from t5ckpt.core.call_site import Notices
from t5ckpt.errors import MissingMetricWarning
from t5ckpt.save_policies import SavePolicy


@dataclasses.dataclass(frozen=True)
class PolicyUse:
    """The use of a policy by an option, for the warning.

    Attributes:
      option: of the constructor.
      event: what happened without the metric, with ``{step}``.
      effect: what the policy does not do.
      calls: what is counted.
      patience: the number of calls without any metric before the warning. Such calls are normal if the model is evaluated only
        now and then.
    """

    option: str
    event: str
    effect: str
    calls: str
    patience: int


OF_SAVE_POLICY = PolicyUse('save_policy', 'maybe_save was called at step {step}', 'save', 'calls', 1000)
# Many steps lie between two saves.
OF_PERSIST_POLICY = PolicyUse('persist_policy', 'step {step} is saved', 'upload a step', 'saves', 10)


class WatchedMetrics:
    """The metrics that a policy compares; warns of one that is never passed."""

    def __init__(self, policy: SavePolicy | None, use: PolicyUse):
        self.names = frozenset[str]() if policy is None else frozenset(policy.metric_names)
        self._policy = policy
        self._use = use
        # Metrics that were not passed so far.
        self._awaited = set(self.names)
        self._calls = 0

    def of(self, metrics: Mapping[str, Any] | None) -> dict[str, Any]:
        """The watched ones of the metrics that were passed to a call."""
        return {name: metrics[name] for name in self.names & metrics.keys()} if self.names and metrics else {}

    def warn_if_missing(self, step: int, metrics: Mapping[str, Any] | None, notices: Notices) -> None:
        """Counts a call, and warns if a metric was not passed so far; in one process of the job, in the caller's thread."""
        if not self._awaited:
            return
        given = {} if metrics is None else metrics
        self._awaited -= given.keys()
        if not self._awaited:
            return
        self._calls += 1
        use = self._use
        if not given and self._calls <= use.patience:
            return
        names = ', '.join(map(repr, sorted(self._awaited)))
        shown = ', '.join(map(str, given)) or f'none in the first {use.patience} {use.calls}'
        text = (
            f'{use.event.format(step=step)} without the metric {names}, which {use.option}={self._policy} needs; the metrics '
            f'given were: {shown}. Until this metric is passed in metrics=, the policy does not {use.effect} because of it. '
            'Pass it, or use one of the given metrics in the policy.'
        )
        notices.warn((use.option, names), MissingMetricWarning(text))
