"""``t5ckpt show``: prints the tree of one checkpoint."""

from __future__ import annotations

import re
from typing import Any

import click

from t5ckpt.cli.output import (
    Column,
    fields_of,
    follow_links_option,
    json_option,
    print_json,
    print_line,
    print_table,
    say_what_is_read,
    step_option,
)
from t5ckpt.cli.paths import CHECKPOINT, resolved
from t5ckpt.cli.tiers import naming_record, tier_option, tier_paths
from t5ckpt.cli.verb import Verb
from t5ckpt.core.leaf_patterns import leaf_pattern, meant_pattern
from t5ckpt.core.text import counted, human_bytes
from t5ckpt.inspection.leaf_tree import Group, LeafInfo, build_tree
from t5ckpt.inspection.view import open_checkpoint
from t5ckpt.options import CheckpointerOptions

_COLUMNS = (
    Column('name'),
    Column('dtype'),
    Column('shape'),
    Column('values', right=True),
    Column('bytes', right=True),
    Column('where'),
)


@click.command('show', cls=Verb)
@click.argument('path', type=CHECKPOINT)
@step_option
@follow_links_option
@click.option('--depth', type=click.IntRange(1), help='Show this many levels of groups, with the sums of deeper ones.')
@click.option('--grep', 'pattern', help='Only leaves whose whole name this regular expression matches.')
@click.option(
    '--sort',
    type=click.Choice(['tree', 'name', 'size']),
    default='tree',
    help='Order; size: a flat list, the largest leaf first.',
)
@tier_option(both=False)
@json_option
def command(path: str, step: int | None, depth: int | None, pattern: str | None, as_json: bool, **how: Any) -> int:
    """Shows the leaves of a checkpoint as a tree: dtype, shape, number of values, bytes, and how they are stored.

    Reads only the manifest. Exits with 1 if --grep matches no leaf.

    \b
    Examples:
      t5ckpt show run
      t5ckpt show run --step 1000 --grep '.*kernel' --sort size
      t5ckpt show run/checkpoint_1000 --depth 2
    """
    if depth is not None and (how['sort'] != 'tree' or as_json):
        raise click.UsageError('--depth applies only to the tree. Leave out --sort and --json.')
    ((tier, location),) = tier_paths(path, how['tier']).items()
    with naming_record(path, tier):
        view = open_checkpoint(resolved(location), step, options=CheckpointerOptions(follow_links=how['follow_links']))
    every = view.infos()
    infos = every if pattern is None else [info for info in every if _matcher(pattern).fullmatch(info.name)]
    if pattern is not None and not infos:
        meant = meant_pattern(pattern, [info.name for info in every])
        print_line(
            f'--grep {pattern!r} matches no leaf in {view.path}. It is matched with whole names.{meant}', err=True
        )
    if how['sort'] != 'tree':
        infos.sort(key=lambda info: info.name if how['sort'] == 'name' else (-info.nbytes, info.name))
    unmatched = [pattern] if pattern is not None and not infos else []
    code = len(unmatched)
    if as_json:
        leaves = [_fields(info) for info in infos]
        print_json(
            {'path': view.path, 'step': view.step, 'metrics': view.metrics, 'leaves': leaves, 'unmatched': unmatched}
        )
        return code
    say_what_is_read(view)
    tree = build_tree(infos)
    rows = _tree_rows(tree, depth, 0) if how['sort'] == 'tree' else [_leaf_row(info.name, info) for info in infos]
    total = ('total', '', counted(tree.leaves, 'leaf', 'leaves'), f'{tree.size:,}', human_bytes(tree.nbytes), '')
    print_table(_COLUMNS, [*rows, total])
    return code


def _matcher(pattern: str) -> re.Pattern[str]:
    try:
        return leaf_pattern(pattern, '--grep')
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _fields(info: LeafInfo) -> dict[str, Any]:
    fields = fields_of(info)
    fields['value'] = fields.pop('text') or fields['value']
    # The keys of the tree are named 'keys', since 'path' is a file or a directory in every verb.
    return {'name': info.name, 'keys': fields.pop('path'), **fields}


def _tree_rows(group: Group, depth: int | None, level: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for key, child in group.children.items():
        indented = '  ' * level + key
        if isinstance(child, LeafInfo):
            rows.append(_leaf_row(indented, child))
            continue
        rows.append(
            (indented, '', counted(child.leaves, 'leaf', 'leaves'), f'{child.size:,}', human_bytes(child.nbytes), '')
        )
        if depth is None or level + 1 < depth:
            rows += _tree_rows(child, depth, level + 1)
    return rows


def _leaf_row(name: str, info: LeafInfo) -> tuple[str, ...]:
    where = f'{info.location} = {info.value}' if info.value else info.location
    if not info.dtype:
        return (name, '', '', '', '', where)
    return (name, info.dtype, str(info.shape), f'{info.size:,}', human_bytes(info.nbytes), where)
