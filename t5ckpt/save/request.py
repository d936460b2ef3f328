"""What one save needs besides the state, and what the saves of one checkpointer hand on."""

from __future__ import annotations

import dataclasses

from t5ckpt.commit.deletion import is_pinned, kept_by, kept_error
from t5ckpt.commit.retention import Retention
from t5ckpt.core.call_site import CallSite
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock, Progress
from t5ckpt.datasets import DatasetState
from t5ckpt.errors import CheckpointExistsError
from t5ckpt.format.names import MANIFEST, step_dir
from t5ckpt.planning.save_plan import SaveOptions
from t5ckpt.save.arguments import SaveCall
from t5ckpt.save.chunk_reuse import PreviousCheckpoint, find_previous
from t5ckpt.save.notices import Notices
from t5ckpt.storage import Storage

__all__ = ['Reuse', 'SaveRequest']


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """What a save needs besides the state; see ``Checkpointer`` for each field."""

    storage: Storage
    step: int
    call: SaveCall
    options: SaveOptions
    retention: Retention
    staging: str
    private_host: bool
    reuse: Reuse | None
    dataset: DatasetState | None
    progress: Progress | None
    clock: Clock
    notices: Notices
    site: CallSite

    def replaces(self) -> bool:
        """Whether the save replaces a complete checkpoint in T5X's format; nothing else is ever replaced.

        Raises:
          StepKeptError: it is pinned, or a reader holds it. The commit looks again, since the save may take long.
          CheckpointExistsError: the storage cannot put one directory in the place of another.
        """
        storage, directory = self.storage, step_dir(self.step)
        if not self.call.overwrite or not storage.is_file(join(directory, MANIFEST)):
            return False
        kept = kept_by(storage, self.step, self.clock, pinned=is_pinned(storage, directory))
        if kept is not None:
            raise kept_error(storage, self.step, kept, 'replaced')
        if not storage.renames:
            raise CheckpointExistsError(
                f'{storage.url(directory)}: overwrite=True needs a storage that renames; on this one the old checkpoint would '
                f'be gone before the new one is whole. Call delete({self.step}) before the save.'
            )
        return True


class Reuse:
    """What the saves of one checkpointer hand on: the last checkpoint that was committed."""

    def __init__(self) -> None:
        self.previous: PreviousCheckpoint | None = None
        self.looked = False

    def start(self, storage: Storage) -> PreviousCheckpoint | None:
        """The checkpoint to take chunks from; looks on storage after a start, and when the last one is gone."""
        if not self.looked or (self.previous is not None and not self.previous.is_there(storage)):
            self.previous = find_previous(storage)
            self.looked = True
        return self.previous
