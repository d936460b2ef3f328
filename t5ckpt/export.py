"""The end of training: the weights alone, in a directory of their own."""

from __future__ import annotations

import os
from typing import Any

from t5ckpt.checkpointer import Checkpointer
from t5ckpt.commit.transaction import CommittedCheckpoint
from t5ckpt.core.leaf_path import leaf_name
from t5ckpt.core.protocols import Partitioner, leaf_pattern
from t5ckpt.format.dtypes import Cast, check_cast
from t5ckpt.resume import MODEL
from t5ckpt.storage import Storage
from t5ckpt.tree.leaf_table import Empty, flatten_nested, unflatten

__all__ = ['export_weights']


def export_weights(
    train_state: Any,
    directory: str | os.PathLike[str] | Storage,
    *,
    dtype: Any = None,
    step: int | None = None,
    take: str = MODEL,
    partitioner: Partitioner | None = None,
) -> CommittedCheckpoint | None:
    """Writes the weights of a state as a checkpoint of their own; the run's checkpoints and checkpointer stay as they are.

    T5X, ``load_t5x_checkpoint`` and ``restore_or_init(..., initial_checkpoint=WarmStart(directory, take=MODEL))`` read it.
    Every process of a job calls it.

    Args:
      train_state: as for ``Checkpointer.save``.
      directory: not the run's own.
      dtype: what is taken is cast to it where it is floating; None casts nothing.
      step: the step to save as; without it the state's own.
      take: a pattern for the names of the leaves that are written.
      partitioner: T5X's.

    Returns:
      The checkpoint, or None when a complete one of this step was there already.

    Raises:
      ValueError: no leaf has such a name, or ``dtype`` is given and none that is taken is floating.
    """
    cast = None if dtype is None else Cast.of(dtype, take, 'dtype')

    def weights(state_dict: Any, parameter_infos: Any) -> tuple[Any, Any]:
        leaves = flatten_nested(state_dict, lambda _: False)
        kept = {
            path: leaf.build() if isinstance(leaf, Empty) else leaf
            for path, leaf in leaves.items()
            if leaf_pattern(take).fullmatch(leaf_name(path))
        }
        if not kept:
            names = ', '.join(leaf_name(path) for path in list(leaves)[:5])
            raise ValueError(f'export_weights: no leaf matches {take!r}; the state has {names}. Pass take=.')
        # Under the name that the option has here; the checkpointer would name its own.
        check_cast(cast, {path: getattr(leaf, 'dtype', None) for path, leaf in kept.items()})
        infos = flatten_nested(parameter_infos, lambda _: False)
        return unflatten(kept), unflatten(
            {path: infos[path] for path in kept if path in infos and infos[path] is not None}
        )

    # Whatever is taken counts as weights.
    casting: dict[str, Any] = {} if dtype is None else {'save_dtype': dtype, 'cast_leaves': take}
    with Checkpointer(train_state, partitioner, directory, reuse_unchanged=False, **casting) as checkpointer:
        return checkpointer.save(train_state, (weights,), step=step)
