"""``t5ckpt best``: the step of a run that is best by a metric."""

from __future__ import annotations

import os
import time

import click

from t5ckpt.cli.output import json_option, print_json, run_at, say
from t5ckpt.commit.retention import Retention, missing_from_all
from t5ckpt.metrics import TensorBoardMetrics
from t5ckpt.policies import KeepAll
from t5ckpt.save.monitored import best_of, candidates, monitored_metrics

__all__ = ['command']


@click.command('best')
@click.argument('path')
@click.argument('metric', required=False, metavar='[METRIC]')
@click.option(
    '--mode', type=click.Choice(['max', 'min']), help='Which values are best; without it, as the run was saved.'
)
@json_option
def command(path: str, metric: str | None, mode: str | None, as_json: bool) -> None:
    """Prints the step of the run at PATH that is best by METRIC.

    Of equal steps it is the newest, and NaN is never the best. A metric is what was given to save, or what TensorBoard's
    files below PATH hold: train/loss is the tag loss in PATH/train. Without METRIC or --mode, they are those of the keep
    policy under which the latest step was saved. Steps of Orbax and Flax have no metrics here.

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
    retention = Retention(storage, KeepAll(), time.time, None, TensorBoardMetrics(storage))
    policy = retention.recorded_policy()
    known = () if policy is None else monitored_metrics(policy, None)
    found = candidates(known, metric, mode)
    if len(found) != 1:
        held = ', '.join(f'{name} ({best})' for name, best in known) or 'none'
        raise click.UsageError(
            f'the keep policy of the run does not say which steps are best (metrics that it compares: {held}). Pass METRIC '
            'and --mode max or --mode min.'
        )
    (name, best) = found[0]
    infos = retention.infos((name,))
    missing = missing_from_all(infos, name)
    if missing is not None and any(info.metrics for info in infos):
        raise click.UsageError(missing)
    step = best_of(infos, name, best)
    value = next((info.metrics[name] for info in infos if info.step == step), None)
    if as_json:
        print_json({'step': step, 'metric': name, 'mode': best, 'value': value})
    elif step is not None:
        say(str(step))
    if step is None:
        say(f'{storage.url()}: no step has a value of {name}', err=True)
        raise click.exceptions.Exit(1)
