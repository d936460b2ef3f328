"""``t5ckpt pin``: marks steps as never to be deleted by retention."""

from __future__ import annotations

import click

from t5ckpt.catalog.locate import locate
from t5ckpt.cli.output import json_option, print_json, say, steps_option
from t5ckpt.steps import pin_checkpoint

__all__ = ['command']


@click.command('pin')
@click.argument('path')
@steps_option
@click.option('--why', default='1', metavar='TEXT', help='Kept in the mark.')
@json_option
def command(path: str, steps: tuple[int, ...], why: str, as_json: bool) -> None:
    """Pins the checkpoint at PATH, or steps of the run at PATH; without --step its latest.

    A file PINNED in the step's directory says so, to T5X, too.

    \b
    Example:
      t5ckpt pin run --step 1000 --why 'in the paper'
    """
    found = [locate(path, step) for step in steps or (None,)]
    places = [each.storage.url(each.directory) for each in found]
    for place in places:
        pin_checkpoint(place, why)
    if as_json:
        print_json({'pinned': places})
    else:
        for place in places:
            say(f'pinned {place}')
