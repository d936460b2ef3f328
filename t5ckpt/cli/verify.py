"""``t5ckpt verify``: is a checkpoint whole?"""

from __future__ import annotations

import dataclasses

import click

from t5ckpt.cli.output import json_option, print_json, progress, step_option
from t5ckpt.cli.paths import CHECKPOINT
from t5ckpt.cli.verb import Verb
from t5ckpt.integrity.verify import verify

__all__ = ['command']


@click.command('verify', cls=Verb)
@click.argument('path', type=CHECKPOINT)
@step_option
@click.option('--full', is_flag=True, help='Read every byte and compare its checksum, at the speed of the disk.')
@click.option('--follow-links', is_flag=True, help='Symbolic links may lead out of the checkpoint.')
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
        print_json({'ok': found.ok, **dataclasses.asdict(found)})
    else:
        click.echo(str(found))
    return 0 if found.ok else 1
