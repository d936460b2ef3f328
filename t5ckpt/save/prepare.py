"""Plans a save and stages its first arrays, in the caller's thread and before anything is written."""

from __future__ import annotations

import dataclasses
from typing import Any

from t5ckpt.core.gc_pause import paused
from t5ckpt.format.dtypes import is_storable
from t5ckpt.planning.save_plan import plan_save, plan_text
from t5ckpt.planning.write_assignment import WriteAssignment
from t5ckpt.save.execute import PreparedSave
from t5ckpt.save.request import SaveRequest
from t5ckpt.save.stage import Staging
from t5ckpt.save.transforms import LeafAxes, transformed
from t5ckpt.tree.leaf_table import LeafTable
from t5ckpt.tree.leaves import is_jax_array, leaves_to_save, most_devices


def prepare_save(request: SaveRequest, table: LeafTable, axes: LeafAxes, transforms: Any) -> PreparedSave:
    """Plans and stages a save. Whether the step is free, process 0 checks later, in the background."""
    context, in_parts, processes = request.context, request.in_parts, request.round.processes
    is_single, is_leader = request.round.is_single_process, request.round.is_leader
    state = transformed(table, axes, transforms)
    with paused():
        assignment = WriteAssignment(processes.index, processes.count, with_copies=in_parts)
        leaves = leaves_to_save(state.leaves, is_storable)
        plan = plan_save(leaves, state.infos, context.options, assignment, state.t5x_inlines)
        text = '' if is_single else plan_text(plan, _header(request))
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
