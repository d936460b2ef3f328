"""The two tiers of one checkpointer: what it saves to, and the steps of both."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import TypeVar

from t5ckpt.catalog.listing import dataset_steps_in, has_step, listing, newest, steps_in
from t5ckpt.catalog.step_summaries import summaries
from t5ckpt.commit.deletion import decide_deletion, delete_step
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.removal import kept_error
from t5ckpt.commit.retention import Retention
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import (
    CheckpointNotFoundError,
    NotPersistedError,
    StorageError,
    T5CkptError,
    UnsupportedTopologyError,
)
from t5ckpt.policies import KeepLatest, KeepPolicy, StepInfo
from t5ckpt.save.arguments import SaveCall, TierOptions
from t5ckpt.save.request import SaveRequest
from t5ckpt.storage import Storage
from t5ckpt.tiers.choose import Choice, choose
from t5ckpt.tiers.intents import Intents, PersistSchedule
from t5ckpt.tiers.local_dir import LocalDir, open_local
from t5ckpt.tiers.queue import UploadQueue
from t5ckpt.tiers.rate_limit import RateLimit
from t5ckpt.tiers.upload import upload

__all__ = ['Tiers']

_T = TypeVar('_T')
_log = logging.getLogger('t5ckpt')


class Tiers:
    """The local directory and the run's storage of a job of one process.

    Attributes:
      local: the storage that saves write to.
      run: the run's storage.
      retention: of the local directory.
      clock: unix seconds.
      read_only: whether nothing is written.
    """

    def __init__(
        self,
        options: TierOptions,
        run: Storage,
        of_run: Retention,
        clock: Clock,
        count: Callable[[], int],
        *,
        read_only: bool,
    ):
        """Reads and creates nothing.

        Args:
          options: of the constructor.
          run: the run's storage.
          of_run: its retention.
          clock: unix seconds.
          count: returns the number of processes of the job.
          read_only: whether nothing may be written.
        """
        self.local = open_local(options.local_dir, run)
        self.run = run
        self.read_only = read_only
        self._count = count
        self._of_run = of_run
        self.clock = clock
        self._dir = LocalDir(self.local, run, options.keep, read_only=read_only)
        self._intents = Intents(self.local)
        self.retention = Retention(self.local, KeepLatest(options.keep), clock)
        # For the thread of the uploads: a Retention belongs to one thread.
        self._after_upload = Retention(self.local, self.retention.policy, clock)
        self._last_saved: int | None = None
        self._schedule = PersistSchedule(options.policy, self.local, clock)
        self._limit = RateLimit(options.gbps)
        self._queue = UploadQueue(self._upload, self._intents.drop, run.url())
        # Of the retention of the run, which the thread of the queue carries out.
        self._guard = threading.Lock()
        self._is_away = False
        self._has_resumed = False

    # --- beginning -----------------------------------------------------------------------------------------------------

    def _check_topology(self) -> None:
        count = self._count()
        if count > 1:
            raise UnsupportedTopologyError(
                f'local_dir is for jobs of one process so far, and this one has {count}. Leave local_dir out; save_async to '
                f'{self.run.url()} continues the training at once, too.'
            )

    def begin_save(self) -> None:
        """Creates, locks and checks the local directory, in the caller's thread.

        Raises:
          LocalDirError: it is in use, or of another run.
        """
        if self._queue.refusal is not None:
            raise self._queue.refusal
        self._open(create=True)

    def begin_fetch(self) -> None:
        """As :meth:`begin_save`, also with a record, for a step that comes from the run's storage."""
        self.begin_save()
        self._dir.ensure_record()

    def _open(self, *, create: bool = False) -> bool:
        """Opens the local directory; the first time, the uploads that were cut off are begun again.

        Raises:
          UnsupportedTopologyError: the job has several processes.
          LocalDirError: the directory is in use, or of another run.
        """
        self._check_topology()
        if not self._dir.open(create=create):
            return False
        if not self._has_resumed and not self.read_only:
            self._has_resumed = True
            self._resume()
        return True

    def _resume(self) -> None:
        self._intents.collect()
        there = set(steps_in(self.local))
        waiting = self._intents.steps()
        for step in sorted(set(waiting) - there):
            _log.warning('t5ckpt: step %d was to be uploaded, and is not in %s anymore', step, self.local.url())
            self._intents.drop(step)
        found = sorted(there & set(waiting))
        if found:
            _log.info('t5ckpt: steps of %s that wait for their upload: %s', self.local.url(), found)
            self._queue.add(found)

    # --- saving --------------------------------------------------------------------------------------------------------

    def persisting(self, request: SaveRequest, *, preempted: bool) -> SaveRequest:
        """The request of a local save, whose commit is followed by the upload if the persist policy takes the step."""
        around = functools.partial(self._committing, request.step, request.call, preempted)
        return dataclasses.replace(request, around_commit=around)

    @contextlib.contextmanager
    def _committing(self, step: int, call: SaveCall, preempted: bool) -> Generator[None]:
        """Surrounds the local commit of a step: records before it that the step is to be uploaded, and begins that after it."""
        self._dir.ensure_record()
        self._last_saved = step
        reason = self._schedule.reason(
            step,
            call.metrics,
            preempted=preempted,
            is_uploading=self._queue.is_uploading(),
        )
        if reason is None:
            yield
            return
        is_new = self._intents.add(step, overwrite=call.overwrite)
        try:
            yield
        except BaseException:
            if is_new:
                self._intents.drop(step)
            raise
        self._schedule.note_taken(step, call.metrics)
        _log.info('t5ckpt: step %d is uploaded to %s: %s', step, self.run.url(), reason)
        self._queue.add([step])

    def _upload(self, step: int) -> None:
        """Uploads a step, and runs the retention of the run; in the thread of the queue."""
        started = time.monotonic()
        self._dir.share_id()
        overwrite = self._intents.overwrites(step)

        def pace(nbytes: int) -> None:
            self._limit.wait(nbytes, self._queue.check)

        nbytes = upload(self.local, self.run, step, pace, self.clock, overwrite=overwrite)
        self._intents.drop(step)
        seconds = self._schedule.upload_seconds = time.monotonic() - started
        _log.info('t5ckpt: uploaded step %d to %s: %d bytes in %.2f s', step, self.run.url(), nbytes, seconds)
        try:
            _, index = collect(self.run, self.clock)
            with self._guard:
                self._of_run.note_index(index)
                self._of_run.carry_out(step)
            # The step may have stayed for its upload alone.
            self._after_upload.carry_out(self._last_saved, confirmed=[step])
        except Exception:  # noqa: BLE001 - a policy is the user's code, and the step is uploaded
            _log.exception('t5ckpt: retention after the upload of step %d failed; the checkpoint is there', step)

    def wait_until_persisted(self, step: int | None) -> None:
        """Waits for the upload of a step; None waits for all that wait.

        Raises:
          NotPersistedError: it failed, or the step is not uploaded.
          LocalDirError: the local directory is of another run.
        """
        self._open()
        self._queue.wait(step)
        if step is not None and not has_step(self.run, step):
            raise NotPersistedError(
                f'step {step} is not in {self.run.url()}: '
                + ('persist_policy did not take it.' if has_step(self.local, step) else 'there is no such step.')
            )

    def close(self) -> None:
        """Waits for the uploads, unless the run's storage fails; the next start uploads what is left. Releases the lock."""
        try:
            waiting = self._intents.steps() if self._has_resumed else []
            if waiting and self._queue.refusal is None:
                _log.info('t5ckpt: waiting for the upload of step %s to %s', waiting[-1], self.run.url())
                with contextlib.suppress(NotPersistedError):
                    self._queue.wait(None)
        finally:
            self._queue.stop()
            left = self._intents.steps() if self._has_resumed else []
            if left:
                _log.warning(
                    't5ckpt: step %s is in %s, and not in %s yet. The next start with this local_dir uploads it.',
                    ', '.join(map(str, left)),
                    self.local.url(),
                    self.run.url(),
                )
            self.retention.wait()
            self._after_upload.wait()
            self._dir.end()
            self._has_resumed = False

    # --- the steps of both tiers ---------------------------------------------------------------------------------------

    def _asked_run(self, ask: Callable[[], _T], otherwise: Callable[[], _T | None]) -> _T:
        """Asks the run's storage. While it does not answer, the local directory answers, with one warning per outage.

        Raises:
          StorageError: it does not answer, and ``otherwise`` is None: the local directory has no step.
        """
        try:
            answer = ask()
        except StorageError as error:
            local = otherwise()
            if local is None:
                raise
            if not self._is_away:
                _log.warning('t5ckpt: only the steps of %s are used: %s', self.local.url(), error)
            self._is_away = True
            return local
        self._is_away = False
        return answer

    def _local_steps(self) -> list[int]:
        """The complete local steps, ascending. One that cannot be read counts as not there."""
        return [each.step for each in listing(self.local).steps] if self._open() else []

    def steps(self) -> list[int]:
        """The complete steps of both tiers, ascending."""
        local = self._local_steps()
        return sorted({*local, *self._asked_run(lambda: steps_in(self.run), lambda: local or None)})

    def dataset_steps(self) -> list[int]:
        """The steps with states of data iterators, ascending."""
        local = dataset_steps_in(self.local) if self._open() else []
        return sorted({*local, *self._asked_run(lambda: dataset_steps_in(self.run), lambda: local or None)})

    def to_restore(self) -> list[int]:
        """The steps of both tiers that ``restore_or_init`` tries, ascending."""
        local = self._local_steps()

        def of_run() -> list[int]:
            self._dir.check_id()
            return listing(self.run).to_restore

        return sorted({*local, *self._asked_run(of_run, lambda: local or None)})

    def choose(self, step: int | None) -> Choice:
        """The step to restore, and its tier."""
        local = self._local_steps()

        def newest_of_run() -> list[int]:
            self._dir.check_id()
            found = newest(self.run) if step is None else None
            return [] if found is None else [found.step]

        return choose(local, self._asked_run(newest_of_run, lambda: [] if local else None), step)

    def has_local(self, step: int) -> bool:
        """Whether the local directory has a step."""
        return _has(self.local, step)

    def unusable(self) -> dict[int, str]:
        """Why local steps are not complete, by step."""
        try:
            found = summaries(self.local)
        except T5CkptError:
            return {}
        return {each.step: f'{each.path} is {each.state}' for each in found if not each.complete or each.reason}

    # --- the facts of the steps ----------------------------------------------------------------------------------------

    @property
    def policy(self) -> KeepPolicy:
        """The keep policy of the run."""
        return self._of_run.policy

    def infos_in_any_layout(self, names: Collection[str] | None = None) -> list[StepInfo]:
        """The facts of the steps of both tiers, ascending."""
        local = self.retention.infos_in_any_layout(names) if self._open() else []
        with self._guard:
            run = self._asked_run(lambda: self._of_run.infos_in_any_layout(names), lambda: local or None)
        return [info for _, info in sorted({info.step: info for info in [*run, *local]}.items())]

    def metrics_at(self, step: int | None) -> Mapping[str, float]:
        """The metrics of a step of either tier; None takes the latest.

        Raises:
          CheckpointNotFoundError: there is no such step.
        """
        infos = {info.step: info for info in self.infos_in_any_layout()}
        wanted = max(infos, default=None) if step is None else step
        return infos[wanted].metrics if wanted in infos else self._of_run.metrics_at(step)

    # --- deleting ------------------------------------------------------------------------------------------------------

    def delete(self, step: int) -> None:
        """Deletes a step from both tiers, and ends its upload.

        Raises:
          CheckpointNotFoundError: neither has it.
          StepKeptError: it is pinned or has a read lease in one of them; nothing was deleted.
          StorageError: the run's storage does not answer; nothing was deleted.
        """
        self._open()
        self._queue.cancel(step)
        try:
            tiers = self._tiers_with(step)
            for storage in tiers:
                self._check_not_kept(storage, step)
            for storage in tiers or [self.run]:
                delete_step(storage, step, self.clock, even_waiting=True)
        except BaseException:
            if step in self._intents.steps():
                self._queue.add([step])
            raise
        self._intents.drop(step)

    def _check_not_kept(self, storage: Storage, step: int) -> None:
        found = decide_deletion(storage, step, self.clock, even_waiting=True)
        if found.keep:
            raise kept_error(storage, step, found.reason, 'deleted')

    def _tiers_with(self, step: int) -> Sequence[Storage]:
        """The storages that have a step; the run's first, since that one may not answer."""
        return [storage for storage in (self.run, self.local) if _has(storage, step)]


def _has(storage: Storage, step: int) -> bool:
    try:
        return has_step(storage, step)
    except CheckpointNotFoundError:
        return False
