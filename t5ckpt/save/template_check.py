"""Checks that a checkpointer could restore the state that it saves; checks again only after the tree has changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from t5ckpt.core.call_site import Notices
from t5ckpt.core.leaf_path import Path
from t5ckpt.core.text import counted, lines, listed
from t5ckpt.errors import LeafProblem, T5CkptError, TemplateMismatchWarning, TreeMismatchError
from t5ckpt.planning.restore_plan import RestoreOptions, plan_restore
from t5ckpt.save.transforms import LeafAxes
from t5ckpt.tree.leaf_table import Empty, LeafTable
from t5ckpt.tree.leaves import leaf_template
from t5ckpt.tree.train_state import flatten_state, leaf_templates


class TemplateCheck:
    """Compares the saved state with the template of the same checkpointer.

    It plans a restore of the saved leaves. This is slow, so it is done only if the tree differs from that of the previous
    save and from that of the template.

    Notes: 2 ms for 10,000 unchanged leaves; the first check takes as long as flattening the template.
    """

    def __init__(self, axes: LeafAxes, notices: Notices, *, is_strict: bool):
        """Makes the check.

        Args:
          axes: the template and the partitioner.
          notices: the warnings that were given.
          is_strict: raises instead of warning.
        """
        self._template = axes.template
        self._partitioner = axes.partitioner
        self._notices = notices
        self._is_strict = is_strict
        self._checked: list[Any] | None = None
        self._problems: Sequence[LeafProblem] = ()

    def check(self, state: Any, table: LeafTable, step: int, options: RestoreOptions, *, warns: bool) -> None:
        """Warns once about each difference that would make a restore with these options fail; ``warns`` is set in one process.

        Raises:
          TreeMismatchError: with ``is_strict``, before anything is written.
        """
        if state is self._template:
            return
        seen = _fingerprint(table)
        if seen != self._checked:
            self._problems = self._differences(table, seen, options)
            self._checked = seen
        if self._problems and (warns or self._is_strict):
            self._warn(step)

    def _differences(self, table: LeafTable, seen: list[Any], options: RestoreOptions) -> Sequence[LeafProblem]:
        try:
            template = flatten_state(self._template)
            if seen != _fingerprint(template.table):
                leaves, keys = _as_saved(table)
                templates = leaf_templates(template, self._template, self._partitioner)
                options = dataclasses.replace(options, keys=keys, knows_keys=True)
                plan_restore(leaves, templates, options, 'the state')
        except TreeMismatchError as error:
            return error.problems
        except T5CkptError:
            # A leaf that cannot be saved at all; the plan of the save reports it.
            return ()
        return ()

    def _warn(self, step: int) -> None:
        problems = [problem for problem in self._problems if self._is_strict or self._notices.is_new(_cause(problem))]
        if not problems:
            return
        where = f'the template of this checkpointer in {counted(len(problems), "place")}'
        cure = (
            'Pass a template with the structure of the saved state to the constructor, such as the state itself, with ... for a '
            'subtree that gets new leaves.'
        )
        if self._is_strict:
            text = lines(f'step {step} is not saved, because it does not fit {where}:', *listed(problems), cure)
            raise TreeMismatchError(text, self._problems)
        head = f'the state of step {step} does not fit {where}, so no restore with that template will succeed:'
        text = lines(head, *listed(problems), f'{cure} strict_save=True makes this an error.')
        self._notices.warn(('tree', *map(_cause, problems)), TemplateMismatchWarning(text))
        for problem in problems:
            self._notices.add(_cause(problem))


def _cause(problem: LeafProblem) -> tuple[str, str, str]:
    """Identifies a difference without its values, since the shape of a growing buffer differs in every save."""
    return 'leaf', problem.leaf, problem.kind


def _fingerprint(table: LeafTable) -> list[Any]:
    """The paths, shapes and dtypes of a tree; cheap, since it is computed in every save."""
    try:
        return [
            (
                path,
                getattr(leaf, 'shape', leaf if isinstance(leaf, Empty) else None),
                getattr(leaf, 'dtype', type(leaf)),
            )
            for path, leaf in table.items()
        ]
    except Exception:  # noqa: BLE001 - a property of an object that is not an array; the plan of the save reports it
        return [(path, None, type(leaf)) for path, leaf in table.items()]


def _as_saved(table: LeafTable) -> tuple[LeafTable, dict[Path, str]]:
    """The leaves as a restore of the checkpoint would find them, and the typed keys among them.

    Raises:
      UnsupportedLeafError: a value cannot be a leaf.
    """
    leaves: LeafTable = {}
    keys: dict[Path, str] = {}
    for path, leaf in table.items():
        template = leaf_template(path, leaf)
        leaves[path] = leaf if template.dtype is None else template
        if template.kind == 'key':
            keys[path] = str(template.impl)
    return leaves, keys
