"""The reports of ``export`` and ``import``, and usage errors from the library."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

import click

from t5ckpt.cli.output import fields_of, print_json, print_line
from t5ckpt.convert.export_options import ExportReport
from t5ckpt.core.text import counted, human_bytes
from t5ckpt.errors import T5CkptError

_SHOWN = 5


@contextlib.contextmanager
def library_usage_errors() -> Generator[None]:
    """Turns a ValueError of the library, such as for an unknown dtype, into a usage error."""
    try:
        yield
    except T5CkptError:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def print_report(report: ExportReport, as_json: bool) -> None:
    """Prints one line for the written arrays and one for the dropped ones, or all names as JSON."""
    if as_json:
        # 'files' counts files in every verb.
        print_json({**fields_of(report), 'files': len(report.files), 'file_names': report.files})
        return
    verb = 'would write' if report.dry_run else 'wrote'
    tensors = sum(len(names) for names in report.mapped.values())
    arrays = (
        counted(len(report.mapped), 'array')
        if tensors == len(report.mapped)
        else f'{counted(len(report.mapped), "array")}, {counted(tensors, "tensor")}'
    )
    files = f', {counted(len(report.files), "file")}' if len(report.files) > 1 else ''
    print_line(
        f'{verb} {report.output}: {report.kind}, {arrays}, {human_bytes(report.bytes)}{files}, {report.seconds:.1f} s'
    )
    if report.dropped:
        print_line(f'left out {len(report.dropped)}: {_few(report.dropped)}')


def _few(names: Sequence[str]) -> str:
    more = ', ... (--json lists them)' if len(names) > _SHOWN else ''
    return ', '.join(names[:_SHOWN]) + more
