"""``t5ckpt diff``: what changed between two checkpoints."""

from __future__ import annotations

import dataclasses
import math

import click

from t5ckpt.cli.output import Column, json_option, print_json, print_table, progress, say
from t5ckpt.cli.paths import CHECKPOINT
from t5ckpt.cli.verb import Verb
from t5ckpt.inspection.diff import LeafDiff, diff

__all__ = ['command']


@click.command('diff', cls=Verb)
@click.argument('a', type=CHECKPOINT)
@click.argument('b', type=CHECKPOINT)
@click.option('--top', type=click.IntRange(1), help='Only the leaves whose values moved most, this many of them.')
@click.option('--no-values', is_flag=True, help='Compare names, shapes and dtypes alone; reads no array.')
@json_option
def command(a: str, b: str, top: int | None, no_values: bool, as_json: bool) -> int:
    """Compares the checkpoints A and B: leaves added and removed, shapes and dtypes changed, values moved.

    "relative" is the norm of b - a over the norm of a. Any formats that t5ckpt reads can be compared. Exits with 1
    when they differ.

    \b
    Examples:
      t5ckpt diff run/checkpoint_1000 run/checkpoint_2000 --top 10
      t5ckpt diff run/checkpoint_1000 orbax_run/1000 --json
    """
    if top is not None and no_values:
        raise click.UsageError('--top sorts by values, which --no-values does not read.')
    with progress('comparing') as report:
        found = diff(a, b, values=not no_values, progress=report)
    leaves = found.leaves if top is None else found.top(top)
    if as_json:
        fields = [_plain(leaf) for leaf in leaves]
        print_json({'a': found.a, 'b': found.b, 'same': found.same, 'different': len(found.leaves), 'leaves': fields})
        return int(bool(found))
    say(found.title)
    if leaves:
        shown = dataclasses.replace(found, leaves=tuple(leaves))
        print_table([Column(name, right=name in ('relative', 'largest')) for name in found.columns], shown.rows())
    return int(bool(found))


def _plain(leaf: LeafDiff) -> dict[str, object]:
    fields = dataclasses.asdict(leaf)
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in fields.items()}
