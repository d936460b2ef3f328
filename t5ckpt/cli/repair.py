"""``t5ckpt repair``: rebuilds metadata and lists of checksums that the other files determine."""

from __future__ import annotations

from typing import Any

import click

from t5ckpt.cli.conversion_output import library_usage_errors
from t5ckpt.cli.output import confirm, fields_of, json_option, print_json, print_line, progress, step_option
from t5ckpt.cli.paths import CHECKPOINT, RUN
from t5ckpt.cli.verb import Verb
from t5ckpt.core.text import counted, lines
from t5ckpt.integrity.repair import RepairReport, repair
from t5ckpt.integrity.repair_plan import RepairOptions


@click.command('repair', cls=Verb)
@click.argument('path', type=CHECKPOINT)
@click.argument('output', required=False, type=RUN)
@step_option
@click.option('--in-place', is_flag=True, help='Replace the checkpoint instead of writing OUTPUT.')
@click.option(
    '--drop', multiple=True, metavar='REGEX', help='Leave out the damaged leaves that match; may be repeated.'
)
@click.option(
    '--trust-files',
    is_flag=True,
    help='Take files whose checksums are lost as they are, and rebuild each .zarray that has none.',
)
@click.option('--add-checksums', is_flag=True, help="Write checksums for a checkpoint without them, such as T5X's.")
@click.option('--dry-run', is_flag=True, help='Print what would be repaired; write nothing.')
@click.option('--yes', is_flag=True, help='Do not ask for confirmation.')
@json_option
def command(path: str, output: str | None, in_place: bool, yes: bool, as_json: bool, **how: Any) -> None:
    """Writes a repaired copy of the checkpoint at PATH into the run at OUTPUT; the original does not change.

    Rebuilds .zarray files from the manifest. Recomputes a lost list of file checksums, if it then matches its checksum in
    the manifest. Lost values cannot be rebuilt: --drop leaves out damaged leaves, such as a part of the optimizer state, and
    a restore then needs fallback_state for them. --in-place replaces the checkpoint in one operation.

    \b
    Examples:
      t5ckpt repair run --dry-run
      t5ckpt repair run/checkpoint_1000 mended
      t5ckpt repair run/checkpoint_1000 --in-place --drop 'opt_state/.*/mu/.*'
    """
    dry_run = how['dry_run']
    if (output is not None and in_place) or not (dry_run or in_place or output is not None):
        raise click.UsageError('pass either OUTPUT or --in-place.')
    if in_place and not dry_run:
        confirm(f'Replace {path} with its repaired copy?', yes, 'nothing was replaced.')
    with library_usage_errors():
        options = RepairOptions(how['drop'], how['trust_files'], how['add_checksums'], dry_run)
    with progress('verifying') as report, library_usage_errors():
        done = repair(path, output, how['step'], in_place=in_place, options=options, progress=report)
    if as_json:
        print_json({'dry_run': dry_run, **fields_of(done)})
    else:
        print_line(_text(done, dry_run))


def _text(done: RepairReport, dry_run: bool) -> str:
    if not done.changed:
        head = f'{done.path}: nothing to repair'
    elif dry_run:
        head = f'{done.path} can be repaired; nothing was written'
    else:
        head = f'{done.path}: repaired, {counted(done.files, "file")}'
    changes = [f'  rebuilt: {name}' for name in done.rebuilt] + [f'  left out: {name}' for name in done.dropped]
    return lines(head, *changes, *(f'  note: {note}' for note in done.notes))
