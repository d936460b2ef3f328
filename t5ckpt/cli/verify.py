"""``t5ckpt verify``: is a checkpoint complete and intact?"""

from __future__ import annotations

from typing import Any

import click

from t5ckpt.cli.output import fields_of, follow_links_option, json_option, print_json, progress, step_option
from t5ckpt.cli.paths import CHECKPOINT
from t5ckpt.cli.shell_messages import in_shell_terms
from t5ckpt.cli.tiers import BOTH, tier_option, tier_paths
from t5ckpt.cli.verb import Verb
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
    """Checks that every file of a checkpoint exists and has its size; with --full, that every byte is what was written.

    If a checkpoint has no checksums (T5X, Orbax), --full decodes every chunk. Exits with 1 if anything is damaged.

    \b
    Examples:
      t5ckpt verify run
      t5ckpt verify run/checkpoint_1000 --full
      t5ckpt verify run --full --json | jq '.damages[].file'
    """
    found: dict[str | None, VerifyReport] = {}
    for name, location in tier_paths(path, tier).items():
        with progress('verifying') as report:
            found[name] = verify(location, step, full=full, follow_links=follow_links, progress=report)
    is_ok = all(each.ok for each in found.values())
    if as_json and tier != BOTH:
        (one,) = found.values()
        print_json(_fields(one))
    elif as_json:
        tiers = [{'tier': name, **_fields(each)} for name, each in found.items()]
        print_json({'ok': is_ok, 'tiers': tiers})
    else:
        for each in found.values():
            click.echo(in_shell_terms(str(each), click.get_current_context().command))
    return 0 if is_ok else 1


def _fields(report: VerifyReport) -> dict[str, Any]:
    fields = fields_of(report)
    # 'leaves' lists leaves in every verb.
    return {'ok': report.ok, 'arrays': fields.pop('leaves'), **fields}
