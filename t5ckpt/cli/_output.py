"""What verbs print: tables for people, JSON for programs, progress on a terminal, questions before destruction."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import click

from t5ckpt._types import Progress

__all__ = ['Column', 'age', 'confirm', 'json_option', 'print_json', 'print_table', 'progress', 'size']

json_option = click.option('--json', 'as_json', is_flag=True, help='Print JSON, for programs.')


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table; numbers go to the right."""

    title: str
    right: bool = False


def print_json(value: Any) -> None:
    """Prints a value as JSON; what JSON does not know (numpy scalars, paths) as a number or as text."""
    click.echo(json.dumps(value, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, 'item') else str(value)


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Prints rows: with colours and lines on a terminal, as plain aligned text where the output is piped."""
    if not sys.stdout.isatty():
        _print_plain(columns, [*rows])
        return
    import rich.box
    import rich.console
    import rich.table
    import rich.text

    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.title, justify='right' if column.right else 'left', overflow='fold')
    for row in rows:
        # Names may hold square brackets, which are rich's markup.
        table.add_row(*[rich.text.Text(cell) for cell in row])
    rich.console.Console(highlight=False).print(table)


def _print_plain(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    lines = [[column.title for column in columns], *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = [
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ]
        click.echo('  '.join(cells).rstrip())


def size(nbytes: int | None) -> str:
    """Bytes for people, in powers of 1000 as disks are sold: '1.5 GB'."""
    if nbytes is None:
        return ''
    value, units = float(nbytes), ['B', 'kB', 'MB', 'GB', 'TB', 'PB']
    while value >= 999.95 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f'{nbytes} B' if units[0] == 'B' else f'{value:.1f} {units[0]}'


def age(seconds: float | None) -> str:
    """A duration for people: '45 s', '12 min', '3 h', '5 days'."""
    if seconds is None:
        return ''
    for limit, unit, name in ((120, 1, 's'), (7200, 60, 'min'), (172800, 3600, 'h')):
        if seconds < limit:
            return f'{max(0, int(seconds / unit))} {name}'
    return f'{int(seconds / 86400)} days'


@contextlib.contextmanager
def progress(title: str) -> Generator[Progress]:
    """A progress bar on the terminal that errors go to; nothing where there is none. Takes bytes done and in all."""
    if not sys.stderr.isatty():
        yield lambda done, total: None  # noqa: ARG005
        return
    import rich.console
    import rich.progress as bars

    columns = (bars.TextColumn(title), bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn())
    with bars.Progress(*columns, bars.TimeRemainingColumn(), console=rich.console.Console(stderr=True)) as shown:
        task = shown.add_task(title, total=None)
        update: Callable[..., None] = shown.update
        yield lambda done, total: update(task, completed=done, total=total)


def confirm(question: str, yes: bool) -> None:
    """Asks before something is destroyed: on a terminal; elsewhere ``--yes`` has to say it.

    Raises:
      click.UsageError: nobody to ask, and no ``--yes``; or the answer was no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f'{question} There is no terminal to ask: pass --yes.')
    if not click.confirm(question, err=True):
        raise click.UsageError('nothing was done.')
