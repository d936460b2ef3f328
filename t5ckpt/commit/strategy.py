"""Chooses how the checkpoints of a run are committed: by a rename, or in place, by the write of the manifest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from t5ckpt.catalog.layouts import ListedStep
from t5ckpt.commit.bucket_deletion import Hidden, hide_in_bucket
from t5ckpt.commit.by_manifest import ManifestTransaction
from t5ckpt.commit.by_rename import RenameTransaction, hide_by_rename
from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.occupancy import occupant_in_bucket, occupant_on_disk
from t5ckpt.commit.prunable_steps import PrunableSteps, StepsInBucket, StepsOnDisk
from t5ckpt.commit.transaction import Transaction, TransactionOptions
from t5ckpt.core.protocols import Clock
from t5ckpt.storage import Storage


class _Hide(Protocol):
    def __call__(
        self, storage: Storage, step: int, clock: Clock, *, even_pinned: bool = False, even_waiting: bool = False
    ) -> Hidden | None: ...


@dataclasses.dataclass(frozen=True)
class CommitStrategy:
    """The functions that write, replace and hide the checkpoints of a run.

    Attributes:
      transaction: writes a checkpoint.
      occupant: see ``occupancy.occupant_on_disk``.
      hide: see ``by_rename.hide_by_rename``.
      prunable_steps: the steps about which a keep policy decides.
    """

    transaction: type[RenameTransaction | ManifestTransaction]
    occupant: Callable[[Storage, int], ListedStep | None]
    hide: _Hide
    prunable_steps: type[PrunableSteps]


_BY_RENAME = CommitStrategy(
    transaction=RenameTransaction,
    occupant=occupant_on_disk,
    hide=hide_by_rename,
    prunable_steps=StepsOnDisk,
)
_BY_MANIFEST = CommitStrategy(
    transaction=ManifestTransaction,
    occupant=occupant_in_bucket,
    hide=hide_in_bucket,
    prunable_steps=StepsInBucket,
)


def strategy_of(storage: Storage) -> CommitStrategy:
    """The strategy of a run: a commit by rename where directories can be renamed, else by the write of the manifest."""
    return _BY_RENAME if storage.commits_by_rename else _BY_MANIFEST


_NO_OPTIONS = TransactionOptions()


def open_transaction(
    storage: Storage, step: int, clock: Clock, options: TransactionOptions = _NO_OPTIONS
) -> Transaction:
    """Creates and locks the directory that a checkpoint is written to; on an object store, writes the marker.

    Garbage collection runs before, here or in the caller.

    Raises:
      StepTakenError: the step is complete and may not be replaced, or another process replaces or deletes it.
    """
    listed = collect(storage, clock)[1] if options.collects else options.listed
    storage.make_dir('')
    return strategy_of(storage).transaction.open(storage, step, clock, options, listed)
