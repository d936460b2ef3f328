"""Uploads the steps that wait, the newest first, in a thread of its own.

When the thread is free it takes the newest step, the one that was saved last; older ones are dropped: they would be of no use to
a restart. A step that replaces one of the run is not dropped, since the run would keep the old values. A failed upload is
repeated from its beginning, in a directory of its own, after a pause that grows to a minute. The log has one warning per outage.

All processes upload a step together, in a round (``distributed/rounds.py``): they look of which save their disks have parts; each
sends the files that were assigned to it in the save; process 0 commits; and all agree on how it has ended.

Notes: the thread is not a daemon, and that of process 0 ends when no step waits. An interpreter that exits without ``close``
waits for an upload, but not for a storage that fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, TypeVar

from t5ckpt.catalog.layouts import number_of
from t5ckpt.catalog.listing import has_step, step_names, waiting_steps
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.markers import SLOWEST_RATE, seconds_for
from t5ckpt.commit.occupancy import occupant_of
from t5ckpt.commit.transaction import Transaction
from t5ckpt.commit.transfer import copy_files
from t5ckpt.core.keys import join, parents_of
from t5ckpt.core.protocols import Clock
from t5ckpt.core.text import numbered_are
from t5ckpt.core.thread_pool import start_thread
from t5ckpt.distributed.processes import ServiceError, lone_process
from t5ckpt.distributed.rounds import Channel, CoordinationRound, Decide, Phase
from t5ckpt.errors import (
    CoordinationError,
    LocalDirError,
    NotDurableError,
    NotPersistedError,
    ProcessMissingError,
    StepKeptError,
    StorageError,
    T5CkptError,
)
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.manifest import decode_manifest
from t5ckpt.format.names import file_checksums_name, is_position, step_dir
from t5ckpt.policies import StepInfo
from t5ckpt.save.request import SaveRequest
from t5ckpt.save.schedule import WatchedMetrics
from t5ckpt.storage import means_damage
from t5ckpt.tiers.directory import LocalDirectory
from t5ckpt.tiers.disk_step import DiskStep, save_in, save_on_disk
from t5ckpt.tiers.local_tier import LocalTier
from t5ckpt.tiers.waiting import PersistSchedule, lost_disks, note_ended, note_waiting

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_LOOK_SECONDS = 0.5
_POLL_SECONDS, _CALL_SECONDS = 5.0, 60.0
# An upload must not take all connections or the processor from the training.
_WORKERS = 4
_OVERWRITES = 'it overwrites a step that the run may have'
UPLOAD_SECONDS = 7 * 86400.0
"""The longest upload of several processes; one that dies ends the wait of the others before."""
_T = TypeVar('_T')
_log = logging.getLogger('t5ckpt')


class _NotUploadableError(Exception):
    """A step that no later attempt can upload."""


class _StoppedError(Exception):
    """The running upload is to end."""


class Uploads:
    """The uploads of one process. Its methods may be called from any thread.

    Attributes:
      has_started: whether the uploads have begun, and are not closed.
    """

    def __init__(
        self,
        options: LocalTier,
        directory: LocalDirectory,
        clock: Clock,
        uploaded: Callable[[], Collection[StepInfo]],
        retain: Callable[..., None],
    ):
        """Reads and starts nothing.

        Args:
          options: of the constructor.
          directory: the local directory.
          clock: unix seconds.
          uploaded: the facts of the steps that the run has, or that wait.
          retain: called after each end of an upload, with the step and ``is_uploaded=``; carries out retention.
        """
        self._directory, self._local, self._run = directory, directory.storage, directory.run
        self._clock, self._retain = clock, retain
        self._schedule = PersistSchedule(options.persist, uploaded, clock)
        # Many steps lie between two saves.
        self._watched = WatchedMetrics(options.persist, 'persist', 10)
        self._bytes_per_second = math.inf if options.upload_gbps is None else options.upload_gbps * 1e9 / 8
        # Held in the commit of a step that is to wait, too: the end of an earlier upload of the step removes no file meanwhile.
        # In C, since an exception from a signal handler may leave the lock of ``with condition`` taken.
        self._guard = threading.RLock()
        self._condition = threading.Condition(self._guard)
        # As the files of ``to_persist``, in the order of the saves, with whether each replaces a step of the run.
        self._waiting: dict[int, bool] = {}
        # The step of the upload that runs, until retention after its end, or -1; and its files on this disk.
        self._current = -1
        self._disk: DiskStep | None = None
        # Why steps were not uploaded; '' for those that were.
        self._outcomes: dict[int, str] = {}
        # The last step that could not be uploaded, until a wait raises it or a newer step is uploaded; or -1.
        self._failed = -1
        # Of the latest attempt, until one succeeds; and how many have failed.
        self._error: Exception | None = None
        self._failures = 0
        # The steps of the run, as its storage has last answered; None before.
        self._of_run: Collection[int] | None = None
        self.has_started = self._is_running = self._is_stopped = False
        # The pause before the next attempt in seconds, its time, and that from which the next file may be sent.
        self._pause = self._next_attempt = self._next_file = 0.0
        self._channel = Channel(lone_process(), '', UPLOAD_SECONDS)
        self._discard_chunks: Callable[[], None] = lambda: None

    # --- the steps that wait ---------------------------------------------------------------------------------------------------

    @property
    def _follows(self) -> bool:
        return self._channel.processes.index != 0

    def take(self, channel: Channel, waiting: Mapping[int, bool]) -> None:
        """Takes the channel of the uploads, and those that an earlier program did not end.

        ``waiting`` has the steps that a disk has, ascending, and whether each replaces one.
        """
        self._channel = channel
        for step in waiting_steps(self._local).difference(waiting):
            note_ended(self._local, step)
        for step, replaces in waiting.items():
            # The disk of this process may be new.
            note_waiting(self._local, step, replaces=replaces)
        self._waiting |= waiting

    def start(self) -> None:
        """Begins the uploads."""
        self.has_started = True
        self._start_thread()

    def of_save(self, request: SaveRequest, *, preempted: bool) -> SaveRequest:
        """The request of a save that is followed by the upload if the persist policy takes the step; in the caller's thread.

        Warns once if the save lacks a metric of the policy.

        Raises:
          LocalDirError: the local directory is of another run, as an upload has found.
        """
        if isinstance(self._error, LocalDirError):
            raise self._error
        # Chunks of an unchanged array may be links to a file that an upload finds damaged.
        self._discard_chunks = request.context.discard_previous
        if request.round.is_leader:
            self._watched.warn_if_missing(request.step, request.facts.metrics, request.context.notices)
        return dataclasses.replace(
            request,
            upload_reason=functools.partial(self._reason, request, preempted=preempted),
            around_commit=functools.partial(self._around_commit, request),
        )

    def _reason(self, request: SaveRequest, *, preempted: bool) -> str | None:
        """The reason to upload a step that is being saved, or None; in process 0."""
        reason = self._schedule.reason(
            request.step, request.facts.metrics, preempted=preempted, is_uploading=self._current >= 0
        )
        if request.overwrite and self._may_replace(request.step):
            return _OVERWRITES
        # In all processes the new save replaces the one that waits, which not each of them had.
        return reason or ('an earlier save of it waits' if request.step in self._waiting else None)

    def _may_replace(self, step: int) -> bool:
        """Whether the run has a step, or gets it; also if its storage has never answered."""
        if self._error is None:
            with contextlib.suppress(T5CkptError):
                self._of_run = self._directory.query_run(lambda: {*map(number_of, step_names(self._run))}, self._of_run)
        return step in self._waiting or self._of_run is None or step in self._of_run

    @contextlib.contextmanager
    def _around_commit(self, request: SaveRequest, reason: str | None) -> Generator[None]:
        """Surrounds the local commit of a step: records before it that the step is to be uploaded, and begins that after it."""
        step = request.step
        if reason is None:
            yield
            return
        failure: NotDurableError | None = None
        with self._guard:
            replaces = reason == _OVERWRITES or self._waiting.get(step, False)
            try:
                note_waiting(self._local, step, replaces=replaces)
                yield
            except NotDurableError as error:
                # The step is listed, so it is uploaded as any other.
                failure = error
            except BaseException:
                if step not in self._waiting:
                    note_ended(self._local, step)
                # The policy has counted the step.
                self._schedule.owe(step)
                raise
            self._schedule.note_taken(step, request.facts.metrics)
            _log.info('t5ckpt: will upload step %d to %s: %s', step, self._run.url(), reason)
            self._add(step, replaces)
        if failure is not None:
            raise failure

    def _add(self, step: int, replaces: bool) -> None:
        with self._guard:
            # As the last one.
            self._waiting.pop(step, None)
            self._waiting[step] = replaces
            self._outcomes.pop(step, None)
            self._drop_older()
            self._condition.notify_all()
        self._start_thread()

    def _drop_older(self) -> None:
        """Drops the steps that are older than the newest one, and that are not being uploaded and replace nothing."""
        newest = [*self._waiting][-1]
        kept = (newest, self._current)
        for step in [step for step, replaces in self._waiting.items() if step not in kept and not replaces]:
            why = f'step {newest} was saved later'
            _log.info('t5ckpt: skipping the upload of step %d to %s: %s', step, self._run.url(), why)
            self._remove(step, why)

    def _remove(self, step: int, why: str) -> None:
        self._waiting.pop(step, None)
        note_ended(self._local, step)
        self._outcomes[step] = why

    @contextlib.contextmanager
    def without(self, step: int) -> Generator[None]:
        """Ends the upload of a step, which is deleted in the context; begins it again if the deletion fails."""
        with self._guard:
            replaces = self._waiting.pop(step, None)
            while self._is_running and self._current == step and not self._follows:
                self._condition.wait(_LOOK_SECONDS)
        try:
            yield
        except BaseException:
            if replaces is not None:
                with self._guard:
                    # It may have been saved before others.
                    self._waiting = {step: replaces, **self._waiting}
                    self._condition.notify_all()
                self._start_thread()
            raise
        with self._guard:
            self._remove(step, '')
            del self._outcomes[step]
            self._condition.notify_all()

    # --- uploading ----------------------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        with self._guard:
            begins = bool(self._waiting or self._follows) and not (self._is_running or self._is_stopped)
            self._is_running |= begins
        if begins and not start_thread(self._work, 't5ckpt-upload'):
            self._work()

    def _work(self) -> None:
        """The thread."""
        try:
            while (at := self._begin()) is not None:
                self._end(self._current, self._attempt(at, self._current))
        except (CoordinationError, ProcessMissingError, ServiceError) as error:
            # A process has ended, or died; the save that runs says so.
            _log.info('t5ckpt: this process uploads nothing more: %s', error)
            self._error = error
            self._free(is_running=False)

    def _begin(self) -> CoordinationRound | None:
        """Begins the upload that process 0 chooses, after the pause that a failed one begins; None ends the thread."""
        with self._guard:
            while not self._follows:
                left = self._next_attempt - time.monotonic()
                is_exiting = left > 0 and not threading.main_thread().is_alive()
                if is_exiting or not self._waiting or self._is_stopped:
                    self._free(is_running=False)
                    return None
                if left <= 0:
                    self._current = [*self._waiting][-1]
                    break
                self._condition.wait(min(left, _LOOK_SECONDS))
        at = self._told(self._current)
        if at is None:
            self._free(is_running=False)
        return at

    def _told(self, step: int) -> CoordinationRound | None:
        """Begins a round for the step of process 0, of which the others learn here; None for -1, after which there is no more."""
        at = self._channel.round('an upload')
        key = f'{at.prefix}/step'
        while not at.is_single_process:
            try:
                if self._follows:
                    step = int(at.processes.get(key, _POLL_SECONDS))
                else:
                    at.processes.put(key, str(step).encode(), _CALL_SECONDS)
                break
            except TimeoutError:
                if not threading.main_thread().is_alive():
                    return None
            except ServiceError as error:
                # A call that has timed out may have set it.
                if error.status.code != 'ALREADY_EXISTS':
                    raise
                break
        # In the other processes, the commit of the step ends before.
        with self._guard:
            self._current = step
        return at if step >= 0 else None

    def _free(self, *, is_running: bool) -> None:
        with self._guard:
            self._current, self._disk, self._is_running = -1, None, is_running
            self._condition.notify_all()

    def _attempt(self, at: CoordinationRound, step: int) -> Exception | None:
        """Uploads a step; returns why it has not."""
        started = time.monotonic()
        try:
            nbytes = self._upload(at, step)
        except (CoordinationError, ProcessMissingError):
            raise
        except (_NotUploadableError, _StoppedError) as error:
            return error
        except Exception as error:  # noqa: BLE001 - repeated, and raised by wait
            if self._error is None and not self._follows:
                text = 't5ckpt: the upload of step %d to %s failed, and is repeated until it succeeds; saves go on: %s'
                trace = None if isinstance(error, T5CkptError) else error
                _log.warning(text, step, self._run.url(), error, exc_info=trace)
            return error
        if not self._follows:
            seconds = time.monotonic() - started
            _log.info('t5ckpt: uploaded step %d to %s: %d bytes in %.2f s', step, self._run.url(), nbytes, seconds)
        return None

    def _upload(self, at: CoordinationRound, step: int) -> int:
        """Copies a step, and commits it; returns the bytes, 0 if the run has this save already.

        Raises:
          _NotUploadableError: the local step is damaged or gone, or the run has this step of another save; in all processes.
          LocalDirError: the local directory is of another run.
          StorageError: the run's storage failed.
          RemoteError: another process has failed.
        """
        with contextlib.ExitStack() as stack:
            work: Transaction | None = None

            def begin(votes: Sequence[Any]) -> list[str] | None:
                nonlocal work
                work = self._transaction(step, votes)
                return work and [votes[0][0], join(stack.enter_context(work).directory, work.generation)]

            def commit(votes: Sequence[Any]) -> int:
                if work is not None and self._disk is not None:
                    self._commit(work, self._disk, [name for _, names in votes for name in names])
                return sum(nbytes for nbytes, _ in votes)

            where = self._agree(at, Phase.LOOK, lambda: self._look(step), begin)
            return 0 if where is None else self._agree(at, Phase.SEND, lambda: self._send(*where), commit)

    def _agree(self, at: CoordinationRound, phase: Phase, vote: Callable[[], Any], decide: Decide) -> Any:
        """As ``reduce_on_leader``; a _NotUploadableError of any process is raised in all."""
        with at.failing_together(phase):
            own = _caught(vote)
        answer, why = at.reduce_on_leader(
            phase,
            own,
            lambda votes: (
                next((vote for vote in votes if vote[1]), None) or _caught(decide, [vote for vote, _ in votes])
            ),
        )
        if why:
            raise _NotUploadableError(why)
        return answer

    def _look(self, step: int) -> list[Any] | None:
        """Reads of which save the disk has a part: the save, the role and the number of roles."""
        self._check()
        if not has_step(self._local, step):
            return None
        self._disk = self._read(step, functools.partial(DiskStep.read, self._local, step))
        return [self._disk.identity.save, self._disk.identity.role, self._disk.identity.count]

    def _transaction(self, step: int, votes: Sequence[Any]) -> Transaction | None:
        """In process 0: that of the upload; None if the run has this save."""
        run, replaces, disk = self._run, self._waiting.get(step, False), self._disk
        found = [*filter(None, votes)]
        if found and (why := lost_disks(found)):
            raise _NotUploadableError(why)
        if disk is None:
            raise _NotUploadableError(f'{self._local.url(step_dir(step))} is gone')
        self._directory.share_id()
        occupant = occupant_of(run, step)
        if occupant is not None and occupant.is_t5x and save_in(run, step) == disk.identity.save:
            return None
        if occupant is not None and not (replaces and occupant.is_t5x):
            why = f'in the layout of {occupant.layout}. Remove it with the program that wrote it'
            if occupant.is_t5x:
                why = 'of another save. To replace it, save the step with overwrite=True, or delete it before the save (t5ckpt '
                why += f'rm {run.url()} {step})'
            raise _NotUploadableError(f'{run.url(occupant.name)} exists, {why}')
        seconds = seconds_for(disk.identity.facts.bytes or 0, min(SLOWEST_RATE, self._bytes_per_second))
        return Transaction(
            run, step, self._clock, overwrite=replaces, seconds=seconds, listed=collect(run, self._clock),
            is_shared=self._channel.processes.count > 1,
        )  # fmt: skip

    def _send(self, save: str, directory: str) -> tuple[int, list[str]]:
        """Sends the files that were assigned to this process in the save, and their list; returns bytes, and positions."""
        disk = self._disk
        # A disk of a larger job may have a part of another save.
        if disk is None or disk.identity.save != save:
            return 0, []

        def read(name: str) -> bytes:
            return self._read(disk.step, functools.partial(disk.read_file, name))

        sizes = {name: size for name, (size, _) in disk.assigned.items()}
        sizes[file_checksums_name(disk.identity.role)] = 0
        nbytes = sum(copy_files(read, sizes, self._run, directory, _WORKERS, self._pace))
        return nbytes, [name for name in disk.assigned if is_position(name)]

    def _commit(self, work: Transaction, disk: DiskStep, positions: Sequence[str]) -> None:
        work.positions, where = positions, self._run.url(join(work.directory, work.generation))
        leaves = decode_manifest(disk.manifest, where).leaves.values()
        arrays = {leaf.location for leaf in leaves if isinstance(leaf, StoredArray)}
        try:
            work.commit(*work.relocated(disk.manifest, disk.facts, where), sorted({*arrays, *parents_of(positions)}))
        except StepKeptError as error:
            raise _NotUploadableError(str(error)) from error

    def _read(self, step: int, read: Callable[[], _T]) -> _T:
        """Reads files of a local step, a second time if the disk has failed: that may have been for a moment.

        Raises:
          _NotUploadableError: a file is damaged or gone, or the disk cannot read it.
          StorageError: another error, such as too many open files, which says nothing about a file.
        """
        try:
            with contextlib.suppress(StorageError):
                return read()
            time.sleep(_FIRST_PAUSE_SECONDS)
            return read()
        except T5CkptError as error:
            if not means_damage(error):
                raise
            raise _NotUploadableError(f'{self._local.url(step_dir(step))} cannot be read: {error}') from error

    def _check(self) -> None:
        if self._is_stopped or self._current not in self._waiting:
            raise _StoppedError('it was stopped')

    def _pace(self, nbytes: int) -> None:
        """Waits until a file of this size may be sent."""
        self._check()
        with self._guard:
            begin = max(time.monotonic(), self._next_file)
            self._next_file = begin + nbytes / self._bytes_per_second
        while (left := begin - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_SECONDS))
            self._check()

    def _end(self, step: int, error: Exception | None) -> None:
        """Records how an upload has ended, and carries out retention."""
        is_over = error is None or isinstance(error, _NotUploadableError)
        with self._guard:
            save = '' if self._disk is None else self._disk.identity.save
            # It may have been overwritten meanwhile.
            if step not in self._waiting or (save and save_on_disk(self._local, step) not in ('', save)):
                is_over = False
            elif is_over:
                self._note_end(step, '' if error is None else str(error).removesuffix('.'))
            else:
                self._error = error
                self._failures += 1
                self._pause = min(2 * self._pause or _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
                self._next_attempt = time.monotonic() + self._pause
        try:
            if is_over:
                self._retain(step, is_uploaded=error is None)
        except Exception:  # noqa: BLE001 - a policy is the user's code, and the step is uploaded
            _log.exception('t5ckpt: retention after the upload of step %d failed', step)
        self._free(is_running=True)

    def _note_end(self, step: int, why: str) -> None:
        """Records that a step is uploaded or, with ``why``, cannot be; the next save is uploaded in its place."""
        if why:
            self._failed = step
            self._schedule.owe(step)
            self._discard_chunks()
            if not self._follows:
                text = 't5ckpt: step %d is not uploaded to %s: %s. The next save is uploaded in its place.'
                _log.error(text, step, self._run.url(), why)
        else:
            self._failed = -1
            if self._error is not None:
                _log.warning('t5ckpt: uploads to %s work again', self._run.url())
            self._error, self._pause = None, 0.0
            self._of_run = None if self._of_run is None else {*self._of_run, step}
            self._drop_older()
        self._remove(step, why)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, step: int | None) -> None:
        """Waits for the upload of a step; None waits for all that wait.

        Raises:
          NotPersistedError: an attempt failed during the wait, or the step is not uploaded; or, without a step, a step could not
            be uploaded and no newer one was since.
          LocalDirError: the local directory is of another run.
        """
        waiting: list[int] = []
        if self.has_started and not self._directory.is_forked:
            with self._guard:
                self._wait(step)
        else:
            waiting = sorted(waiting_steps(self._local))
        for each in waiting if step is None else [step]:
            self._check_in_run(each, is_waiting=each in waiting)

    def _wait(self, step: int | None) -> None:
        failures, self._next_attempt = self._failures, 0.0
        self._condition.notify_all()
        while left := [each for each in sorted({*self._waiting, self._current} - {-1}) if step in (None, each)]:
            text = f'{numbered_are("step", left)} not in {self._run.url()}'
            if isinstance(self._error, LocalDirError):
                raise self._error
            if self._error is not None and self._failures > failures:
                raise NotPersistedError(f'{text} yet: {self._error} The upload is repeated.') from self._error
            if not self._is_running or self._is_stopped:
                why = 'the checkpointer is closed' if self._is_stopped else f'the uploads have ended: {self._error}'
                raise NotPersistedError(f'{text}, since {why}. The next start with this local directory uploads it.')
            self._condition.wait(_LOOK_SECONDS)
        ended = self._failed if step is None else step
        if why := self._outcomes.get(ended):
            self._failed = -1
            raise NotPersistedError(f'step {ended} was not uploaded to {self._run.url()}: {why}.')

    def _check_in_run(self, step: int, *, is_waiting: bool) -> None:
        """Raises NotPersistedError if the run does not have a step, or has another save of it."""
        run = self._run
        try:
            is_there = has_step(run, step)
        except StorageError:
            if not is_waiting:
                raise
            is_there = False
        if not is_there:
            why = 'persist did not take it, or it was deleted since.'
            if is_waiting:
                why = (
                    'it waits for its upload, which begins with the first restore or save; neither a checkpointer with '
                    'read_only=True nor a forked process uploads.'
                )
            elif not has_step(self._local, step):
                why = 'there is no such step.'
            raise NotPersistedError(f'step {step} is not in {run.url()}: {why}')
        save = save_on_disk(self._local, step)
        if save not in ('', save_in(run, step)):
            raise NotPersistedError(
                f'step {step} in {run.url()} is of another save than in {self._local.url()}. Save it with overwrite=True.'
            )

    def close(self) -> None:
        """Waits for the uploads, unless the run's storage fails; the next start uploads the remaining steps.

        In a process that was forked, does nothing: the threads of the uploads are those of its parent. A process that an error
        ends does not wait for the others.
        """
        if self._directory.is_forked or not self.has_started:
            return
        # The thread of another process ends when process 0 has closed.
        self._is_stopped = leaves = self._follows and sys.exception() is not None
        try:
            if self._waiting and not leaves:
                _log.info('t5ckpt: waiting for the upload of step %d to %s', [*self._waiting][-1], self._run.url())
                with contextlib.suppress(NotPersistedError, LocalDirError):
                    self.wait(None)
        finally:
            with self._guard:
                # After Ctrl-C in all processes, process 0 does not wait for the files that the others send.
                self._is_stopped = sys.exception() is not None or not self._follows
                self._condition.notify_all()
                while self._is_running and not leaves:
                    self._condition.wait(_LOOK_SECONDS)
            if not self._follows:
                with contextlib.suppress(ServiceError):
                    self._told(-1)
            if self._waiting:
                _log.warning(
                    't5ckpt: %s in %s, and not in %s yet. The next start with this local directory uploads it.',
                    numbered_are('step', sorted(self._waiting)),
                    self._local.url(),
                    self._run.url(),
                )
            self.has_started = False


def _caught(call: Callable[..., Any], *given: Any) -> tuple[Any, str]:
    """The result of a call, and the text of its _NotUploadableError."""
    try:
        return call(*given), ''
    except _NotUploadableError as error:
        return None, str(error)
