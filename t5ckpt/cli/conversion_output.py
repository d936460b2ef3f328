"""The reports of conversions, exports, imports and copies, and usage errors from the library."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Sequence
from typing import Any

import click

from t5ckpt.cli.output import fields_of, print_json, print_line
from t5ckpt.convert import ConvertOptions, ConvertReport
from t5ckpt.core.text import counted, human_bytes, lines, some_of
from t5ckpt.errors import T5CkptError

_SHOWN = 8


@contextlib.contextmanager
def library_usage_errors() -> Generator[None]:
    """Turns a ValueError of the library, such as for an unknown dtype, into a usage error."""
    try:
        yield
    except T5CkptError:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def print_report(report: ConvertReport, options: ConvertOptions, as_json: bool) -> None:
    """Prints what was written and the changed, added, dropped names; or all names as JSON."""
    if as_json:
        print_json({**report_fields(report), 'dry_run': options.dry_run})
        return
    files = f', {counted(len(report.files), "file")}' if report.files else ''
    written = f'written: {human_bytes(report.nbytes)}{files} in {report.seconds:.1f} s'
    print_line(f'{report.path} {"would be written" if options.dry_run else written}')
    if report.mapped:
        renamed = [f'{old} -> {new}' for old, new in report.mapped.items() if old != new]
        _print_some(f'mapped {counted(len(report.mapped), "name")}, {len(renamed)} renamed', renamed)
        _print_some(f'added {counted(len(report.added), "leaf", "leaves")}', report.added)
        _print_some(f'dropped {counted(len(report.dropped), "name")}', report.dropped)
    print_names(report.left_out, 'left out: ')


def report_fields(report: ConvertReport) -> dict[str, Any]:
    """The fields of a report for JSON; 'files' counts files in every verb."""
    return {**fields_of(report), 'files': len(report.files), 'file_names': report.files}


def print_names(names: Collection[str], head: str) -> None:
    """Prints some of the names, if there are any, in a line."""
    if names:
        print_line(f'{head}{some_of(sorted(names), _SHOWN)}')


def _print_some(head: str, names: Sequence[str]) -> None:
    more = [f'and {len(names) - _SHOWN} more (--json lists all)'] if names[_SHOWN:] else []
    print_line(lines(f'{head}:', *names[:_SHOWN], *more, between='\n  ') if names else head)
