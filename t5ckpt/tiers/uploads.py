"""The uploads of the local steps: begins those that ``tiers/intents.py`` chooses, runs them, and waits for them."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from t5ckpt.catalog.listing import has_step, steps_in
from t5ckpt.commit.retention import Retention
from t5ckpt.distributed.processes import ServiceError
from t5ckpt.errors import NotDurableError, NotPersistedError, T5CkptError
from t5ckpt.policies import KeepLatest
from t5ckpt.save.arguments import SaveCall, TierOptions
from t5ckpt.tiers.catalog import TierCatalog
from t5ckpt.tiers.coverage import DiskStep
from t5ckpt.tiers.intents import Intents, PersistSchedule
from t5ckpt.tiers.local_dir import LocalDir
from t5ckpt.tiers.orders import Close, Ended, Failed, Orders
from t5ckpt.tiers.part import Part, save_of
from t5ckpt.tiers.queue import StepUploads, UploadOutdated, UploadQueue, UploadStopped
from t5ckpt.tiers.rate_limit import RateLimit, SavesFirst
from t5ckpt.tiers.shared_upload import Follower, Leader
from t5ckpt.tiers.upload import NotUploadableError, copy_alone, upload

_log = logging.getLogger('t5ckpt')


class Uploads:
    """Uploads local steps in the background, in a thread of its own."""

    def __init__(self, options: TierOptions, directory: LocalDir, catalog: TierCatalog):
        """Reads and starts nothing."""
        self.local, self.run, self.clock = catalog.local, catalog.run, catalog.clock
        self._dir = directory
        self._catalog = catalog
        self._intents = Intents(self.local)
        # For the thread of the uploads: a Retention belongs to one thread.
        self._retention = Retention(self.local, KeepLatest(options.keep), self.clock)
        self._last_saved: int | None = None
        self._schedule = PersistSchedule(options.policy, self.local, self.clock)
        self._limit, self._saves_first = RateLimit(options.gbps), SavesFirst()
        self.note_save = self._saves_first.note_save
        self._queue: StepUploads = UploadQueue(self._upload, self._forget, self.run.url())
        # Of a job of several processes, in process 0.
        self._leader: Leader | None = None
        self._has_resumed = False

    def check_not_refused(self) -> None:
        """Raises the LocalDirError for which nothing is uploaded, if there is one."""
        if self._queue.refusal is not None:
            raise self._queue.refusal

    def resume(self) -> None:
        """Begins the uploads that an earlier process did not end; the first call does, later ones do nothing."""
        if self._has_resumed:
            return
        self._has_resumed = True
        self._intents.collect()
        existing = set(steps_in(self.local))
        waiting = self._intents.steps()
        for step in sorted(set(waiting) - existing):
            _log.warning('t5ckpt: step %d was to be uploaded, and is not in %s anymore', step, self.local.url())
            self._intents.drop(step)
            self._schedule.owe(step)
        # The part of a job of several processes waits for that job.
        found = sorted(existing.intersection(waiting).difference(self._catalog.partial_steps()))
        if found:
            _log.info('t5ckpt: steps of %s that wait for their upload: %s', self.local.url(), found)
            self._queue.add(found)

    def waiting_parts(self) -> list[list[Any]]:
        """The votes on the steps that wait, of a job of several processes; see :class:`DiskStep`."""
        self._intents.collect()
        found: list[list[Any]] = []
        for step in self._intents.steps():
            try:
                part = Part.read(self.local, step)
            except T5CkptError:
                found.append(DiskStep('', -1, 1).vote(step))
            else:
                found.append(part.as_vote().vote(step))
        return found

    def part_of(self, step: int, save: str) -> Part | None:
        """The part of a save of a step in the local directory; None if there is none that can be read."""
        try:
            part = Part.read(self.local, step)
        except T5CkptError:
            return None
        return part if part.save == save else None

    def join(self, orders: Orders, waiting: Sequence[int], dropped: Sequence[int]) -> None:
        """Begins the uploads of a job of several processes.

        Args:
          orders: of process 0 to the others.
          waiting: the steps of earlier processes that can be uploaded.
          dropped: those that cannot.
        """
        self._has_resumed = True
        is_leader = orders.processes.index == 0
        for step in dropped:
            if is_leader:
                _log.warning(
                    't5ckpt: step %d was to be uploaded, and the local disks do not have all of its files anymore; the next save '
                    'is uploaded in its place',
                    step,
                )
            self._intents.drop(step)
            self._schedule.owe(step)
        for step in set(waiting).difference(self._intents.steps()):
            # The disk of this process is new.
            self._intents.add(step, overwrite=False)
        if not is_leader:
            self._queue = Follower(orders, self.local, self.run, self._pace, self._end, self._intents.steps)
            return
        self._leader = Leader(orders, self.local, self.run, self.clock)
        if waiting:
            _log.info('t5ckpt: steps that wait for their upload: %s', waiting)
            self._queue.add(waiting)

    def reason(self, step: int, call: SaveCall, preempted: bool) -> str | None:
        """Why to upload a step that is being saved, or None."""
        return self._schedule.reason(step, call.metrics, preempted=preempted, is_uploading=self._queue.is_uploading())

    @contextlib.contextmanager
    def around_commit(self, step: int, call: SaveCall, reason: str | None) -> Generator[None]:
        """Surrounds the local commit of a step: records before it that the step is to be uploaded, and begins that after it."""
        self._dir.ensure_record()
        self._last_saved = step
        if reason is None:
            yield
            return
        failure: NotDurableError | None = None
        with self._intents.committing(step):
            is_new = self._intents.add(step, overwrite=call.overwrite)
            try:
                yield
            except NotDurableError as error:
                # The step is listed, so it is uploaded as any other.
                failure = error
            except BaseException:
                if is_new:
                    self._intents.drop(step)
                raise
        self._schedule.note_taken(step, call.metrics)
        _log.info('t5ckpt: step %d is uploaded to %s: %s', step, self.run.url(), reason)
        self._queue.add([step])
        if failure is not None:
            raise failure

    def _pace(self, nbytes: int, check: Callable[[], None]) -> None:
        """Waits until a file of this size may be sent; ``check`` is called meanwhile, and may raise."""
        self._limit.wait(nbytes, check)
        self._saves_first.wait(check)

    def _upload(self, step: int) -> None:
        """Uploads a step, and runs the retention of the run; in the thread of the queue."""
        started = time.monotonic()
        overwrite, save = self._intents.overwrites(step), save_of(self.local, step)

        def pace(nbytes: int) -> None:
            self._pace(nbytes, self._queue.check)

        leader = self._leader
        if leader is None:
            copy = copy_alone(self.local, self.run, step, pace, self.clock)
        else:
            copy = functools.partial(leader.copy, step, pace)
        try:
            self._dir.share_id()
            nbytes = upload(self.local, self.run, step, copy, self.clock, overwrite=overwrite)
        except UploadStopped:
            raise
        except NotUploadableError as error:
            if not self._intents.is_of(step, save):
                raise UploadOutdated from error
            self._schedule.owe(step)
            raise
        except Exception as error:
            # The other processes wait for the end of this attempt.
            if leader is not None:
                leader.orders.send(Failed(f'step {step} is not in {self.run.url()} yet: {error}'))
            raise
        if not self._intents.drop(step, save):
            raise UploadOutdated
        if leader is not None:
            leader.orders.send(Ended(step, save=save))
        seconds = self._schedule.upload_seconds = time.monotonic() - started
        _log.info('t5ckpt: uploaded step %d to %s: %d bytes in %.2f s', step, self.run.url(), nbytes, seconds)
        try:
            self._catalog.retain(step)
            self._retain(step)
        except Exception:  # noqa: BLE001 - a policy is the user's code, and the step is uploaded
            _log.exception('t5ckpt: retention after the upload of step %d failed; the checkpoint is there', step)

    def _retain(self, step: int) -> None:
        """Local retention: the step may have stayed for its upload alone."""
        self._retention.carry_out(self._last_saved, confirmed=[step])

    def _forget(self, step: int, why: str = 'the log of process 0 has the reason') -> None:
        """Forgets that a step waits, in all processes; in process 0."""
        self._intents.drop(step)
        if self._leader is not None:
            self._leader.orders.send(Ended(step, why))

    def _end(self, step: int, save: str | None) -> None:
        """Forgets that a step waits, in the other processes."""
        if save is not None:
            # Process 0 has shared the id before the upload.
            self._dir.note_shared()
        self._intents.drop(step, save)
        self._retain(step)

    @contextlib.contextmanager
    def without(self, step: int) -> Generator[None]:
        """Ends the upload of a step, which is deleted in the context; begins it again if the deletion fails."""
        self._queue.cancel(step)
        try:
            yield
        except BaseException:
            if step in self._intents.steps():
                self._queue.add([step])
            raise
        self._forget(step, 'it was deleted')

    def drop(self, step: int) -> None:
        """Forgets that a local step waits, which is not there anymore."""
        self._intents.drop(step)

    def wait(self, step: int | None) -> None:
        """Waits for the upload of a step; None waits for all that wait.

        Raises:
          NotPersistedError: it failed, or the step is not uploaded.
          LocalDirError: the local directory is of another run.
        """
        self._queue.wait(step)
        if step is not None and not has_step(self.run, step):
            raise NotPersistedError(
                f'step {step} is not in {self.run.url()}: '
                + ('persist_policy did not take it.' if has_step(self.local, step) else 'there is no such step.')
            )

    def close(self) -> None:
        """Waits for the uploads, unless the run's storage fails; the next start uploads the remaining steps."""
        if isinstance(self._queue, Follower) and sys.exception() is not None:
            self._queue.leave()
        try:
            waiting = self._waiting()
            if waiting and self._queue.refusal is None:
                _log.info('t5ckpt: waiting for the upload of step %s to %s', waiting[-1], self.run.url())
                with contextlib.suppress(NotPersistedError):
                    self._queue.wait(None)
        finally:
            self._queue.stop()
            if self._leader is not None:
                with contextlib.suppress(ServiceError, TimeoutError):
                    self._leader.orders.send(Close())
                self._leader = None
            left = self._waiting()
            if left and self._queue.refusal is None:
                _log.warning(
                    't5ckpt: step %s is in %s, and not in %s yet. The next start with this local_dir uploads it.',
                    ', '.join(map(str, left)),
                    self.local.url(),
                    self.run.url(),
                )
            self._retention.wait()
            self._has_resumed = False

    def _waiting(self) -> list[int]:
        return self._intents.steps() if self._has_resumed else []
