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

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from t5ckpt._meetings import Meetings
from t5ckpt._pending import PendingSave
from t5ckpt._process import Channel
from t5ckpt._retention import Retention
from t5ckpt._types import Clock, check_kind
from t5ckpt.errors import DisagreementError, RemoteError
from t5ckpt.save_policies import Moment, SavePolicy

__all__ = ['SaveSchedule', 'metric_numbers']

_CHECK_SECONDS = 1.0
_MAX_GAP = 1000

_log = logging.getLogger('t5ckpt')

Best = dict[str, tuple[float, float]]


@dataclasses.dataclass
class _View:
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
    next_check: int = 0


@dataclasses.dataclass(frozen=True)
class _Begun:
    """A save that was begun, and what is known again should it fail."""

    pending: PendingSave
    epoch: int
    metrics: Mapping[str, float]
    last_step: int | None
    last_unix: float


class SaveSchedule:
    """Asks the policy at every call. One for a checkpointer; to be called from the thread that trains."""

    def __init__(
        self,
        policy: SavePolicy | None,
        meetings: Meetings,
        retention: Retention,
        clock: Clock,
        preempted: Callable[[], bool] | None,
    ):
        """``preempted`` says whether this process was told to end."""
        self._policy = policy
        self._meetings = meetings
        self._retention = retention
        self._clock = clock
        self._preempted = preempted if preempted is not None else _never
        self._names = frozenset[str]() if policy is None else frozenset(policy.metric_names)
        self._others: Channel | None = None
        self._is_first = True
        self._view: _View | None = None
        self._previous: int | None = None
        self._begun: _Begun | None = None
        self._best: Best = {}
        self._blocked: float | None = None
        self._called = False
        self._epoch = self._check = 0
        self._gap = 1
        self.should_stop = False

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

    def _reason(self, step: int, metrics: Mapping[str, Any] | None) -> str | None:
        """Why to save this step, or None."""
        if self._policy is None:
            raise ValueError('maybe_save: pass save_policy= to the constructor, such as SaveEvery(1000).')
        if self._view is None:
            self._meet()
        watched = {name: metrics[name] for name in self._names & metrics.keys()} if metrics and self._names else {}
        others = self._others
        self._view = view = self._look(step, watched) if others is None else self._heard(others, step, watched)
        previous, self._previous = self._previous, step
        self.should_stop = view.preempted
        if step == view.last_step:
            return None
        return self._policy.reason(
            Moment(
                step=step,
                previous_step=previous,
                last_saved_step=view.last_step,
                seconds_since_save=view.now - view.last_unix,
                preempted=view.preempted and not view.handled,
                metrics=view.metrics,
                best=view.best,
                blocked_seconds=view.blocked,
                write_seconds=view.write,
            )
        )

    def _begin(self, pending: PendingSave, blocked: float, metrics: Mapping[str, float]) -> None:
        """Takes note of a save that was begun for the reason just given."""
        view = self._view
        if view is None:
            return
        if self._is_first:
            if self._begun is not None:
                # One save at a time, so the one before has ended.
                self._settle(view, self._begun)
            self._begun = _Begun(pending, self._epoch, metrics, view.last_step, view.last_unix)
            self._blocked = blocked
        self._epoch, self._check = self._epoch + 1, 0
        view.last_step, view.last_unix, view.handled = pending.step, view.now, view.preempted

    def _meet(self) -> None:
        """Before the first call: whether there are others."""
        processes = self._meetings.of_job()
        self._is_first = processes.index == 0
        if processes.count > 1 and self._others is None:
            self._others = self._meetings.new_channel()

    # --- process 0's view --------------------------------------------------------------------------------------------

    def _look(self, step: int, watched: Mapping[str, Any]) -> _View:
        """What process 0 sees now."""
        metrics = metric_numbers(watched)
        now, view = self._clock(), self._view
        if view is None:
            view = self._first_view(now)
        if self._begun is not None and self._begun.pending.done():
            self._settle(view, self._begun)
        view.now = now
        view.preempted = view.preempted or self._preempted()
        view.metrics = metrics
        view.best = self._best if self._begun is None else _with_best(self._best, self._begun.metrics)
        view.blocked = self._blocked
        view.next_check = step + self._gap
        return view

    def _first_view(self, now: float) -> _View:
        if not self._names:
            steps = self._retention.steps()
        else:
            infos = self._retention.infos()
            steps = [info.step for info in infos]
            for info in infos:
                self._best = _with_best(self._best, info.metrics)
        return _View(now, steps[-1] if steps else None, now)

    def _settle(self, view: _View, begun: _Begun) -> None:
        """A save has ended. A failed one counts for nothing, so what it was begun for is due again."""
        self._begun = None
        if begun.pending.failed():
            view.last_step, view.last_unix, view.handled = begun.last_step, begun.last_unix, False
            return
        self._best = _with_best(self._best, begun.metrics)
        if self._others is not None:
            # All have entered that save, so nobody asks any more for what was told before it.
            self._others.forget(str(begun.epoch))
        done = begun.pending.result()
        view.write = view.write if done is None else done.seconds

    # --- several processes -------------------------------------------------------------------------------------------

    def _heard(self, others: Channel, step: int, watched: Mapping[str, Any]) -> _View:
        """The common view; at a check-in, process 0's of now."""
        if not self._called and not self._is_first and self._preempted():
            self._called = True
            others.call('preempted')
        view = self._view
        is_back = self._previous is not None and step <= self._previous
        if view is not None and step < view.next_check and not is_back and not watched:
            view.metrics = {}
            return view
        name, action = f'{self._epoch}/{self._check}', f'the check-in of maybe_save at step {step}'
        self._check += 1
        if self._is_first:
            try:
                self._pace(step)
                seen = self._look(step, watched)
                seen.preempted = seen.preempted or others.was_called('preempted')
            except Exception as error:
                others.tell(name, json.dumps([None, f'{type(error).__name__}: {error}']).encode(), action)
                raise
            others.tell(name, json.dumps([step, dataclasses.asdict(seen)]).encode(), action)
            return seen
        at, fields = json.loads(others.tell(name, None, action))
        if at is None:
            raise RemoteError(f'{action} failed: process 0: {fields}', (0,))
        if at != step:
            raise DisagreementError(
                f'maybe_save: process 0 is at step {at}, process {others.processes.index} at step {step}. Every process '
                'has to call it for the same steps, and with metrics in the same calls.'
            )
        best = {key: (low, high) for key, (low, high) in fields.pop('best').items()}
        return _View(**fields, best=best)

    def _pace(self, step: int) -> None:
        """Chooses how many steps lie between this check-in and the next, by how long ago the last one was."""
        if self._view is None or self._previous is None:
            return
        seconds = self._clock() - self._view.now
        if seconds > _CHECK_SECONDS:
            self._gap = max(1, int(self._gap * _CHECK_SECONDS / seconds))
        elif step >= self._view.next_check:
            self._gap = min(_MAX_GAP, self._gap + 1)


def _never() -> bool:
    return False


def _with_best(best: Mapping[str, tuple[float, float]], metrics: Mapping[str, float]) -> Best:
    joined = dict(best)
    for name, value in metrics.items():
        if not math.isnan(value):
            low, high = joined.get(name, (value, value))
            joined[name] = min(low, value), max(high, value)
    return joined


def metric_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as Python floats: of numbers, and of arrays with one element, which waits for the device.

    Raises:
      ValueError: something else.
    """
    check_kind('metrics', metrics, Mapping, "{'loss': 0.5}")
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        check_kind('the name of a metric', name, str, "'loss'")
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f'metrics: {name!r} is {value!r:.80}, which is no number ({error}).') from error
        except OverflowError as error:
            raise ValueError(
                f'metrics: {name!r} is an integer too large for a float. Save its logarithm, or float("inf").'
            ) from error
    return numbers
