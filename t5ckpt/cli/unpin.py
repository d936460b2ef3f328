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
    checkpoints = checkpoints_of(paths, steps)
    were = [path for path in checkpoints if is_pinned_checkpoint(path)]
    for path in were:
        unpin_checkpoint(path)
    not_pinned = [path for path in checkpoints if path not in were]
    if as_json:
        print_json({'unpinned': were, 'not_pinned': not_pinned})
    else:
        for text in [f'unpinned {path}' for path in were] + [f'was not pinned: {path}' for path in not_pinned]:
            print_line(text)
    if not_pinned:
        raise click.exceptions.Exit(1)
