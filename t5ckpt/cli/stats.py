"""``t5ckpt stats``: prints mean, spread, extremes, zeros and NaN of every leaf."""

from __future__ import annotations

import dataclasses

import click

from t5ckpt.cli.output import (
    Column,
    follow_links_option,
    json_option,
    print_json,
    print_line,
    print_table,
    progress,
    say_what_is_read,
    step_option,
    without_nan,
)
from t5ckpt.cli.paths import CHECKPOINT
from t5ckpt.cli.verb import Exit, Verb, fail
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.inspection.view import open_checkpoint
from t5ckpt.options import CheckpointerOptions


@click.command('stats', cls=Verb)
@click.argument('path', type=CHECKPOINT)
@click.argument('leaves', required=False, metavar='[LEAVES]')
@step_option
@follow_links_option
@click.option('--fail-on-nan', is_flag=True, help='Exit with 1 if any value is NaN or infinite.')
@json_option
def command(
    path: str, leaves: str | None, step: int | None, follow_links: bool, fail_on_nan: bool, as_json: bool
) -> int:
    """Prints statistics of each leaf of a checkpoint: mean, standard deviation, extremes, norm, zeros, NaN, inf.

    LEAVES is a name, a group, or a regular expression for complete names, such as 'target/.*/kernel'; default: all leaves.
    The leaves are read in blocks, so memory is bounded.

    \b
    Examples:
      t5ckpt stats run
      t5ckpt stats run 'target/.*/kernel' --fail-on-nan
    """
    view = open_checkpoint(path, step, options=CheckpointerOptions(follow_links=follow_links))
    if leaves is not None:
        try:
            view = view.select(leaves)
        except CheckpointNotFoundError as error:
            fail(str(error), Exit.NO)
    with progress('reading') as report:
        stats = view.stats(bins=0, progress=report)
    left_out = [info.name for info in view.infos() if info.name not in stats]
    bad = [name for name, leaf in stats.items() if leaf.nan or leaf.inf]
    if as_json:
        fields = [{'name': name, **_plain(dataclasses.asdict(leaf))} for name, leaf in stats.items()]
        print_json({'path': view.path, 'step': view.step, 'leaves': fields, 'not_finite': bad, 'left_out': left_out})
    else:
        say_what_is_read(view)
        print_table([Column(name, right=name != 'name') for name in stats.columns], stats.rows())
        if left_out:
            print_line(f'left out, because they contain no numbers: {", ".join(left_out)}')
    return 1 if bad and fail_on_nan else 0


def _plain(fields: dict[str, object]) -> dict[str, object]:
    """Without the histogram, and with null for NaN."""
    return without_nan({name: value for name, value in fields.items() if name not in ('counts', 'edges')})
