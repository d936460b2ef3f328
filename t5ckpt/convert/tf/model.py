"""TensorFlow checkpoints for a model that is at hand: ``Checkpointer.restore_from_tf_checkpoint`` and its sibling."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import Any, TypeAlias

from t5ckpt.commit.transaction import CommittedCheckpoint
from t5ckpt.convert.conversion import Found
from t5ckpt.convert.tf import open_tf, tf_leaves
from t5ckpt.core.protocols import Partitioner, SaveStateTransformationFn
from t5ckpt.errors import CheckpointExistsError
from t5ckpt.format.dtypes import Cast
from t5ckpt.planning.restore_plan import RestoreOptions
from t5ckpt.restore.pipeline import fit_leaves, place_leaves
from t5ckpt.save.stream_writer import StreamRequest, write_stream
from t5ckpt.save.transforms import LeafAxes, transformed
from t5ckpt.translate import CheckpointTranslator
from t5ckpt.tree.leaf_table import LeafTable
from t5ckpt.tree.train_state import flatten_state

__all__ = ['Asked', 'convert_tf_to_model', 'restore_tf']

_log = logging.getLogger('t5ckpt')

Asked: TypeAlias = tuple[str | os.PathLike[str], bool, CheckpointTranslator | None]
"""Path or directory, whether what the model lacks is an error, and the rules."""


def restore_tf(asked: Asked, cast: Cast | None, state: Any, partitioner: Partitioner | None) -> Any:
    """A state of the structure of ``state``; each tensor is read whole, put where it belongs, and let go of."""
    found = _found(asked, state)
    return place_leaves(fit_leaves(found.table, _where(found), state, partitioner, RestoreOptions(cast)), state)


def convert_tf_to_model(
    asked: Asked,
    request: StreamRequest,
    model: tuple[Any, Partitioner | None],
    axes: LeafAxes,
    fns: Sequence[SaveStateTransformationFn],
) -> CommittedCheckpoint | None:
    """Writes the leaves that the model (its state and partitioner) has; None when the step is there already."""
    state, partitioner = model
    found = _found(asked, state)
    if found.step is None:
        raise ValueError(f'{_where(found)}: no global_step, and no number at the end of its name.')
    plan = fit_leaves(found.table, _where(found), state, partitioner)
    table: LeafTable = plan.kept | {read.path: read.value for read in plan.inline}
    given = transformed(table, axes, fns)
    try:
        step = dataclasses.replace(request, step=found.step, source=found.source, rule=given.rule)
        return write_stream(given.leaves, step)
    except CheckpointExistsError as error:
        _log.warning('Skipping conversion: %s', error)
        return None


def _found(asked: Asked, state: Any) -> Found:
    path, strict, translator = asked
    found = tf_leaves(open_tf(path), translator)
    if strict:
        return found
    held = flatten_state(state).table
    return dataclasses.replace(found, table={path: leaf for path, leaf in found.table.items() if path in held})


def _where(found: Found) -> str:
    return str(found.source['path'])
