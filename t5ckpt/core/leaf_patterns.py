"""Patterns that choose leaves: everywhere regular expressions for whole names, such as ``'params/.*/kernel'``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from t5ckpt.core.text import corrected, shown

Pattern: TypeAlias = str | re.Pattern[str]
Patterns: TypeAlias = Pattern | Sequence[Pattern]
"""One pattern or several, as text or compiled."""
# Not the repetitions of a regular expression.
_GLOB = re.compile(r'(?<![.)\]\\])(\*\*/|\*\*|[*?])')
_OF_GLOB = {'**/': '(.*/)?', '**': '.*', '*': '[^/]*', '?': '[^/]'}
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
        (corrected(each, known, _matches) for each in (text, *whole[:1], f'{part}/.*')),
        # Of alternatives, whole keys only.
        [] if '|' in text else [f'{text}.*', f'.*{text}', f'.*{text}.*'],
    )
    meant = next((each for each in candidates if each and any(_matches(each, name) for name in known)), '')
    return f' Did you mean {option}{meant!r}?' if meant else ''


def _matches(pattern: str, name: str) -> bool:
    try:
        return leaf_pattern(pattern).fullmatch(name) is not None
    except ValueError:
        return False
