"""Derives the rules of an assignment map for a template in which only names have changed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

from t5ckpt.core.leaf_path import leaf_name, path_of
from t5ckpt.core.protocols import leaf_pattern
from t5ckpt.errors import near_names

Rule: TypeAlias = tuple[str, str]

# A longer list is better written by hand.
_MOST_RULES = 5
# The search takes milliseconds a leaf.
_SEARCHED = 100


def renaming_rules(lacking: Mapping[str, Any], free: Mapping[str, Any], names: Collection[str]) -> list[Rule]:
    """Rules that map leaves that the checkpoint lacks to leaves of it with equal values, in order; empty without such leaves.

    Args:
      lacking: leaves of the template that the checkpoint lacks, by name, with their shape and kind of dtype.
      free: the same of the leaves of the checkpoint that the template lacks.
      names: of all leaves of the template; rules do not match those that the checkpoint has.
    """
    rules: list[Rule] = []
    source: dict[str, str] = {}
    for name, values in [*lacking.items()][:_SEARCHED]:
        unused = {old: its for old, its in free.items() if old not in source.values()}
        # Of layers with other numbers only their order would tell which is which.
        equal = [
            old for old, its in unused.items() if its == values and _without_numbers(old) != _without_numbers(name)
        ]
        rest = [new for new in names if new not in source]
        alike = [new for new in rest if lacking.get(new) == values]
        near = near_names(name, equal) or [old for old in equal if path_of(name)[-1] in path_of(old)]
        # A leaf that is nearer to another one is its source. Of two that remain, such as Adam's moments, each would be a guess.
        mutual = [old for old in near if name in (near_names(old, alike, 1) or [name])]
        # A box around a parameter (nn.Partitioned) adds a key, also to Adam's moments, which have the same shape.
        mutual = [old for old in mutual if old.startswith(f'{name}/')] or mutual
        if name in source or len(mutual) != 1:
            continue
        rule, moved = max(
            ((rule, _moved(rule, rest, lacking, unused)) for rule in _rules(name, *mutual)),
            key=lambda each: len(each[1]),
        )
        if moved:
            rules.append(rule)
            source |= moved
    return rules if len(rules) <= _MOST_RULES else []


def _moved(rule: Rule, names: Collection[str], lacking: Mapping[str, Any], free: Mapping[str, Any]) -> dict[str, str]:
    """The source of each name that a rule matches; empty if one has no leaf with an equal value, or two have the same."""
    moved: dict[str, str] = {}
    pattern = leaf_pattern(rule[0])
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        moved[name] = old = match.expand(rule[1])
        if name not in lacking or free.get(old) != lacking[name]:
            return {}
    return moved if len(set(moved.values())) == len(moved) else {}


def _rules(template: str, held: str) -> Iterator[Rule]:
    """Rules that map one name to the other, the most general first; the last matches only this name."""
    ours, theirs = ([leaf_name((key,)) for key in path_of(name)] for name in (template, held))
    shorter = min(len(ours), len(theirs))
    head = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    tail = next((i for i in range(shorter - head) if ours[-1 - i] != theirs[-1 - i]), shorter - head)
    before, after = ours[:head], ours[len(ours) - tail :]
    changed, to = ours[head : len(ours) - tail], theirs[head : len(theirs) - tail]
    for end in ['(.*)', f'({_literal(after)})'] if after else [None]:
        for start in _heads(before):
            old = '/'.join(part for part in (start, _literal(changed), end) if part)
            first, last = [r'\1'] if start else [], [rf'\{2 if start else 1}'] if end else []
            yield old, '/'.join([*first, *(key.replace('\\', r'\\') for key in to), *last])
    yield _literal(ours), held.replace('\\', r'\\')


def _heads(before: list[str]) -> list[str | None]:
    """Patterns for the scopes above the one that has changed."""
    if not before:
        return [None]
    inner = range(1, len(before))
    return [
        '(.*)',
        *(f'({_literal(before[:i])}/.*)' for i in inner),
        *(f'(.*/{_literal(before[-i:])})' for i in inner),
        f'({_literal(before)})',
    ]


def _without_numbers(name: str) -> str:
    return re.sub(r'\d+', '#', name)


def _literal(keys: list[str]) -> str:
    """A pattern that matches only these keys; a minus needs no escape outside brackets."""
    return re.escape('/'.join(keys)).replace('\\-', '-')
