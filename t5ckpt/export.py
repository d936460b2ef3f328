"""Exports only the weights of a train state, at the end of training."""

from __future__ import annotations

import collections
import logging
from typing import Any

from t5ckpt.checkpointer import Checkpointer
from t5ckpt.commit.transaction import CommittedCheckpoint
from t5ckpt.core.arguments import check_path
from t5ckpt.core.leaf_path import MODEL, Path, leaf_name
from t5ckpt.core.leaf_patterns import Patterns
from t5ckpt.core.protocols import Partitioner
from t5ckpt.core.text import some_of
from t5ckpt.options import CheckpointerOptions
from t5ckpt.planning.casts import Cast, check_cast
from t5ckpt.planning.leaf_choice import TakenLeaves
from t5ckpt.save.arguments import check_no_directory
from t5ckpt.storage import PathOrStorage, Storage
from t5ckpt.tree.leaf_table import LeafTable, flatten_nested, unflatten
from t5ckpt.tree.leaves import is_key

__all__ = ['export_weights']

_log = logging.getLogger('t5ckpt')


def export_weights(
    train_state: Any,
    directory: PathOrStorage,
    *,
    dtype: Any = None,
    step: int | None = None,
    take: Patterns = MODEL,
    leave: Patterns | None = None,
    partitioner: Partitioner | None = None,
) -> CommittedCheckpoint | None:
    """Writes only the weights of a state as a checkpoint, to another directory than the run's.

    T5X, ``load_t5x_checkpoint`` and ``restore_or_init(..., initial_checkpoint=WarmStart(directory, take=MODEL))`` read it.
    Every process of a job calls it. A line in the log names the groups of leaves that are written.

    Args:
      train_state: as for ``Checkpointer.save``.
      directory: the destination.
      dtype: floating leaves are cast to it; None casts nothing.
      step: the step of the checkpoint; None takes the state's.
      take: patterns for the whole names of the leaves to write. By default also an RNG stream of Flax NNX under any name is left
        out: a typed PRNG key ``key`` and the ``count`` next to it.
      leave: patterns for leaves to leave out, although ``take`` matches them.
      partitioner: T5X's.

    Returns:
      The checkpoint, or None if a complete checkpoint of this step exists.

    Raises:
      ValueError: a pattern matches no leaf, or ``dtype`` is given and none of the matching leaves is floating.
    """
    check_no_directory('Write export_weights(train_state, directory).', train_state=train_state)
    if not isinstance(directory, Storage):
        check_path('directory', directory)
    choice = TakenLeaves(take=take, leave=leave)
    cast = None if dtype is None else Cast.of(dtype, take, 'dtype')

    def weights(state_dict: Any, parameter_infos: Any) -> tuple[Any, Any]:
        leaves = flatten_nested(state_dict)
        left = _rng_streams(leaves) if take == MODEL else ()
        taken = choice.taken(map(leaf_name, leaves))
        kept = {path: leaf for path, leaf in leaves.items() if path not in left and leaf_name(path) in taken}
        groups = collections.Counter('/'.join('/'.join(path).split('/')[:2]) for path in kept)
        _log.info(
            't5ckpt: export_weights: leaves below %s', some_of([f'{name} ({n})' for name, n in groups.items()], 20)
        )
        # Checked here, because the checkpointer's error would name its own options.
        check_cast(cast, kept)
        infos = flatten_nested(parameter_infos)
        return unflatten(kept), unflatten(
            {path: infos[path] for path in kept if path in infos and infos[path] is not None}
        )

    options = CheckpointerOptions(reuse_unchanged=False, cast_leaves=None if dtype is None else take)
    with Checkpointer(train_state, partitioner, directory, save_dtype=dtype, options=options) as checkpointer:
        return checkpointer.save(train_state, (weights,), step=step)


def _rng_streams(leaves: LeafTable) -> set[Path]:
    """The leaves of NNX's ``RngStream``: typed keys called ``key``, and the counters next to them."""
    streams: set[Path] = set()
    for path, leaf in leaves.items():
        # A variable of NNX has its array below it, as 'value'.
        key_index = len(path) - 2 if path[-1] == 'value' else len(path) - 1
        if key_index > 0 and path[key_index] == 'key' and is_key(getattr(leaf, 'dtype', None)):
            streams |= {path, (*path[:key_index], 'count', *path[key_index + 1 :])}
    return streams
