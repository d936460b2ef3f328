"""Maps the names of a checkpoint's leaves to those of a template."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from t5ckpt.core.leaf_path import Path, leaf_name, path_of
from t5ckpt.core.leaf_patterns import Pattern, leaf_pattern, meant_pattern
from t5ckpt.core.text import lines, some_of
from t5ckpt.errors import MissingLeaves, TreeMismatchError, near_names

__all__ = ['CheckpointTranslator', 'Rule', 'Translation', 'apply_assignment_map', 'intersect_state']

_log = logging.getLogger('t5ckpt')
_SHOWN = 20

Rule: TypeAlias = Callable[..., tuple[str | None, Any]]
"""Takes (options, key, value, *groups of the pattern), returns the new key, None to drop it, and the value."""


@dataclasses.dataclass(frozen=True)
class Translation:
    """The result of a translation.

    Attributes:
      leaves: from the new key to the value.
      mapped: from the old key to the new key.
      dropped: old keys that a rule left out.
    """

    leaves: dict[str, Any]
    mapped: dict[str, str]
    dropped: tuple[str, ...]


class CheckpointTranslator:
    r"""Rules that translate the keys of a checkpoint (the class of the same name in t5x/checkpoint_importer.py).

        rules = CheckpointTranslator()

        @rules.add(r'encoder/block_(\d+)/norm')
        def norm(options, key, value, block):
            return f'target/encoder/layers_{int(block)}/norm/scale', value

    The first rule whose pattern matches the whole key applies. Every key needs a rule, and two keys must not get the same new
    key.
    """

    def __init__(self) -> None:
        self.rules: list[tuple[re.Pattern[str], Rule]] = []

    def add(self, pattern: str) -> Callable[[Rule], Rule]:
        """A decorator that registers a rule for the keys that ``pattern`` matches as a whole."""
        compiled = leaf_pattern(pattern)

        def register(rule: Rule) -> Rule:
            self.rules.append((compiled, rule))
            return rule

        return register

    def apply(self, flatdict: Mapping[str, Any], **opts: Any) -> dict[str, Any]:
        """Translates a flat dict; ``opts`` are passed to the rules. See :meth:`translate`."""
        return self.translate(flatdict, **opts).leaves

    def translate(self, flatdict: Mapping[str, Any], **opts: Any) -> Translation:
        """Translates a flat dict.

        Raises:
          TreeMismatchError: keys without a rule, or several keys with the same new key; the message names all of them.
        """
        leaves: dict[str, Any] = {}
        became: dict[str, str | None] = {}
        unmatched: list[str] = []
        clashes: dict[str, list[str]] = {}
        for key, value in flatdict.items():
            match_and_rule = next(
                ((match, rule) for pattern, rule in self.rules if (match := pattern.fullmatch(key))), None
            )
            if match_and_rule is None:
                unmatched.append(key)
                continue
            match, rule = match_and_rule
            new, new_value = rule(opts, key, value, *match.groups())
            became[key] = new
            if new is not None:
                clashes.setdefault(new, []).append(key)
                leaves[new] = new_value
        problems = [f'{new}: {" and ".join(keys)} would both become it.' for new, keys in clashes.items() if keys[1:]]
        if unmatched:
            problems.append(f'no rule for {some_of(unmatched, _SHOWN)}.')
        if problems:
            raise TreeMismatchError(
                lines(
                    lines('the checkpoint cannot be translated:', *problems[:_SHOWN], between='\n  '),
                    'Add or correct a rule of translator= (--rules FILE.py); one that returns (None, None) drops a key.',
                )
            )
        mapped = {key: new for key, new in became.items() if new is not None}
        return Translation(leaves, mapped, tuple(key for key, new in became.items() if new is None))


def apply_assignment_map(
    ckpt_optimizer_state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any],
    assignment_map: Sequence[tuple[Pattern, str | None]],
    require_all_rules_match: bool = True,
    *,
    is_resuming: bool = False,
) -> Mapping[str, Any]:
    r"""Renames the leaves of a checkpoint's state to those of a template (T5X, state_utils.apply_assignment_map).

    For each leaf of the template, the first rule whose pattern matches the whole name applies. Its replacement, with ``\1`` for
    groups, is the name in the checkpoint; None leaves the leaf out. Several leaves of the template may come from one leaf of the
    checkpoint. Leaves without a rule keep their names.

    Args:
      ckpt_optimizer_state: the checkpoint's state, nested dicts.
      optimizer_state: the template's state.
      assignment_map: (pattern, replacement or None), in order. A pattern is text or compiled.
      require_all_rules_match: whether a pattern that matches nothing is an error.
      is_resuming: True returns the state unchanged, for the restart of a run whose state was mapped before.

    Returns:
      The new state.

    Raises:
      MissingLeaves: a rule names a leaf that the checkpoint lacks.
      TreeMismatchError: a rule matches nothing.
    """
    if is_resuming:
        return ckpt_optimizer_state
    held, template = _flatten(ckpt_optimizer_state), _flatten(optimizer_state)
    return _nest(
        {new: held[old] for new, old in sources_of(held, template, assignment_map, require_all_rules_match).items()}
    )


def sources_of(
    held: Mapping[str, Any],
    template: Mapping[str, Any],
    rules: Sequence[tuple[Pattern, str | None]],
    require_all_rules_match: bool = True,
    *,
    wanted: Callable[[str], bool] | None = None,
    may_lack: bool = False,
    may_stay: bool = False,
) -> dict[str, str]:
    """The name in the checkpoint of each leaf of the result, by its new name, with rules as in :func:`apply_assignment_map`.

    With ``wanted``, the rules apply only to such leaves of the template, and leaves without a rule that the checkpoint lacks are
    left to the caller.

    Args:
      held: the checkpoint's leaves by name.
      template: the template's leaves by name.
      rules: (pattern, replacement or None).
      require_all_rules_match: whether a pattern that matches nothing is an error.
      wanted: which leaves of the template the rules are for.
      may_lack: a rule that names a leaf that the checkpoint lacks leaves it out.
      may_stay: such a leaf keeps its own name, if the checkpoint has that.
    """
    where = 'the assignment map' if wanted is None else 'rename='
    compiled = [(leaf_pattern(pattern, where), replacement) for pattern, replacement in rules]
    unused = {pattern for pattern, _ in compiled}
    source: dict[str, str | None] = {}
    for name in template:
        rule = next(((match, repl) for pattern, repl in compiled if (match := pattern.fullmatch(name))), None)
        if rule is None:
            if name in held:
                source[name] = name
            elif wanted is None:
                _log.warning('t5ckpt: %s matches no rule of the assignment map and is not in the checkpoint', name)
            continue
        match, replacement = rule
        unused.discard(match.re)
        if wanted is not None and not wanted(name):
            continue
        old = None if replacement is None else _expanded(match, replacement)
        if old is not None and old not in held:
            stays = may_stay and name in held
            if not stays and not may_lack and not _is_nothing(template[name]):
                near = near_names(old, held)
                raise MissingLeaves(
                    f'{name}: {where} takes it from {old}, which is not in the checkpoint. '
                    + (f'Near: {", ".join(near)}.' if near else f'It has {some_of(list(held), 3)}.')
                )
            old = name if stays else None
        source[name] = old
    patterns = [pattern for pattern, _ in compiled]
    # Of two rules with the same pattern, the second never applies.
    unmatched = [each.pattern for i, each in enumerate(patterns) if each in unused or each in patterns[:i]]
    if unmatched and require_all_rules_match:
        raise TreeMismatchError(
            f'the patterns {unmatched} of {where} match no leaf of the template that earlier rules do not match; it has '
            f'{some_of(list(template), 3)}. A rule is (name in the template, name in the checkpoint): correct it or leave it out.'
            f'{meant_pattern(unmatched[0], template)}'
        )
    moved = {old for new, old in source.items() if old is not None and old != new}
    kept = {name: name for name in held if name not in moved and name not in source}
    # An empty container gives way to leaves that are moved below it.
    kept = {
        old: old for old in kept if not (_is_nothing(held[old]) and any(new.startswith(f'{old}/') for new in source))
    }
    return {new: old for new, old in {**source, **kept}.items() if old is not None}


def intersect_state(state_dict: Mapping[str, Any], intersect_state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leaves out the leaves that the template lacks (T5X, state_utils.intersect_state).

    Pass it in ``state_transformation_fns`` of a restore. A warning in the log names the leaves that were left out.

    Args:
      state_dict: the checkpoint's state, nested dicts.
      intersect_state_dict: the template's state.

    Returns:
      The leaves of the checkpoint whose names the template has, too.
    """
    held, template = _flatten(state_dict), _flatten(intersect_state_dict)
    # As in a restore, None or an empty container in the template does not match an array.
    kept = {name for name, leaf in template.items() if not _is_nothing(leaf) or _is_nothing(held.get(name))}
    dropped = [name for name in held if name not in kept]
    if dropped:
        _log.warning('t5ckpt: not in the template, so left out: %s', some_of(dropped, _SHOWN))
    return _nest({name: value for name, value in held.items() if name in kept})


def _is_nothing(leaf: Any) -> bool:
    return leaf is None or (isinstance(leaf, (Mapping, list, tuple)) and not leaf)


def _expanded(match: re.Match[str], replacement: str) -> str:
    try:
        return match.expand(replacement)
    except (re.error, IndexError) as error:
        raise ValueError(
            f'the rule ({match.re.pattern!r}, {replacement!r}): the replacement does not fit the pattern ({error}). Give the '
            'pattern a group for each \\1 and \\g<name>.'
        ) from error


def _flatten(tree: Mapping[str, Any], prefix: Path = ()) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = (*prefix, str(key))
        if isinstance(value, Mapping) and not set(value.keys()) >= {'driver', 'kvstore', 'metadata'}:
            flat |= _flatten(value, path)
        else:
            flat[leaf_name(path)] = value
    return flat


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = path_of(name)
        node = root
        for key in parents:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            raise MissingLeaves(
                f'{name}: after the assignment map, another leaf has this name, or a name that is a prefix of it. Give each '
                'leaf a separate name.'
            )
        node[last] = value
    return root
