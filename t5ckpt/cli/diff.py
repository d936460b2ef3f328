"""``t5ckpt diff``: compares two checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import click

from t5ckpt.cli.paths import CHECKPOINT
from t5ckpt.cli.show import opened, selected
from t5ckpt.cli.verb import COUNT, FOLLOW_LINKS, argument, emit, flag, option, progress, table, verb
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.inspection.diff import CheckpointDiff, LeafDiff, diff as differences
from t5ckpt.inspection.view import CheckpointView


@verb(
    'diff',
    argument('a', CHECKPOINT),
    argument('b', CHECKPOINT),
    argument('pattern', required=False, metavar='[PATTERN]'),
    option(
        '--top',
        'Print only this many leaves or layers: first those whose values changed most, then other differences.',
        COUNT,
    ),
    flag('--by-layer', 'Print one row per layer: the sum over its leaves.'),
    flag('--no-values', 'Compare only names, shapes and dtypes; read no array.'),
    FOLLOW_LINKS,
)
def diff(a: str, b: str, pattern: str | None, top: int | None, **flags: bool) -> int:
    """Compares the checkpoints A and B: leaves added and removed, and changed shapes, dtypes and values.

    PATTERN is a name, a group, or a regular expression for complete names, such as 'target/.*/kernel'; default: all leaves.
    "relative" is the norm of b - a divided by the norm of a. --top ranks by min(relative, 1) times the number of values, so
    that counters and biases do not come first. A and B may be in any format that t5ckpt reads; name a step in each path.

    Exit codes: 0 equal in every bit, shape and dtype; 1 they differ, or neither has a leaf that matches PATTERN.

    \b
    Examples:
      t5ckpt diff run@1000 run@2000 --top 10
      t5ckpt diff run/checkpoint_1000 orbax_run/1000 --json
      t5ckpt diff run@latest weights target && echo 'the same weights'
    """
    by_layer = flags['by_layer']
    if (top is not None or by_layer) and flags['no_values']:
        raise click.UsageError(
            '--top and --by-layer compare values, which --no-values does not read. Leave --no-values out.'
        )
    views = _selected([opened(path, flags['follow_links']) for path in (a, b)], pattern)
    found = differences(*views, values=not flags['no_values'], progress=progress('comparing'))
    leaves, sums = found.leaves, found.by_layer()
    if top is not None:
        leaves, sums = _first(found, top), sorted(sums, key=lambda layer: -layer.weight)[:top]
    emit(
        {
            'a': found.a,
            'b': found.b,
            'same': found.same,
            'different': len(found.leaves),
            'leaves': leaves,
            'layers': sums,
        },
        found.title,
        *[_table(dataclasses.replace(found, leaves=tuple(sums if by_layer else leaves)), by_layer=by_layer)]
        * bool(found),
    )
    return int(bool(found))


def _table(found: CheckpointDiff, *, by_layer: bool) -> str:
    if not by_layer:
        return table(found.columns, found.rows())
    rows = [[name, a.split()[0], *sizes] for name, _, a, _, *sizes in found.rows()]
    return table(['layer', 'leaves', *found.columns[-2:]], rows)


def _selected(views: Sequence[CheckpointView], pattern: str | None) -> list[CheckpointView]:
    """The leaves of a pattern on each side; only one of the sides may have none."""
    if pattern is None:
        return [*views]
    found: list[CheckpointView] = []
    for view in views:
        try:
            found.append(view.select(pattern))
        except CheckpointNotFoundError:
            found.append(view.without_leaves())
    return found if any(view.infos() for view in found) else [selected(views[1], pattern)]


def _first(found: CheckpointDiff, count: int) -> Sequence[LeafDiff]:
    """The leaves with the largest differences, then the leaves whose values were not compared."""
    moved = found.top(count)
    return [*moved, *(leaf for leaf in found.leaves if leaf not in moved)][:count]
