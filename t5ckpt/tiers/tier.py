"""The local tier of one checkpointer: saves go to the local disks, some of them are uploaded, and restores read either."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, TypeVar

from t5ckpt.catalog.listing import has_step, listing
from t5ckpt.commit.deletion import check_deletable, delete_step
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.retention import Retention
from t5ckpt.core.protocols import Clock
from t5ckpt.distributed.coordinator import Coordinator
from t5ckpt.distributed.rounds import Phase
from t5ckpt.errors import CheckpointNotFoundError, ClosedError, StorageError, T5CkptError
from t5ckpt.format.names import step_dir
from t5ckpt.policies import KeepLatest, KeepPolicy, StepInfo
from t5ckpt.restore.execute import run_restore
from t5ckpt.restore.request import RestoreRequest
from t5ckpt.save.request import SaveRequest
from t5ckpt.storage import Storage
from t5ckpt.tiers.directory import LocalDirectory
from t5ckpt.tiers.disk_step import identify
from t5ckpt.tiers.local_tier import LocalTier
from t5ckpt.tiers.restore import LocalRestore
from t5ckpt.tiers.uploads import UPLOAD_SECONDS, Uploads
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
        self._directory = LocalDirectory(options.directory, run, options.keep, read_only=read_only)
        self.storage = self._local = self._directory.storage
        self._run, self._run_retention, self._clock = run, run_retention, clock
        self._coordinator = coordinator
        self.retention = Retention(self._local, KeepLatest(options.keep), clock)
        # A metric source belongs to one thread at a time.
        self._guard = threading.Lock()
        self._last_saved: int | None = None
        # Held in the commit of a step, until all processes have committed it; and the step, unless they have.
        self._commits = threading.Lock()
        self._uncertain: int | None = None
        # Local steps with other shardings than those of this job, which a restore has found.
        self._for_others = set[int]()
        self._uploads = Uploads(options, self._directory, clock, self._uploaded, self._retain)
        self._is_closed = False

    @property
    def _count(self) -> int:
        return self._coordinator.processes_of_job().count

    # --- the directory ------------------------------------------------------------------------------------------------

    def _begin(self, *, create: bool = False) -> None:
        """Locks the directory, agrees on the run's id, and begins the uploads that were cut off; all processes call it.

        Raises:
          LocalDirError: a directory is in use, or of another run.
        """
        directory, uploads = self._directory, self._uploads
        if uploads.has_started or directory.read_only or directory.is_forked:
            return
        is_alone = self._count == 1
        if is_alone and not create and self._local.kind('') is None:
            return
        at = self._coordinator.round('opening the local directories')
        with at.failing_together(Phase.LOOK):
            directory.open(create=create or not is_alone)
            remove_partial_records(self._local)
            # A crash before the commit of a step leaves its record alone.
            records = replacing_steps(self._local)
            vote = directory.id, [each for each in records.items() if self._local.kind(step_dir(each[0])) == 'dir']

        def decide(votes: Sequence[Any]) -> tuple[str, list[Any]]:
            ids, waiting = zip(*votes, strict=True)
            # A step replaces one of the run if any process has recorded that.
            return directory.agreed_id(ids), [*dict(sorted(itertools.chain(*waiting))).items()]

        agreed, waiting = at.reduce_on_leader(Phase.LOOK, vote, decide)
        channel = self._coordinator.new_channel(UPLOAD_SECONDS)
        with at.together(Phase.COMMIT):
            directory.adopt(agreed)
            uploads.take(channel, dict(waiting))
        uploads.start()

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
        self._last_saved = request.step
        request = self._uploads.of_save(request, preempted=preempted)
        return dataclasses.replace(
            request,
            in_parts=self._count > 1,
            is_for_others=functools.partial(self._is_for_others, request.step),
            around_commit=functools.partial(self._around_commit, request.step, request.around_commit),
        )

    @contextlib.contextmanager
    def _around_commit(
        self, step: int, inner: Callable[[str | None], contextlib.AbstractContextManager[None]], reason: str | None
    ) -> Generator[None]:
        """Surrounds the commit of a step. Meanwhile, and after one that some process lacks, an upload deletes no older step."""
        with self._commits, inner(reason):
            self._uncertain = step
            yield
            self._uncertain = None

    def _is_for_others(self, step: int) -> bool:
        """Whether the local step is of a job with other processes or shardings."""
        known = identify(self._local, step)
        return known is not None and (known.count != self._count or step in self._for_others)

    def _uploaded(self) -> list[StepInfo]:
        # The save that asks does not wait for a storage that is away.
        with self._guard:
            run = self._directory.query_run(self._run_retention.infos, [])
        return [*run, *(info for info in self.retention.infos() if info.waits)]

    def _retain(self, step: int, *, is_uploaded: bool) -> None:
        """After the end of an upload, in its thread: local steps may have stayed for their uploads alone."""
        if is_uploaded and self._coordinator.processes_of_job().index == 0:
            with self._guard:
                self._run_retention.listed = collect(self._run, self._clock)
                self._run_retention.carry_out(step)
        with self._commits:
            if self._uncertain is None or not has_step(self._local, self._uncertain):
                self.retention.carry_out(self._last_saved)

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
        restore = LocalRestore(self._directory, self._coordinator, self._clock)
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

    def local_steps(self) -> list[tuple[int, bool]]:
        """The local steps, and whether this job may restore each: it can be read, and as many processes saved it."""
        found: list[tuple[int, bool]] = []
        for each in listing(self._local) if self._is_there() else ():
            known = None if each.error else identify(self._local, each.step)
            found.append((each.step, not each.error and (known is None or known.count == self._count)))
        return found

    def steps(self, on_disks: Sequence[Sequence[tuple[int, bool]]] = ()) -> list[int]:
        """The steps of both tiers, ascending; ``on_disks`` has the ``local_steps`` of all processes.

        Local steps that this job cannot restore count if there is nothing else: never a new run.
        """
        known = [*itertools.chain(*on_disks or [self.local_steps()])]
        local, every = {step for step, is_own in known if is_own}, sorted({step for step, _ in known})
        found = sorted(local.union(self._directory.query_run(self._run_retention.steps, [*local] or every or None)))
        newer = [step for step in every if found and step > found[-1]]
        if on_disks and newer:
            text = 't5ckpt: local steps %s are not restored: another number of processes saved them, or they cannot be read'
            _log.warning(text, newer)
        return found or every

    def _both(self, query: Callable[[Retention], list[_T]]) -> list[_T]:
        """Asks the run and the local directory."""
        local = query(self.retention) if self._is_there() else []
        return [*self._directory.query_run(lambda: query(self._run_retention), local or None), *local]

    def dataset_steps(self) -> list[int]:
        """The steps with states of data iterators, ascending."""
        return sorted({*self._both(Retention.dataset_steps)})

    def latest(self) -> int | None:
        """The largest step, or None."""
        local = [step for step, is_own in self.local_steps() if is_own]
        run = self._directory.query_run(lambda: [self._run_retention.latest()], local or None)
        return max((step for step in (*local, *run) if step is not None), default=None)

    @property
    def policy(self) -> KeepPolicy:
        """The keep policy of the run."""
        return self._run_retention.policy

    def infos(self, names: Collection[str] | None = None) -> list[StepInfo]:
        """The facts of the steps of both tiers, ascending."""
        with contextlib.nullcontext() if self._directory.is_forked else self._guard:
            infos = {info.step: info for info in self._both(lambda each: each.infos(names))}
        return [infos[step] for step in sorted(infos)]

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

    def without_upload(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Ends the upload of a step, which is deleted in the context; all processes call it."""
        return self._uploads.without(step)

    def delete(self, step: int, *, is_local: bool) -> None:
        """Deletes a step from the run's storage, which need not have it if a disk has it, and from this disk; in process 0."""
        try:
            delete_step(self._run, step, self._clock)
        except CheckpointNotFoundError as error:
            if not is_local:
                raise self._no_step(step) from error
        self.delete_local(step)

    def delete_local(self, step: int) -> None:
        """Deletes the local step, if there is one."""
        with contextlib.suppress(CheckpointNotFoundError):
            delete_step(self._local, step, self._clock, even_waiting=True)
