"""Uploads the steps that wait, the newest first, in a thread of its own.

When the thread is free it takes the newest step, the one that was saved last, and drops older ones: they would be of no use to a
restart. A step that replaces one of the run is not dropped, since the run would keep the old values. A failed upload is repeated
from its beginning, in a directory of its own, after a pause that grows to a minute. The log has one warning per outage.

In a job of several processes, process 0 orders each upload, each process sends the files that were assigned to it in the save,
and process 0 commits when all have answered (``tiers/channel.py``).

Notes: the thread is not a daemon and ends when no step waits. An interpreter that exits without ``close`` waits for an upload,
but not for a storage that fails.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any

from t5ckpt.catalog.listing import has_step, newest, waiting_steps
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.markers import SLOWEST_RATE, seconds_for
from t5ckpt.commit.occupancy import occupant_of
from t5ckpt.commit.transaction import Transaction
from t5ckpt.commit.transfer import copy_files
from t5ckpt.core.keys import join, parents_of
from t5ckpt.core.protocols import Clock
from t5ckpt.core.text import numbered, numbered_are, some_of
from t5ckpt.core.thread_pool import start_thread
from t5ckpt.distributed.processes import ServiceError
from t5ckpt.errors import (
    CheckpointNotFoundError,
    FormatError,
    LocalDirError,
    NotDurableError,
    NotPersistedError,
    RemoteError,
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
from t5ckpt.storage import is_disk_error
from t5ckpt.tiers.channel import UploadChannel
from t5ckpt.tiers.directory import LocalDirectory
from t5ckpt.tiers.disk_step import DiskStep, save_in, save_on_disk
from t5ckpt.tiers.local_tier import LocalTier
from t5ckpt.tiers.waiting import PersistSchedule, note_ended, note_waiting

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_LOOK_SECONDS = 0.5
# An upload must not take all connections or the processor from the training.
_WORKERS = 4
_OVERWRITES = 'it overwrites a step that the run may have'
_log = logging.getLogger('t5ckpt')


class NotUploadableError(Exception):
    """A step that no later attempt can upload."""


class _StoppedError(Exception):
    """The running upload is to end."""


class RateLimit:
    """Spaces files so that their bytes keep a rate, on average over a few files. Safe from any thread."""

    def __init__(self, gigabits: float | None):
        """Takes the rate in gigabits (10^9 bits) per second; None sets no limit."""
        self.bytes_per_second = math.inf if gigabits is None else gigabits * 1e9 / 8
        self._guard = threading.Lock()
        self._free = 0.0

    def wait(self, nbytes: int, check: Callable[[], None]) -> None:
        """Waits until a file of this size may be sent; ``check`` is called meanwhile, and may raise."""
        check()
        with self._guard:
            begin = max(time.monotonic(), self._free)
            self._free = begin + nbytes / self.bytes_per_second
        while (left := begin - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_SECONDS))
            check()


class Uploads:
    """The uploads of one process. Its methods may be called from any thread.

    Attributes:
      has_started: whether the uploads have begun, and are not closed.
    """

    def __init__(
        self,
        tier: LocalTier,
        directory: LocalDirectory,
        clock: Clock,
        uploaded: Callable[[], Collection[StepInfo]],
        retain: Callable[..., None],
    ):
        """Reads and starts nothing.

        Args:
          tier: the options.
          directory: the local directory.
          clock: unix seconds.
          uploaded: the facts of the steps that the run has, or that wait.
          retain: called after each end of an upload, with the step and ``is_uploaded=``; carries out retention.
        """
        self._directory, self._local, self._run = directory, directory.storage, directory.run
        self._clock, self._retain = clock, retain
        self._schedule = PersistSchedule(tier.persist, uploaded, clock)
        # Many steps lie between two saves.
        self._watched = WatchedMetrics(tier.persist, 'persist', 10)
        self._limit = RateLimit(tier.upload_gbps)
        # Held in the commit of a step that is to wait, too: the end of an earlier upload of the step removes no file meanwhile.
        # In C, since an exception from a signal handler may leave the lock of ``with condition`` taken.
        self._guard = threading.RLock()
        self._condition = threading.Condition(self._guard)
        # As the files of ``to_persist``, in the order of the saves, with whether each replaces a step of the run.
        self._waiting: dict[int, bool] = {}
        # From its choice until retention after its end.
        self._current: int | None = None
        # Why steps were not uploaded; '' for those that were.
        self._outcomes: dict[int, str] = {}
        # The last step that could not be uploaded, until a wait raises it or a newer step is uploaded.
        self._failed: int | None = None
        # Of the latest attempt, until one succeeds. After a LocalDirError there are no more.
        self._error: Exception | None = None
        # The step that the disk could not read in the latest attempt.
        self._unreadable: int | None = None
        # As the run's storage has last answered; None before.
        self._newest_of_run: int | None = None
        self.has_started = self._is_running = self._is_stopped = False
        self._pause_end = 0.0
        self._channel: UploadChannel | None = None
        self._discard_chunks: Callable[[], None] = lambda: None

    # --- the steps that wait ---------------------------------------------------------------------------------------------------

    @property
    def _follows(self) -> bool:
        return self._channel is not None and self._channel.index != 0

    @property
    def _is_refused(self) -> bool:
        return isinstance(self._error, LocalDirError)

    def take(self, waiting: Sequence[tuple[int, bool]], dropped: Sequence[tuple[int, str]]) -> None:
        """Takes the uploads that an earlier program did not end; the next save is uploaded in place of those ``dropped``."""
        self._waiting = dict(waiting)
        for step in waiting_steps(self._local) - self._waiting.keys():
            note_ended(self._local, step)
        for step, replaces in waiting:
            # The disk of this process may be new.
            note_waiting(self._local, step, replaces=replaces)
        for step, why in dropped:
            self._schedule.owe(step)
            self._outcomes[step], self._failed = why, step

    def start(self, channel: UploadChannel | None) -> None:
        """Begins the uploads; ``channel`` is that to other processes, if there are any."""
        self._channel, self.has_started = channel, True
        if channel is not None and self._follows:
            self._is_running = start_thread(lambda: self._follow(channel), 't5ckpt-upload', daemon=False) is not None
        else:
            self._start_thread()

    def note_request(self, request: SaveRequest) -> None:
        """Takes a save that begins, and warns once if it lacks a metric of the policy; in the caller's thread.

        Raises:
          LocalDirError: the local directory is of another run, so nothing is uploaded.
        """
        if isinstance(self._error, LocalDirError):
            raise self._error
        # Chunks of an unchanged array may be links to a file that an upload finds damaged.
        self._discard_chunks = request.context.discard_previous
        if request.round.is_leader:
            self._watched.warn_if_missing(request.step, request.facts.metrics, request.context.notices)

    def reason(self, request: SaveRequest, *, preempted: bool) -> str | None:
        """The reason to upload a step that is being saved, or None; in process 0."""
        is_uploading = self._current is not None
        reason = self._schedule.reason(
            request.step, request.facts.metrics, preempted=preempted, is_uploading=is_uploading
        )
        return _OVERWRITES if request.overwrite and self._may_replace(request.step) else reason

    def _may_replace(self, step: int) -> bool:
        """Whether the run has a step, or gets it; also if its storage does not answer."""
        if step in self._waiting:
            return True
        if self._error is None:
            with contextlib.suppress(T5CkptError):
                found = newest(self._run)
                self._newest_of_run = -1 if found is None else found.step
                return has_step(self._run, step)
        return self._newest_of_run is None or step <= self._newest_of_run

    @contextlib.contextmanager
    def around_commit(self, request: SaveRequest, reason: str | None) -> Generator[None]:
        """Surrounds the local commit of a step: records before it that the step is to be uploaded, and begins that after it."""
        step = request.step
        if reason is None:
            yield
            return
        failure: NotDurableError | None = None
        replaces = reason == _OVERWRITES
        with self._guard:
            with contextlib.ExitStack() as undo:
                if step not in self._waiting:
                    undo.callback(note_ended, self._local, step)
                note_waiting(self._local, step, replaces=replaces)
                try:
                    yield
                except NotDurableError as error:
                    # The step is listed, so it is uploaded as any other.
                    failure = error
                undo.pop_all()
            self._schedule.note_taken(step, request.facts.metrics)
            _log.info('t5ckpt: will upload step %d to %s: %s', step, self._run.url(), reason)
            self._add(step, replaces)
        if failure is not None:
            raise failure

    def _add(self, step: int, replaces: bool) -> None:
        with self._guard:
            others = {each: value for each, value in self._waiting.items() if each != step}
            self._waiting = others | {step: replaces}
            self._forget_outcome(step)
            self._drop_older()
        if not self._follows:
            self._start_thread()

    def _start_thread(self) -> None:
        with self._guard:
            begins = bool(self._waiting) and not (self._is_running or self._is_stopped)
            self._is_running |= begins
        if begins and start_thread(self._upload_all, 't5ckpt-upload', daemon=False) is None:
            self._upload_all()

    def _forget_outcome(self, step: int) -> None:
        self._outcomes.pop(step, None)
        self._failed = None if self._failed == step else self._failed

    def _drop_older(self) -> None:
        """Drops the steps that are older than the newest one, and that are not being uploaded and replace nothing."""
        newest = next(reversed(self._waiting), None)
        kept = (newest, self._current)
        for step in [step for step, replaces in self._waiting.items() if step not in kept and not replaces]:
            why = f'step {newest} was saved later'
            _log.info('t5ckpt: skipping the upload of step %d to %s: %s', step, self._run.url(), why)
            note_ended(self._local, step)
            del self._waiting[step]
            self._outcomes[step] = why
        self._condition.notify_all()

    def forget(self, step: int) -> None:
        """Forgets that a local step waits, which no longer exists."""
        with self._guard:
            self._waiting.pop(step, None)
            self._forget_outcome(step)
            self._condition.notify_all()
            note_ended(self._local, step)

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
                self._add(step, replaces)
            raise
        self.forget(step)

    # --- uploading ----------------------------------------------------------------------------------------------------

    def _upload_all(self) -> None:
        """The thread of process 0, or of a job of one process."""
        seconds, is_exiting = _FIRST_PAUSE_SECONDS, False
        while True:
            with self._guard:
                step = next(reversed(self._waiting), None)
                if step is None or self._is_stopped or self._is_refused or is_exiting:
                    self._is_running = False
                    self._condition.notify_all()
                    return
                self._begin(step)
            has_failed = self._attempt(step)
            with self._guard:
                self._end()
                is_exiting = has_failed and not self._pause(seconds)
            seconds = min(2 * seconds, _LONGEST_PAUSE_SECONDS) if has_failed else _FIRST_PAUSE_SECONDS

    def _begin(self, step: int) -> None:
        # In the other processes, the commit of the step ends before.
        with self._guard:
            self._current = step
            self._drop_older()

    def _end(self) -> None:
        with self._guard:
            self._current = None
            self._condition.notify_all()

    def _pause(self, seconds: float) -> bool:
        """Waits, with the lock; returns False if the interpreter exits. Ends when a caller waits for an upload."""
        self._pause_end = time.monotonic() + seconds
        while (left := self._pause_end - time.monotonic()) > 0 and not self._is_stopped:
            if not threading.main_thread().is_alive():
                return False
            self._condition.wait(min(left, _LOOK_SECONDS))
        return True

    def _attempt(self, step: int) -> bool:
        """Uploads a step; returns whether that is to be repeated after a pause."""
        started, save = time.monotonic(), save_on_disk(self._local, step)
        error: Exception | None = None
        try:
            self._tell('order', step)
            nbytes = self._copy(step)
            seconds = self._schedule.upload_seconds = time.monotonic() - started
            _log.info('t5ckpt: uploaded step %d to %s: %d bytes in %.2f s', step, self._run.url(), nbytes, seconds)
        except (NotUploadableError, _StoppedError) as caught:
            error = caught
        except LocalDirError as caught:
            error = caught
            _log.error('t5ckpt: nothing is uploaded: %s', caught)
        except Exception as caught:  # noqa: BLE001 - repeated, and raised by wait
            error = caught
            self._unreadable = step if is_disk_error(caught) else None
            if self._error is None:
                text = 't5ckpt: the upload of step %d to %s failed, and is repeated until it succeeds; saves go on: %s'
                trace = None if isinstance(caught, T5CkptError) else caught
                _log.warning(text, step, self._run.url(), caught, exc_info=trace)
        self._take_end(step, save, error)
        try:
            self._tell('end', save, _encoded(error))
        except (ServiceError, TimeoutError) as caught:
            # The job is ending. The next start finds the steps that wait.
            _log.info('t5ckpt: the other processes were not told of an upload: %s', caught)
        return error is not None and step in self._waiting

    def _tell(self, *message: Any) -> None:
        if self._channel is not None:
            self._channel.put(message)

    def _take_end(self, step: int, save: str, error: Exception | None) -> None:
        """Records how the upload of a save of a step has ended, in all processes."""
        if error is None or isinstance(error, NotUploadableError):
            self._record_end(step, save, '' if error is None else str(error).removesuffix('.'))
        elif step in self._waiting:
            self._error = error

    def _record_end(self, step: int, save: str, why: str) -> None:
        """Records that a save of a step is uploaded or, with ``why``, cannot be."""
        with self._guard:
            # Without a save, process 0 could not read the step.
            is_overwritten = bool(save) and save_on_disk(self._local, step) not in ('', save)
            if is_overwritten or step not in self._waiting:
                return
            note_ended(self._local, step)
            del self._waiting[step]
            self._outcomes[step] = why
            self._failed = step if why else None
            if not why:
                self._newest_of_run = max(step, self._newest_of_run or step)
                if self._error is not None:
                    _log.warning('t5ckpt: uploads to %s work again', self._run.url())
                self._error = None
        if why:
            _log.error('t5ckpt: step %d is not uploaded to %s: %s', step, self._run.url(), why)
            self._schedule.owe(step)
            self._discard_chunks()
        try:
            self._retain(step, is_uploaded=not why)
        except Exception:  # noqa: BLE001 - a policy is the user's code, and the step is uploaded
            _log.exception('t5ckpt: retention after the upload of step %d failed', step)

    def _check(self) -> None:
        if self._is_stopped or self._current not in self._waiting:
            raise _StoppedError('it was stopped')

    def _copy(self, step: int) -> int:
        """Copies a step and commits it; returns the bytes, 0 if the run has this save already.

        Raises:
          NotUploadableError: the local step is damaged or gone, or the run has this step of another save.
          LocalDirError: the local directory is of another run.
          StorageError: the run's storage failed, or that of another process.
        """
        run, replaces = self._run, self._waiting.get(step, False)
        self._directory.share_id()
        disk, occupant = self._read(step), occupant_of(run, step)
        if occupant is not None and occupant.is_t5x and save_in(run, step) == disk.identity.save:
            return 0
        if occupant is not None and not (replaces and occupant.is_t5x):
            kind = 'of another save' if occupant.is_t5x else f'in the layout of {occupant.layout}'
            cure = (
                'To replace it, save the step with overwrite=True, or delete it before the save (t5ckpt rm --tier persistent)'
                if occupant.is_t5x
                else 'Remove it with the program that wrote it'
            )
            raise NotUploadableError(f'{run.url(occupant.name)} exists, {kind}. {cure}')
        seconds = seconds_for(disk.identity.facts.bytes or 0, min(SLOWEST_RATE, self._limit.bytes_per_second))
        try:
            with Transaction(
                run, step, self._clock, overwrite=replaces, seconds=seconds, listed=collect(run, self._clock),
                is_shared=self._channel is not None,
            ) as work:  # fmt: skip
                nbytes, work.positions = self._sent_by_all(disk, join(work.directory, work.generation))
                where = run.url(join(work.directory, work.generation))
                leaves = decode_manifest(disk.manifest, where).leaves.values()
                arrays = {leaf.location for leaf in leaves if isinstance(leaf, StoredArray)}
                manifest, facts = work.relocated(disk.manifest, disk.facts, where)
                work.commit(manifest, facts, sorted({*arrays, *parents_of(work.positions)}))
        except StepKeptError as error:
            raise NotUploadableError(str(error)) from error
        return nbytes

    def _read(self, step: int) -> DiskStep:
        with self._reading(step):
            return DiskStep.read(self._local, step)

    @contextlib.contextmanager
    def _reading(self, step: int) -> Generator[None]:
        """Maps the error of a file of a local step that is damaged or gone, or that the disk could not read before, either."""
        try:
            yield
        except (FormatError, CheckpointNotFoundError, StorageError) as error:
            if isinstance(error, StorageError) and not (is_disk_error(error) and self._unreadable == step):
                raise
            raise NotUploadableError(f'{self._local.url(step_dir(step))} cannot be read: {error}') from error

    def _send(self, disk: DiskStep, directory: str) -> tuple[int, list[str]]:
        """Sends the files that were assigned to this process in the save, and their list; returns bytes, and positions."""

        def read(name: str) -> bytes:
            with self._reading(disk.step):
                return disk.read_file(name)

        def pace(nbytes: int) -> None:
            self._limit.wait(nbytes, self._check)

        sizes = {name: size for name, (size, _) in disk.assigned.items()}
        sizes[file_checksums_name(disk.identity.role)] = 0
        nbytes = sum(copy_files(read, sizes, self._run, directory, _WORKERS, pace))
        return nbytes, [name for name in disk.assigned if is_position(name)]

    def _sent_by_all(self, disk: DiskStep, directory: str) -> tuple[int, list[str]]:
        """As :meth:`_send`, and has the other processes send theirs."""
        identity, channel = disk.identity, self._channel
        answers: list[Any] = []
        self._tell('send', identity.save, directory)
        try:
            nbytes, positions = self._send(disk, directory)
        finally:
            if channel is not None:
                answers = channel.get_answers(self._check)
        errors = [error for *_, encoded in answers if (error := _decoded(encoded)) is not None]
        if errors:
            raise max(errors, key=lambda error: isinstance(error, NotUploadableError))
        roles = {identity.role, *(role for role, *_ in answers)}
        missing = [str(role) for role in range(identity.count) if role not in roles]
        if missing:
            raise NotUploadableError(f'the disks of the processes {some_of(missing, 8)} of the save are lost')
        for _, sent, names, _ in answers:
            nbytes += sent
            positions += names
        return nbytes, positions

    # --- the other processes ------------------------------------------------------------------------------------------

    def _follow(self, channel: UploadChannel) -> None:
        """The thread of the other processes."""
        step = -1
        try:
            while message := channel.get():
                match message:
                    case ['order', step]:
                        self._begin(step)
                    case ['send', save, directory]:
                        channel.put_answer(self._answer(step, save, directory))
                    case _:
                        self._take_end(step, message[1], _decoded(message[2]))
                        self._end()
        except (ServiceError, TimeoutError) as error:
            # Process 0 has ended, or died; the save that runs says so.
            _log.info('t5ckpt: this process uploads nothing more: %s', error)
        finally:
            self._is_running = False
            self._end()

    def _answer(self, step: int, save: str, directory: str) -> list[Any]:
        """Sends the files of this process; returns its role, the bytes, the positions, and the error."""
        try:
            self._check()
            if save_on_disk(self._local, step) != save:
                # A new disk.
                return [-1, 0, [], None]
            disk = self._read(step)
            return [disk.identity.role, *self._send(disk, directory), None]
        except Exception as error:  # noqa: BLE001 - process 0 repeats the upload
            self._unreadable = step if is_disk_error(error) else None
            return [-1, 0, [], _encoded(error)]

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
        if step is not None:
            self._check_in_run(step, is_waiting=step in waiting)
        elif waiting:
            verb = 'waits for its' if len(waiting) == 1 else 'wait for their'
            text = f'{numbered("step", waiting)} {verb} upload to {self._run.url()}: {self._why_not_begun()}'
            raise NotPersistedError(text)

    def _wait(self, step: int | None) -> None:
        self._pause_end = 0.0
        self._condition.notify_all()
        error = self._error
        while not self._is_refused:
            unended = sorted({*self._waiting, *([] if self._current is None else [self._current])})
            if step not in unended and (step is not None or not unended):
                break
            text = f'{numbered_are("step", unended)} not in {self._run.url()}'
            if not self._is_running or self._is_stopped:
                raise NotPersistedError(
                    f'{text}, since the checkpointer is closed. The next start with this local directory uploads it.'
                )
            if self._error not in (None, error):
                raise NotPersistedError(f'{text} yet: {self._error} The upload is repeated.') from self._error
            self._condition.wait(_LOOK_SECONDS)
        if isinstance(self._error, LocalDirError):
            raise self._error
        ended = self._failed if step is None else step
        why = '' if ended is None else self._outcomes.get(ended)
        if why:
            self._failed = None
            raise NotPersistedError(f'step {ended} was not uploaded to {self._run.url()}: {why}.')

    def _why_not_begun(self) -> str:
        if self._directory.is_forked:
            return 'the process from which this one was forked uploads it.'
        if self._directory.read_only:
            return 'a checkpointer with read_only=True uploads nothing.'
        return 'the upload begins with the first restore or save.'

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
            why = 'persist did not take it.'
            if is_waiting:
                why = f'it waits for its upload: {self._why_not_begun()}'
            elif step in self._outcomes:
                why = 'it was uploaded, and the keep policy has deleted it since.'
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
        leaves = self._follows and sys.exception() is not None
        self._is_stopped = leaves
        try:
            if self._waiting and not self._is_refused and not leaves:
                _log.info('t5ckpt: waiting for the upload of step %d to %s', [*self._waiting][-1], self._run.url())
                with contextlib.suppress(NotPersistedError):
                    self.wait(None)
        finally:
            with self._guard:
                self._is_stopped = leaves or not self._follows
                self._condition.notify_all()
                while self._is_running and not leaves:
                    self._condition.wait(_LOOK_SECONDS)
            if not self._follows:
                with contextlib.suppress(ServiceError, TimeoutError):
                    self._tell()
            if self._waiting and not self._is_refused:
                _log.warning(
                    't5ckpt: %s in %s, and not in %s yet. The next start with this local directory uploads it.',
                    numbered_are('step', sorted(self._waiting)),
                    self._local.url(),
                    self._run.url(),
                )
            self.has_started = False


def _encoded(error: Exception | None) -> list[str] | None:
    return None if error is None else [type(error).__name__, str(error)]


def _decoded(encoded: Sequence[str] | None) -> Exception | None:
    if encoded is None:
        return None
    kinds = {'NotUploadableError': NotUploadableError, 'LocalDirError': LocalDirError}
    return kinds.get(encoded[0], RemoteError)(encoded[1])
