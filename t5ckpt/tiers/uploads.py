"""The uploads of the local steps: begins those that ``tiers/intents.py`` chooses, runs them, and waits for them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Generator

from t5ckpt.catalog.listing import has_step, steps_in
from t5ckpt.commit.retention import Retention
from t5ckpt.errors import NotPersistedError
from t5ckpt.policies import KeepLatest
from t5ckpt.save.arguments import SaveCall, TierOptions
from t5ckpt.tiers.catalog import TierCatalog
from t5ckpt.tiers.intents import Intents, PersistSchedule
from t5ckpt.tiers.local_dir import LocalDir
from t5ckpt.tiers.queue import UploadQueue
from t5ckpt.tiers.rate_limit import RateLimit
from t5ckpt.tiers.upload import upload

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
        self._limit = RateLimit(options.gbps)
        self._queue = UploadQueue(self._upload, self._intents.drop, self.run.url())
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
        found = sorted(existing & set(waiting))
        if found:
            _log.info('t5ckpt: steps of %s that wait for their upload: %s', self.local.url(), found)
            self._queue.add(found)

    @contextlib.contextmanager
    def around_commit(self, step: int, call: SaveCall, preempted: bool) -> Generator[None]:
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
            self._catalog.retain(step)
            # The step may have stayed for its upload alone.
            self._retention.carry_out(self._last_saved, confirmed=[step])
        except Exception:  # noqa: BLE001 - a policy is the user's code, and the step is uploaded
            _log.exception('t5ckpt: retention after the upload of step %d failed; the checkpoint is there', step)

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
        """Waits for the uploads, unless the run's storage fails; the next start uploads what is left."""
        try:
            waiting = self._waiting()
            if waiting and self._queue.refusal is None:
                _log.info('t5ckpt: waiting for the upload of step %s to %s', waiting[-1], self.run.url())
                with contextlib.suppress(NotPersistedError):
                    self._queue.wait(None)
        finally:
            self._queue.stop()
            left = self._waiting()
            if left:
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
