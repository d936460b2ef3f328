"""The restores of a checkpointer, which ``Checkpointer`` and ``restore_or_init`` share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from t5ckpt.catalog.listing import steps_in
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.core.call_site import Notices
from t5ckpt.core.protocols import Partitioner, Progress, TrainState
from t5ckpt.datasets import DatasetState
from t5ckpt.distributed.coordinator import Coordinator
from t5ckpt.distributed.rounds import CoordinationRound, Phase
from t5ckpt.errors import T5CkptError
from t5ckpt.options import CheckpointerOptions
from t5ckpt.planning.casts import Cast
from t5ckpt.planning.leaf_choice import LeafChoice
from t5ckpt.planning.restore_plan import strictness
from t5ckpt.restore.execute import run_restore
from t5ckpt.restore.request import RestoreRequest
from t5ckpt.save.pending import PendingSave
from t5ckpt.storage import Storage

if TYPE_CHECKING:
    from t5ckpt.tiers.tier import Tier


@dataclasses.dataclass(eq=False)
class Restorer:
    """Restores states of a run. Each call waits for the save in the background first.

    Attributes:
      storage, storage_options: of the run.
      template, partitioner: those of the checkpointer.
      dataset: the data iterator, if its position is saved and restored.
      coordinator: of the processes.
      tier: the local directory; None without one.
      options: how arrays are read.
      progress: as for ``Checkpointer``.
      notices: the warnings that the checkpointer gives once.
      read_only: whether the caller never saves.
      cast: of the leaves; may be set.
      saving: the latest save in the background.
      restored_step: the step of this run that the last restore restored; None after a restore from a ``path``.
    """

    storage: Storage
    storage_options: Mapping[str, Any] | None
    template: Any
    partitioner: Partitioner | None
    dataset: DatasetState | None
    coordinator: Coordinator
    tier: Tier | None
    options: CheckpointerOptions
    progress: Progress | None
    notices: Notices
    read_only: bool
    cast: Cast | None
    saving: PendingSave | None = None
    restored_step: int | None = None

    @property
    def is_t5x(self) -> bool:
        """Whether the state is one of T5X, which restores from checkpoints with more leaves."""
        return self.partitioner is not None or isinstance(self.template, TrainState)

    def wait(self) -> None:
        """Waits for the save in the background."""
        if self.saving is not None:
            self.saving.wait()

    def round(self, action: str) -> CoordinationRound:
        """Begins a coordination round of all processes."""
        # A restore finds the step of the save that is running; and a round removes the keys of the previous one.
        self.wait()
        return self.coordinator.round(action)

    def agree(self, action: str, note: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        """A coordination round: each process sends a vote, process 0 decides on all of them, and all get its answer.

        Votes and answer are of JSON's types; ``note`` is a vote, or returns one. In a single process, this calls ``decide``.
        """
        at = self.round(action)
        with at.failing_together(Phase.AGREE):
            vote = note() if callable(note) else note
        return at.reduce_on_leader(Phase.AGREE, vote, decide)

    def restore(self, choice: LeafChoice, **call: Any) -> Any:
        """Restores the leaves of a choice; ``call`` has fields of RestoreRequest."""
        request = RestoreRequest(
            template=self.template,
            partitioner=self.partitioner,
            dataset=self.dataset,
            storage=self.storage,
            storage_options=self.storage_options,
            round=self.round('a restore'),
            cast=self.cast,
            progress=self.progress,
            reading=self.options,
            notices=self.notices,
            continues=not self.read_only,
            note_step=lambda step: setattr(self, 'restored_step', step),
            choice=choice,
            strict=strictness(choice.strict, is_t5x=self.is_t5x),
            **call,
        )
        return run_restore(request) if self.tier is None else self.tier.restore(request)

    def steps(self, local: Sequence[Any] = ()) -> list[int]:
        """The steps that ``restore_or_init`` tries, ascending, with the ``local_steps`` of all processes."""
        if self.storage.commits_by_rename and not self.read_only:
            # It publishes the step that a killed overwrite has hidden. If the storage is away, the next line says so.
            with contextlib.suppress(T5CkptError):
                collect(self.storage, self.options.clock)
        return steps_in(self.storage) if self.tier is None else self.tier.steps(local)

    def local_steps(self) -> Any:
        """The local steps of this process, see ``Tier.local_steps``; None without a local directory."""
        return None if self.tier is None else self.tier.local_steps()

    def damaged_copies(self, step: int, *, shared: bool) -> list[Storage]:
        """The storages that may have damaged copies of a step that was not restored, in this process or ``shared`` by all."""
        if self.tier is None:
            return [self.storage] if shared else []
        return self.tier.damaged_copies(step, shared=shared)
