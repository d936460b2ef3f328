"""Restores and converts TensorFlow checkpoints for a given model."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from t5ckpt.commit.transaction import CommittedCheckpoint
from t5ckpt.convert.source import Source
from t5ckpt.core.protocols import Partitioner, SaveStateTransformationFn
from t5ckpt.errors import CheckpointExistsError
from t5ckpt.planning.casts import Cast
from t5ckpt.planning.restore_plan import RestoreOptions, RestorePlan, plan_restore
from t5ckpt.restore.make_leaf import make_inline_leaf
from t5ckpt.restore.report import warn_if_narrowed
from t5ckpt.save.prepare import write_stream
from t5ckpt.save.request import SaveRequest
from t5ckpt.save.transforms import LeafAxes, transformed
from t5ckpt.tree.leaf_table import LeafTable
from t5ckpt.tree.train_state import flatten_state, leaf_templates

_log = logging.getLogger('t5ckpt')


def restore_tf(found: Source, cast: Cast | None, state: Any, partitioner: Partitioner | None, *, strict: bool) -> Any:
    """Restores a state of the structure of ``state``. Complete tensors are read, one after another.

    Args:
      found: of the TensorFlow checkpoint.
      cast: of floating leaves.
      state: the template.
      partitioner: provides the shardings, if there is one.
      strict: a leaf that the template lacks is an error, and not left out.
    """
    plan = _plan(found if strict else _in_template(found, state), state, partitioner, RestoreOptions(cast))
    warn_if_narrowed(plan)
    return flatten_state(state).rebuild(plan.kept | {read.path: make_inline_leaf(read) for read in plan.inline})


def convert_tf_to_model(
    found: Source, request: SaveRequest, axes: LeafAxes, fns: Sequence[SaveStateTransformationFn]
) -> CommittedCheckpoint | None:
    """Writes the leaves that the template of ``axes`` has; None if the step exists already."""
    if found.step is None:
        raise ValueError(f'{found.path}: the step is unknown: no global_step, and no number at the end of its name.')
    plan = _plan(_in_template(found, axes.template), axes.template, axes.partitioner, RestoreOptions())
    table: LeafTable = plan.kept | {read.path: read.value for read in plan.inline}
    leaves, _, t5x_inlines = transformed(table, axes, fns)
    try:
        step = dataclasses.replace(request, step=found.step)
        return write_stream(leaves, step, t5x_inlines)
    except CheckpointExistsError as error:
        _log.warning('Skipping conversion: %s', error)
        return None


def _plan(found: Source, state: Any, partitioner: Partitioner | None, options: RestoreOptions) -> RestorePlan:
    """Matches the tensors, which are LazyArrays, with the template.

    Raises:
      TreeMismatchError: with all differences.
    """
    templates = leaf_templates(flatten_state(state), state, partitioner)
    return plan_restore(found.table, templates, options, found.path)


def _in_template(found: Source, state: Any) -> Source:
    """The leaves of the checkpoint that the template has, too."""
    template = flatten_state(state).table
    return dataclasses.replace(found, table={path: leaf for path, leaf in found.table.items() if path in template})
