"""The local tier of one checkpointer: saves go to the local disks, some of them are uploaded, and restores read either."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from t5ckpt.catalog.listing import has_step, listing, steps_in, waiting_steps
from t5ckpt.commit.deletion import check_deletable, delete_step, rename_damaged
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.retention import Retention
from t5ckpt.core.protocols import Clock
from t5ckpt.distributed.coordinator import Coordinator
from t5ckpt.distributed.rounds import Phase
from t5ckpt.errors import CheckpointNotFoundError, ClosedError, StorageError, T5CkptError
from t5ckpt.policies import KeepLatest, KeepPolicy, StepInfo
from t5ckpt.restore.execute import run_restore
from t5ckpt.restore.request import RestoreRequest
from t5ckpt.save.request import SaveRequest
from t5ckpt.storage import Storage
from t5ckpt.tiers.channel import UploadChannel
from t5ckpt.tiers.choice import waiting_to_upload
from t5ckpt.tiers.directory import LocalDirectory, open_local
from t5ckpt.tiers.disk_step import identify
from t5ckpt.tiers.local_tier import LocalTier
from t5ckpt.tiers.restore import LocalRestore
from t5ckpt.tiers.uploads import Uploads
from t5ckpt.tiers.waiting import remove_partial_records, replacing_steps

_T = TypeVar('_T')
_log = logging.getLogger('t5ckpt')


class Tier:
    """The local directory of this process, beside the run's storage.

    Attributes:
      storage: the local directory.
      retention: of it.
    """

    may_be_away = True

    def __init__(
        self,
        options: LocalTier,
        run: Storage,
        run_retention: Retention,
        clock: Clock,
        coordinator: Coordinator,
        *,
        read_only: bool,
    ):
        """Reads and creates nothing.

        Args:
          options: of the constructor.
          run: the run's storage.
          run_retention: its retention, which the thread of the uploads carries out.
          clock: unix seconds.
          coordinator: of the job.
          read_only: whether nothing may be written.
        """
        self.storage = self._local = open_local(options.directory, run)
        self._run, self._run_retention, self._clock = run, run_retention, clock
        self._coordinator = coordinator
        self._directory = LocalDirectory(self._local, run, options.keep, read_only=read_only)
        self.retention = Retention(self._local, KeepLatest(options.keep), clock)
        # A Retention belongs to one thread at a time.
        self._guard = threading.Lock()
        self._after_uploads = Retention(self._local, KeepLatest(options.keep), clock)
        self._last_saved: int | None = None
        # Local steps with other shardings than those of this job, which a restore has found.
        self._for_others = set[int]()
        self._uploads = Uploads(options, self._directory, clock, self._uploaded, self._retain)
        self._is_away = self._is_closed = False

    @property
    def _count(self) -> int:
        return self._coordinator.processes_of_job().count

    # --- the directory ------------------------------------------------------------------------------------------------

    def _begin(self, *, create: bool = False) -> None:
        """Locks the directory, agrees on the run's id, and begins the uploads that were cut off; all processes call it.

        Raises:
          LocalDirError: a directory is in use, or of another run.
        """
        directory = self._directory
        if self._uploads.has_started or directory.read_only or directory.is_forked:
            return
        is_alone = self._count == 1
        if is_alone and not create and self._local.kind('') is None:
            return
        at = self._coordinator.round('opening the local directories')
        with at.failing_together(Phase.LOOK):
            directory.open(create=create or not is_alone)
            readable = [each.step for each in listing(self._local) if each.error is None]
            found = {step: identify(self._local, step) for step in readable}
            saves = [[step, each.save, each.role, each.count] for step, each in found.items() if each is not None]
            remove_partial_records(self._local)
            vote = {'id': directory.id, 'waiting': [*replacing_steps(self._local).items()], 'saves': saves}

        def decide(votes: Sequence[Any]) -> dict[str, Any]:
            recorded: dict[int, bool] = {}
            for step, replaces in (each for other in votes for each in other['waiting']):
                recorded[step] = replaces or recorded.get(step, False)
            waiting, dropped = waiting_to_upload(recorded, [each['saves'] for each in votes])
            for step, why in dropped:
                text = 't5ckpt: step %d was to be uploaded, and is not: %s. The next save is uploaded in its place.'
                _log.warning(text, step, why)
            agreed = directory.agreed_id([each['id'] for each in votes])
            return {'id': agreed, 'waiting': waiting, 'dropped': dropped}

        decided = at.reduce_on_leader(Phase.LOOK, vote, decide)
        with at.together(Phase.COMMIT):
            directory.adopt(decided['id'])
            self._uploads.take(decided['waiting'], decided['dropped'])
        self._uploads.start(None if at.is_single_process else UploadChannel(self._coordinator.new_channel()))

    def _is_there(self) -> bool:
        """Whether the directory exists; a job of one process begins the uploads that were cut off."""
        if self._count == 1:
            self._begin()
        return self._directory.open()

    def _check_not_closed(self, call: str) -> None:
        if self._is_closed:
            raise ClosedError(
                f'the checkpointer of {self._run.url()} is closed, and another one may use {self._local.url()}. Call {call} '
                'inside the with block, or before close().'
            )

    def close(self) -> None:
        """Waits for the uploads, unless the run's storage fails; the next start uploads the rest. Releases the lock."""
        self._is_closed = True
        try:
            self._uploads.close()
        finally:
            self._directory.close()

    # --- saving -------------------------------------------------------------------------------------------------------

    def begin_save(self) -> None:
        """Makes the local directory ready, in the caller's thread.

        Raises:
          LocalDirError: it is in use, or of another run.
        """
        self._begin(create=True)
        self._directory.open(create=True)

    def with_upload(self, request: SaveRequest, *, preempted: bool) -> SaveRequest:
        """The request of a save, whose commit is followed by the upload if the persist policy takes the step."""
        self._uploads.note_request(request)
        self._last_saved = request.step
        return dataclasses.replace(
            request,
            in_parts=self._count > 1,
            frees_step=functools.partial(self._put_aside, request.step),
            upload_reason=functools.partial(self._uploads.reason, request, preempted=preempted),
            around_commit=functools.partial(self._uploads.around_commit, request),
        )

    def _put_aside(self, step: int) -> bool:
        """Renames a step of a job with other processes or shardings, which is saved again; returns whether it did."""
        known = identify(self._local, step)
        if known is None or (known.count == self._count and step not in self._for_others):
            return False
        aside = rename_damaged(self._local, step, self._clock)
        self._uploads.forget(step)
        text = 't5ckpt: local step %d of a job with other processes or shardings was renamed to %s: it is saved again'
        _log.warning(text, step, self._local.url(aside))
        return True

    def _uploaded(self) -> list[StepInfo]:
        with self._guard:
            # The save that asks does not wait for a storage that is away.
            run = [] if self._is_away else self._run_retention.infos()
        return [*run, *(info for info in self.retention.infos() if info.waits)]

    def _retain(self, step: int, *, is_uploaded: bool) -> None:
        """After the end of an upload, in its thread: local steps may have stayed for their uploads alone."""
        if is_uploaded and self._coordinator.processes_of_job().index == 0:
            with self._guard:
                self._run_retention.listed = collect(self._run, self._clock)
                self._run_retention.carry_out(step)
        ended = {*steps_in(self._local)} - waiting_steps(self._local)
        self._after_uploads.carry_out(self._last_saved, confirmed=ended)

    def wait_until_persisted(self, step: int | None) -> None:
        """See ``Checkpointer.wait_until_persisted``."""
        self._check_not_closed('wait_until_persisted')
        self._is_there()
        self._uploads.wait(step)

    # --- restoring ----------------------------------------------------------------------------------------------------

    def restore(self, request: RestoreRequest) -> Any:
        """Restores a step from the tier that has it; see ``run_restore``."""
        if request.path is not None:
            return run_restore(request)
        if not self._is_closed:
            self._begin()
        restore = LocalRestore(self._directory, self._coordinator, self._clock, self._query_run)
        try:
            return restore.restore(dataclasses.replace(request, no_step=self._no_step))
        finally:
            self._for_others |= restore.for_others

    def damaged_copies(self, step: int, *, shared: bool) -> list[Storage]:
        """The storages that have a copy of a step that cannot be restored: that of all processes, or of this one."""
        with contextlib.suppress(StorageError):
            storage = self._run if shared else self._local
            return [storage] if has_step(storage, step) else []
        return []

    # --- listing ------------------------------------------------------------------------------------------------------

    def local_steps(self) -> tuple[list[int], list[int]]:
        """The local steps that as many processes saved as this job has; and those of others, or that cannot be read."""
        own: list[int] = []
        others: list[int] = []
        for each in listing(self._local) if self._is_there() else ():
            known = None if each.error else identify(self._local, each.step)
            is_own = not each.error and (known is None or known.count == self._count)
            (own if is_own else others).append(each.step)
        return own, others

    def _query_run(self, query: Callable[[], _T], local: _T | None) -> _T:
        """Asks the run's storage. While it does not answer, the local steps are all there are, with one warning per outage.

        Raises:
          LocalDirError: the local directory is of another run.
          StorageError: it does not answer, and ``local`` is None.
        """
        try:
            self._directory.check_run()
            answer = query()
        except StorageError as error:
            if local is None:
                raise
            if not self._is_away:
                _log.warning('t5ckpt: only the steps of %s are used: %s', self._local.url(), error)
            self._is_away = True
            return local
        self._is_away = False
        return answer

    def steps(self, on_disks: Sequence[Sequence[Sequence[int]]] = ()) -> list[int]:
        """The steps of both tiers, ascending; ``on_disks`` has the ``local_steps`` of all processes.

        Local steps that this job cannot restore count if there is nothing else: never a new run.
        """
        local, others = (
            sorted({*itertools.chain(*each)}) for each in zip(*on_disks or [self.local_steps()], strict=True)
        )
        run = self._query_run(self._run_retention.steps, local or others or None)
        found = sorted({*local, *run})
        newer = [step for step in others if found and step > found[-1]]
        if on_disks and newer:
            text = 't5ckpt: local steps %s are not restored: another number of processes saved them, or they cannot be read'
            _log.warning(text, newer)
        return found or others

    def dataset_steps(self) -> list[int]:
        """The steps with states of data iterators, ascending."""
        local = self.retention.dataset_steps() if self._is_there() else []
        return sorted({*local, *self._query_run(self._run_retention.dataset_steps, local or None)})

    def latest(self) -> int | None:
        """The largest step, or None."""
        local = max(self.local_steps()[0], default=None)
        run = self._query_run(self._run_retention.latest, local)
        return max((step for step in (local, run) if step is not None), default=None)

    @property
    def policy(self) -> KeepPolicy:
        """The keep policy of the run."""
        return self._run_retention.policy

    def infos(self, names: Collection[str] | None = None) -> list[StepInfo]:
        """The facts of the steps of both tiers, ascending."""
        local = self.retention.infos(names) if self._is_there() else []
        with self._guard:
            run = self._query_run(lambda: self._run_retention.infos(names), local or None)
        return [info for _, info in sorted({info.step: info for info in [*run, *local]}.items())]

    def metrics_at(self, step: int | None) -> Mapping[str, float]:
        """The metrics of a step of either tier; None takes the latest.

        Raises:
          CheckpointNotFoundError: there is no such step.
        """
        infos = {info.step: info for info in self.infos()}
        wanted = max(infos, default=None) if step is None else step
        if wanted is None:
            return self._run_retention.metrics_at(None)
        if wanted not in infos:
            raise self._no_step(wanted)
        return infos[wanted].metrics

    def _no_step(self, step: int) -> T5CkptError:
        existing = [str(each) for each in self.steps()][-10:]
        cure = f'{", ".join(existing)}. Pass one of them.' if existing else 'none.'
        return CheckpointNotFoundError(
            f'{self._local.url()} and {self._run.url()}: step {step} does not exist, complete steps are: {cure}'
        )

    # --- deleting -----------------------------------------------------------------------------------------------------

    def deletion_vote(self, step: int) -> tuple[str, bool]:
        """The error that a deletion of the local step would raise, or ''; and whether there is a local step.

        Raises:
          ClosedError: the checkpointer is closed.
          LocalDirError: the local directory is in use, or of another run.
        """
        self._check_not_closed('delete')
        self._directory.check_not_forked()
        self._begin()
        try:
            check_deletable(self._local, step, self._clock, even_waiting=True)
        except CheckpointNotFoundError:
            return '', False
        except T5CkptError as error:
            # Raised by process 0, in all processes.
            return str(error), True
        return '', True

    def delete(self, step: int, *, is_local: bool) -> None:
        """Deletes a step from the run's storage, which need not have it if a disk has it, and from this disk; in process 0."""
        with self._uploads.without(step):
            try:
                delete_step(self._run, step, self._clock)
            except CheckpointNotFoundError as error:
                if not is_local:
                    raise self._no_step(step) from error
            self.delete_local(step)

    def delete_local(self, step: int) -> None:
        """Deletes the local step, if there is one."""
        with self._uploads.without(step), contextlib.suppress(CheckpointNotFoundError):
            delete_step(self._local, step, self._clock, even_waiting=True)
