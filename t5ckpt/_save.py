"""One save, from the state to the commit."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t5ckpt._budget import ByteBudget
from t5ckpt._commit import CommittedCheckpoint, Workspace, abandon, begin, commit, is_complete, sweep, writer_facts
from t5ckpt._dataset_state import DatasetState
from t5ckpt._layout import MANIFEST, integrity_file, join, step_dir
from t5ckpt._leaves import Empty, LeafTable, flatten_nested, lookup, nest
from t5ckpt._manifest import encode_manifest
from t5ckpt._plan import ParameterInfo, SaveOptions, plan_save
from t5ckpt._process import process_index, require_one_process
from t5ckpt._retention import apply_policy, remove_old_datasets
from t5ckpt._sidecar import Sidecar
from t5ckpt._specs import spec_of
from t5ckpt._stage import StagedSave, stage
from t5ckpt._types import Clock, Partitioner, Path, Progress, leaf_name
from t5ckpt._version import __version__
from t5ckpt._write import WriteReport, digest, integrity_bytes, write_arrays
from t5ckpt.errors import UnsupportedLeafError
from t5ckpt.policies import KeepPolicy
from t5ckpt.storage import Storage

__all__ = ['SaveRequest', 'prepare_save']

_log = logging.getLogger('t5ckpt')
SaveWork = Callable[[], CommittedCheckpoint]


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
    progress: Progress | None
    clock: Clock


def prepare_save(
    request: SaveRequest,
    state: Any,
    table: LeafTable,
    fns: Sequence[Any],
    partitioner: Partitioner | None,
    dataset: DatasetState | None,
) -> SaveWork | None:
    """Plans and stages a save; after it returns the caller may do with the state what it likes.

    Returns:
      The rest of the work, which writes and commits; None when the step is there already.
    """
    require_one_process('save')
    started = time.monotonic()
    storage, step = request.storage, request.step
    if is_complete(storage, step_dir(step)):
        where = storage.url(step_dir(step))
        _log.info('Skipping save checkpoint for step %d (directory %s already exists)', step, where)
        return None
    infos = _parameter_infos(table, state, partitioner)
    leaves, infos = _transformed(table, infos, fns)
    plan = plan_save(leaves, infos, request.options)
    staged = stage(plan, request.staging, private_host=request.private_host)
    work: Workspace | None = None
    if dataset is not None:
        # The iterator moves on as soon as the caller does, so its state is written now.
        work = _begin(request)
        try:
            dataset.save(storage, work.directory)
        except BaseException:
            abandon(work)
            raise
    return lambda: _write_and_commit(request, staged, work, started)


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


def _write_and_commit(
    request: SaveRequest, staged: StagedSave, work: Workspace | None, started: float
) -> CommittedCheckpoint:
    storage, step = request.storage, request.step
    work = _begin(request) if work is None else work
    try:
        report = write_arrays(storage, work.directory, staged, ByteBudget(request.budget_bytes), request.progress)
        integrity = integrity_bytes(report)
        integrity_name = integrity_file(process_index())
        storage.write(join(work.directory, integrity_name), integrity)
        manifest = _manifest_bytes(staged, storage.driver)
        files = {MANIFEST: (len(manifest), digest(manifest)), integrity_name: (len(integrity), digest(integrity))}
        commit(work, manifest, _sidecar(request, staged, report, files), request.clock)
    except BaseException:
        abandon(work)
        raise
    seconds = time.monotonic() - started
    nbytes = report.file_bytes + sum(size for size, _ in files.values())
    path = storage.url(step_dir(step))
    _log.info('Saved checkpoint for step %d to %s: %d bytes in %.2f s', step, path, nbytes, seconds)
    apply_policy(storage, request.keep_policy, step, request.clock)
    remove_old_datasets(storage, request.keep_datasets, step)
    return CommittedCheckpoint(step, path, nbytes, seconds)


def _manifest_bytes(staged: StagedSave, driver: str) -> bytes:
    table: LeafTable = dict(staged.inline_values())
    table |= {write.path: spec_of(write.array, driver) for write in staged.plan.writes}
    return encode_manifest(nest(table))


def _sidecar(
    request: SaveRequest, staged: StagedSave, report: WriteReport, files: Mapping[str, tuple[int, str]]
) -> Sidecar:
    extra = {
        'writer': writer_facts(__version__),
        'created_unix': round(request.clock(), 3),
        'step': request.step,
        'bytes': report.file_bytes,
        'files': len(report.digests),
        'digests': {name: list(entry) for name, entry in files.items()},
    }
    return Sidecar(staged.plan.facts, extra)
