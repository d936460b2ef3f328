"""Derives the rules of an assignment map for a template in which only names have changed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

from t5ckpt.core.leaf_path import Path, leaf_name, path_of
from t5ckpt.core.protocols import leaf_pattern
from t5ckpt.errors import near_names

Rule: TypeAlias = tuple[str, str | None]

# A longer list is better written by hand.
_MOST_RULES = 5
# The search compares a leaf with all others: at most so many pairs, and so many leaves.
_PAIRS, _SEARCHED = 200_000, 100
# Below these, a name tells what an optimizer computes, and no other name has its values.
_OPTIMIZER = re.compile(r'opt|optim|optimizer|opt_state|param_states')


def renaming_rules(missing: Collection[str], names: Mapping[str, Any], held: Mapping[str, Any]) -> list[Rule]:
    """Rules that map leaves that the checkpoint lacks to leaves of it with equal values, in order; empty without such leaves.

    Args:
      missing: names of the template's leaves that the checkpoint lacks.
      names: shape and kind of dtype of all leaves of the template, by name; rules do not match those that need none.
      held: the same of the checkpoint.
    """
    shifted = _shifted(missing, names, held)
    # An outer scope that has changed is seen best from the leaves far below it.
    order = sorted({*missing, *shifted}, key=lambda name: (name not in shifted, -len(path_of(name)), name))
    lacking = {name: names[name] for name in order}
    unused = {old: its for old, its in held.items() if old not in names} | {old: held[old] for old in shifted.values()}
    rules: list[Rule] = []
    source: dict[str, str] = {}
    searched = min(_SEARCHED, _PAIRS // (len(names) or 1))
    for name in itertools.islice((name for name in order if name not in source), searched):
        rest = [new for new in names if new not in source]
        mutual = [shifted[name]] if name in shifted else _mutual(name, rest, lacking, unused)
        if len(mutual) != 1:
            continue
        rule, moved = max(
            ((rule, _moved(rule, rest, lacking, unused, shifted)) for rule in _rules(name, *mutual)),
            key=lambda each: len(each[1]),
        )
        if moved:
            rules.append(rule)
            source |= moved
            gone = {*moved.values()}
            unused = {old: values for old, values in unused.items() if old not in gone}
    if _mixes_scopes(source):
        return []
    # With a leaf under its own name that another one takes, too, a new one would have its values.
    taken = {*source.values()} - source.keys()
    rules += [(_literal([name]), None) for name in names if name in taken]
    return rules if len(rules) <= _MOST_RULES else []


def _mutual(name: str, rest: Collection[str], lacking: Mapping[str, Any], unused: Mapping[str, Any]) -> list[str]:
    """The leaves of the checkpoint that may be the source of a leaf."""
    values = lacking[name]
    # Of layers with other numbers only their order would tell which is which.
    equal = [
        old
        for old, its in unused.items()
        if its == values and _without_numbers(old) != _without_numbers(name) and _computes_same(name, old)
    ]
    alike = [new for new in rest if lacking.get(new) == values]
    near = near_names(name, equal) or [old for old in equal if path_of(name)[-1] in path_of(old)]
    # A leaf that is nearer to another one is its source. Of two that remain, such as Adam's moments, each would be a guess.
    mutual = [old for old in near if name in (near_names(old, alike, 1) or [name])]
    # A box around a parameter (nn.Partitioned) adds a key, also to Adam's moments, which have the same shape.
    return [old for old in mutual if old.startswith(f'{name}/')] or mutual


def _mixes_scopes(source: Mapping[str, str]) -> bool:
    """Whether leaves of one renamed scope would come from two scopes, as the kernel of a layer and the bias of another."""
    scopes: dict[Path, Path] = {}
    for new, old in source.items():
        ours, theirs = path_of(new), path_of(old)
        if not _has_further_keys(new, old):
            end = 1 + next((i for i, keys in enumerate(zip(ours, theirs, strict=False)) if keys[0] != keys[1]), 0)
            if scopes.setdefault(ours[:end], theirs[:end]) != theirs[:end]:
                return True
    return False


def _computes_same(new: str, old: str) -> bool:
    """Whether a leaf of an optimizer may come from another: one name is the other with further keys, as those of a wrapper."""
    return not any(map(_OPTIMIZER.fullmatch, path_of(new))) or _has_further_keys(new, old)


def _has_further_keys(new: str, old: str) -> bool:
    """Whether one name is the other with further keys; numbers do not count."""
    few, many = sorted(([key for key in path_of(name) if not key.isdecimal()] for name in (new, old)), key=len)
    left = iter(many)
    return all(key in left for key in few)


def _shifted(missing: Collection[str], names: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, str]:
    """The sources of leaves below numbers that have changed, as in an optax.chain to which a transform was added."""
    ours, theirs = _numbered(names), _numbered(held)
    if len(ours) * len(theirs) > _PAIRS:
        return {}
    paths = [path_of(name) for name in missing]
    shifted: dict[str, str] = {}
    for scope in dict.fromkeys(path[:length] for path in paths for length in range(len(path)) if path[:length] in ours):
        found = [
            (other, pairs)
            for other in ([scope] if scope in theirs else theirs.keys() - ours.keys())
            if (pairs := _in_order(ours.get(scope, {}), theirs[other]))
        ]
        if len(found) == 1:
            ((other, pairs),) = found
            below = (((*scope, i, *rest), (*other, j, *rest)) for i, j in pairs for rest in ours[scope][i])
            shifted = {leaf_name(new): leaf_name(old) for new, old in below if new != old} | shifted
    return shifted


_Numbered: TypeAlias = dict[str, dict[Path, Any]]


def _numbered(table: Mapping[str, Any]) -> dict[Path, _Numbered]:
    """The leaves below each number, such as a position in a tuple, by the path of its scope."""
    scopes: dict[Path, _Numbered] = {}
    for name, values in table.items():
        path = path_of(name)
        for i, key in enumerate(path[:-1]):
            if key.isdecimal():
                scopes.setdefault(path[:i], {}).setdefault(key, {})[path[i + 1 :]] = values
    return scopes


def _in_order(ours: _Numbered, theirs: _Numbered) -> list[tuple[str, str]]:
    """The only pairs of numbers with equal leaves, in order, such that one side has no others; empty if there are none."""
    new, old = (sorted(numbers.items(), key=lambda each: int(each[0])) for numbers in (ours, theirs))
    few, many = sorted((new, old), key=len)
    ways: list[list[tuple[str, str]]] = []
    for way in (1, -1):
        left = iter(many[::way])
        ways.append(
            [(key, next((other for other, its in left if its == values), '')) for key, values in few[::way]][::way]
        )
    if ways[0] != ways[1] or not all(other for _, other in ways[0]):
        return []
    return ways[0] if few is new else [(i, j) for j, i in ways[0]]


def _moved(
    rule: tuple[str, str],
    names: Collection[str],
    lacking: Mapping[str, Any],
    free: Mapping[str, Any],
    shifted: Mapping[str, str],
) -> dict[str, str]:
    """The source of each name that a rule matches; empty if one has no leaf with an equal value, or two have the same."""
    moved: dict[str, str] = {}
    pattern = leaf_pattern(rule[0])
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        moved[name] = old = match.expand(rule[1])
        if name not in lacking or free.get(old) != lacking[name] or shifted.get(name, old) != old:
            return {}
    return moved if len(set(moved.values())) == len(moved) else {}


def _rules(template: str, held: str) -> Iterator[tuple[str, str]]:
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
