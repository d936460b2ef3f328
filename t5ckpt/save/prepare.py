"""Plans a save and stages its first arrays, in the caller's thread and before anything is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt.core.gc_pause import paused
from t5ckpt.format.dtypes import is_storable
from t5ckpt.format.facts import TreeFacts
from t5ckpt.planning.save_plan import ArrayWrite, InlineWrite, plan_save, plan_text
from t5ckpt.planning.write_assignment import WriteAssignment
from t5ckpt.save.chunk_reuse import PreviousCheckpoint
from t5ckpt.save.request import SaveRequest
from t5ckpt.save.stage import Staging
from t5ckpt.save.transforms import LeafAxes, transformed
from t5ckpt.tree.leaf_table import LeafTable
from t5ckpt.tree.leaves import is_jax_array, leaves_to_save, most_devices


@dataclasses.dataclass(frozen=True)
class PreparedSave:
    """A planned save whose first wave is staged, for :func:`run_save`. It keeps no original of a staged array alive.

    Attributes:
      request: of the save.
      tree_facts: the facts of the tree.
      staging: the leaves, in waves.
      previous: the checkpoint from which chunks are linked or copied.
      dataset: the files of the data iterator's position, by name.
      text: the plan as text, which the processes compare.
      samples: beginnings of arrays, from which process 0 chooses the codecs of all processes.
      devices: the largest number of devices of a leaf.
      files_of_others: in a save ``in_parts``, the files that this process writes and that are assigned to other processes.
    """

    request: SaveRequest
    tree_facts: TreeFacts
    staging: Staging
    previous: PreviousCheckpoint | None
    dataset: Mapping[str, bytes]
    text: str
    samples: Mapping[str, Any]
    devices: int
    files_of_others: frozenset[str] = frozenset()


def prepare_save(request: SaveRequest, table: LeafTable, axes: LeafAxes) -> PreparedSave | None:
    """Plans and stages a save.

    Returns:
      The prepared save; None if the step exists already. In a job of several processes, process 0 checks that later, in
      the background.
    """
    is_single, is_leader, processes = request.round.is_single_process, request.round.is_leader, request.round.processes
    context = request.context
    if is_single and not request.decide_to_save():
        return None
    # The iterator advances as soon as the caller continues, so its state is taken now; first, because that may fail.
    dataset = {} if context.dataset is None else context.dataset.snapshot(processes)
    state = transformed(table, axes, request.call.transforms)
    with paused():
        assignment = WriteAssignment(processes.index, processes.count, with_copies=request.in_parts)
        leaves = leaves_to_save(state.leaves, is_storable)
        devices = most_devices(table.values())
        plan = plan_save(leaves, state.infos, context.options, assignment, state.t5x_inlines)
        text = '' if is_single else plan_text(plan, _header(request))
    if not is_leader and not _writes_manifest(plan.inline, request):
        plan = dataclasses.replace(plan, inline=())
    files_of_others = (
        _files_of_others(plan.writes, with_metadata=not is_leader) if request.in_parts else frozenset[str]()
    )
    previous = _previous(request)
    samples = context.codec_selection.samples(plan.writes) if is_leader and not is_single else {}
    staging = Staging(
        plan,
        request.call.budget_bytes,
        in_background=request.in_background,
        writes_metadata=is_leader or request.in_parts,
    )
    with paused():
        staging.start()
    return PreparedSave(request, plan.tree_facts, staging, previous, dataset, text, samples, devices, files_of_others)


def _writes_manifest(inline: Sequence[InlineWrite], request: SaveRequest) -> bool:
    """Whether a process other than 0 writes the manifest, too: in a save ``in_parts``, if it has a device of every leaf in it."""
    return request.in_parts and all(not is_jax_array(write.value) or write.value.addressable_shards for write in inline)


def _files_of_others(writes: Sequence[ArrayWrite], *, with_metadata: bool) -> frozenset[str]:
    """The files that this process writes and that are assigned to others."""
    return frozenset(file for write in writes for file in write.files_of_others(with_metadata=with_metadata))


def _previous(request: SaveRequest) -> PreviousCheckpoint | None:
    """The checkpoint to take chunks from.

    With several processes it is the last one that this job committed, which all of them know without reading storage.
    """
    reuse = request.context.reuse
    if reuse is None:
        return None
    return reuse.find(request.context.storage) if request.round.is_single_process else reuse.previous


def _header(request: SaveRequest) -> list[str]:
    """The first lines of the plan's text: the step, the directory and the options, which are equal in all processes."""
    where = [] if request.in_parts else [f'directory: {request.context.storage.url()}']
    return [f'step: {request.step}', *where, f'options: {request.context.options}']
