"""Begins a transaction: chooses how it commits, by a rename or by its manifest.

A write that can be resumed, such as a copy, also takes over the files of an earlier attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from t5ckpt.catalog.run_catalog import Index
from t5ckpt.commit.by_manifest import ManifestTransaction
from t5ckpt.commit.by_rename import RenameTransaction
from t5ckpt.commit.transaction import Transaction
from t5ckpt.core.protocols import Clock
from t5ckpt.storage import Storage


def kind_of(storage: Storage) -> type[RenameTransaction | ManifestTransaction]:
    """The commit of a storage: by a rename where directories can be renamed, else by the write of the manifest."""
    return RenameTransaction if storage.commits_by_rename else ManifestTransaction


def begin(
    storage: Storage,
    step: int,
    clock: Clock,
    writer: Mapping[str, Any],
    index: Index | None = None,
    may_replace: Callable[[], bool] = lambda: False,
) -> Transaction:
    """Creates and locks the directory that a save writes to.

    The caller runs garbage collection before, which returns ``index``. On object stores that also writes missing steps markers;
    listings do not search for these after the marker of this step exists. ``may_replace`` is called under the lock or the write
    lease, and returns whether a complete checkpoint of the step may be replaced.
    """
    storage.make_dir('')
    return kind_of(storage).begin(storage, step, clock, writer, index, may_replace)


def resume(storage: Storage, step: int, clock: Clock, writer: Mapping[str, Any]) -> Transaction:
    """Resumes an unfinished write of the same contents, which ``writer['resume']`` identifies, or begins a new one."""
    return kind_of(storage).resume(storage, step, clock, writer)


def unfinished(storage: Storage, step: int, clock: Clock, writer: Mapping[str, Any]) -> Transaction | None:
    """Adopts the temporary directory of a killed write of the same contents; None if there is none."""
    return kind_of(storage).unfinished(storage, step, clock, writer)
