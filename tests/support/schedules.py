"""Runs two actors on one storage, one storage operation at a time, in every order with few switches between them.

An actor is a function of a storage, run in a thread of its own. Before each operation it waits for its turn, so the order in
which the operations of both reach the storage is the one that the schedule says, and a failure is found again by its schedule.
An actor that asks the same again and again waits for the other, which then gets the turn.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
import time
from collections.abc import Callable, Generator, Sequence

from t5ckpt.commit.lease_owner import process_facts
from t5ckpt.storage import Storage
from t5ckpt.testing import FaultyStorage

_WAIT_SECONDS = 60
# So many operations of one actor that are all among the last few different ones mean that it polls.
_POLLS = 16
# What is different in the names of leases at each attempt.
_NONCE = re.compile(r'[0-9a-f]{16}')


class Killed(BaseException):
    """The process of the actor is dead: it raises at its operation, and at all that it tries afterwards."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Who begins, and after how many operations, counted since the last switch, the other goes on.

    Attributes:
      first: 0 or 1.
      switches: after the last one, an actor runs to its end, and then the other.
      killed_at: the index of the operation at which the first actor is killed; None for not at all.
      stalls: an actor that polls does not get the other going, and its clock advances by a second an operation.
    """

    first: int
    switches: tuple[int, ...] = ()
    killed_at: int | None = None
    stalls: bool = False


class _Turns:
    """Whose turn it is."""

    def __init__(self, schedule: Schedule):
        self._changed = threading.Condition()
        self._current = schedule.first
        self._left = list(schedule.switches)
        self._live = {0, 1}
        self._done = 0
        self._recent: list[object] = []
        self._stalls = schedule.stalls

    def take(self, actor: int, operation: object) -> None:
        """Waits until the actor may carry out one operation."""
        with self._changed:
            self._await(actor)
            is_polling = not self._stalls and len(self._recent) == _POLLS and len(set(self._recent)) <= 7
            if (self._left and self._done == self._left[0]) or is_polling:
                if self._left and not is_polling:
                    self._left.pop(0)
                self._pass_on(actor)
                self._await(actor)
            self._done += 1
            self._recent = [*self._recent, operation][-_POLLS:]

    def _await(self, actor: int) -> None:
        assert self._changed.wait_for(lambda: self._current == actor, _WAIT_SECONDS), (
            'the other actor does not come back'
        )

    def _pass_on(self, actor: int) -> None:
        self._done, self._recent = 0, []
        if 1 - actor in self._live:
            self._current = 1 - actor
            self._changed.notify_all()

    def end(self, actor: int) -> None:
        """The actor has no more operations."""
        with self._changed:
            self._await(actor)
            self._live.discard(actor)
            self._pass_on(actor)


class _OtherProcess:
    """A lock of a store whose locks hold in one process only, as another process sees it: always free."""

    is_held = True

    def close(self) -> None:
        pass


class Stepped(FaultyStorage):
    """The storage as one actor sees it.

    Attributes:
      clock: the actor's. It stands still, so nothing depends on how fast the machine is.
    """

    def __init__(self, inner: Storage, actor: int, turns: _Turns, schedule: Schedule, ahead: float | None):
        super().__init__(inner)
        self._is_elsewhere = ahead is not None
        start, pace = time.time() + (ahead or 0.0), int(schedule.stalls)
        self.clock = lambda: start + pace * len(self.operations)
        self._actor = actor
        self._turns = turns
        self._killed_at = schedule.killed_at if actor == schedule.first else None

    def _count(self, name: str, key: str) -> None:
        self._turns.take(self._actor, (name, _NONCE.sub('', key)))
        index = len(self.operations)
        self.operations.append((name, key))
        if self._killed_at is not None and index >= self._killed_at:
            raise Killed

    def write(self, key: str, data: bytes) -> None:
        super().write(key, self._from_elsewhere(data))

    def _from_elsewhere(self, data: bytes) -> bytes:
        """A lease as a process of another machine writes it, where nobody else sees whether the process has ended."""
        if not self._is_elsewhere or b'"digests"' in data:
            return data
        return data.replace(process_facts()['place'].encode(), b'machine %d' % self._actor)

    def replace(self, key: str, data: bytes, version: object) -> object:
        return super().replace(key, self._from_elsewhere(data), version)

    def try_lock(self, key: str) -> object:
        return super().try_lock(key) if self.commits_by_rename and not self._is_elsewhere else _OtherProcess()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an actor returned or raised, and how many operations it had."""

    value: object
    error: BaseException | None
    operations: tuple[tuple[str, str], ...]


def run_schedule(
    storage: Storage,
    actors: Sequence[Callable[[Storage], object]],
    schedule: Schedule,
    ahead: Sequence[float | None] = (None, None),
) -> tuple[Outcome, Outcome]:
    """Runs both actors to their ends.

    Args:
      storage: the run.
      actors: their functions.
      schedule: whose turn it is.
      ahead: by how many seconds the clock of each is ahead, on a machine of its own; None for actors on this machine.
    """
    turns = _Turns(schedule)
    found: dict[int, Outcome] = {}

    def run(actor: int) -> None:
        mine = Stepped(storage, actor, turns, schedule, ahead[actor])
        value, error = None, None
        try:
            value = actors[actor](mine)
        except (Exception, Killed) as raised:  # noqa: BLE001 - what the test compares
            error = raised
        finally:
            turns.end(actor)
        found[actor] = Outcome(value, error, tuple(mine.operations))

    threads = [threading.Thread(target=run, args=(actor,)) for actor in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found[0], found[1]


def schedules(counts: Sequence[int], switches: int, *, stride: int = 1) -> Generator[Schedule]:
    """All schedules with so many switches, of actors with about so many operations each; every ``stride``-th of them."""
    for first in (0, 1):
        ranges = [range(counts[(first + index) % 2] + 1) for index in range(switches)]
        for chosen in itertools.islice(itertools.product(*ranges), 0, None, stride):
            yield Schedule(first, chosen)


def kills(counts: Sequence[int], *, after_other: bool = False, stalls: bool = False) -> Generator[Schedule]:
    """One actor is killed at each of its operations, and then the other runs; or the other runs before the last one."""
    for first in (0, 1):
        for index in range(int(after_other), counts[first]):
            yield Schedule(first, (index - 1,) if after_other else (), index, stalls)
