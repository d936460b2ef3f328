"""Plans a save and stages its first arrays, in the caller's thread and before anything is written.

Copies and conversions save as one process: leaves are any mixture of numpy arrays, numbers, None and LazyArrays. A LazyArray is
read when it is written, in slices of one chunk if it can be sliced, and each slice is released once its write was started. The
bytes in flight stay within ``budget_bytes``, so a checkpoint of any size takes a few hundred megabytes of memory, plus the
largest leaf that cannot be sliced. The files of a :class:`LinkedArray` are linked (``save/linked_arrays.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

from t5ckpt.commit.occupancy import check_room
from t5ckpt.commit.transaction import CommittedCheckpoint
from t5ckpt.core.gc_pause import paused
from t5ckpt.core.leaf_path import Path
from t5ckpt.core.protocols import ParameterInfo
from t5ckpt.format.dtypes import is_storable
from t5ckpt.planning.save_plan import plan_save, plan_text
from t5ckpt.planning.write_assignment import WriteAssignment
from t5ckpt.save.execute import PreparedSave
from t5ckpt.save.linked_arrays import linked_write
from t5ckpt.save.request import SaveRequest
from t5ckpt.save.stage import Staging
from t5ckpt.tree.leaf_table import LeafTable
from t5ckpt.tree.leaves import is_jax_array, leaves_to_save, most_devices


def prepare_save(
    request: SaveRequest,
    table: LeafTable,
    infos: Mapping[Path, ParameterInfo],
    t5x_inlines: Mapping[Path, bool] | None = None,
) -> PreparedSave:
    """Plans and stages a save of the leaves after the transforms; arrays of other checkpoints are linked in one process.

    Whether the step is free, process 0 checks later, in the background.
    """
    context, in_parts, processes = request.context, request.in_parts, request.round.processes
    is_single, is_leader = request.round.is_single_process, request.round.is_leader
    with paused():
        assignment = WriteAssignment(processes.index, processes.count, with_copies=in_parts)
        leaves = leaves_to_save(table, is_storable)
        plan = plan_save(leaves, infos, context.options, assignment, t5x_inlines)
        text = '' if is_single else plan_text(plan, _header(request))
    if is_single:
        plan = dataclasses.replace(plan, writes=tuple(map(linked_write, plan.writes)))
    # Another process than 0 writes the manifest in a save in parts alone, if it has a device of every leaf in it.
    inline = [write.value for write in plan.inline]
    if not is_leader and not (in_parts and all(not is_jax_array(leaf) or leaf.addressable_shards for leaf in inline)):
        plan = dataclasses.replace(plan, inline=())
    files_of_others = [write.files_of_others(with_metadata=not is_leader) for write in plan.writes if in_parts]
    samples = context.codec_selection.samples(plan.writes) if is_leader and not is_single else {}
    writes_metadata = is_leader or in_parts
    with paused():
        staging = Staging(
            plan, request.budget_bytes, in_background=request.in_background, writes_metadata=writes_metadata
        )
    devices = most_devices(table.values())
    facts = dataclasses.replace(request.facts, tree=plan.tree_facts, devices=devices if devices > 1 else None)
    return PreparedSave(request, facts, staging, text, samples, frozenset().union(*files_of_others))


def _header(request: SaveRequest) -> list[str]:
    """The first lines of the plan's text: the step, the directory and the options, which are equal in all processes."""
    where = [] if request.in_parts else [f'directory: {request.context.storage.url()}']
    return [f'step: {request.step}', *where, f'options: {request.context.options}']


def rehearse(table: LeafTable, request: SaveRequest, t5x_inlines: Mapping[Path, bool] | None = None) -> None:
    """Raises the errors that :func:`write_stream` would raise before it reads or writes anything; for dry runs."""
    context = request.context
    check_room(context.storage, request.step, overwrite=request.overwrite)
    plan_save(leaves_to_save(table, is_storable), {}, context.options, WriteAssignment(), t5x_inlines)


def write_stream(
    table: LeafTable, request: SaveRequest, t5x_inlines: Mapping[Path, bool] | None = None
) -> CommittedCheckpoint:
    """Writes a checkpoint, leaf by leaf.

    Args:
      table: path to leaf, as in ``{('target', 'w'): LazyThreadPoolArray(...), ('state', 'step'): np.int32(7)}``.
      request: where and how; a pinned checkpoint is never replaced.
      t5x_inlines: as for ``plan_save``.

    Raises:
      CheckpointExistsError: see ``commit/occupancy.check_room``; nothing was read.
      UnsupportedLeafError: a leaf cannot be written; nothing was written.
      StorageError: a file cannot be written; no checkpoint became visible.
    """
    check_room(request.context.storage, request.step, overwrite=request.overwrite)
    # A step that exists is an error of a conversion.
    return cast('CommittedCheckpoint', prepare_save(request, table, {}, t5x_inlines).run(lambda: None))
