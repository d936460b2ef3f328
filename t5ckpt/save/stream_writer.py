"""Writes a checkpoint leaf by leaf, for converters and rewriters.

The leaves are any mixture of numpy arrays, numbers, None and LazyArrays. A LazyArray is read when it is written, in slices of
one chunk if it can be sliced, and each slice is released once its write was started. The bytes in flight stay within
``budget_bytes``, so a checkpoint of any size takes a few hundred megabytes of memory, plus the largest leaf that cannot be
sliced. The commit is the same as that of a save: temporary directory, fsync, file checksums, manifest with facts, rename.

The chunk files of an unchanged :class:`LinkedArray` are hard-linked from its checkpoint, or copied where links are not
possible, after their checksums were verified.

Notes: runs in one process and does not import jax.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt.commit.garbage_collection import collect
from t5ckpt.commit.markers import seconds_for
from t5ckpt.commit.occupancy import check_room
from t5ckpt.commit.taken_steps import taken_step_exists
from t5ckpt.commit.transaction import CommittedCheckpoint, Transaction
from t5ckpt.core.keys import join, parents_of
from t5ckpt.core.leaf_path import Path
from t5ckpt.core.protocols import Clock, Progress
from t5ckpt.format.dtypes import is_storable
from t5ckpt.format.facts import Facts
from t5ckpt.format.file_checksums import FileEntry, entry_of
from t5ckpt.format.manifest import encode_manifest
from t5ckpt.format.names import is_position, step_dir
from t5ckpt.planning.save_plan import ArrayWrite, SaveOptions, SavePlan, plan_save
from t5ckpt.save.linked_arrays import LinkedArray, chunks_of_array, link_or_copy_chunks, linkable_array
from t5ckpt.save.manifest_and_facts import manifest_leaves
from t5ckpt.save.stage import Staging
from t5ckpt.save.write import write_arrays
from t5ckpt.storage import Storage
from t5ckpt.tree.leaf_table import LeafTable, unflatten
from t5ckpt.tree.leaves import leaves_to_save

__all__ = ['STREAM_BYTES', 'LinkedArray', 'StreamRequest', 'rehearse', 'write_stream']

STREAM_BYTES = 512 * 10**6
"""Bytes in flight by default: enough for a few chunks of 64 MiB on their way to the disk."""


@dataclasses.dataclass(frozen=True)
class StreamRequest:
    """The destination and the options of a write.

    Attributes:
      storage: of the run's directory.
      step: to write as.
      options: dtype, codec, chunks and what goes inline, as in a save.
      budget_bytes: of values in flight; a larger chunk is written alone.
      overwrite: replace a complete checkpoint of this step once the new one is complete. A pinned one is never replaced.
      source: the input and its options, in JSON types; recorded in the facts.
      progress: called with (bytes done, bytes in total).
      clock: unix seconds.
      files: further files of the step, by name in its directory.
      facts: further ones, such as metrics.
      t5x_inlines: as for ``plan_save``.
    """

    storage: Storage
    step: int
    options: SaveOptions = dataclasses.field(default_factory=SaveOptions)
    budget_bytes: int = STREAM_BYTES
    overwrite: bool = False
    source: Mapping[str, Any] | None = None
    progress: Progress | None = None
    clock: Clock = time.time
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict[str, bytes])
    facts: Facts = dataclasses.field(default_factory=Facts)
    t5x_inlines: Mapping[Path, bool] = dataclasses.field(default_factory=dict[Path, bool])


def rehearse(table: LeafTable, request: StreamRequest) -> None:
    """Raises the errors that :func:`write_stream` would raise before it reads or writes anything; for dry runs."""
    check_room(request.storage, request.step, overwrite=request.overwrite)
    plan_save(leaves_to_save(table, is_storable), {}, request.options, t5x_inlines=request.t5x_inlines)


def write_stream(table: LeafTable, request: StreamRequest) -> CommittedCheckpoint:
    """Writes a checkpoint, leaf by leaf.

    Args:
      table: path to leaf, as in ``{('target', 'w'): LazyThreadPoolArray(...), ('state', 'step'): np.int32(7)}``.
      request: where and how.

    Raises:
      CheckpointExistsError: see ``commit/occupancy.check_room``; nothing was read.
      UnsupportedLeafError: a leaf cannot be written; nothing was written.
      StorageError: a file cannot be written; no checkpoint became visible.
    """
    started = time.monotonic()
    check_room(request.storage, request.step, overwrite=request.overwrite)
    plan = plan_save(leaves_to_save(table, is_storable), {}, request.options, t5x_inlines=request.t5x_inlines)
    with taken_step_exists('Write to another directory, or try again.'):
        planned = sum(write.array.nbytes for write in plan.writes)
        listed = collect(request.storage, request.clock)
        work = Transaction(
            request.storage,
            request.step,
            request.clock,
            overwrite=request.overwrite,
            seconds=seconds_for(planned),
            listed=listed,
        )
    with work, taken_step_exists('Write to another directory, or replace it (overwrite=True).'):
        nbytes = _fill_and_commit(request, plan, work)
    url = request.storage.url(step_dir(request.step))
    return CommittedCheckpoint(request.step, url, nbytes, time.monotonic() - started)


def _fill_and_commit(request: StreamRequest, plan: SavePlan, work: Transaction) -> int:
    """Writes everything and commits; returns the bytes of all files."""
    storage, directory = request.storage, join(work.directory, work.generation)
    linked, linked_files = _link_leaves(request, plan.writes, directory)
    rest = tuple(write for write in plan.writes if write.path not in linked)
    staging = Staging(dataclasses.replace(plan, writes=rest), request.budget_bytes)
    staging.start()
    progress = _progress_after(request.progress, sum(write.array.nbytes for write in linked.values()))
    report = write_arrays(storage, directory, staging, progress=progress)
    report = dataclasses.replace(
        report,
        arrays=report.arrays | {path: write.array for path, write in linked.items()},
        checksums=report.checksums | linked_files,
    ).below(work.generation)
    _write_files(request, directory)
    work.positions = [name for name in request.files if is_position(name)]
    checksums = report.checksums | {join(work.generation, name): entry_of(data) for name, data in request.files.items()}
    manifest = encode_manifest(unflatten(manifest_leaves(staging.inline, report.arrays, storage.driver)))
    facts = dataclasses.replace(
        request.facts,
        tree=plan.tree_facts,
        source=request.source or {},
        bytes=report.file_bytes,
        files=len(report.checksums),
    )
    locations = [array.location for array in report.arrays.values()] + parents_of(request.files)
    return work.commit_with_checksums(manifest, facts, checksums, locations)


def _write_files(request: StreamRequest, directory: str) -> None:
    for parent in parents_of(request.files):
        request.storage.make_dir(join(directory, parent))
    for name, data in request.files.items():
        request.storage.write(join(directory, name), data)


def _progress_after(progress: Progress | None, before: int) -> Progress | None:
    return None if progress is None else lambda done, total: progress(before + done, before + total)


def _link_leaves(
    request: StreamRequest, writes: Sequence[ArrayWrite], directory: str
) -> tuple[dict[Path, ArrayWrite], dict[str, FileEntry]]:
    """Links the files of leaves of other checkpoints, which are then not read; returns these leaves and the file checksums."""
    linked: dict[Path, ArrayWrite] = {}
    checksums: dict[str, FileEntry] = {}
    total, done = sum(write.array.nbytes for write in writes), 0
    for write in writes:
        source = write.value.source if isinstance(write.value, LinkedArray) else None
        array = None if source is None else linkable_array(source, write)
        if source is None or array is None:
            continue
        linked[write.path] = dataclasses.replace(write, array=array, chunks=chunks_of_array(array))
        checksums |= link_or_copy_chunks(source, linked[write.path], request.storage, directory)
        done += array.nbytes
        if request.progress is not None:
            request.progress(done, total)
    return linked, checksums
