"""Whether the checkpointer that saves a state could restore it: looked at when the tree changes, not at every save."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.core.leaf_path import Path, leaf_name
from t5ckpt.core.text import counted, lines, some_of
from t5ckpt.errors import (
    LeafProblem,
    T5CkptError,
    TemplateMismatchWarning,
    TreeMismatchError,
)
from t5ckpt.save.notices import Notices
from t5ckpt.tree.leaf_table import Empty, LeafTable
from t5ckpt.tree.leaf_values import is_abstract, leaf_devices
from t5ckpt.tree.template import leaf_template
from t5ckpt.tree.train_state import flatten_state

__all__ = ['SavedLeaf', 'TemplateCheck']

_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class SavedLeaf:
    """An array as a restore of the checkpoint will find it."""

    shape: tuple[int, ...]
    dtype: np.dtype


# Matches leaves, and the implementation of typed keys by path, with the template, as a restore does.
Match = Callable[[LeafTable, Mapping[Path, str]], Any]


class TemplateCheck:
    """Compares what is saved with the template of the same checkpointer.

    The decision is the restore's own (``match``). It costs as much as the plan of a restore, so it is asked for only when
    the tree differs from the one of the save before, and from the template's.

    Notes: 2 ms for 10,000 leaves that have not changed; the first look takes as long as flattening the template.
    """

    def __init__(self, template: Any, match: Match, notices: Notices, *, is_strict: bool):
        """``is_strict`` makes what is otherwise a warning an error."""
        self._template = template
        self._match = match
        self._notices = notices
        self._is_strict = is_strict
        self._checked: list[Any] | None = None
        self._problems: Sequence[LeafProblem] = ()
        self._has_looked_at_shardings = False

    def look(self, state: Any, table: LeafTable, step: int, *, tells: bool) -> None:
        """Warns of what could not be restored, each difference once; in the process of a job that ``tells``.

        Raises:
          TreeMismatchError: with ``is_strict``, before anything is written.
        """
        if state is self._template:
            return
        seen = _fingerprint(table)
        if seen != self._checked:
            self._problems = self._differences(table, seen)
            self._checked = seen
        if self._problems and (tells or self._is_strict):
            self._tell(step)

    def look_at_shardings(self, table: LeafTable, step: int) -> None:
        """Warns, at the first save, where leaves that lie on several devices have no sharding in an abstract template."""
        if self._has_looked_at_shardings:
            return
        template = flatten_state(self._template).table
        names = [
            leaf_name(path)
            for path, leaf in table.items()
            if leaf_devices(leaf) > 1
            and is_abstract(template.get(path))
            and template[path].sharding is None
            and template[path].shape
        ]
        if names:
            self._notices.unsharded(
                f'{some_of(names, 5)}: step {step} is saved from several devices, and the template of this checkpointer names no '
                'sharding, so each is restored to one device.'
            )
        self._has_looked_at_shardings = True

    def _differences(self, table: LeafTable, seen: list[Any]) -> Sequence[LeafProblem]:
        try:
            if seen == _fingerprint(flatten_state(self._template).table):
                return ()
            leaves, keys = _as_saved(table)
            self._match(leaves, keys)
        except TreeMismatchError as error:
            return error.problems
        except T5CkptError:
            # A leaf that cannot be saved at all: the plan of the save lists these.
            return ()
        return ()

    def _tell(self, step: int) -> None:
        problems = [problem for problem in self._problems if self._is_strict or self._notices.is_new(_cause(problem))]
        if not problems:
            return
        shown = [f'  {problem}' for problem in problems[:_SHOWN]]
        shown += [f'  ... and {len(problems) - _SHOWN} more'] if len(problems) > _SHOWN else []
        where = f'the template that this checkpointer was made with in {counted(len(problems), "place")}'
        cure = 'Make the checkpointer with a template of the structure that is saved, such as the state itself.'
        if self._is_strict:
            text = lines(f'step {step} is not saved, since it does not fit {where}:', *shown, cure)
            raise TreeMismatchError(text, self._problems)
        head = f'step {step} is saved, but does not fit {where}, so a restore with that template fails:'
        text = lines(head, *shown, f'{cure} strict_save=True makes this an error.')
        self._notices.warn(('tree', *map(_cause, problems)), TemplateMismatchWarning(text))
        for problem in problems:
            self._notices.add(_cause(problem))


def _cause(problem: LeafProblem) -> tuple[str, str, str]:
    """Without the values: the shape of a buffer that grows is another one at every save."""
    return 'leaf', problem.leaf, problem.kind


def _fingerprint(table: LeafTable) -> list[Any]:
    """What decides whether two trees are alike: cheap, since it is made at every save."""
    try:
        return [
            (
                path,
                getattr(leaf, 'shape', leaf if isinstance(leaf, Empty) else None),
                getattr(leaf, 'dtype', type(leaf)),
            )
            for path, leaf in table.items()
        ]
    except Exception:  # noqa: BLE001 - a property of an object that is no array; the plan of the save names it
        return [(path, None, type(leaf)) for path, leaf in table.items()]


def _as_saved(table: LeafTable) -> tuple[LeafTable, dict[Path, str]]:
    """The leaves as a manifest and its sidecar bring them back, and the typed keys among them.

    Raises:
      UnsupportedLeafError: one of them is no leaf.
    """
    leaves: LeafTable = {}
    keys: dict[Path, str] = {}
    for path, leaf in table.items():
        target = leaf_template(path, leaf)
        leaves[path] = leaf if target.dtype is None else SavedLeaf(tuple(target.shape), target.dtype)
        if target.kind == 'key':
            keys[path] = target.impl
    return leaves, keys
