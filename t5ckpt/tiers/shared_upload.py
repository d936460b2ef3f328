"""The upload of a step that several processes saved: each sends the files of its list, and process 0 commits with the manifest.

Process 0 decides which step is uploaded, and sends orders to the others: numbered keys of the coordination service, in a
channel of their own. The other processes wait for orders in a thread, without a barrier and without a time-out, since an upload
may take hours. An order is answered when the files are in the run's storage. The last order is :class:`Close`.

If the disk of one process of the save is lost, the others upload the files of its list, see ``tiers/lost_files.py``, and process
0 writes the list, whose checksum is in the facts.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from t5ckpt.commit.markers import seconds_for
from t5ckpt.commit.transaction import Transaction
from t5ckpt.core.interrupt_safe_event import InterruptSafeEvent
from t5ckpt.core.keys import join, parents_of
from t5ckpt.core.protocols import Clock
from t5ckpt.core.thread_pool import start_thread
from t5ckpt.distributed.processes import ServiceError
from t5ckpt.errors import CheckpointNotFoundError, LocalDirError, NotPersistedError, StorageError
from t5ckpt.format.facts import decode_facts
from t5ckpt.format.file_checksums import FileChecksums, FileEntry, entry_of
from t5ckpt.format.names import MANIFEST, file_checksums_name
from t5ckpt.storage import Storage
from t5ckpt.tiers.lost_files import pack, unpack
from t5ckpt.tiers.orders import Answer, Close, Ended, Failed, Order, Orders, Refused, Upload
from t5ckpt.tiers.part import Part
from t5ckpt.tiers.queue import StepUploads, UploadStopped, not_uploaded_anymore
from t5ckpt.tiers.send_lists import read_part, send_lists
from t5ckpt.tiers.upload import NotUploadableError, UnreadableStepError

_log = logging.getLogger('t5ckpt')
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.1, 2.0


class Leader:
    """Uploads steps with all processes; in process 0."""

    def __init__(self, orders: Orders, local: Storage, run: Storage, clock: Clock):
        """Takes the orders, and the two storages."""
        self.orders = orders
        self._local, self._run, self._clock = local, run, clock

    def copy(self, step: int, pace: Callable[[int], None], rate: float, replaces: bool) -> int:
        """Copies a step of all local directories, and commits it; returns its bytes.

        Raises:
          NotUploadableError: files of it are damaged, or on no disk.
          UnreadableStepError: the disk of any process failed.
          StorageError: the run's storage failed, for any process.
          UploadStopped: ``pace`` has raised it.
        """
        run, part = self._run, read_part(self._local, step)
        # Of all processes, since an upload waits for saves.
        nbytes = decode_facts(part.facts, run.url()).bytes or 0
        with Transaction(run, step, self._clock, overwrite=replaces, seconds=seconds_for(nbytes, rate)) as work:
            directory = join(work.directory, work.generation)
            number = self.orders.send(Upload(step, part.save, directory))
            try:
                lost = self.orders.lost.of(part)
                nbytes, positions = send_lists(part, run, directory, pace, lost)
                answers = self._answers(number, pace)
            except BaseException:
                self.orders.stop(number)
                self._answers(number, lambda _: None)
                raise
            uploaded_lists = self._check(answers, part)
            if lost is not None and self.orders.lost.index not in uploaded_lists:
                nbytes += self._write_lost_list(directory, part, [lost, *(unpack(answer.lost) for answer in answers)])
            grids = part.numbers().locations
            names = [name for entries in part.lists.values() for name in entries]
            work.positions = {*positions, *(name for answer in answers for name in answer.positions)}
            manifest, facts = work.relocated(part.manifest, part.facts, run.url(directory))
            work.commit(manifest, facts, sorted({*grids, *parents_of(names)}))
        return nbytes + sum(answer.nbytes for answer in answers)

    def _answers(self, number: int, pace: Callable[[int], None]) -> list[Answer]:
        pause = _LOOK_SECONDS
        while len(answers := self.orders.collect_answers(number)) < self.orders.processes.count - 1:
            pace(0)
            if not threading.main_thread().is_alive():
                raise UploadStopped
            time.sleep(pause)
            pause = min(_LONGEST_LOOK_SECONDS, 1.5 * pause)
        return answers

    def _write_lost_list(self, directory: str, part: Part, entry_maps: Sequence[Mapping[str, FileEntry]]) -> int:
        """Writes the list of the lost disk, whose files the processes have sent; returns its size."""
        name = file_checksums_name(self.orders.lost.index)
        data = FileChecksums({key: entry for entries in entry_maps for key, entry in entries.items()}).encode()
        if decode_facts(part.facts, MANIFEST).digests.get(name) != entry_of(data):
            raise NotUploadableError(f'{name} is on no disk, and cannot be made from the other disks')
        self._run.write(join(directory, name), data)
        return len(data)

    def _check(self, answers: list[Answer], part: Part) -> set[int]:
        """Raises for an answer that is an error, or if a list was on no disk; returns the indices of those that were on one."""
        failed = [answer for answer in answers if answer.error]
        for answer in sorted(failed, key=lambda answer: (answer.is_fatal, answer.is_unreadable), reverse=True):
            if answer.is_fatal:
                raise NotUploadableError(answer.error)
            if answer.is_unreadable:
                raise UnreadableStepError(errno.EIO, answer.error)
            raise StorageError(0, answer.error)
        uploaded_lists = {index for answer in answers for index in answer.lists} | {*part.complete_lists()}
        missing = sorted(
            set(range(part.count))
            - uploaded_lists
            - {self.orders.lost.index if self.orders.lost.save == part.save else -1}
        )
        if missing:
            raise NotUploadableError(
                f'the files that the processes {missing} of the save were to upload are on no disk'
            )
        return uploaded_lists


class Follower(StepUploads):
    """Carries out the orders of process 0 in a thread, and uploads in another one."""

    def __init__(
        self,
        orders: Orders,
        local: Storage,
        run: Storage,
        pace: Callable[[int, Callable[[], None]], None],
        end: Callable[[Ended], None],
        waiting: Callable[[], list[int]],
    ):
        """Starts the thread.

        Args:
          orders: of process 0.
          local: the local directory.
          run: the run's storage.
          pace: waits until a file of a size may be sent; calls a function meanwhile.
          end: forgets that a step waits, unless the disk has another save of it than the one that was uploaded.
          waiting: the steps that wait.
        """
        super().__init__(run.url())
        self._orders = orders
        self._local, self._run = local, run
        self._pace = pace
        self._end = end
        self._waiting = waiting
        self._error = ''
        self._is_uploading = self._has_left = False
        self._ended = InterruptSafeEvent()
        self._looked = 0.0
        self._upload_ended: InterruptSafeEvent | None = None
        if start_thread(self._follow, 't5ckpt-upload', daemon=False) is None:
            self._ended.set()

    def is_uploading(self) -> bool:
        return self._is_uploading

    def add(self, steps: Iterable[int], kept: Collection[int] = ()) -> None:
        """Does nothing, as ``check`` and ``cancel``: process 0 decides."""

    def check(self) -> None:
        pass

    def cancel(self, step: int) -> None:
        pass

    def wait(self, step: int | None) -> None:
        if os.getpid() != self._process:
            return
        with self._guard:
            failed = self._failed_attempts
            while self.refusal is None:
                # Before the steps are read: the last orders may end them.
                has_ended = self._ended.is_set() or self._has_left
                waiting = [waiting_step for waiting_step in self._waiting() if step in (waiting_step, None)]
                if not waiting:
                    break
                if has_ended:
                    raise not_uploaded_anymore(waiting, self._run.url())
                if self._failed_attempts > failed:
                    raise NotPersistedError(f'{self._error} The upload is repeated.')
                self._condition.wait(0.5)
            if self.refusal is not None:
                raise self.refusal
            self.outcomes.check(step)

    def leave(self) -> None:
        """From now on, answers all orders with an error; does not wait.

        An error ends this program, and process 0 may wait for it elsewhere, such as in a collective of the training.
        """
        self._has_left = True

    def stop(self) -> None:
        while not self._has_left and os.getpid() == self._process and not self._ended.wait(0.5):
            pass

    def _follow(self) -> None:
        try:
            while threading.main_thread().is_alive():
                received = self._orders.receive()
                if received is None:
                    continue
                if isinstance(received[1], Close):
                    return
                self._carry_out(*received)
        except (ServiceError, TimeoutError) as error:
            # Process 0 has ended, or died; the save that runs says so.
            _log.info('t5ckpt: this process uploads nothing more: %s', error)
        finally:
            if self._upload_ended is not None:
                self._upload_ended.wait()
            self._ended.set()
            with self._guard:
                self._condition.notify_all()

    def _carry_out(self, number: int, order: Order) -> None:
        if isinstance(order, Upload):
            # In a thread of its own: an order to drop a step, whose files may then be deleted, does not wait for the upload.
            self._is_uploading = True
            upload = functools.partial(self._upload_and_answer, number, order)
            self._upload_ended = start_thread(upload, 't5ckpt-upload', daemon=False)
            if self._upload_ended is None:
                upload()
            return
        with self._guard:
            if isinstance(order, Failed):
                self._failed_attempts += 1
                self._error = order.text
            elif isinstance(order, Refused):
                self.refusal = LocalDirError(order.text)
            elif isinstance(order, Ended):
                if order.why:
                    self.outcomes.note_dropped(order.step, order.why, is_failure=order.is_failure)
                else:
                    self.outcomes.note_uploaded(order.step)
                try:
                    self._end(order)
                except Exception:  # noqa: BLE001 - the next start drops it
                    _log.exception('t5ckpt: the end of the upload of step %d could not be recorded', order.step)
            self._condition.notify_all()

    def _upload_and_answer(self, number: int, order: Upload) -> None:
        try:
            self._orders.answer(number, self._upload(number, order))
        except (ServiceError, TimeoutError) as error:
            _log.info('t5ckpt: process 0 was not told of an upload: %s', error)
        finally:
            self._is_uploading = False

    def _part_of(self, order: Upload) -> Part | None:
        """The part of this process; None if its disk has none, such as a new one, or one of another save."""
        try:
            part = read_part(self._local, order.step)
        except CheckpointNotFoundError:
            return None
        return part if part.save == order.save else None

    def _upload(self, number: int, order: Upload) -> Answer:
        def check() -> None:
            if self._has_left:
                raise UploadStopped
            if time.monotonic() - self._looked > _LONGEST_LOOK_SECONDS:
                self._looked = time.monotonic()
                if self._orders.is_stopped(number):
                    raise UploadStopped

        try:
            check()
            part = self._part_of(order)
            if part is None:
                return Answer(lost=pack({}))
            lost = self._orders.lost.of(part)
            nbytes, positions = send_lists(part, self._run, order.directory, lambda size: self._pace(size, check), lost)
            text = pack(lost or {})
        except NotUploadableError as error:
            return Answer(error=str(error), is_fatal=True)
        except UnreadableStepError as error:
            return Answer(error=error.strerror or str(error), is_unreadable=True)
        except UploadStopped:
            return Answer(error=f'process {self._orders.processes.index} has stopped the upload')
        except ServiceError:
            raise
        except Exception as error:  # noqa: BLE001 - process 0 repeats the upload
            return Answer(error=f'process {self._orders.processes.index}: {type(error).__name__}: {error}')
        return Answer(part.complete_lists(), nbytes, positions, text)
