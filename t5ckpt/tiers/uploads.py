"""The uploads of the local steps: begins those that ``tiers/intents.py`` chooses, and waits for them."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Collection, Generator, Iterable, Sequence
from typing import Any

from t5ckpt.catalog.listing import has_step, steps_in
from t5ckpt.core.text import numbered_are
from t5ckpt.errors import NotDurableError, NotPersistedError, T5CkptError
from t5ckpt.save.arguments import TierOptions
from t5ckpt.save.request import SaveRequest
from t5ckpt.save.schedule import WatchedMetrics
from t5ckpt.tiers.catalog import TierCatalog
from t5ckpt.tiers.coverage import NOWHERE, DiskStep
from t5ckpt.tiers.intents import Intents, PersistSchedule
from t5ckpt.tiers.local_dir import LocalDir
from t5ckpt.tiers.orders import Orders
from t5ckpt.tiers.overwrites import Overwrites
from t5ckpt.tiers.part import LocalParts, Part, part_alone
from t5ckpt.tiers.persisted import check_in_run, check_none_waits
from t5ckpt.tiers.queue import StepUploads, UploadQueue
from t5ckpt.tiers.shared_upload import Follower, Leader
from t5ckpt.tiers.uploader import Uploader

_OVERWRITES = 'it overwrites a step that the run may have'
_log = logging.getLogger('t5ckpt')


class Uploads:
    """Chooses the local steps to upload, and has them uploaded in a thread of their own."""

    def __init__(self, options: TierOptions, directory: LocalDir, catalog: TierCatalog):
        """Reads and starts nothing."""
        self.local, self.run, self.clock = catalog.local, catalog.run, catalog.clock
        self._dir = directory
        self._catalog = catalog
        self._intents = Intents(self.local)
        self._schedule = PersistSchedule(options.policy, self.local, self.clock)
        self._overwrites = Overwrites(self.run, self._intents)
        # Many steps lie between two saves.
        self._watched = WatchedMetrics(options.policy, 'persist_policy', 10)
        self._uploader = Uploader(options, directory, catalog, self._intents, self._schedule)
        self.note_save = self._uploader.note_save
        upload = self._uploader.upload
        self._queue: StepUploads = UploadQueue(
            lambda step: upload(step, self._queue.check), self._uploader.forget, self.run.url()
        )
        self._has_resumed = False
        # The steps that wait and of which a job of one process has only a part.
        self._parts = set[int]()

    def note_request(self, request: SaveRequest) -> None:
        """Takes a save that begins, and warns once if it lacks a metric of the persist policy; in the caller's thread.

        The checkpoint that the save links chunks from is not linked again if an upload finds it damaged.
        """
        self._uploader.saves = request.context
        if request.round.is_leader:
            self._watched.warn_if_missing(request.step, request.facts.metrics, request.context.notices)

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
            why = f'{self.local.url()} no longer has it'
            self._note_lost(step, why)
            # Not a failure: its save may have been killed before the commit.
            self._queue.outcomes.note_dropped(step, why)
        found = self._without_parts(sorted(existing & set(waiting)))
        if found:
            _log.info('t5ckpt: steps of %s that wait for their upload: %s', self.local.url(), found)
            self._add(found)

    def _note_lost(self, step: int, why: str, level: int = logging.WARNING) -> None:
        """Forgets a step that waited when an earlier process ended, and that cannot be uploaded."""
        text = 't5ckpt: step %d was to be uploaded, and is not: %s. The next save is uploaded in its place.'
        _log.log(level, text, step, why)
        self._intents.drop(step)
        self._schedule.owe(step)

    def _without_parts(self, steps: Sequence[int]) -> list[int]:
        """Those of some steps of which the directory has more than the part of one of several processes."""
        self._parts = {step for step in steps if part_alone(self.local, step) is not None}
        if self._parts:
            _log.info(
                't5ckpt: a job of several processes can upload the steps %s, of which %s has a part',
                sorted(self._parts),
                self.local.url(),
            )
        return [step for step in steps if step not in self._parts]

    def records(self) -> list[tuple[int, bool]]:
        """The steps that wait, and whether their upload may replace a step of the run, for a job of several processes."""
        self._intents.collect()
        return self._intents.records()

    def part_votes(self, local: LocalParts) -> list[list[Any]]:
        """The votes on all local steps, of a job of several processes; see :class:`DiskStep`.

        A disk may have a step whose record only another disk has.
        """
        steps = sorted({*local.parts, *local.damaged, *self._intents.steps()})
        nothing = DiskStep('', -1, 1)
        return [(local.parts[step].as_vote() if step in local.parts else nothing).vote(step) for step in steps]

    def part_of(self, step: int, save: str) -> Part | None:
        """The part of a save of a step in the local directory; None if there is none that can be read."""
        try:
            part = Part.read(self.local, step)
        except T5CkptError:
            return None
        return part if part.save == save else None

    def join(
        self,
        orders: Orders,
        waiting: Sequence[int],
        dropped: Sequence[tuple[int, str]],
        overwriting: Collection[int],
    ) -> None:
        """Begins the uploads of a job of several processes.

        Args:
          orders: of process 0 to the others.
          waiting: the steps of earlier processes that can be uploaded.
          dropped: those that cannot, each with the reason.
          overwriting: those that may replace a step of the run.
        """
        self._has_resumed = True
        is_leader = orders.processes.index == 0
        for step, why in dropped:
            self._note_lost(step, why, level=logging.WARNING if is_leader else logging.DEBUG)
        for step in set(waiting).difference(self._intents.steps()):
            # The disk of this process is new, or was that of a job of one process.
            self._intents.add(step, overwrite=step in overwriting)
        if not is_leader:
            uploader = self._uploader
            self._queue = Follower(orders, self.local, self.run, uploader.pace, uploader.end, self._intents.steps)
        for step, why in dropped:
            self._queue.outcomes.note_dropped(step, why, is_failure=why != NOWHERE)
        if not is_leader:
            return
        self._uploader.leader = Leader(orders, self.local, self.run, self.clock)
        if waiting:
            _log.info('t5ckpt: steps that wait for their upload: %s', waiting)
            self._add(waiting)

    def _add(self, steps: Iterable[int]) -> None:
        steps = sorted(steps)
        self._queue.add(steps, [step for step in steps if self._intents.overwrites(step)])

    def reason(self, request: SaveRequest, preempted: bool) -> str | None:
        """The reason to upload a step that is being saved, or None."""
        step, metrics, is_uploading = request.step, request.facts.metrics, self._queue.is_uploading()
        reason = self._schedule.reason(step, metrics, preempted=preempted, is_uploading=is_uploading)
        return _OVERWRITES if request.overwrite and self._overwrites.may_replace(step, self._queue) else reason

    @contextlib.contextmanager
    def around_commit(self, request: SaveRequest, reason: str | None) -> Generator[None]:
        """Surrounds the local commit of a step: records before it that the step is to be uploaded, and begins that after it."""
        step = request.step
        self._dir.ensure_record()
        self._uploader.last_saved = step
        self._parts.discard(step)
        if reason is None:
            yield
            return
        failure: NotDurableError | None = None
        with self._intents.committing(step):
            overwrites = reason == _OVERWRITES
            is_new = self._intents.add(step, overwrite=overwrites)
            try:
                yield
            except NotDurableError as error:
                # The step is listed, so it is uploaded as any other.
                failure = error
            except BaseException:
                if is_new:
                    self._intents.drop(step)
                raise
        self._schedule.note_taken(step, request.facts.metrics)
        _log.info('t5ckpt: will upload step %d to %s: %s', step, self.run.url(), reason)
        self._queue.add([step], [step] if overwrites else ())
        if failure is not None:
            raise failure

    @contextlib.contextmanager
    def without(self, step: int) -> Generator[None]:
        """Ends the upload of a step, which is deleted in the context; begins it again if the deletion fails.

        Raises:
          LocalDirError: this process was forked from the one that has the local directory.
        """
        self._dir.lock.check_not_forked()
        self._queue.cancel(step)
        try:
            yield
        except BaseException:
            if step in self._intents.steps():
                self._add([step])
            raise
        self._uploader.forget(step, 'it was deleted')

    def drop(self, step: int) -> None:
        """Forgets that a local step waits, because the step no longer exists."""
        self._parts.discard(step)
        self._intents.drop(step)

    def wait(self, step: int | None) -> None:
        """Waits for the upload of a step; None waits for all that wait.

        Raises:
          NotPersistedError: it failed, or the step is not uploaded.
          LocalDirError: the local directory is of another run.
        """
        self._queue.wait(step)
        if step is None:
            check_none_waits(self._dir, self._not_begun())
        else:
            check_in_run(self._dir, step, self._not_begun(), self._why_not_there)

    def _not_begun(self) -> list[int]:
        """The steps that wait while this process uploads nothing."""
        return [] if self._has_resumed and not self._dir.lock.is_forked else self._intents.steps()

    def _why_not_there(self, step: int) -> str:
        if self._queue.outcomes.was_uploaded(step):
            return 'it was uploaded, and the keep policy has deleted it since.'
        if not has_step(self.local, step):
            return 'there is no such step.'
        if step in self._parts:
            return 'only a job of several processes can upload it.'
        return 'persist_policy did not take it.'

    def close(self) -> None:
        """Waits for the uploads, unless the run's storage fails; the next start uploads the remaining steps.

        In a process that was forked, does nothing: the threads of the uploads are those of its parent.
        """
        if self._dir.lock.is_forked:
            return
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
            self._uploader.close()
            left = self._waiting()
            if left and self._queue.refusal is None:
                _log.warning(
                    't5ckpt: %s in %s, and not in %s yet. The next start with this local_dir uploads it.',
                    numbered_are('step', left),
                    self.local.url(),
                    self.run.url(),
                )
            self._has_resumed = False

    def _waiting(self) -> list[int]:
        return [step for step in self._intents.steps() if step not in self._parts] if self._has_resumed else []
