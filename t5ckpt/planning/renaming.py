"""Derives the rules of an assignment map for a template in which only names have changed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from t5ckpt.core.leaf_path import Path, leaf_name, path_of
from t5ckpt.core.leaf_patterns import leaf_pattern
from t5ckpt.errors import near_names

Rule: TypeAlias = tuple[str, str]

# A longer list is better written by hand.
_MOST_RULES = 5
# The search compares a leaf with all others: at most so many pairs, and so many leaves.
_PAIRS, _SEARCHED = 200_000, 100
# Keys of an optimizer's state: below these, a name tells what is computed, and no other name has its values. Wider than the
# scopes that a conversion leaves out, since a rule that is not printed costs less than one that is wrong.
_OPTIMIZER = re.compile(r'(?i).*opt.*|tx|param_states')


def renaming_rules(missing: Collection[str], names: Mapping[str, Any], held: Mapping[str, Any]) -> list[Rule]:
    """Rules that map leaves that the checkpoint lacks to leaves of it with equal values, in order; empty without such leaves.

    Args:
      missing: names of the template's leaves that the checkpoint lacks.
      names: shape and kind of dtype of all leaves of the template, by name; rules do not match those that need none.
      held: the same of the checkpoint.
    """
    # An outer scope that has changed is seen best from the leaves far below it.
    order = sorted(missing, key=lambda name: (-len(path_of(name)), name))
    lacking = {name: names[name] for name in order}
    unused = {old: its for old, its in held.items() if old not in names}
    rules: list[Rule] = []
    source: dict[str, str] = {}
    searched = min(_SEARCHED, _PAIRS // (len(names) or 1))

    def moved_by(pattern: str, replacement: str) -> dict[str, str]:
        """The source of each name that a rule matches; empty if one has no leaf with an equal value, or two have the same."""
        matches = filter(None, map(leaf_pattern(pattern).fullmatch, rest))
        moved = {match[0]: match.expand(replacement) for match in matches}
        fits = all(new in lacking and unused.get(old) == lacking[new] for new, old in moved.items())
        return moved if fits and len({*moved.values()}) == len(moved) else {}

    for name in itertools.islice((name for name in order if name not in source), searched):
        rest = [new for new in names if new not in source]
        # Of layers with other numbers only their order would tell which is which.
        equal = [
            old
            for old, its in unused.items()
            if its == lacking[name] and _without_numbers(old) != _without_numbers(name) and _computes_same(name, old)
        ]
        alike = [new for new in rest if lacking.get(new) == lacking[name]]
        near = near_names(name, equal) or [old for old in equal if path_of(name)[-1] in path_of(old)]
        # A leaf that is nearer to another one is its source. Of two that remain, such as Adam's moments, each would be a guess.
        mutual = [old for old in near if name in (near_names(old, alike, 1) or [name])]
        if len(mutual) == 1:
            rule = max(_rules(name, mutual[0]), key=lambda rule: len(moved_by(*rule)))
            if moved := moved_by(*rule):
                rules.append(rule)
                source |= moved
                for old in moved.values():
                    del unused[old]
    return rules if len(rules) <= _MOST_RULES and not _is_guess(source, names, held) else []


def _is_guess(source: Mapping[str, str], names: Mapping[str, Any], held: Mapping[str, Any]) -> bool:
    """Whether a renamed scope has other leaves than its source, so that another scope may be the right one."""
    scopes: set[tuple[Path, Path]] = set()
    for new, old in source.items():
        ours, theirs = path_of(new), path_of(old)
        if not _has_further_keys(new, old):
            end = 1 + _equal_keys(ours, theirs)
            scopes.add((ours[:end], theirs[:end]))
    ours, theirs = _subtrees(names), _subtrees(held)
    return any(ours[new] != theirs[old] for new, old in scopes)


def _subtrees(table: Mapping[str, Any]) -> dict[Path, dict[Path, Any]]:
    """The leaves below each path; outer paths come first."""
    found: dict[Path, dict[Path, Any]] = {}
    for name, values in table.items():
        path = path_of(name)
        for end in range(1, len(path) + 1):
            found.setdefault(path[:end], {})[path[end:]] = values
    return found


def _computes_same(new: str, old: str) -> bool:
    """Whether a leaf of an optimizer may come from another: one name is the other with further keys, as those of a wrapper."""
    return not any(map(_OPTIMIZER.fullmatch, path_of(new))) or _has_further_keys(new, old)


def _has_further_keys(new: str, old: str) -> bool:
    """Whether one name is the other with further keys; numbers do not count."""
    few, many = sorted(([key for key in path_of(name) if not key.isdecimal()] for name in (new, old)), key=len)
    left = iter(many)
    return all(key in left for key in few)


def _equal_keys(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """The number of keys that are equal from the start."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def _rules(template: str, held: str) -> Iterator[tuple[str, str]]:
    """Rules that map one name to the other, the most general first."""
    ours, theirs = ([leaf_name((key,)) for key in path_of(name)] for name in (template, held))
    head = _equal_keys(ours, theirs)
    before, after = ours[:head], _equal_keys(ours[head:][::-1], theirs[head:][::-1])
    changed, to = (keys[head : len(keys) - after] for keys in (ours, theirs))
    starts = [
        '(.*)',
        *(f'({_literal(before[:i])}/.*)' for i in range(1, head)),
        *(f'(.*/{_literal(before[-i:])})' for i in range(1, head)),
        f'({_literal(before)})',
    ]
    end = '(.*)' if after else ''
    for start in starts if before else ['']:
        first, last = start and r'\1', end and rf'\{1 + bool(start)}'
        yield (
            '/'.join(filter(None, (start, _literal(changed), end))),
            '/'.join(filter(None, (first, '/'.join(to).replace('\\', r'\\'), last))),
        )


def _without_numbers(name: str) -> str:
    return re.sub(r'\d+', '#', name)


def _literal(keys: Sequence[str]) -> str:
    """A pattern that matches only these keys; a minus needs no escape outside brackets."""
    return re.escape('/'.join(keys)).replace('\\-', '-')
