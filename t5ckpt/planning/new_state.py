"""Compares the state that ``init_fn`` returned with the template of the checkpointer."""

from __future__ import annotations

from collections.abc import Sequence

from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.text import lines
from t5ckpt.tree.leaf_table import LeafTable


def check_new_state(fresh: LeafTable, template: LeafTable, needed: Sequence[Path]) -> None:
    """Raises where the state of ``init_fn`` is not one of the checkpointer's template.

    Raises:
      ValueError: with every leaf that is missing, too many, or of another shape.
    """
    problems = [f'{leaf_name(path)}: in the template, not in the new state' for path in needed if path not in fresh]
    problems += [f'{leaf_name(path)}: in the new state, not in the template' for path in fresh if path not in template]
    for path in needed:
        shapes = [getattr(table.get(path), 'shape', None) for table in (fresh, template)]
        if None not in shapes and shapes[0] != shapes[1]:
            problems.append(f'{leaf_name(path)}: shape {shapes[0]} in the new state, {shapes[1]} in the template')
    if problems:
        cure = 'Let init_fn return a state of the tree that Checkpointer was given.'
        raise ValueError(lines("init_fn: its state is not one of the checkpointer's template.", *problems, cure))
