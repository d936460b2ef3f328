"""``t5ckpt verify``: checks whether a checkpoint is complete and intact."""

from __future__ import annotations

from typing import Any

import click

from t5ckpt.cli.output import (
    fields_of,
    follow_links_option,
    json_option,
    print_json,
    print_line,
    progress,
    step_option,
)
from t5ckpt.cli.paths import CHECKPOINT, resolved
from t5ckpt.cli.shell_messages import in_shell_terms
from t5ckpt.cli.tiers import BOTH, naming_record, tier_option, tier_paths
from t5ckpt.cli.verb import Exit, Verb, code_of
from t5ckpt.errors import CheckpointNotFoundError, StorageError, T5CkptError
from t5ckpt.integrity.report import VerifyReport
from t5ckpt.integrity.verify import verify


@click.command('verify', cls=Verb)
@click.argument('path', type=CHECKPOINT)
@step_option
@click.option('--full', is_flag=True, help='Read every byte and compare all checksums.')
@follow_links_option
@tier_option(both=True)
@json_option
def command(path: str, step: int | None, full: bool, follow_links: bool, as_json: bool, tier: str | None) -> int:
    """Checks that every file of a checkpoint exists and has its size; with --full, also compares all checksums.

    If a checkpoint has no checksums (T5X, Orbax), --full decodes every chunk. With --tier all, a tier that does not have the
    step is named, and the other one is verified.

    Exit codes: 0 intact; 1 anything is damaged; 3 no tier has the step; 4 a tier does not answer.

    \b
    Examples:
      t5ckpt verify run
      t5ckpt verify run/checkpoint_1000 --full
      t5ckpt verify run --full --json | jq '.damages[].file'
    """
    reports: dict[str | None, VerifyReport] = {}
    lacking: dict[str | None, T5CkptError] = {}
    for name, location in tier_paths(path, tier).items():
        try:
            with naming_record(path, name), progress('verifying') as report:
                reports[name] = verify(resolved(location), step, full=full, follow_links=follow_links, progress=report)
        except (CheckpointNotFoundError, StorageError) as error:
            if tier != BOTH:
                raise
            lacking[name] = error
    verb = click.get_current_context().command
    is_ok = all(report.ok for report in reports.values())
    if as_json and tier != BOTH:
        (one,) = reports.values()
        print_json(_fields(one))
    elif as_json and reports:
        tiers = [{'tier': name, **_fields(report)} for name, report in reports.items()]
        unverified = [{'tier': name, 'error': str(error)} for name, error in lacking.items()]
        print_json({'ok': is_ok, 'tiers': tiers, 'unverified': unverified})
    else:
        for report in reports.values():
            click.echo(in_shell_terms(str(report), verb))
    for name, error in lacking.items():
        print_line(f'tier {name} is not verified: {in_shell_terms(str(error), verb)}', err=True)
    away = [error for error in lacking.values() if isinstance(error, StorageError)]
    if not is_ok:
        return Exit.NO
    return code_of(away[0]) if away else Exit.DONE if reports else Exit.UNREADABLE


def _fields(report: VerifyReport) -> dict[str, Any]:
    fields = fields_of(report)
    # 'leaves' lists leaves in every verb.
    return {'ok': report.ok, 'arrays': fields.pop('leaves'), **fields}
