"""Decides when the next save is due, with the same result in every process.

A policy is pure, so processes that ask it about the same moment agree. All processes know the step. About once a second, at
a check-in, process 0 broadcasts its clock, the preemption flag, the metrics and the outcome of the last save; between
check-ins the shared state does not change. Each check-in announces the step of the next one.

Notes: a check-in costs one key in the coordination service per process, and no barrier or collective. The number of steps
between check-ins grows by one while they come more often than once a second, and is divided at once when they come less
often. Time policies are therefore about a second late in a job of several processes. A single process reads its own clock
in every call, which costs microseconds.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from t5ckpt.commit.retention import RunFacts
from t5ckpt.core.call_site import Notices
from t5ckpt.core.protocols import Clock
from t5ckpt.core.text import lines_of_error
from t5ckpt.distributed.coordinator import Coordinator
from t5ckpt.distributed.rounds import Channel
from t5ckpt.errors import DisagreementError, MissingMetricWarning, NoEffectWarning, RemoteError, StorageError
from t5ckpt.save.arguments import check_preemption, metric_numbers
from t5ckpt.save.pending import PendingSave
from t5ckpt.save_policies import Moment, SavePolicy

_CHECK_SECONDS = 1.0
_MAX_GAP = 1000

_log = logging.getLogger('t5ckpt')

Best = dict[str, tuple[float, float]]


@dataclasses.dataclass
class PolicyState:
    """The state from which a policy decides at each call; that of saves is broadcast by process 0.

    Mutable, since making a new one at every step would be slow.
    """

    now: float
    last_step: int | None
    last_unix: float
    preempted: bool = False
    handled: bool = False
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    best: Best = dataclasses.field(default_factory=dict[str, tuple[float, float]])
    saving: bool = False
    next_check: int = 0

    def reason(self, policy: SavePolicy, step: int, previous: int | None) -> str | None:
        """The reason to save a step, or None; ``previous`` is the step of the previous call."""
        return policy.reason(
            Moment(
                step=step,
                previous_step=previous,
                last_saved_step=self.last_step,
                seconds_since_save=self.now - self.last_unix,
                preempted=self.preempted and not self.handled,
                metrics=self.metrics,
                best=self.best,
                saving=self.saving,
            )
        )

    def set_now(self, now: float) -> None:
        """Takes the time. If the clock was set back, saves continue without waiting until it has caught up."""
        self.now, self.last_unix = now, min(self.last_unix, now)

    def note(self, step: int, metrics: Mapping[str, float], unix: float) -> None:
        """Takes a step that was saved, and when."""
        self.last_step, self.last_unix, self.best = step, unix, with_best(self.best, metrics)


@dataclasses.dataclass
class _StartedSave:
    """A save that was started, and the state to return to if it fails."""

    pending: PendingSave
    epoch: int
    metrics: Mapping[str, float]
    last_step: int | None
    last_unix: float


class WatchedMetrics:
    """The metrics that a policy compares; warns of one that is never passed."""

    def __init__(self, policy: SavePolicy | None, option: str, patience: int):
        """Takes the policy and its option of the constructor: ``save_policy``, or ``persist`` of LocalTier.

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
        names = ', '.join(map(repr, sorted(self._awaited)))
        shown = ', '.join(map(str, given)) or f'none in the first {self._patience} steps'
        text = (
            f'step {step} comes without the metric {names}, which {self._option}={self._policy} needs; the metrics given were: '
            f'{shown}. Until this metric is passed in metrics=, the policy takes no step because of it. Pass it, or use one of '
            'the given metrics in the policy.'
        )
        notices.warn((self._option, names), MissingMetricWarning(text))


class SaveSchedule:
    """Asks the save policy at every call. There is one per checkpointer; call it from the thread that trains.

    Attributes:
      should_stop: whether a process of the job is preempted.
      is_used: whether the policy or the preemption flag was used.
    """

    def __init__(
        self,
        policy: SavePolicy | None,
        coordinator: Coordinator,
        facts: RunFacts,
        clock: Clock,
        preempted: Callable[[], bool] | None,
        notices: Notices,
    ):
        """``policy`` is the policy of ``maybe_save``, or None; ``clock`` and ``preempted`` are those of this process.

        Raises:
          ValueError: the policy waits for a preemption, and there is no ``preempted``.
        """
        check_preemption(policy, preempted, 'saves')
        self._policy = policy
        self._coordinator = coordinator
        self._facts = facts
        self._clock = clock
        self._preempted = preempted
        self._notices = notices
        self._watched = WatchedMetrics(policy, 'save_policy', 1000)
        self._channel: Channel | None = None
        self._is_leader = True
        self._view: PolicyState | None = None
        self._previous: int | None = None
        self._updated_at = 0
        self._last: PendingSave | None = None
        # In process 0, until the outcome of the save is known.
        self._begun: _StartedSave | None = None
        self._best: Best = {}
        self._has_signalled = False
        self._epoch = self._check = 0
        self._gap = 1
        self.should_stop = self.is_used = False

    def save_if_due(
        self, step: int, metrics: Mapping[str, Any] | None, save: Callable[[Mapping[str, float]], PendingSave]
    ) -> PendingSave | None:
        """Starts a save if the policy gives a reason; ``save`` takes the metrics as floats."""
        policy, previous = self._given_policy('maybe_save'), self._previous
        view = self._updated(step, self._watched.of(metrics))
        if self._is_leader:
            self._watched.warn_if_missing(step, metrics, self._notices)
        reason = None if self._is_saved(step, view) else view.reason(policy, step, previous)
        self._previous = step
        if reason is None:
            return None
        _log.info('t5ckpt: saving step %d: %s', step, reason)
        try:
            return save(metric_numbers(metrics))
        except BaseException:
            # A save that fails, or reports that an earlier one has failed, is due again at the next step.
            self._previous = previous
            raise

    def would_save(self, step: int, metrics: Mapping[str, Any] | None) -> bool:
        """Whether ``save_if_due`` would start a save; observes, as that does.

        Several processes use the state of the latest check-in, and do not communicate.
        """
        policy, numbers = self._given_policy('should_save'), metric_numbers(metrics)
        view = self._view
        if self._coordinator.processes_of_job().count == 1:
            # A loop may call only ``should_save`` and ``save``; the interval begins now.
            view = self._view = self._observe(step, {})
        elif view is None:
            # Before the first check-in each process knows only its own flag.
            view = dataclasses.replace(self._observe(step, {}), preempted=False)
        view = dataclasses.replace(view, metrics=self._watched.of(numbers))
        return not self._is_saved(step, view) and view.reason(policy, step, self._previous) is not None

    def _is_saved(self, step: int, view: PolicyState) -> bool:
        """Whether the loop begins with the latest step, or has saved it. A save reports the step of an abandoned branch."""
        is_own = self._previous is None or (self._last is not None and self._last.step == step)
        return is_own and step == view.last_step

    def is_preempted(self, step: int) -> bool:
        """Whether a process of the job is preempted; the same at the same step in all processes."""
        if self._preempted is None:
            raise ValueError('reached_preemption: pass preempted=PreemptionNotice() to the constructor.')
        self.is_used = True
        return self._updated(step, {}).preempted

    def forget(self, step: int, latest: int | None) -> None:
        """Forgets a deleted step, so that it may be saved again; ``latest`` is the largest step left."""
        for state in (self._view, self._begun):
            if state is not None and state.last_step == step:
                state.last_step = latest

    def warn_at_end(self, *, has_saved: bool) -> None:
        """Warns in process 0 if an option was passed and never used, or no step was saved after a preemption."""
        if self._coordinator.processes_of_job().index != 0:
            return
        view = self._view
        if self.should_stop and view is not None and not view.handled and view.last_step != self._updated_at:
            _log.warning(
                't5ckpt: step %d was not saved when the job was preempted; the last saved step is %s. Join SaveOnPreemption() to '
                'save_policy, or save when should_stop is set.',
                self._updated_at,
                view.last_step,
            )
        given = {'save_policy': self._policy, 'preempted': self._preempted}
        names = ' and '.join(name for name, value in given.items() if value is not None)
        if not has_saved or not names or self.is_used:
            return
        methods = 'maybe_save' if self._policy is not None else 'maybe_save or reached_preemption'
        text = (
            f'{names} had no effect: steps were saved, and {methods} was never called. Call it at every step, or leave {names} '
            'out.'
        )
        self._notices.warn('unused', NoEffectWarning(text))

    def _given_policy(self, method: str) -> SavePolicy:
        self.is_used = True
        if self._policy is None:
            raise ValueError(f'{method}: pass save_policy= to the constructor, such as SaveEvery(1000).')
        return self._policy

    def record(self, pending: PendingSave, started: float, metrics: Mapping[str, float]) -> None:
        """Records a save of the loop, whether the policy gave a reason or not; all processes call it.

        ``started`` is the time when the call began, which ends now.
        """
        self._last, view = pending, self._view
        if view is None:
            return
        if self._is_leader:
            # One save runs at a time, so the previous one has ended.
            self._record_result(view)
            self._begun = _StartedSave(pending, self._epoch, metrics, view.last_step, view.last_unix)
        self._epoch, self._check = self._epoch + 1, 0
        now = started if self._channel is None else view.now
        view.last_step, view.last_unix, view.handled = pending.step, now, view.preempted
        view.saving = True

    def _updated(self, step: int, watched: Mapping[str, Any]) -> PolicyState:
        """Updates the state; the first call finds the processes of the job and opens the channel to them."""
        if self._view is None:
            processes = self._coordinator.processes_of_job()
            self._is_leader = processes.index == 0
            if processes.count > 1 and self._channel is None:
                self._channel = self._coordinator.new_channel()
        channel = self._channel
        view = self._observe(step, watched) if channel is None else self._receive(channel, step, watched)
        self._view, self._updated_at, self.should_stop = view, step, view.preempted
        return view

    # --- process 0's view --------------------------------------------------------------------------------------------

    def _observe(self, step: int, watched: Mapping[str, Any]) -> PolicyState:
        """The state that process 0 observes now."""
        metrics, now = metric_numbers(watched), self._clock()
        view = self._first_view(now) if self._view is None else self._view
        if self._begun is not None and self._begun.pending.done():
            self._record_result(view)
        view.set_now(now)
        view.preempted = view.preempted or (self._preempted is not None and self._preempted())
        view.metrics = metrics
        view.saving = self._last is not None and not self._last.done()
        view.best = self._best if self._begun is None else with_best(self._best, self._begun.metrics)
        view.next_check = step + self._gap
        return view

    def _first_view(self, now: float) -> PolicyState:
        steps: list[int] = []
        try:
            steps = self._facts.steps()
            for info in self._facts.infos() if self._watched.names else ():
                self._best = with_best(self._best, info.metrics)
        except StorageError as error:
            if not self._facts.may_be_away:
                raise
            # ``would_save`` may call this before the first check-in.
            if self._notices.is_new('first view'):
                _log.warning('t5ckpt: the save policy starts without the steps of the run: %s', error)
            self._notices.add('first view')
        return PolicyState(now, steps[-1] if steps else None, now)

    def _record_result(self, view: PolicyState) -> None:
        """Records the outcome of the save that has ended, if there is one. After a failed one, the reason for it is due again."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        if begun.pending.failed():
            view.last_step, view.last_unix, view.handled = begun.last_step, begun.last_unix, False
            return
        self._best = with_best(self._best, begun.metrics)
        if self._channel is not None:
            # All processes have entered that save, so they have received the messages before it.
            self._channel.drop(str(begun.epoch), 'the check-in of maybe_save')

    # --- several processes -------------------------------------------------------------------------------------------

    def _receive(self, channel: Channel, step: int, watched: Mapping[str, Any]) -> PolicyState:
        """The shared state, updated by process 0 at a check-in. A loop that goes back to an earlier step checks in, too."""
        if not (self._has_signalled or self._is_leader or self._preempted is None) and self._preempted():
            self._has_signalled = True
            channel.signal_leader('preempted')
        view = self._view
        if view is not None and self._updated_at <= step < view.next_check and not watched:
            view.metrics = {}
            return view
        name, action = f'{self._epoch}/{self._check}', f'the check-in of maybe_save at step {step}'
        self._check += 1
        if self._is_leader:
            try:
                self._adapt_interval(step)
                seen = self._observe(step, watched)
                seen.preempted = seen.preempted or channel.was_signalled('preempted')
            except Exception as error:
                channel.broadcast(name, json.dumps([None, lines_of_error(error)]).encode(), action)
                raise
            channel.broadcast(name, json.dumps([step, dataclasses.asdict(seen)]).encode(), action)
            return seen
        leader_step, fields = json.loads(channel.broadcast(name, None, action))
        if leader_step is None:
            raise RemoteError(f'{action} failed: process 0: {fields}', (0,))
        if leader_step != step:
            raise DisagreementError(
                f'maybe_save: process 0 is at step {leader_step}, process {channel.processes.index} at step {step}. Every '
                'process has to call it for the same steps, and with metrics in the same calls.'
            )
        best = {key: (low, high) for key, (low, high) in fields.pop('best').items()}
        return PolicyState(**fields, best=best)

    def _adapt_interval(self, step: int) -> None:
        """Adapts the number of steps to the next check-in to the time since the last one."""
        if self._view is None:
            return
        seconds = self._clock() - self._view.now
        if seconds > _CHECK_SECONDS:
            self._gap = max(1, int(self._gap * _CHECK_SECONDS / seconds))
        elif step >= self._view.next_check:
            self._gap = min(_MAX_GAP, self._gap + 1)


def with_best(best: Mapping[str, tuple[float, float]], metrics: Mapping[str, float]) -> Best:
    """The lowest and the highest value of each metric, with those of another step; NaN and infinities do not count."""
    joined = dict(best)
    for name, value in metrics.items():
        if math.isfinite(value):
            low, high = joined.get(name, (value, value))
            joined[name] = min(low, value), max(high, value)
    return joined
