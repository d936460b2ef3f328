"""``t5ckpt pin``: pins steps, which retention then never deletes."""

from __future__ import annotations

import click

from t5ckpt.catalog.pin_file import NO_REASON, pin_text
from t5ckpt.cli.output import json_option, print_json, print_line, steps_option
from t5ckpt.cli.paths import CHECKPOINT, checkpoints_of
from t5ckpt.cli.verb import Verb
from t5ckpt.steps import pin_checkpoint
from t5ckpt.storage import open_storage


@click.command('pin', cls=Verb)
@click.argument('paths', metavar='PATH...', type=CHECKPOINT, nargs=-1, required=True)
@steps_option
@click.option(
    '--why',
    default=NO_REASON,
    show_default=False,
    metavar='TEXT',
    help='The reason, which ls shows; default: the reason of an earlier pin.',
)
@json_option
def command(paths: tuple[str, ...], steps: tuple[int, ...], why: str, as_json: bool) -> None:
    """Pins the checkpoints at PATH..., or steps of the run at PATH; by default its latest.

    No keep policy deletes a pinned step. The pin is a file PINNED in the step's directory, as in T5X.

    \b
    Examples:
      t5ckpt pin run --step 1000 --why 'in the paper'
      t5ckpt pin run@best:eval/loss run@latest
    """
    checkpoints = checkpoints_of(paths, steps)
    for path in checkpoints:
        pin_checkpoint(path, why)
    reasons = {path: pin_text(open_storage(path), '') for path in checkpoints}
    if as_json:
        print_json({'paths': checkpoints, 'why': reasons})
    else:
        for path, text in reasons.items():
            print_line(f'pinned {path}: {text}' if text else f'pinned {path}')
