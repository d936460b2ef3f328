"""The request of one save, what all saves of a checkpointer share, and whether the step of a save may be written."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from t5ckpt.catalog.layouts import ListedStep, other_layout
from t5ckpt.catalog.listing import newest, steps_in
from t5ckpt.catalog.locate import contents_of_new_run
from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.occupancy import occupant_of
from t5ckpt.commit.removal import check_not_kept, check_removable
from t5ckpt.commit.retention import Retention
from t5ckpt.core.call_site import CallSite, Notices
from t5ckpt.core.protocols import Clock, Progress
from t5ckpt.core.text import some_of
from t5ckpt.distributed.processes import lone_process
from t5ckpt.distributed.rounds import CoordinationRound
from t5ckpt.errors import StorageError
from t5ckpt.format.facts import Facts
from t5ckpt.planning.save_plan import SaveOptions
from t5ckpt.save.chunk_reuse import WrittenArrays, find_previous
from t5ckpt.save.encoding import CodecSelection
from t5ckpt.storage import Storage

STREAM_BYTES = 512 * 10**6
"""Bytes in flight by default: enough for a few chunks of 64 MiB on their way to the disk."""
_log = logging.getLogger('t5ckpt')


class SaveContext:
    """The objects that all saves of a checkpointer share, or the one of a converter.

    Attributes:
      storage: the run, or the local directory of a checkpointer with ``local``.
      options: of the plans, such as the codec and the size of chunks.
      retention: of ``storage``, carried out after a commit; None for a converter.
      progress: called with (bytes done, bytes in all).
      clock: unix seconds.
      notices: the warnings that the checkpointer gives once.
      codec_selection: chooses the codecs that depend on the data.
      later_steps: of the run, to say that saves are below them.
      reuses: whether chunks are linked that equal those of the previous checkpoint.
      previous: the arrays that were committed last, from which the next save links chunks; None links none.
    """

    def __init__(
        self,
        storage: Storage,
        options: SaveOptions,
        retention: Retention | None = None,
        progress: Progress | None = None,
        clock: Clock = time.time,
        notices: Notices | None = None,
        *,
        reuses: bool = False,
    ):
        """Reads nothing; see the attributes."""
        self.storage, self.options, self.retention = storage, options, retention
        self.progress, self.clock = progress, clock
        self.notices = Notices() if notices is None else notices
        self.codec_selection, self.later_steps = CodecSelection(storage), LaterSteps(storage)
        self.reuses = reuses and (storage.links or storage.copies)
        # Before the first save, one that is not there.
        self.previous = WrittenArrays('') if self.reuses else None

    def find_previous(self, *, searches: bool) -> WrittenArrays | None:
        """The checkpoint to link chunks from, at the beginning of a save.

        ``searches``: on storage in the first save, and if the last one was deleted. In a job of several processes it is the last
        one that the job committed, which all of them know without reading storage.
        """
        # Another thread may discard it.
        previous = self.previous
        if previous is not None and not previous.is_there(self.storage):
            previous = self.previous = find_previous(self.storage) if searches else None
        return previous

    def discard_previous(self) -> None:
        """Links nothing in the next save, since a chunk on the disk is damaged; called from any thread."""
        self.previous = None


def _lone_round() -> CoordinationRound:
    return CoordinationRound(lone_process(), '', 'a conversion', math.inf, ())


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """One save, without its state, whose arrays must not be kept alive after staging.

    Attributes:
      context: of all saves of the checkpointer.
      step: as which the state is saved.
      budget_bytes: of values in flight; a larger chunk is written alone.
      overwrite: whether it replaces a complete checkpoint of the step, after the new one is complete.
      facts: those that the caller gives, such as the metrics.
      files: further files of the step, by name in its directory, such as the positions of data iterators.
      round: of all processes of the job.
      in_background: whether the caller continues during the save, and may write to its host arrays.
      names_step: whether the caller has named the step, which may differ from that of the state.
      site: the line of the caller, for warnings from the thread of the save.
      in_parts: whether each process commits what its devices hold to a storage of its own, see ``save/parts.py``.
      is_for_others: whether the step that exists is of another job, so that it is renamed, and the step is saved.
      upload_reason: called in process 0 before the commit; why the step is also uploaded, or None.
      around_commit: surrounds the commit, with the answer of ``upload_reason``; with ``in_parts`` in every process, else in
        process 0.
      started: the time of the call, by ``time.monotonic``.
    """

    context: SaveContext
    step: int
    budget_bytes: int
    overwrite: bool = False
    facts: Facts = dataclasses.field(default_factory=Facts)
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict[str, bytes])
    round: CoordinationRound = dataclasses.field(default_factory=_lone_round)
    in_background: bool = False
    names_step: bool = False
    site: CallSite | None = None
    in_parts: bool = False
    is_for_others: Callable[[], bool] = lambda: False
    upload_reason: Callable[[], str | None] = lambda: None
    around_commit: Callable[[str | None], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    started: float = dataclasses.field(default_factory=time.monotonic)

    def find_kept(self) -> ListedStep | None:
        """The complete step that exists, unless the save replaces it; None if the save may write the step.

        Raises:
          UnsupportedFormatError: the step is to be replaced, and is in another layout.
          AccessDeniedError: the step is to be replaced, and belongs to another user.
          StepKeptError: the step is to be replaced, and is pinned or held by a reader.
        """
        storage, retention = self.context.storage, self.context.retention
        # A converter has looked before it read its source.
        if retention is None or retention.is_surely_new(self.step):
            return None
        occupant = occupant_of(storage, self.step)
        if occupant is None or self.is_for_others():
            return None
        if not self.overwrite:
            return occupant
        if not occupant.is_t5x:
            cure = 'Remove it with the program that wrote it, or save as another step.'
            where = storage.url(occupant.name)
            raise other_layout(where, occupant.layout, 'which t5ckpt does not replace', cure)
        check_not_kept(storage, occupant, held_steps(storage, self.context.clock), 'replaced', even_waiting=True)
        check_removable(storage, occupant.name)
        return None

    def log_skipped(self, occupant: ListedStep) -> None:
        """Logs that the save is skipped, since a complete step exists."""
        where = self.context.storage.url(occupant.name)
        written = '' if occupant.is_t5x else f', in the layout of {occupant.layout}'
        cure = '; save(..., overwrite=True) replaces it' if occupant.is_t5x else ''
        text = 'Skipping save checkpoint for step %d (directory %s already exists%s)%s'
        _log.warning(text, self.step, where, written, cure)


class LaterSteps:
    """The latest step of a run, to say once that saves are below it: the next start would take another branch of the training."""

    def __init__(self, storage: Storage):
        """Takes the storage that saves write to."""
        self._storage = storage
        self._latest: int | None = None
        self._is_told = False

    def note_save(self, step: int) -> None:
        """Called before each save, in process 0; logs the later steps once. Only the first call lists the steps."""
        if self._latest is None:
            try:
                found = newest(self._storage)
            except StorageError:
                return  # The save says what is wrong with the storage, if it needs it.
            self._latest = step if found is None else found.step
            # Refuses the path of a step. The trainer itself may have saved its best steps as models.
            if found is None and (contents := contents_of_new_run(self._storage)):
                where = self._storage.url()
                _log.warning('t5ckpt: a new run begins in %s, which contains %s', where, some_of(contents, 5))
        if step >= self._latest:
            self._latest = step
        elif not self._is_told:
            later = [str(each) for each in steps_in(self._storage) if each > step]
            if not later:
                # They were deleted since.
                self._latest = step
                return
            self._is_told = True
            _log.warning(
                't5ckpt: step %d is to be saved, but %s has later steps: %s. A restart takes step %s. To continue from step %d, '
                'delete the later steps (delete(step), or t5ckpt rm), replace each with save(..., overwrite=True), or save to '
                'another directory.',
                step, self._storage.url(), some_of(later, 10), later[-1], step,
            )  # fmt: skip
