"""Uploads one step, and forgets it: in the thread of the queue, and in the other processes by the orders of process 0."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

from t5ckpt.catalog.listing import has_step
from t5ckpt.commit.markers import SLOWEST_RATE
from t5ckpt.commit.retention import Retention
from t5ckpt.distributed.processes import ServiceError
from t5ckpt.errors import LocalDirError
from t5ckpt.policies import KeepLatest
from t5ckpt.save.arguments import TierOptions
from t5ckpt.save.request import SaveContext
from t5ckpt.tiers.catalog import TierCatalog
from t5ckpt.tiers.intents import Intents, PersistSchedule
from t5ckpt.tiers.local_dir import LocalDir
from t5ckpt.tiers.local_reads import UNREADABLE_SECONDS
from t5ckpt.tiers.orders import Close, Ended, Failed, Order, Refused
from t5ckpt.tiers.part import save_of
from t5ckpt.tiers.queue import UploadOutdated, UploadStopped
from t5ckpt.tiers.rate_limit import RateLimit, SavesFirst
from t5ckpt.tiers.send_lists import copy_alone
from t5ckpt.tiers.shared_upload import Leader
from t5ckpt.tiers.upload import NotUploadableError, UnreadableStepError, upload

_log = logging.getLogger('t5ckpt')


class Uploader:
    """Uploads steps, one after the other.

    Attributes:
      leader: of a job of several processes, in process 0; else None.
      last_saved: the step that was saved last; None before the first save.
      retention: of the local directory, for the thread of the uploads: a Retention belongs to one thread.
      saves: has the checkpoint that the next save links chunks from; None before the first save.
    """

    def __init__(
        self,
        options: TierOptions,
        directory: LocalDir,
        catalog: TierCatalog,
        intents: Intents,
        schedule: PersistSchedule,
    ):
        """Reads nothing."""
        self._local, self._run, self._clock = catalog.local, catalog.run, catalog.clock
        self._dir = directory
        self._catalog = catalog
        self._intents = intents
        self._schedule = schedule
        self._limit, self._saves_first = RateLimit(options.gbps), SavesFirst()
        self.note_save = self._saves_first.note_save
        # Saves may take half of the time.
        self._rate = SLOWEST_RATE if options.gbps is None else min(SLOWEST_RATE, options.gbps * 1e9 / 8 / 2)
        self.retention = Retention(self._local, KeepLatest(options.keep), self._clock)
        self.leader: Leader | None = None
        self.last_saved: int | None = None
        self.saves: SaveContext | None = None
        # The step whose local files the latest attempts could not read, and the time of the first of them.
        self._unreadable = (-1, 0.0)

    def pace(self, nbytes: int, check: Callable[[], None]) -> None:
        """Waits until a file of this size may be sent; ``check`` is called meanwhile, and may raise."""
        self._limit.wait(nbytes, check)
        try:
            self._saves_first.wait(check)
        except BaseException:
            self._limit.give_back(nbytes)
            raise

    def upload(self, step: int, check: Callable[[], None]) -> None:
        """Uploads a step, and runs the retention of the run; ``check`` raises UploadStopped if the upload is to end.

        The other processes get every error but UploadStopped, since they may wait for this upload.

        Raises:
          UploadStopped: the upload has ended, and its files stay.
          UploadOutdated: the step is being overwritten.
          NotUploadableError: no later attempt can upload the step, which no longer waits.
          LocalDirError: the local directory is of another run.
          Exception: the attempt failed.
        """
        started = time.monotonic()
        save = save_of(self._local, step)
        try:
            nbytes = self._copy(step, check)
        except UploadStopped:
            raise
        except NotUploadableError as error:
            self._end_not_uploadable(step, save, error)
            raise
        except LocalDirError as error:
            self._tell(Refused(str(error)))
            raise
        except Exception as error:
            self._tell(Failed(f'step {step} is not in {self._run.url()} yet: {error}'))
            raise
        if not self._intents.drop(step, save):
            raise UploadOutdated
        self._tell(Ended(step, save=save))
        seconds = self._schedule.upload_seconds = time.monotonic() - started
        _log.info('t5ckpt: uploaded step %d to %s: %d bytes in %.2f s', step, self._run.url(), nbytes, seconds)
        try:
            self._catalog.retain(step)
            self._retain(step)
        except Exception:  # noqa: BLE001 - a policy is the user's code, and the step is uploaded
            _log.exception('t5ckpt: retention after the upload of step %d failed; the upload is complete', step)

    def _copy(self, step: int, check: Callable[[], None]) -> int:
        """Copies a step, and commits it; returns the bytes."""

        def pace(nbytes: int) -> None:
            self.pace(nbytes, check)

        self._dir.share_id()
        overwrite = self._intents.overwrites(step)
        if self.leader is None:
            copy = copy_alone(self._local, self._run, step, pace, self._rate, self._clock)
        else:
            copy = functools.partial(self.leader.copy, step, pace, self._rate)
        (unreadable, since), self._unreadable = self._unreadable, (-1, 0.0)
        try:
            return upload(self._local, self._run, step, copy, overwrite=overwrite)
        except UnreadableStepError as error:
            now = time.monotonic()
            self._unreadable = step, since if unreadable == step else now
            if now - self._unreadable[1] >= UNREADABLE_SECONDS:
                raise NotUploadableError(str(error)) from error
            raise

    def _end_not_uploadable(self, step: int, save: str, error: NotUploadableError) -> None:
        """Forgets that a step waits, which cannot be uploaded; the next save is uploaded in its place.

        Raises:
          UploadOutdated: another save of the step waits, or is being committed.
        """
        # A deletion of a step that waits removes its record, too.
        error.is_failure = step in self._intents.steps() or has_step(self._local, step)
        if not self._intents.drop(step, save):
            raise UploadOutdated from error
        self._schedule.owe(step)
        self._discard_chunks()
        self._tell(Ended(step, f'{error}'.removesuffix('.'), is_failure=error.is_failure))

    def _discard_chunks(self) -> None:
        """Has the next save write all chunks, since those of an unchanged array may be links to a damaged file."""
        if self.saves is not None:
            self.saves.discard_previous()

    def _tell(self, order: Order) -> None:
        """Sends an order to the other processes, if there are any."""
        if self.leader is None:
            return
        try:
            self.leader.orders.send(order)
        except (ServiceError, TimeoutError) as error:
            # The job is ending. The next start finds the records of the steps.
            _log.info('t5ckpt: the other processes were not told of an upload: %s', error)

    def forget(self, step: int, why: str) -> None:
        """Forgets that a step waits, in all processes; in process 0, or in a job of one."""
        self._intents.drop(step)
        self._tell(Ended(step, why))

    def end(self, order: Ended) -> None:
        """Forgets that a step waits, in the other processes."""
        if order.save is not None:
            # Process 0 has shared the id before the upload.
            self._dir.note_shared()
        if order.is_failure:
            self._discard_chunks()
        self._intents.drop(order.step, order.save)
        self._retain(order.step)

    def _retain(self, step: int) -> None:
        """Local retention: the step may have stayed for its upload alone."""
        self.retention.carry_out(self.last_saved, confirmed=[step])

    def close(self) -> None:
        """Tells the other processes that no order follows."""
        self._tell(Close())
        self.leader = None
