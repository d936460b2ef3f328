"""``t5ckpt best``: the step of a run that is best by a metric."""

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
    '--mode', type=click.Choice(['max', 'min']), help='Which values are best; without it, as the run was saved.'
)
@json_option
def command(path: str, metric: str | None, mode: str | None, as_json: bool) -> None:
    """Prints the step of the run at PATH that is best by METRIC.

    Of equal steps it is the newest, and NaN is never the best. A metric is what was given to save, or what TensorBoard's
    files below PATH hold: train/loss is the tag loss in PATH/train. Without METRIC or --mode, they are those of the keep
    policy under which the latest step was saved. Steps of Orbax count with the metrics that Orbax saved.

    \b
    Exit codes: 0 done; 1 no step has a value of the metric;
    2 invalid arguments, such as a metric that no step has while steps have others.

    \b
    Examples:
      t5ckpt best run
      t5ckpt best run eval/loss --mode min
      t5ckpt cp run weights --step $(t5ckpt best run eval/loss --mode min)
    """
    if metric is not None and os.path.isdir(metric) and not os.path.exists(path):
        raise click.UsageError(
            f'{metric} is a directory, {path} is none. PATH comes first: t5ckpt best {metric} {path}'
        )
    storage = run_at(path)
    check_exists(storage)
    best = chosen(storage, metric, mode)
    if as_json:
        print_json(dataclasses.asdict(best))
    elif best.step is not None:
        print_line(str(best.step))
    if best.step is None:
        print_line(f'{storage.url()}: no step has a value of {best.metric}', err=True)
        raise click.exceptions.Exit(Exit.NO)
