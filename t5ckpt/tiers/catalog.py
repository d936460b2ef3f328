"""The steps of both tiers, and their facts; the step to restore, in a job of one process; the deletion of a step from both."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Collection, Generator, Mapping
from typing import TypeVar

from t5ckpt.catalog.listing import dataset_steps_in, has_step, listing, newest, steps_in
from t5ckpt.catalog.step_summaries import summaries
from t5ckpt.commit.deletion import check_deletable, delete_step
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.retention import Retention
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import CheckpointNotFoundError, StorageError, T5CkptError
from t5ckpt.policies import KeepPolicy, StepInfo
from t5ckpt.storage import Storage
from t5ckpt.tiers.local_dir import LocalDir
from t5ckpt.tiers.one_tier import StepCatalog
from t5ckpt.tiers.part import is_incomplete

_T = TypeVar('_T')
_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class Choice:
    """The step to restore.

    Attributes:
      step: its number; None if no tier has a step.
      is_local: whether it is read from the local directory.
    """

    step: int | None
    is_local: bool


def _choice(local: Collection[int], run: Collection[int], step: int | None = None) -> Choice:
    """The requested step, or else the newest one that a tier has; the local one if both have it."""
    chosen = max([*local, *run], default=None) if step is None else step
    return Choice(chosen, chosen in local)


class TierCatalog(StepCatalog):
    """The complete steps of the local directory and of the run's storage.

    Attributes:
      local: the local directory.
      run: the run's storage.
      clock: unix seconds.
    """

    may_be_away = True

    def __init__(
        self,
        directory: LocalDir,
        opened: Callable[[], bool],
        retention: Retention,
        run_retention: Retention,
        clock: Clock,
        *,
        has_parts: Callable[[], bool],
    ):
        """Reads nothing.

        Args:
          directory: the local directory.
          opened: opens it, and returns whether it exists.
          retention: of the local directory.
          run_retention: of the run's storage.
          clock: unix seconds.
          has_parts: whether the job has several processes, so that a part of a step is one to restore.
        """
        self.local, self.run, self.clock = directory.storage, directory.run, clock
        self._dir = directory
        self._opened = opened
        self._has_parts = has_parts
        self._retention = retention
        self._run_retention = run_retention
        # Of the retention of the run, which the thread of the uploads carries out.
        self._guard = threading.Lock()
        self._is_away = False
        self._damaged: dict[int | None, list[Storage]] = {}

    @property
    def read_only(self) -> bool:
        """Whether nothing is written; also after the checkpointer was closed."""
        return self._dir.read_only

    def _query_run(self, query: Callable[[], _T], fallback: Callable[[], _T | None]) -> _T:
        """Asks the run's storage. While it does not answer, the local directory answers, with one warning per outage.

        Raises:
          LocalDirError: the local directory is of another run.
          StorageError: it does not answer, and ``fallback`` is None: the local directory has no step.
        """
        try:
            self._dir.check_id()
            answer = query()
        except StorageError as error:
            local = fallback()
            if local is None:
                raise
            if not self._is_away:
                _log.warning('t5ckpt: only the steps of %s are used: %s', self.local.url(), error)
            self._is_away = True
            return local
        self._is_away = False
        return answer

    def local_steps(self) -> list[int]:
        """The complete local steps and the parts of steps of several processes, ascending, except those that cannot be read."""
        return [each.step for each in listing(self.local) if each.error is None] if self._opened() else []

    def partial_steps(self) -> list[int]:
        """The local steps of which a job of one process has only a part, since several processes saved them; ascending."""
        return [] if self._has_parts() else [step for step in self.local_steps() if is_incomplete(self.local, step)]

    def local_part_steps(self) -> list[int]:
        if not self._has_parts():
            return []
        try:
            return steps_in(self.local) if self._opened() else []
        except Exception:  # noqa: BLE001 - the restore that follows raises it in all processes
            return []

    def steps(self) -> list[int]:
        """The complete steps of both tiers, ascending."""
        partial = self.partial_steps()
        local = [step for step in self.local_steps() if step not in partial]
        return sorted({*local, *self._query_run(lambda: steps_in(self.run), lambda: local or None)})

    def dataset_steps(self) -> list[int]:
        local = dataset_steps_in(self.local) if self._opened() else []
        return sorted({*local, *self._query_run(lambda: dataset_steps_in(self.run), lambda: local or None)})

    def warn_of_parts(self, step: int) -> None:
        """Logs which parts are newer than the step that is restored; they stay for a job of several processes."""
        for part_step in self.partial_steps():
            if part_step > step:
                _log.warning(
                    't5ckpt: local step %d was not restored: %s has the part of one of several processes. Start all processes of '
                    'the job to restore it. A save of step %d by this process renames the part.',
                    part_step, self.local.url(), part_step,
                )  # fmt: skip

    def to_restore(self, on_disks: Collection[int] = ()) -> list[int]:
        partial = self.partial_steps()
        local = [step for step in self.local_steps() if step not in partial]
        of_run = self._query_run(lambda: steps_in(self.run), lambda: sorted({*local, *on_disks}) or partial or None)
        steps = sorted({*local, *of_run})
        if steps:
            self.warn_of_parts(steps[-1])
        # A single part is an error, never a fresh start.
        return steps or partial

    def choose(self, step: int | None) -> Choice:
        """The step to restore, and its tier. A part that this process cannot read is chosen only if there is nothing else."""
        local, partial = self.local_steps(), self.partial_steps()

        def steps_of_run() -> list[int]:
            if step is not None:
                return [step] if step in partial and has_step(self.run, step) else []
            listed_step = newest(self.run)
            return [] if listed_step is None else [listed_step.step]

        run = self._query_run(steps_of_run, lambda: [] if local else None)
        complete = _choice([number for number in local if number not in partial], run, step)
        has_part_alone = complete.step is None or (complete.step in partial and complete.step not in run)
        return _choice(local, run, step) if has_part_alone else complete

    def latest(self) -> int | None:
        return self.choose(None).step

    def begin_restore(self, step: int | None) -> None:
        """Forgets what an earlier restore of the step has found damaged."""
        self._damaged.pop(step, None)

    @contextlib.contextmanager
    def noting_damage(self, step: int | None, *storages: Storage) -> Generator[None]:
        """Records the storages for :meth:`damaged_copies` if the restore in the context fails."""
        try:
            yield
        except T5CkptError:
            self._damaged.setdefault(step, []).extend(storages)
            raise

    def damaged_copies(self, step: int, *, shared: bool) -> list[Storage]:
        # In a job of several processes, each has a local directory of its own.
        return [
            storage
            for storage in self._damaged.get(step, [])
            if shared == (storage is self.run or not self._has_parts())
        ]

    def unusable(self) -> dict[int, str]:
        """The reasons why local steps are not complete, by step."""
        try:
            local_steps = summaries(self.local)
        except T5CkptError:
            return {}
        return {
            summary.step: f'{summary.path} is {summary.state}'
            for summary in local_steps
            if not summary.complete or summary.reason
        }

    @property
    def policy(self) -> KeepPolicy:
        """The keep policy of the run."""
        return self._run_retention.policy

    def infos(self, names: Collection[str] | None = None) -> list[StepInfo]:
        """The facts of the steps of both tiers, ascending."""
        local = self._retention.infos(names) if self._opened() else []
        with self._guard:
            run = self._query_run(lambda: self._run_retention.infos(names), lambda: local or None)
        return [info for _, info in sorted({info.step: info for info in [*run, *local]}.items())]

    def metrics_at(self, step: int | None) -> Mapping[str, float]:
        """The metrics of a step of either tier; None takes the latest.

        Raises:
          CheckpointNotFoundError: there is no such step.
        """
        infos = {info.step: info for info in self.infos()}
        wanted = max(infos, default=None) if step is None else step
        if wanted is not None and wanted not in infos:
            raise self.no_step(wanted)
        return infos[wanted].metrics if wanted is not None else self._run_retention.metrics_at(None)

    def no_step(self, step: int) -> T5CkptError:
        """The error for a step that no tier has, with the steps of both."""
        existing = [str(each) for each in self.steps()][-10:]
        cure = f'{", ".join(existing)}. Pass one of them.' if existing else 'none.'
        return CheckpointNotFoundError(
            f'{self.local.url()} and {self.run.url()}: step {step} does not exist, complete steps are: {cure}'
        )

    def retain(self, step: int) -> None:
        """Runs garbage collection and retention on the run's storage after the upload of a step."""
        self._run_retention.listed = collect(self.run, self.clock)
        with self._guard:
            self._run_retention.carry_out(step)

    def delete(self, step: int) -> None:
        """Deletes a step from both tiers.

        Raises:
          CheckpointNotFoundError: neither has it.
          StepKeptError: it is pinned or held by a reader in one of them; nothing was deleted.
          StorageError: the run's storage does not answer; nothing was deleted.
        """
        # The run's first, since that one may not answer.
        tiers = [storage for storage in (self.run, self.local) if _has(storage, step)]
        for storage in tiers:
            check_deletable(storage, step, self.clock, even_waiting=True)
        try:
            for storage in tiers or [self.run]:
                delete_step(storage, step, self.clock, even_waiting=True)
        except CheckpointNotFoundError as error:
            if tiers:
                raise
            raise self.no_step(step) from error


def _has(storage: Storage, step: int) -> bool:
    try:
        return has_step(storage, step)
    except CheckpointNotFoundError:
        return False
