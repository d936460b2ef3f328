"""``t5ckpt verify``: is a checkpoint whole?"""

from __future__ import annotations

import click

from t5ckpt.cli.output import fields_of, follow_links_option, json_option, print_json, progress, step_option
from t5ckpt.cli.paths import CHECKPOINT
from t5ckpt.cli.verb import Verb
from t5ckpt.cli.words import in_words
from t5ckpt.integrity.verify import verify

__all__ = ['command']


@click.command('verify', cls=Verb)
@click.argument('path', type=CHECKPOINT)
@step_option
@click.option('--full', is_flag=True, help='Read every byte and compare its checksum, at the speed of the disk.')
@follow_links_option
@json_option
def command(path: str, step: int | None, full: bool, follow_links: bool, as_json: bool) -> int:
    """Checks that every file of a checkpoint is there in its full size; with --full, that every byte is what was written.

    Of checkpoints without checksums (T5X, Orbax) --full decodes every chunk. Exits with 1 if anything is wrong.

    \b
    Examples:
      t5ckpt verify run
      t5ckpt verify run/checkpoint_1000 --full
      t5ckpt verify run --full --json | jq '.damages[].file'
    """
    with progress('verifying') as report:
        found = verify(path, step, full=full, follow_links=follow_links, progress=report)
    if as_json:
        print_json({'ok': found.ok, **fields_of(found)})
    else:
        click.echo(in_words(str(found), click.get_current_context().command))
    return 0 if found.ok else 1
