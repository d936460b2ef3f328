"""The request of one save, whether its step may be written, and the previous checkpoint that it links to."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from t5ckpt.catalog.layouts import ListedStep, other_layout
from t5ckpt.catalog.listing import newest, steps_in
from t5ckpt.catalog.locate import contents_of_new_run
from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.occupancy import occupant_of
from t5ckpt.commit.removal import check_not_kept, check_removable
from t5ckpt.commit.retention import Retention
from t5ckpt.core.call_site import CallSite, Notices
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock, Progress
from t5ckpt.core.text import some_of
from t5ckpt.datasets import DatasetState
from t5ckpt.distributed.rounds import CoordinationRound
from t5ckpt.errors import StorageError
from t5ckpt.format.names import MANIFEST, step_dir
from t5ckpt.planning.save_plan import SaveOptions
from t5ckpt.policies import KeepPolicy
from t5ckpt.save.arguments import SaveCall
from t5ckpt.save.chunk_reuse import PreviousCheckpoint, find_previous
from t5ckpt.save.encoding import CodecSelection
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class SaveContext:
    """The objects of a checkpointer that all of its saves use.

    Attributes:
      storage: the run, or the local directory of a checkpointer with ``local_dir``.
      options: of the plans, such as the codec and the size of chunks.
      retention: of ``storage``, carried out after a commit.
      reuse: the checkpoint from which chunks are linked; None links none.
      codec_selection: chooses the codecs that depend on the data.
      dataset: the data iterator whose position is saved.
      progress: called with (bytes done, bytes in all).
      clock: unix seconds.
      notices: the warnings that the checkpointer gives once.
    """

    storage: Storage
    options: SaveOptions
    retention: Retention
    reuse: Reuse | None
    codec_selection: CodecSelection
    dataset: DatasetState | None
    progress: Progress | None
    clock: Clock
    notices: Notices


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """A save without its state; every stage of the save has it.

    Attributes:
      context: of all saves of the checkpointer.
      step: as which the state is saved.
      call: the arguments of the call.
      in_background: whether the caller continues during the save, and may write to its host arrays.
      round: of all processes of the job.
      site: the line of the caller, for warnings from the thread of the save.
      keep: the keep policy that the facts record.
      is_as_restored: whether the arrays are those that were restored from this step; a loop that saves it first is not warned.
      in_parts: whether each process commits what its devices hold to a storage of its own, see ``save/parts.py``.
      frees_step: called if the step exists; renames what is there if it need not stay, and returns whether it did.
      upload_reason: called in process 0 before the commit; why the step is also uploaded, or None.
      around_commit: surrounds the commit, with the answer of ``upload_reason``; with ``in_parts`` in every process, else in
        process 0.
      started: the time of the call, by ``time.monotonic``.
    """

    context: SaveContext
    step: int
    call: SaveCall
    in_background: bool
    round: CoordinationRound
    site: CallSite
    keep: KeepPolicy
    is_as_restored: bool = False
    in_parts: bool = False
    frees_step: Callable[[], bool] = lambda: False
    upload_reason: Callable[[], str | None] = lambda: None
    around_commit: Callable[[str | None], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    started: float = dataclasses.field(default_factory=time.monotonic)

    def decide_to_save(self) -> bool:
        """Returns whether to save: no complete step exists, or the save replaces it. Logs a save that is skipped."""
        occupant = self.find_kept()
        if occupant is not None:
            self.log_skipped(occupant)
        return occupant is None

    def find_kept(self) -> ListedStep | None:
        """The complete step that exists, unless the save replaces it; None if the save may write the step.

        Raises:
          UnsupportedFormatError, AccessDeniedError, StepKeptError, CheckpointExistsError: the save cannot replace the step.
        """
        if self.context.retention.is_surely_new(self.step):
            return None
        occupant = occupant_of(self.context.storage, self.step)
        return None if occupant is None or self.frees_step() or self._is_replaced(occupant) else occupant

    def _is_replaced(self, occupant: ListedStep) -> bool:
        """Returns whether the save replaces a complete step.

        Raises:
          UnsupportedFormatError: the step is to be replaced, and is in another layout.
          AccessDeniedError: the step is to be replaced, and belongs to another user.
          StepKeptError, CheckpointExistsError: as :meth:`may_replace`.
        """
        # If another process has deleted a step that is to be replaced, the save writes it.
        if occupant.is_t5x and (self.may_replace() or self.call.overwrite):
            check_removable(self.context.storage, occupant.name)
            return True
        if self.call.overwrite and not occupant.is_t5x:
            cure = 'Remove it with the program that wrote it, or save as another step.'
            where = self.context.storage.url(occupant.name)
            raise other_layout(where, occupant.layout, 'which t5ckpt does not replace', cure)
        return False

    def log_skipped(self, occupant: ListedStep) -> None:
        """Logs that the save is skipped, since a complete step exists."""
        where = self.context.storage.url(occupant.name)
        written = '' if occupant.is_t5x else f', in the layout of {occupant.layout}'
        cure = '; save(..., overwrite=True) replaces it' if occupant.is_t5x and not self.is_as_restored else ''
        level = logging.INFO if self.is_as_restored else logging.WARNING
        text = 'Skipping save checkpoint for step %d (directory %s already exists%s)%s'
        _log.log(level, text, self.step, where, written, cure)

    def may_replace(self) -> bool:
        """Whether the save may replace the complete checkpoint in T5X's format that is there; the commit asks again.

        Raises:
          StepKeptError: it is pinned, or held by a reader.
        """
        storage, old = self.context.storage, ListedStep(self.step, step_dir(self.step))
        if not self.call.overwrite or not storage.is_file(join(old.name, MANIFEST)):
            return False
        check_not_kept(storage, old, held_steps(storage, self.context.clock), 'replaced', even_waiting=True)
        return True


class LaterSteps:
    """The latest step of a run, to say once that saves are below it: the next start would take another branch of the training."""

    def __init__(self, storage: Storage):
        """Takes the storage that saves write to."""
        self._storage = storage
        self._latest: int | None = None
        self._is_known = self._is_told = False

    def _begin_run(self) -> None:
        """Refuses the path of a step, and logs checkpoints and models there: the trainer itself may have saved its best steps."""
        if contents := contents_of_new_run(self._storage):
            _log.warning('t5ckpt: a new run begins in %s, which contains %s', self._storage.url(), some_of(contents, 5))

    def note_save(self, step: int) -> None:
        """Called before each save, in process 0; logs the later steps once. Only the first call lists the steps."""
        if not self._is_known:
            try:
                found = newest(self._storage)
            except StorageError:
                return  # The save says what is wrong with the storage, if it needs it.
            if found is None:
                self._begin_run()
            self._latest, self._is_known = None if found is None else found.step, True
        if self._latest is None or step > self._latest:
            self._latest = step
        elif step < self._latest and not self._is_told:
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


class Reuse:
    """The last checkpoint that a checkpointer committed, from which its next save links chunks."""

    def __init__(self) -> None:
        self.previous: PreviousCheckpoint | None = None
        self._has_searched = False
        self._is_discarded = False

    def find(self, storage: Storage) -> PreviousCheckpoint | None:
        """The checkpoint to link chunks from; searched on storage in the first save, and if the last one was deleted."""
        self._is_discarded = False
        if not self._has_searched or (self.previous is not None and not self.previous.is_there(storage)):
            self.previous = find_previous(storage)
            self._has_searched = True
        return self.previous

    def take(self, previous: PreviousCheckpoint) -> None:
        """Takes the checkpoint that a save has committed, unless it may have chunks of a discarded one."""
        if not self._is_discarded:
            self.previous = previous

    def discard(self) -> None:
        """Links nothing in the next save, since a chunk on the disk is damaged; called from any thread."""
        self._has_searched = self._is_discarded = True
        self.previous = None
