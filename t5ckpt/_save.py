"""One save, from the state to the commit."""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt._budget import ByteBudget
from t5ckpt._commit import (
    AlreadyCommittedError,
    CommittedCheckpoint,
    Workspace,
    abandon,
    begin,
    commit,
    is_free,
    sweep,
    writer_facts,
)
from t5ckpt._dataset_state import DatasetState
from t5ckpt._digest import digest
from t5ckpt._layout import MANIFEST, integrity_file, join, step_dir
from t5ckpt._leaves import Empty, LeafTable, flatten_nested, lookup, nest
from t5ckpt._manifest import encode_manifest
from t5ckpt._plan import ArrayWrite, ParameterInfo, SaveOptions, plan_save
from t5ckpt._process import WRITE_EVENT, process_index, record_duration, require_one_process
from t5ckpt._retention import apply_policy, remove_old_datasets
from t5ckpt._reuse import Previous, find_previous, leaves_of_writes
from t5ckpt._sidecar import Sidecar, TreeFacts, encode_sidecar
from t5ckpt._specs import spec_of
from t5ckpt._stage import Staging
from t5ckpt._types import Clock, Partitioner, Path, Progress, leaf_name
from t5ckpt._version import __version__
from t5ckpt._write import WriteJob, WriteReport, integrity_bytes, write_arrays
from t5ckpt.errors import UnsupportedLeafError
from t5ckpt.policies import KeepPolicy
from t5ckpt.storage import Storage

__all__ = ['PreparedSave', 'Reuse', 'SaveRequest', 'axes_tree', 'prepare_save']

_log = logging.getLogger('t5ckpt')


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """What a save needs besides the state; see ``Checkpointer`` for each field."""

    storage: Storage
    step: int
    options: SaveOptions
    keep_policy: KeepPolicy
    keep_datasets: int | None
    budget_bytes: int
    staging: str
    private_host: bool
    reuse: Reuse | None
    progress: Progress | None
    clock: Clock


class Reuse:
    """What the saves of one checkpointer hand on: the last checkpoint that was committed."""

    def __init__(self) -> None:
        self.previous: Previous | None = None
        self.looked = False

    def start(self, storage: Storage) -> Previous | None:
        """The checkpoint to take chunks from; looks on storage after a start, and when the last one is gone."""
        if not self.looked or (self.previous is not None and not self.previous.is_there(storage)):
            self.previous = find_previous(storage)
            self.looked = True
        return self.previous


@dataclasses.dataclass(frozen=True)
class PreparedSave:
    """A planned save whose first wave is staged; see ``_pending.Work`` for its methods."""

    job: _Job
    workspace: Workspace | None

    def run(self) -> CommittedCheckpoint | None:
        """Writes and commits."""
        return _write_and_commit(self.job, self.workspace)

    def feed(self) -> None:
        """Stages the other waves."""
        self.job.staging.feed()

    def stop(self) -> None:
        """Ends the save at the next chunk."""
        self.job.staging.stop()


def prepare_save(
    request: SaveRequest,
    state: Any,
    table: LeafTable,
    fns: Sequence[Any],
    partitioner: Partitioner | None,
    dataset: DatasetState | None,
) -> PreparedSave | None:
    """Plans and stages a save.

    Returns:
      The rest of the work; None when the step is there already.
    """
    require_one_process('save')
    started = time.monotonic()
    storage, step = request.storage, request.step
    if not is_free(storage, step):
        where = storage.url(step_dir(step))
        _log.warning('Skipping save checkpoint for step %d (directory %s already exists)', step, where)
        return None
    # Without transforms each leaf is its own info.
    infos = _parameter_infos(table, state, partitioner) if fns else {}
    leaves, infos = _transformed(table, infos, fns)
    plan = plan_save(leaves, infos, request.options)
    previous = None if request.reuse is None else request.reuse.start(storage)
    unchanged = () if previous is None else tuple(write for write in plan.writes if previous.is_same(write))
    linked = {write.path for write in unchanged}
    changed = tuple(write for write in plan.writes if write.path not in linked)
    staging = Staging(
        dataclasses.replace(plan, writes=changed), request.staging, request.budget_bytes, request.private_host
    )
    staging.start()
    work: Workspace | None = None
    if dataset is not None:
        # The iterator moves on as soon as the caller does, so its state is written now.
        work = _begin(request)
        try:
            dataset.save(storage, work.directory)
        except BaseException:
            abandon(work)
            raise
    job = _Job(request, plan.facts, staging, previous, unchanged, leaves_of_writes(plan.writes), started)
    return PreparedSave(job, work)


@dataclasses.dataclass(frozen=True)
class _Job:
    """What the background needs; it holds no array of the caller's but the unchanged ones.

    ``leaves`` is for the next save, see ``_reuse.py``.
    """

    request: SaveRequest
    facts: TreeFacts
    staging: Staging
    previous: Previous | None
    unchanged: tuple[ArrayWrite, ...]
    leaves: Mapping[str, tuple[weakref.ref[Any], str]]
    started: float


def _parameter_infos(table: LeafTable, state: Any, partitioner: Partitioner | None) -> dict[Path, ParameterInfo]:
    axes = None if partitioner is None else axes_tree(partitioner, state)
    return {
        path: ParameterInfo(leaf_name(path), tuple(leaf.shape), lookup(axes, path))
        for path, leaf in table.items()
        if hasattr(leaf, 'shape')
    }


def axes_tree(partitioner: Partitioner, state: Any) -> Any:
    """The partitioner's PartitionSpecs as a tree of dicts or whatever the state is made of."""
    axes = partitioner.get_mesh_axes(state)
    return axes.state_dict() if hasattr(axes, 'state_dict') else axes


def _transformed(
    table: LeafTable, infos: dict[Path, ParameterInfo], fns: Sequence[Any]
) -> tuple[LeafTable, dict[Path, ParameterInfo]]:
    if not fns:
        return table, infos
    state: Any = nest({path: leaf.build() if isinstance(leaf, Empty) else leaf for path, leaf in table.items()})
    # Leaves without an array (None, numbers, empty) have None for an info, as in T5X.
    tree: Any = nest({path: infos.get(path) for path in table})
    for fn in fns:
        state, tree = fn(state, tree)
    if not isinstance(state, Mapping) or not isinstance(tree, Mapping):
        raise UnsupportedLeafError('a state transformation must return the new state dict and the new parameter infos.')
    leaves = flatten_nested(state, lambda _: False)
    moved = flatten_nested(tree, lambda _: False)
    return leaves, {path: info for path, info in moved.items() if isinstance(info, ParameterInfo)}


def _begin(request: SaveRequest) -> Workspace:
    sweep(request.storage, request.clock)
    return begin(request.storage, request.step, request.clock, writer_facts(__version__))


def _write_and_commit(job: _Job, work: Workspace | None) -> CommittedCheckpoint | None:
    request = job.request
    storage, step = request.storage, request.step
    try:
        work = _begin(request) if work is None else work
    except AlreadyCommittedError as error:
        return _dropped(step, error)
    try:
        # Staged copies hold half of the budget, see _stage.py; what is being written, the other half.
        budget = ByteBudget(max(1, request.budget_bytes // 2))
        write_job = WriteJob(storage, work.directory, budget, job.previous, job.unchanged, request.progress)
        report = write_arrays(write_job, job.staging)
        integrity = integrity_bytes(report)
        integrity_name = integrity_file(process_index())
        storage.write(join(work.directory, integrity_name), integrity)
        manifest = _manifest_bytes(job, report)
        files = {MANIFEST: (len(manifest), digest(manifest)), integrity_name: (len(integrity), digest(integrity))}
        sidecar = encode_sidecar(_sidecar(job, report, files))
        commit(work, manifest, sidecar, request.clock)
    except AlreadyCommittedError as error:
        abandon(work)
        return _dropped(step, error)
    except BaseException:
        abandon(work)
        raise
    seconds = time.monotonic() - job.started
    nbytes = report.file_bytes + sum(size for size, _ in files.values())
    if request.reuse is not None:
        request.reuse.previous = Previous(
            step_dir(step), dict(report.digests), digest(sidecar), report.stamps, job.leaves
        )
    _finish(job, report, nbytes, seconds)
    return CommittedCheckpoint(step, storage.url(step_dir(step)), nbytes, seconds)


def _dropped(step: int, error: AlreadyCommittedError) -> None:
    _log.warning('t5ckpt: step %d is saved by another writer, this save is dropped: %s', step, error)


def _finish(job: _Job, report: WriteReport, nbytes: int, seconds: float) -> None:
    """What follows a commit: the log line, the event, and retention."""
    request = job.request
    storage, step = request.storage, request.step
    linked = f', {report.linked_bytes} bytes of arrays linked' if report.linked_bytes else ''
    path = storage.url(step_dir(step))
    _log.info('Saved checkpoint for step %d to %s: %d bytes in %.2f s%s', step, path, nbytes, seconds, linked)
    record_duration(WRITE_EVENT, seconds)
    try:
        apply_policy(storage, request.keep_policy, step, request.clock)
        remove_old_datasets(storage, request.keep_datasets, step)
    except Exception:  # noqa: BLE001 - logged with its traceback
        # A policy is the user's code. The checkpoint is committed, so its save has not failed.
        _log.exception('t5ckpt: retention after the save of step %d failed; the checkpoint is there', step)


def _manifest_bytes(job: _Job, report: WriteReport) -> bytes:
    table: LeafTable = dict(job.staging.inline_values())
    table |= {path: spec_of(array, job.request.storage.driver) for path, array in report.arrays.items()}
    return encode_manifest(nest(table))


def _sidecar(job: _Job, report: WriteReport, files: Mapping[str, tuple[int, str]]) -> Sidecar:
    extra = {
        'writer': writer_facts(__version__),
        'created_unix': round(job.request.clock(), 3),
        'step': job.request.step,
        'bytes': report.file_bytes,
        'files': len(report.digests),
        'digests': {name: list(entry) for name, entry in files.items()},
    }
    return Sidecar(job.facts, extra)
