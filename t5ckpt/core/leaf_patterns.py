"""Patterns that choose leaves: everywhere regular expressions for whole names, such as ``'params/.*/kernel'``."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from t5ckpt.core.text import LONGEST, shown

Pattern: TypeAlias = str | re.Pattern[str]
Patterns: TypeAlias = Pattern | Sequence[Pattern]
"""One pattern or several, as text or compiled."""
# Not the repetitions of a regular expression.
_GLOB = re.compile(r'(?<![.)\]\\])(\*\*/|\*\*|[*?])')
_OF_GLOB = {'**/': '(.*/)?', '**': '.*', '*': '[^/]*', '?': '[^/]'}
_WORD = re.compile(r'\w{2,}')
# What is compared with a pattern that matches no name.
_COMPARED = 10_000


def leaf_pattern(pattern: Pattern, option: str = 'pattern') -> re.Pattern[str]:
    """Compiles a pattern for names of leaves; a compiled one is returned unchanged.

    A key may contain line breaks, and a pattern such as ``params/.*`` has to match these names, too.

    Raises:
      ValueError: not a regular expression, with the option and the position of the mistake.
    """
    if not isinstance(pattern, str):
        return re.compile(pattern)
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        glob = of_glob(pattern)
        cure = f' A glob is written {glob!r}.' if glob != pattern else ''
        raise ValueError(f'{option}: {shown(pattern)} is not a regular expression: {error}.{cure}') from error


def of_glob(glob: str) -> str:
    """The regular expression of a glob, in which ``*`` and ``?`` match within a key, and ``**`` any number of keys."""
    return _GLOB.sub(lambda match: _OF_GLOB[match[0]], glob)


def meant_pattern(pattern: Pattern, names: Iterable[str], option: str = '') -> str:
    """' Did you mean ...?' for a pattern that matches no name: a glob, a part of a name, or a misspelt one; or ''."""
    text = pattern if isinstance(pattern, str) else pattern.pattern
    known = [*itertools.islice(names, _COMPARED)]
    part, glob = f'(?:{text})' if '|' in text else text, of_glob(text)
    whole = [glob, glob.replace('[^/]*', '.*')] if glob != text else []
    candidates = itertools.chain(
        [*whole, f'{part}/.*', f'.*/{part}', f'.*/{part}/.*'],
        (_corrected(each, known) for each in (text, *whole[:1], f'{part}/.*')),
        # Of alternatives, whole keys only.
        [] if '|' in text else [f'{text}.*', f'.*{text}', f'.*{text}.*'],
    )
    meant = next((each for each in candidates if each and any(_matches(each, name) for name in known)), '')
    return f' Did you mean {option}{meant!r}?' if meant else ''


def _corrected(pattern: str, names: Sequence[str]) -> str:
    """A pattern with its misspelt keys replaced by those of the names, or with a '/' inside keys; '' if it matches no name."""
    keys = {word for name in names for word in _WORD.findall(name)}

    def nearest(match: re.Match[str]) -> str:
        return match[0] if match[0] in keys else next(iter(difflib.get_close_matches(match[0], keys, 1, 0.7)), match[0])

    meant = _WORD.sub(nearest, pattern[:LONGEST])
    if meant != pattern:
        return meant if any(_matches(meant, name) for name in names) else ''
    # A '/' inside a key has a backslash before it, which a '.' matches in a regular expression.
    escaped = [name for name in names if '\\/' in name][:1000]
    slashes = [match.start() for match in re.finditer('/', pattern)][:8] if escaped else []
    for mark, (first, last) in itertools.product('.\\', itertools.combinations_with_replacement(slashes, 2)):
        inside = pattern[first : last + 1].replace('/', f'{mark}/')
        meant = pattern[:first] + inside + pattern[last + 1 :]
        if any(_matches(meant, name) for name in escaped):
            return meant
    return ''


def _matches(pattern: str, name: str) -> bool:
    try:
        return leaf_pattern(pattern).fullmatch(name) is not None
    except ValueError:
        return False
