"""``t5ckpt unpin``: removes the pins of steps."""

from __future__ import annotations

import click

from t5ckpt.cli.output import json_option, print_json, print_line, steps_option
from t5ckpt.cli.paths import CHECKPOINT, checkpoints_of
from t5ckpt.cli.verb import Verb
from t5ckpt.steps import is_pinned_checkpoint, unpin_checkpoint


@click.command('unpin', cls=Verb)
@click.argument('paths', metavar='PATH...', type=CHECKPOINT, nargs=-1, required=True)
@steps_option
@json_option
def command(paths: tuple[str, ...], steps: tuple[int, ...], as_json: bool) -> None:
    """Unpins the checkpoints at PATH..., or steps of the run at PATH; by default its latest.

    This deletes nothing, but the next save of the run or t5ckpt prune may delete the step.

    \b
    Exit codes: 0 done; 1 one of them was not pinned.

    \b
    Example:
      t5ckpt unpin run --step 1000
    """
    places = checkpoints_of(paths, steps)
    were = [place for place in places if is_pinned_checkpoint(place)]
    for place in were:
        unpin_checkpoint(place)
    others = [place for place in places if place not in were]
    if as_json:
        print_json({'unpinned': were, 'not_pinned': others})
    else:
        for text in [f'unpinned {place}' for place in were] + [f'was not pinned: {place}' for place in others]:
            print_line(text)
    if others:
        raise click.exceptions.Exit(1)
