"""``t5ckpt cp``: a checkpoint to another storage."""

from __future__ import annotations

import dataclasses

import click

from t5ckpt._copy import copy_checkpoint
from t5ckpt._text import human_bytes
from t5ckpt.cli._output import json_option, print_json, progress, step_option

__all__ = ['command']


@click.command('cp')
@click.argument('source')
@click.argument('target')
@step_option
@click.option('--workers', default=16, show_default=True, help='How many files are under way at once.')
@json_option
def command(source: str, target: str, step: int | None, workers: int, as_json: bool) -> None:
    """Copies the checkpoint at SOURCE, byte for byte, into the run at TARGET.

    Both may be on any storage: a path, gs://bucket/run, s3://bucket/run. Files are compared with their checksums on the
    way, and the copy shows when it is whole. Called again after it was stopped, it goes on where it was.

    \b
    Examples:
      t5ckpt cp run gs://bucket/run
      t5ckpt cp s3://bucket/run/checkpoint_1000 /data/run
    """
    with progress('copying') as report:
        done = copy_checkpoint(source, target, step, progress=report, workers=workers)
    if as_json:
        print_json(dataclasses.asdict(done))
        return
    resumed = f', {done.resumed_files} of them were there already' if done.resumed_files else ''
    click.echo(f'{done.path}: {done.files} files, {human_bytes(done.nbytes)} in {done.seconds:.1f} s{resumed}')
