"""Writes a checkpoint leaf by leaf, for converters and rewriters.

The leaves are any mixture of numpy arrays, numbers, None and LazyArrays. A LazyArray is read when it is written, in slices of
one chunk if it can be sliced, and each slice is released once its write was started. The bytes in flight stay within
``budget_bytes``, so a checkpoint of any size takes a few hundred megabytes of memory, plus the largest leaf that cannot be
sliced. The write and the commit are those of a save of one process.

The chunk files of an unchanged :class:`LinkedArray` are hard-linked from its checkpoint, or copied where links are not
possible, after their checksums were verified.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

from t5ckpt.commit.occupancy import check_room
from t5ckpt.commit.transaction import CommittedCheckpoint
from t5ckpt.core.leaf_path import Path
from t5ckpt.format.dtypes import is_storable
from t5ckpt.planning.save_plan import SavePlan, plan_save
from t5ckpt.save.execute import PreparedSave
from t5ckpt.save.linked_arrays import LinkedArray
from t5ckpt.save.request import SaveContext, SaveRequest
from t5ckpt.save.stage import Staging
from t5ckpt.tree.leaf_table import LeafTable
from t5ckpt.tree.leaves import leaves_to_save

__all__ = ['STREAM_BYTES', 'LinkedArray', 'SaveContext', 'SaveRequest', 'rehearse', 'write_stream']

STREAM_BYTES = 512 * 10**6
"""Bytes in flight by default: enough for a few chunks of 64 MiB on their way to the disk."""


def rehearse(table: LeafTable, request: SaveRequest, t5x_inlines: Mapping[Path, bool] | None = None) -> SavePlan:
    """Raises the errors that :func:`write_stream` would raise before it reads or writes anything; for dry runs."""
    context = request.context
    check_room(context.storage, request.step, overwrite=request.overwrite)
    return plan_save(leaves_to_save(table, is_storable), {}, context.options, t5x_inlines=t5x_inlines)


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
    plan = rehearse(table, request, t5x_inlines)
    sources = (write.value.source if isinstance(write.value, LinkedArray) else None for write in plan.writes)
    writes = [
        write if source is None else source.linked(write) for write, source in zip(plan.writes, sources, strict=True)
    ]
    staging = Staging(dataclasses.replace(plan, writes=tuple(writes)), request.budget_bytes)
    facts = dataclasses.replace(request.facts, tree=plan.tree_facts)
    # A step that exists is an error of a conversion.
    return cast('CommittedCheckpoint', PreparedSave(request, facts, staging).run(lambda: None))
