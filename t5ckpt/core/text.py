"""Text of messages: aligned tables, bytes, durations."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

CURE_OF_DAMAGE = 'Restore an older step, or copy the checkpoint again.'
"""The last sentence of errors about a damaged checkpoint."""
LONGEST = 300
"""The characters of a name or a pattern that are compared with others; the comparison is quadratic."""
_LISTED = 20
# Elements of a collection that an error shows.
_SHOWN_ELEMENTS = 4


def aligned(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Lines with each column as wide as its widest cell.

    Args:
      rows: cells, as many in each row as in ``right``.
      right: for each column, whether its cells are right-aligned.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(right))]
    return [
        '  '.join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]


class Lines(str):
    """Printable text of several lines, made by :func:`lines`. Any other string is shown as one line."""

    __slots__ = ()


def lines(*texts: str, between: str = '\n') -> Lines:
    """Joins texts with line breaks. Each text is made printable first, so that a name in it cannot begin a line.

    Args:
      texts: parts; one that is ``Lines`` keeps its line breaks.
      between: the separator.
    """
    return Lines(between.join(map(printable, texts)))


def lines_of_error(error: BaseException) -> Lines:
    """``'SomeError: message'``; line breaks in errors of other libraries are escaped."""
    return lines(type(error).__name__, str(error), between=': ')


def printable(text: str) -> str:
    """Escapes control characters, line breaks and marks of direction; ``Lines`` are returned unchanged.

    The names in a message come from checkpoints, and a terminal executes control sequences in the text that it shows.
    """
    if isinstance(text, Lines) or text.isprintable():
        return text
    return ''.join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def shown(value: Any, limit: int = 80) -> str:
    """The ``repr`` of a caller's value for an error, cut to about ``limit`` characters; a cut value is shown with its size.

    The full text of a large value is never built: for an array or a list with millions of elements this takes seconds.
    """
    shape, dtype = getattr(value, 'shape', None), getattr(value, 'dtype', None)
    if isinstance(shape, tuple) and dtype is not None:
        sized = f'{type(value).__name__} of {dtype} {shape}'
        try:
            is_large = len(shape) > 1 or any(size > _SHOWN_ELEMENTS for size in shape)
            return sized if is_large else _cut(repr(value), limit)
        except RuntimeError:
            # An array of JAX that was deleted.
            return sized
    if isinstance(value, (str, bytes)):
        more = f'…, {counted(len(value), "character" if isinstance(value, str) else "byte")}'
        return repr(value) if len(value) <= limit else f'{value[:limit]!r}{more}'
    if type(value) in (list, tuple, set, frozenset, dict) and len(value) > _SHOWN_ELEMENTS:
        first = ', '.join(
            shown(element, limit // _SHOWN_ELEMENTS) for element in itertools.islice(value, _SHOWN_ELEMENTS)
        )
        return f'{type(value).__name__} of {first}, …, {counted(len(value), "element")}'
    return _cut(repr(value), limit)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f'{text[:limit]}…'


class _PrintableArguments(logging.Filter):
    """Makes the arguments of a log line printable, since they include names from checkpoints and errors of other libraries."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(_printed(value) for value in record.args)
        return True


def _printed(value: object) -> object:
    return printable(str(value)) if isinstance(value, (str, os.PathLike, BaseException)) else value


# Added to the logger itself, so that it applies to all modules.
logging.getLogger('t5ckpt').addFilter(_PrintableArguments())


def human_bytes(nbytes: int | None) -> str:
    """Bytes in powers of 1000, as disks are sold: '1.5 GB'."""
    if nbytes is None:
        return ''
    value, units = float(nbytes), ['B', 'kB', 'MB', 'GB', 'TB', 'PB']
    while value >= 999.95 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f'{nbytes} B' if units[0] == 'B' else f'{value:.1f} {units[0]}'


def human_age(seconds: float) -> str:
    """A duration in a unit of which there are at least two: '45 s', '12 min', '3 h', '5 days'."""
    for limit, unit, name in ((120, 1, 's'), (7200, 60, 'min'), (172800, 3600, 'h')):
        if seconds < limit:
            return f'{max(0, int(seconds / unit))} {name}'
    return f'{int(seconds / 86400)} days'


def counted(count: int, one: str, several: str = '') -> str:
    """A count with its noun: '1 step', '1,024 steps'; ``several`` is an irregular plural."""
    return f'{count:,} {one}' if count == 1 else f'{count:,} {several or one + "s"}'


def numbered(noun: str, numbers: Iterable[object], several: str = '') -> str:
    """A noun with the numbers that it has: 'step 3', 'steps 3, 5'; ``several`` is an irregular plural."""
    texts = [str(number) for number in numbers]
    return f'{noun if len(texts) == 1 else several or noun + "s"} {", ".join(texts)}'


def numbered_are(noun: str, numbers: Sequence[object], several: str = '') -> str:
    """As :func:`numbered`, with the verb: 'step 3 is', 'steps 3, 5 are'."""
    return f'{numbered(noun, numbers, several)} {"is" if len(numbers) == 1 else "are"}'


def some_of(texts: Sequence[str], shown: int, between: str = ', ') -> str:
    """The first ``shown`` texts, and the number of those left out."""
    return between.join(texts[:shown]) + (f' and {len(texts) - shown} more' if len(texts) > shown else '')


def listed(items: Sequence[object], rest: str = '') -> list[str]:
    """Lines for the first 20 items, and for the number of those left out; ``rest`` says where these are."""
    more = [f'  ... and {len(items) - _LISTED} more{rest}'] if len(items) > _LISTED else []
    return [f'  {item}' for item in items[:_LISTED]] + more


def did_you_mean(word: str, words: Iterable[str], before: str = ' ') -> str:
    """' Did you mean ...?' with the nearest of some words, or ''."""
    near = difflib.get_close_matches(word[:LONGEST], words, 1)
    return f'{before}Did you mean {near[0]!r}?' if near else ''


def short_repr(record: Any) -> str:
    """The repr of a dataclass with large values cut; the names of all leaves would fill a notebook's page."""
    fields = (f'{field.name}={shown(getattr(record, field.name))}' for field in dataclasses.fields(record))
    return f'{type(record).__name__}({", ".join(fields)})'


def finite_json(value: Any) -> Any:
    """A value of JSON with text for NaN and infinities, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: finite_json(item) for key, item in cast('Mapping[Any, Any]', value).items()}
    if isinstance(value, list):
        return [finite_json(item) for item in cast('list[Any]', value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
