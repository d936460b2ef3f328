"""``t5ckpt best``: prints the step of a run that is best by a metric."""

from __future__ import annotations

import dataclasses
import os

import click

from t5ckpt.cli.best_step import chosen
from t5ckpt.cli.output import check_exists, json_option, print_json, print_line, run_at
from t5ckpt.cli.paths import RUN
from t5ckpt.cli.verb import Exit, Verb


@click.command('best', cls=Verb)
@click.argument('path', type=RUN)
@click.argument('metric', required=False, metavar='[METRIC]')
@click.option(
    '--mode',
    type=click.Choice(['max', 'min']),
    help='Which value is best; default: that of the keep policy of the run.',
)
@json_option
def command(path: str, metric: str | None, mode: str | None, as_json: bool) -> None:
    """Prints the step of the run at PATH that is best by METRIC.

    Of steps with equal values, the newest is best. NaN and infinities are never best. Metrics are those that were passed to
    save, those in TensorBoard's files below PATH (train/loss is the tag loss in PATH/train), and those that Orbax saved.
    METRIC and --mode default to those of the keep policy of the latest save; standard error then names them.

    Exit codes: 0 done; 1 no step has a value for METRIC; 2 wrong usage: the steps have metrics, but not METRIC, or the
    keep policy does not define the mode.

    \b
    Examples:
      t5ckpt best run
      t5ckpt best run eval/loss --mode min
      t5ckpt cp run weights --step $(t5ckpt best run eval/loss --mode min)
    """
    if metric is not None and os.path.isdir(metric) and not os.path.exists(path):
        raise click.UsageError(
            f'{metric} is a directory, and {path} is not. PATH comes first: t5ckpt best {metric} {path}'
        )
    storage = run_at(path)
    check_exists(storage)
    best = chosen(storage, metric, mode)
    if as_json:
        print_json(dataclasses.asdict(best))
    elif best.step is not None:
        print_line(str(best.step))
        if mode is None:
            which, other, reverse = ('highest', 'lowest', 'min') if best.mode == 'max' else ('lowest', 'highest', 'max')
            print_line(
                f'{best.metric}: the {which} value is best by the keep policy of the run. For the {other}, pass --mode '
                f'{reverse}.',
                err=True,
            )
    if best.step is None:
        print_line(f'{storage.url()}: no step has a value for {best.metric}', err=True)
        raise click.exceptions.Exit(Exit.NO)
