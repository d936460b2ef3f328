"""``t5ckpt diff``: compares two checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import click

from t5ckpt.cli.conversion_output import library_usage_errors
from t5ckpt.cli.output import (
    Column,
    follow_links_option,
    json_option,
    layers_option,
    moved_option,
    print_json,
    print_line,
    print_table,
    progress,
    without_nan,
)
from t5ckpt.cli.paths import CHECKPOINT
from t5ckpt.cli.verb import Exit, Verb, fail
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.inspection.diff import CheckpointDiff, LeafDiff, diff
from t5ckpt.inspection.view import CheckpointView, open_checkpoint
from t5ckpt.options import CheckpointerOptions

_NUMBERS = ('leaves', 'relative', 'largest')


@click.command('diff', cls=Verb)
@click.argument('a', type=CHECKPOINT)
@click.argument('b', type=CHECKPOINT)
@click.argument('pattern', required=False, metavar='[PATTERN]')
@moved_option('--step', 'name the step in each path: t5ckpt diff run@1000 run@2000.')
@click.option(
    '--top',
    type=click.IntRange(1),
    help='Print only this many leaves or layers: first those whose values changed most, then other differences.',
)
@click.option('--by-layer', is_flag=True, help='Print one row per layer: the sum over its leaves.')
@layers_option
@click.option('--no-values', is_flag=True, help='Compare only names, shapes and dtypes; read no array.')
@follow_links_option
@json_option
def command(
    a: str, b: str, pattern: str | None, top: int | None, layers: str | None, as_json: bool, **how: bool
) -> int:
    """Compares the checkpoints A and B: leaves added and removed, and changed shapes, dtypes and values.

    PATTERN is a name, a group, or a regular expression for complete names, such as 'target/.*/kernel'; default: all leaves.
    "relative" is the norm of b - a divided by the norm of a. --top ranks by min(relative, 1) times the number of values, so
    that counters and biases do not come first. A and B may be in any format that t5ckpt reads.

    Exit codes: 0 equal in every bit, shape and dtype; 1 they differ, or neither has a leaf that matches PATTERN.

    \b
    Examples:
      t5ckpt diff run/checkpoint_1000 run/checkpoint_2000 --top 10
      t5ckpt diff run/checkpoint_1000 orbax_run/1000 --json
      t5ckpt diff run@latest weights target && echo 'the same weights'
    """
    by_layer = how['by_layer'] or layers is not None
    if (top is not None or by_layer) and how['no_values']:
        raise click.UsageError(
            '--top, --by-layer and --layers compare values, which --no-values does not read. Leave --no-values out.'
        )
    with library_usage_errors(), progress('comparing') as report:
        views = _selected(
            [open_checkpoint(path, options=CheckpointerOptions(follow_links=how['follow_links'])) for path in (a, b)],
            pattern,
        )
        difference = diff(*views, values=not how['no_values'], layers=layers, progress=report)
    leaves = difference.leaves if top is None else _first(difference, top)
    sums = difference.by_layer()
    if top is not None:
        sums = sorted(sums, key=lambda layer: -layer.weight)[:top]
    if as_json:
        fields, by_name = ([without_nan(dataclasses.asdict(leaf)) for leaf in each] for each in (leaves, sums))
        counts = {'same': difference.same, 'different': len(difference.leaves)}
        print_json({'a': difference.a, 'b': difference.b, **counts, 'leaves': fields, 'layers': by_name})
        return int(bool(difference))
    print_line(difference.title)
    rows = sums if by_layer else leaves
    if rows:
        _print_rows(dataclasses.replace(difference, leaves=tuple(rows)), by_layer=by_layer)
    return int(bool(difference))


def _print_rows(difference: CheckpointDiff, *, by_layer: bool) -> None:
    titles: tuple[str, ...] = tuple(difference.columns)
    rows = difference.rows()
    if by_layer:
        titles = ('layer', 'leaves', *titles[-2:])
        rows = [[name, a.split()[0], *sizes] for name, _, a, _, *sizes in rows]
    print_table([Column(title, right=title in _NUMBERS) for title in titles], rows)


def _selected(views: Sequence[CheckpointView], pattern: str | None) -> list[CheckpointView]:
    """The leaves of a pattern on each side; only one of the sides may have none."""
    if pattern is None:
        return [*views]
    selections: list[CheckpointView | None] = []
    message = ''
    for view in views:
        try:
            selections.append(view.select(pattern))
        except CheckpointNotFoundError as error:
            selections.append(None)
            message = str(error)
    if all(selection is None for selection in selections):
        fail(message, Exit.NO)
    return [
        view.without_leaves() if selection is None else selection
        for view, selection in zip(views, selections, strict=True)
    ]


def _first(difference: CheckpointDiff, count: int) -> list[LeafDiff]:
    """The leaves with the largest differences, then the leaves whose values were not compared."""
    moved = difference.top(count)
    return [*moved, *(leaf for leaf in difference.leaves if leaf not in moved)][:count]
