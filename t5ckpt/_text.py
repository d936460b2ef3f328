"""Text for people: aligned tables, bytes, durations."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ['aligned', 'human_age', 'human_bytes', 'printable', 'some_of']


def aligned(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Lines with each column as wide as its widest cell.

    Args:
      rows: cells, as many in each row as in ``right``.
      right: for each column, whether its cells go to the right.
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


def printable(text: str, also: str = '') -> str:
    """Text in which nothing but letters is left, and what is in ``also``.

    Names come from checkpoints, and a terminal obeys what it is shown.
    """
    return ''.join(letter if letter.isprintable() or letter in also else ascii(letter)[1:-1] for letter in text)


def human_bytes(nbytes: int | None) -> str:
    """Bytes in powers of 1000, as disks are sold: '1.5 GB'."""
    if nbytes is None:
        return ''
    value, units = float(nbytes), ['B', 'kB', 'MB', 'GB', 'TB', 'PB']
    while value >= 999.95 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f'{nbytes} B' if units[0] == 'B' else f'{value:.1f} {units[0]}'


def human_age(seconds: float) -> str:
    """A duration in its largest unit that is not coarse: '45 s', '12 min', '3 h', '5 days'."""
    for limit, unit, name in ((120, 1, 's'), (7200, 60, 'min'), (172800, 3600, 'h')):
        if seconds < limit:
            return f'{max(0, int(seconds / unit))} {name}'
    return f'{int(seconds / 86400)} days'


def some_of(texts: Sequence[str], shown: int, between: str = ', ') -> str:
    """The first texts, and how many more there are."""
    return between.join(texts[:shown]) + (f' and {len(texts) - shown} more' if len(texts) > shown else '')
