"""The two tiers of one checkpointer: saves go to the local directory, restores read either."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

from t5ckpt.catalog.listing import has_step
from t5ckpt.commit.deletion import check_deletable, delete_step, rename_damaged
from t5ckpt.commit.retention import Retention
from t5ckpt.core.protocols import Clock
from t5ckpt.distributed.coordinator import Coordinator
from t5ckpt.errors import CheckpointNotFoundError, ClosedError, T5CkptError, UnsupportedTopologyError
from t5ckpt.policies import KeepLatest
from t5ckpt.restore.execute import run_restore
from t5ckpt.restore.request import RestoreRequest
from t5ckpt.save.arguments import TierOptions
from t5ckpt.save.request import SaveRequest
from t5ckpt.storage import Storage
from t5ckpt.tiers.catalog import TierCatalog
from t5ckpt.tiers.join import Join
from t5ckpt.tiers.local_dir import LocalDir, open_local
from t5ckpt.tiers.one_tier import StepTiers
from t5ckpt.tiers.part import LocalParts, is_incomplete
from t5ckpt.tiers.restore import restore_from_tiers
from t5ckpt.tiers.shared_restore import SharedRestore
from t5ckpt.tiers.uploads import Uploads

_log = logging.getLogger('t5ckpt')


class Tiers(StepTiers):
    """The local directory and the run's storage."""

    def __init__(
        self,
        options: TierOptions,
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
          run_retention: its retention.
          clock: unix seconds.
          coordinator: of the job.
          read_only: whether nothing may be written.
        """
        self.local = open_local(options.local_dir, run)
        self._read_only = read_only
        self._coordinator = coordinator
        self._dir = LocalDir(self.local, run, options.keep, read_only=read_only)
        self.retention = Retention(self.local, KeepLatest(options.keep), clock)
        self.catalog = self.facts = self._catalog = TierCatalog(
            self._dir, self._open, self.retention, run_retention, clock, has_parts=lambda: not self._is_single
        )
        self._uploads = Uploads(options, self._dir, self._catalog)
        self._join_once = Join(self._dir, self._uploads, clock)
        self._has_joined = self._is_closed = False

    @property
    def _is_single(self) -> bool:
        return self._coordinator.processes_of_job().count == 1

    def _open(self, *, create: bool = False) -> bool:
        """Opens the local directory; in a job of one process, the first time begins the uploads again that were cut off.

        Raises:
          LocalDirError: the directory is in use, or of another run.
        """
        with self._dir.guard:
            if not self._dir.open(create=create):
                return False
            if self._is_single and not self._dir.read_only:
                self._uploads.resume()
            return True

    def _join(self) -> LocalParts | None:
        """Agrees on the run's id with the other processes, and begins the uploads; the first call does, in all processes.

        Returns:
          The parts in the local directory; None if they were not read, or have changed since.

        Raises:
          UnsupportedTopologyError: the checkpointer only reads.
          LocalDirError: a directory is in use, or of another run.
        """
        if self._has_joined:
            return None
        local = self._join_once.run(self._coordinator, self._open_in_job)
        self._has_joined = True
        return local

    def _open_in_job(self) -> None:
        self._check_not_closed('restore')
        if self._read_only:
            raise UnsupportedTopologyError(
                'local_dir with read_only=True is for jobs of one process. Leave local_dir out, to read '
                f'{self._catalog.run.url()}.'
            )
        self._open(create=True)

    def begin_save(self) -> None:
        """Creates, locks and checks the local directory."""
        self._uploads.check_not_refused()
        if self._is_single:
            self._open(create=True)
            self._dir.check_id_before_save()
        else:
            self._join()
            self._dir.open(create=True)

    def with_upload(self, request: SaveRequest, *, preempted: bool) -> SaveRequest:
        self._uploads.note_request(request)
        return dataclasses.replace(
            request,
            in_parts=not self._is_single,
            frees_step=functools.partial(self._put_part_aside, request.step) if self._is_single else request.frees_step,
            upload_reason=functools.partial(self._uploads.reason, request, preempted),
            around_commit=functools.partial(self._uploads.around_commit, request),
        )

    def note_save(self, has_ended: Callable[[], bool]) -> None:
        self._uploads.note_save(has_ended)

    def _put_part_aside(self, step: int) -> bool:
        """Renames the part of one of several processes, whose step a job of one process saves; returns whether it did."""
        if not is_incomplete(self.local, step):
            return False
        aside = rename_damaged(self.local, step, self._catalog.clock)
        self._uploads.drop(step)
        _log.warning(
            't5ckpt: local step %d is the part of one of several processes, and this process saves the step again; the part was '
            'renamed to %s',
            step,
            self.local.url(aside),
        )
        return True

    def wait_until_persisted(self, step: int | None) -> None:
        self._check_not_closed('wait_until_persisted')
        self._open()
        self._uploads.wait(step)

    def restore(self, request: RestoreRequest) -> Any:
        if request.path is not None:
            return run_restore(request)
        request = dataclasses.replace(request, no_step=self._catalog.no_step)
        if not self._is_single:
            # It would write to the local directory.
            self._check_not_closed('restore')
            local = self._join()
            shared = SharedRestore(self._catalog, self._coordinator, self._uploads.drop, local)
            return shared.restore(request)
        return restore_from_tiers(self._catalog, request)

    def begin_deletion(self) -> None:
        self._check_not_closed('delete')
        if not self._is_single:
            self._join()

    def deletion_vote(self, step: int) -> tuple[str, bool]:
        try:
            check_deletable(self.local, step, self._catalog.clock, even_waiting=True)
            return '', has_step(self.local, step)
        except CheckpointNotFoundError:
            return '', False
        except T5CkptError as error:
            # An error here would let the other processes wait.
            return str(error), True

    def delete_part(self, step: int) -> None:
        if has_step(self.local, step):
            delete_step(self.local, step, self._catalog.clock, even_waiting=True)

    def delete(self, step: int) -> None:
        self._check_not_closed('delete')
        self._open()
        with self._uploads.without(step):
            self._catalog.delete(step)

    def _check_not_closed(self, call: str) -> None:
        """Raises ClosedError after :meth:`close`, which has released the lock of the local directory."""
        if self._is_closed:
            raise ClosedError(
                f'the checkpointer of {self._catalog.run.url()} is closed, and another one may use {self.local.url()}. Call '
                f'{call} inside the with block, or before close().'
            )

    def close(self) -> None:
        self._is_closed = True
        try:
            self._uploads.close()
        finally:
            self._dir.end()
