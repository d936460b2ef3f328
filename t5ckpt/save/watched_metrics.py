"""The metrics that a save policy or a persist policy compares; warns of those that no call passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from t5ckpt.core.call_site import Notices
from t5ckpt.errors import MissingMetricWarning
from t5ckpt.save_policies import SavePolicy


class WatchedMetrics:
    """The metrics that a policy compares; warns of one that is never passed."""

    def __init__(self, policy: SavePolicy | None, option: str, patience: int):
        """Takes the policy and its option of the constructor: ``save_policy`` or ``persist_policy``.

        ``patience`` is the number of calls without any metric before the warning. Such calls are normal if the model is evaluated
        only now and then.
        """
        self.names = frozenset[str]() if policy is None else frozenset(policy.metric_names)
        self._policy, self._option, self._patience = policy, option, patience
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
        self._calls += 1
        if not self._awaited or (not given and self._calls <= self._patience):
            return
        event, effect, calls = f'maybe_save was called at step {step}', 'save', 'calls'
        if self._option == 'persist_policy':
            event, effect, calls = f'step {step} is saved', 'upload a step', 'saves'
        names = ', '.join(map(repr, sorted(self._awaited)))
        shown = ', '.join(map(str, given)) or f'none in the first {self._patience} {calls}'
        text = (
            f'{event} without the metric {names}, which {self._option}={self._policy} needs; the metrics given were: {shown}. '
            f'Until this metric is passed in metrics=, the policy does not {effect} because of it. Pass it, or use one of the '
            'given metrics in the policy.'
        )
        notices.warn((self._option, names), MissingMetricWarning(text))
