"""When the next save is due: the policy, asked about the same moment in every process.

A policy is pure, so processes that ask it about the same moment agree. The step is the same by itself. What only process 0
knows (its clock, whether anybody was preempted, the metrics, what became of the last save) it tells the others at
check-ins; between two of them nobody's view changes. Which call is the next check-in is said at the one before it.

Notes: a check-in costs process 0 one look and one key in the coordination service, the others one key: no barrier, and no
collective. They come about once a second: the number of steps between them grows by one while they come faster, and
shrinks at once when they come slower, so that a loop that slows down is not left for long. So time policies are a second
or so late in a job of several processes. A single process looks at its own clock in every call, which costs microseconds.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from t5ckpt.commit.retention import Retention
from t5ckpt.core.protocols import Clock
from t5ckpt.core.text import lines_of_error
from t5ckpt.distributed.coordinator import Coordinator
from t5ckpt.distributed.rounds import Channel
from t5ckpt.errors import DisagreementError, MissingMetricWarning, NoEffectWarning, RemoteError
from t5ckpt.save import Notices, metric_numbers
from t5ckpt.save.pending import PendingSave
from t5ckpt.save_policies import Moment, SaveOnPreemption, SavePolicy, parts_of

__all__ = ['Environment', 'SaveSchedule']

_CHECK_SECONDS = 1.0
_MAX_GAP = 1000
_PATIENT_CALLS = 1000

_log = logging.getLogger('t5ckpt')

Best = dict[str, tuple[float, float]]


@dataclasses.dataclass
class _SharedState:
    """What process 0 knows; the same in all processes. It changes in place, since a new one at every step would cost."""

    now: float
    last_step: int | None
    last_unix: float
    preempted: bool = False
    handled: bool = False
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    best: Best = dataclasses.field(default_factory=dict[str, tuple[float, float]])
    blocked: float | None = None
    write: float | None = None
    saving: bool = False
    next_check: int = 0


@dataclasses.dataclass(frozen=True)
class _StartedSave:
    """A save that was begun, and what is known again should it fail."""

    pending: PendingSave
    epoch: int
    metrics: Mapping[str, float]
    last_step: int | None
    last_unix: float


@dataclasses.dataclass(frozen=True)
class Environment:
    """What a process can find out by itself: unix seconds, whether it was told to end, whether a save is under way."""

    clock: Clock
    preempted: Callable[[], bool] | None
    is_saving: Callable[[], bool]


class SaveSchedule:
    """Asks the policy at every call. One for a checkpointer; to be called from the thread that trains."""

    def __init__(
        self,
        policy: SavePolicy | None,
        coordinator: Coordinator,
        retention: Retention,
        environment: Environment,
        notices: Notices,
    ):
        """``policy`` is what ``maybe_save`` asks; None where it is not used.

        Raises:
          ValueError: the policy waits for a preemption, and nobody says whether there is one.
        """
        preempted = environment.preempted
        if preempted is None and any(isinstance(part, SaveOnPreemption) for part in parts_of(policy)):
            raise ValueError(
                'SaveOnPreemption never saves without preempted=: pass preempted=PreemptionNotice() to the constructor.'
            )
        self._policy = policy
        self._notices = notices
        self._coordinator = coordinator
        self._retention = retention
        self._clock = environment.clock
        self._is_saving = environment.is_saving
        self._has_notice = preempted is not None
        self._preempted = preempted if preempted is not None else _never
        self._names = frozenset[str]() if policy is None else frozenset(policy.metric_names)
        # Those that no call has given yet.
        self._awaited = set(self._names)
        self._calls = 0
        self._others: Channel | None = None
        self._is_leader = True
        self._view: _SharedState | None = None
        self._previous: int | None = None
        self._begun: _StartedSave | None = None
        self._best: Best = {}
        self._blocked: float | None = None
        self._has_signalled = False
        self._epoch = self._check = 0
        self._gap = 1
        self.should_stop = False
        self.is_used = False
        """Whether anybody asked the policy, or for a preemption."""

    def save_if_due(
        self, step: int, metrics: Mapping[str, Any] | None, save: Callable[[Mapping[str, float]], PendingSave]
    ) -> PendingSave | None:
        """Begins a save if the policy says so; ``save`` takes the metrics as numbers."""
        reason = self._reason(step, metrics)
        if reason is None:
            return None
        _log.info('t5ckpt: saving step %d: %s', step, reason)
        started, numbers = self._clock(), metric_numbers(metrics or {})
        pending = save(numbers)
        self._begin(pending, self._clock() - started, numbers)
        return pending

    def would_save(self, step: int, metrics: Mapping[str, Any] | None) -> bool:
        """Whether ``save_if_due`` would begin a save; nothing changes.

        One process looks at what is so now, through a copy of this object, since looking takes notes. Several see what
        they have in common since the latest check-in: no word passes between them.
        """
        policy = self._given_policy('should_save')
        view = self._view
        if self._others is None or view is None:
            view = copy.copy(self)._looked(step)  # noqa: SLF001 - of this class
        watched = {name: metrics[name] for name in self._names & metrics.keys()} if metrics else {}
        view = dataclasses.replace(view, metrics=metric_numbers(watched))
        return step != view.last_step and policy.reason(_moment(view, step, self._previous)) is not None

    def _looked(self, step: int) -> _SharedState:
        """What this process sees now; for a copy, since it takes notes."""
        self._view = None if self._view is None else dataclasses.replace(self._view)
        self._others = None
        if self._coordinator.processes_of_job().count > 1:
            # Before the first check-in each process knows this of itself alone.
            self._preempted = _never
        return self._look(step, {})

    def is_preempted(self, step: int) -> bool:
        """Whether a process of the job was told to end; the same at the same step in all."""
        if not self._has_notice:
            raise ValueError('reached_preemption: pass preempted=PreemptionNotice() to the constructor.')
        self.is_used = True
        if self._view is None:
            self._find_processes()
        others = self._others
        self._view = view = (
            self._look(step, {})
            if others is None
            else self._receive(others, step, {}, self._previous is not None and step < self._previous)
        )
        self.should_stop = view.preempted
        return view.preempted

    def forget(self, step: int, latest: int | None) -> None:
        """A step was deleted, so it may be saved again; ``latest`` is the largest one left."""
        if self._view is not None and self._view.last_step == step:
            self._view.last_step = latest
        if self._begun is not None and self._begun.last_step == step:
            self._begun = dataclasses.replace(self._begun, last_step=latest)

    def warn_if_unused(self) -> None:
        """Warns of a policy and of a notice of preemption that nobody asked for; to be called after a save, at the end."""
        given = {'save_policy': self._policy is not None, 'preempted': self._has_notice}
        names = [name for name, is_given in given.items() if is_given]
        if not names or self.is_used or self._coordinator.processes_of_job().index != 0:
            return
        methods = 'maybe_save' if self._policy is not None else 'maybe_save or reached_preemption'
        text = (
            f'{" and ".join(names)} had no effect: steps were saved, and {methods} was never called. Call it at every step, or '
            f'leave {" and ".join(names)} out.'
        )
        self._notices.warn('unused', NoEffectWarning(text))

    def _given_policy(self, method: str) -> SavePolicy:
        self.is_used = True
        if self._policy is None:
            raise ValueError(f'{method}: pass save_policy= to the constructor, such as SaveEvery(1000).')
        return self._policy

    def _reason(self, step: int, metrics: Mapping[str, Any] | None) -> str | None:
        """Why to save this step, or None."""
        policy = self._given_policy('maybe_save')
        if self._view is None:
            self._find_processes()
        watched = self._watched(step, metrics)
        others = self._others
        self._view = view = (
            self._look(step, watched)
            if others is None
            else self._receive(others, step, watched, self._previous is not None and step <= self._previous)
        )
        previous, self._previous = self._previous, step
        self.should_stop = view.preempted
        if step == view.last_step:
            return None
        return policy.reason(_moment(view, step, previous))

    def _watched(self, step: int, metrics: Mapping[str, Any] | None) -> dict[str, Any]:
        """Those of the metrics that the policy looks at; warns of one that does not come."""
        if not self._names:
            return {}
        given = {} if metrics is None else metrics
        watched = {name: given[name] for name in self._names & given.keys()}
        self._awaited -= watched.keys()
        if self._awaited and self._is_leader:
            self._calls += 1
            # Calls without any metrics are the rule where the model is evaluated now and then.
            if given or self._calls > _PATIENT_CALLS:
                self._warn(step, given)
        return watched

    def _warn(self, step: int, given: Mapping[str, Any]) -> None:
        names = ', '.join(map(repr, sorted(self._awaited)))
        shown = ', '.join(map(str, given)) or f'none in the first {_PATIENT_CALLS} calls'
        text = (
            f'maybe_save was called at step {step} without the metric {names}, which save_policy={self._policy} looks at; the '
            f'metrics that came: {shown}. Until it comes, the policy never saves for it. Name one of these in the policy, or '
            'pass it in metrics=.'
        )
        self._notices.warn(('save_policy', names), MissingMetricWarning(text))

    def _begin(self, pending: PendingSave, blocked: float, metrics: Mapping[str, float]) -> None:
        """Takes note of a save that was begun for the reason just given."""
        view = self._view
        if view is None:
            return
        if self._is_leader:
            if self._begun is not None:
                # One save at a time, so the one before has ended.
                self._record_result(view, self._begun)
            self._begun = _StartedSave(pending, self._epoch, metrics, view.last_step, view.last_unix)
            self._blocked = blocked
        self._epoch, self._check = self._epoch + 1, 0
        view.last_step, view.last_unix, view.handled = pending.step, view.now, view.preempted
        view.saving = True

    def _find_processes(self) -> None:
        """Finds the processes of the job, and opens the channel to them, before the first call."""
        processes = self._coordinator.processes_of_job()
        self._is_leader = processes.index == 0
        if processes.count > 1 and self._others is None:
            self._others = self._coordinator.new_channel()

    # --- process 0's view --------------------------------------------------------------------------------------------

    def _look(self, step: int, watched: Mapping[str, Any]) -> _SharedState:
        """What process 0 sees now."""
        metrics = metric_numbers(watched)
        now, view = self._clock(), self._view
        if view is None:
            view = self._first_view(now)
        if self._begun is not None and self._begun.pending.done():
            self._record_result(view, self._begun)
        view.now = now
        view.preempted = view.preempted or self._preempted()
        view.metrics = metrics
        view.saving = self._is_saving()
        view.best = self._best if self._begun is None else _with_best(self._best, self._begun.metrics)
        view.blocked = self._blocked
        view.next_check = step + self._gap
        return view

    def _first_view(self, now: float) -> _SharedState:
        steps = self._retention.steps()
        if self._names:
            for info in self._retention.infos():
                self._best = _with_best(self._best, info.metrics)
        return _SharedState(now, steps[-1] if steps else None, now)

    def _record_result(self, view: _SharedState, begun: _StartedSave) -> None:
        """A save has ended. A failed one counts for nothing, so what it was begun for is due again."""
        self._begun = None
        if begun.pending.failed():
            view.last_step, view.last_unix, view.handled = begun.last_step, begun.last_unix, False
            return
        self._best = _with_best(self._best, begun.metrics)
        if self._others is not None:
            # All processes have entered that save, so they have received the messages before it.
            self._others.drop(str(begun.epoch))
        done = begun.pending.result()
        view.write = view.write if done is None else done.seconds

    # --- several processes -------------------------------------------------------------------------------------------

    def _receive(self, others: Channel, step: int, watched: Mapping[str, Any], is_back: bool) -> _SharedState:
        """The common view; at a check-in, process 0's of now. There is one when the loop has gone back."""
        if not self._has_signalled and not self._is_leader and self._preempted():
            self._has_signalled = True
            others.signal_leader('preempted')
        view = self._view
        if view is not None and step < view.next_check and not is_back and not watched:
            view.metrics = {}
            return view
        name, action = f'{self._epoch}/{self._check}', f'the check-in of maybe_save at step {step}'
        self._check += 1
        if self._is_leader:
            try:
                self._adapt_interval(step)
                seen = self._look(step, watched)
                seen.preempted = seen.preempted or others.was_signalled('preempted')
            except Exception as error:
                others.broadcast(name, json.dumps([None, lines_of_error(error)]).encode(), action)
                raise
            others.broadcast(name, json.dumps([step, dataclasses.asdict(seen)]).encode(), action)
            return seen
        at, fields = json.loads(others.broadcast(name, None, action))
        if at is None:
            raise RemoteError(f'{action} failed: process 0: {fields}', (0,))
        if at != step:
            raise DisagreementError(
                f'maybe_save: process 0 is at step {at}, process {others.processes.index} at step {step}. Every process '
                'has to call it for the same steps, and with metrics in the same calls.'
            )
        best = {key: (low, high) for key, (low, high) in fields.pop('best').items()}
        return _SharedState(**fields, best=best)

    def _adapt_interval(self, step: int) -> None:
        """Chooses how many steps lie between this check-in and the next, by how long ago the last one was."""
        if self._view is None:
            return
        seconds = self._clock() - self._view.now
        if seconds > _CHECK_SECONDS:
            self._gap = max(1, int(self._gap * _CHECK_SECONDS / seconds))
        elif step >= self._view.next_check:
            self._gap = min(_MAX_GAP, self._gap + 1)


def _moment(view: _SharedState, step: int, previous: int | None) -> Moment:
    return Moment(
        step=step,
        previous_step=previous,
        last_saved_step=view.last_step,
        seconds_since_save=view.now - view.last_unix,
        preempted=view.preempted and not view.handled,
        metrics=view.metrics,
        best=view.best,
        blocked_seconds=view.blocked,
        write_seconds=view.write,
        saving=view.saving,
    )


def _never() -> bool:
    return False


def _with_best(best: Mapping[str, tuple[float, float]], metrics: Mapping[str, float]) -> Best:
    joined = dict(best)
    for name, value in metrics.items():
        if not math.isnan(value):
            low, high = joined.get(name, (value, value))
            joined[name] = min(low, value), max(high, value)
    return joined
