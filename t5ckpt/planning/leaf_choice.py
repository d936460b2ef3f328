"""The words that choose leaves, of all functions; and those of a restore: under which names, and how far leaves may differ."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from t5ckpt.core.arguments import check_word
from t5ckpt.core.leaf_path import Path, leaf_name, path_of
from t5ckpt.core.leaf_patterns import Pattern, Patterns, leaf_pattern, meant_pattern
from t5ckpt.core.text import shown, some_of
from t5ckpt.errors import TreeMismatchError, UnmatchedPattern
from t5ckpt.translate import sources_of
from t5ckpt.tree.leaf_table import Empty, LeafTable

# 'exact' includes every dtype, 'up_to_dtype' allows float32 for bfloat16 and the like, 'contains' also allows a checkpoint with
# more leaves than the template.
_STRICTNESS = ('exact', 'up_to_dtype', 'contains')


class LeafPatterns:
    """The patterns of one option: a leaf is covered if one of them matches its whole name."""

    def __init__(self, given: Patterns | None, option: str):
        """Compiles the patterns; None has none.

        Raises:
          ValueError: one of them is not a regular expression.
        """
        several = () if given is None else [given] if isinstance(given, (str, re.Pattern)) else given
        self._option = option
        self.patterns = [leaf_pattern(pattern, option) for pattern in several]

    def covers(self, name: str) -> bool:
        """Whether a pattern matches a name."""
        return any(pattern.fullmatch(name) for pattern in self.patterns)

    def check(self, names: Iterable[str]) -> None:
        """Raises UnmatchedPattern for a pattern that matches no name, with the one that is probably meant."""
        known = [*names] if self.patterns else []
        for pattern in self.patterns:
            if not any(map(pattern.fullmatch, known)):
                raise UnmatchedPattern(
                    f'{self._option}={pattern.pattern!r} matches no leaf, such as {some_of(known, 3)}. A pattern is a regular '
                    f'expression for the whole name of a leaf.{meant_pattern(pattern, known)}'
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TakenLeaves:
    """Chooses leaves by patterns, one or several, as text or compiled, that are matched with their whole names.

    Attributes:
      take: the leaves to take.
      leave: the leaves to leave, although ``take`` matches them.
    """

    take: Patterns = '.*'
    leave: Patterns | None = None

    def __post_init__(self) -> None:
        _ = self.patterns

    @functools.cached_property
    def patterns(self) -> dict[str, LeafPatterns]:
        """Of ``take`` and ``leave``, by option."""
        return {option: LeafPatterns(getattr(self, option), option) for option in ('take', 'leave')}

    def takes(self, name: str) -> bool:
        """Whether a leaf is taken."""
        return self.patterns['take'].covers(name) and not self.patterns['leave'].covers(name)

    def taken(self, names: Iterable[str]) -> set[str]:
        """Those of the names that are taken; raises UnmatchedPattern for a pattern that matches none."""
        names = [*names]
        for patterns in self.patterns.values():
            patterns.check(names)
        return set(filter(self.takes, names))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafChoice(TakenLeaves):
    r"""The leaves of a template that come from a checkpoint; the others are those of the initial state.

    Patterns, one or several, as text or compiled, are matched with the whole name of a leaf of the template,
    ``'params/dense/kernel'``.

    Attributes:
      take: leaves that come from the checkpoint.
      leave: leaves that do not, although ``take`` matches them.
      rename: (pattern, replacement) in order, as in ``apply_assignment_map``: the names in the checkpoint of leaves of the
        template. Averaged weights instead of the trained ones: ``[(r'params/(.*)', r'ema/\1')]``.
      missing: for leaves that ``take`` matches and the checkpoint lacks: 'error', or 'init' to take them from the initial state.
      strict: the required match: 'exact' includes every dtype; 'up_to_dtype' allows float32 for bfloat16 and the like; 'contains'
        also allows a checkpoint with more leaves than the template. None is 'contains' for a state with T5X's protocol and with
        a partitioner, as in T5X, and 'up_to_dtype' for any other pytree.
      resize: leaves that may have another shape: the values keep their indices, a larger dimension of the template is padded with
        zeros, a smaller one is truncated. The log names each leaf. PRNG keys are not resized.
    """

    rename: Sequence[tuple[Pattern, str | None]] = ()
    missing: str = 'error'
    strict: str | None = None
    resize: Patterns | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_word('missing', self.missing, ('error', 'init'))
        check_word('strict', self.strict, (*_STRICTNESS, None))
        rules: Any = self.rename
        is_list = isinstance(rules, Sequence) and not isinstance(rules, str)
        if not is_list or any(isinstance(rule, str) or len(rule) != 2 for rule in rules):
            raise ValueError(
                'rename must be a list of (name in the template, name in the checkpoint), such as '
                f"[('params/(.*)', r'ema/\\1')], got {shown(rules)}."
            )
        for pattern, replacement in rules:
            leaf_pattern(pattern, 'rename')
            if not isinstance(replacement, str | None):
                raise TypeError(f'rename: the name in the checkpoint must be text or None, got {shown(replacement)}.')

    @functools.cached_property
    def patterns(self) -> dict[str, LeafPatterns]:
        """Of ``take``, ``leave`` and ``resize``, by option."""
        return super().patterns | {'resize': LeafPatterns(self.resize, 'resize')}

    def sources(self, held: LeafTable, template: LeafTable, *, repeats: bool = False) -> dict[Path, Path]:
        """The path in the checkpoint of each leaf that comes from it, by its path in the template.

        Args:
          held: the leaves of the checkpoint.
          template: the leaves of the template.
          repeats: whether the same call restores later checkpoints, which have the new names, too: a rule whose leaf is gone
            leaves a leaf its own name.

        Raises:
          UnmatchedPattern: a pattern matches no leaf.
          MissingLeaves: a rule takes a leaf that the checkpoint lacks.
          TreeMismatchError: with ``repeats``, a rule replaces a leaf that the checkpoint has under its new name.
        """
        if self == dataclasses.replace(LeafChoice(), missing=self.missing, strict=self.strict):
            return {path: path for path in held}
        ours, theirs = ({leaf_name(path): _plain(leaf) for path, leaf in table.items()} for table in (template, held))
        for patterns in self.patterns.values():
            patterns.check(dict.fromkeys((*ours, *theirs)))
        old_names = {name: name for name in theirs}
        if self.rename:
            old_names = sources_of(
                theirs, ours, self.rename, wanted=self.takes, may_lack=self.missing == 'init', may_stay=repeats
            )
        arrays = [
            leaf_name(path) for path, leaf in held.items() if path in template and not isinstance(leaf, Empty | None)
        ]
        replaced = [name for name in arrays if self.takes(name) and old_names.get(name) != name] if repeats else []
        if replaced:
            old = old_names.get(replaced[0])
            raise TreeMismatchError(
                f'{replaced[0]}: rename= takes it from {old or "the new state"}, and the checkpoint has it, too: each restart '
                'would lose the trained values. Call Checkpointer.restore(rename=) once, or start a new run with '
                'initial_checkpoint=WarmStart(path, rename=).'
            )
        return {path_of(new): path_of(old) for new, old in old_names.items() if self.takes(new)}


def _plain(leaf: Any) -> Any:
    return leaf.build() if isinstance(leaf, Empty) else leaf
