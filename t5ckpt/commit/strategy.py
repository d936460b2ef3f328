"""Begins the write of a checkpoint, which a rename commits where directories can be renamed, else the write of the manifest."""

from __future__ import annotations

from t5ckpt.commit.by_manifest import ManifestTransaction
from t5ckpt.commit.by_rename import RenameTransaction
from t5ckpt.commit.transaction import Transaction, TransactionOptions
from t5ckpt.core.protocols import Clock
from t5ckpt.storage import Storage

_NO_OPTIONS = TransactionOptions()


def open_transaction(
    storage: Storage, step: int, clock: Clock, options: TransactionOptions = _NO_OPTIONS
) -> Transaction:
    """Creates and locks the directory that a checkpoint is written to; on an object store, writes the marker.

    The caller runs garbage collection before.

    Raises:
      StepTakenError: the step is complete and may not be replaced, or another process replaces or deletes it.
    """
    storage.make_dir('')
    transaction = RenameTransaction if storage.commits_by_rename else ManifestTransaction
    return transaction.open(storage, step, clock, options)
