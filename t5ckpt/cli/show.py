"""``t5ckpt show``, ``cat`` and ``stats`` print the tree, the values and the statistics of one checkpoint."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click
import numpy as np

from t5ckpt.cli.paths import CHECKPOINT
from t5ckpt.cli.verb import (
    COUNT,
    FOLLOW_LINKS,
    STEP,
    Exit,
    argument,
    as_json,
    emit,
    fail,
    fields_of,
    flag,
    option,
    progress,
    say,
    table,
    verb,
)
from t5ckpt.core.leaf_patterns import leaf_pattern, meant_pattern
from t5ckpt.core.text import counted, human_bytes
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.inspection.leaf_tree import Group, LeafInfo, build_tree
from t5ckpt.inspection.view import CheckpointView, open_checkpoint
from t5ckpt.lazy import LazyArray
from t5ckpt.options import CheckpointerOptions

_PATH = argument('path', CHECKPOINT)
_TITLES = ('name', 'dtype', 'shape', 'values', 'bytes', 'where')


def opened(path: str, follow_links: bool) -> CheckpointView:
    """Opens a checkpoint."""
    return open_checkpoint(path, options=CheckpointerOptions(follow_links=follow_links))


def _title(view: CheckpointView) -> str:
    """The path and the step, since the path of a run does not name the step."""
    return view.path if view.step is None else f'{view.path}: step {view.step}'


def selected(view: CheckpointView, pattern: str) -> CheckpointView:
    """The leaves that match; ends the verb with 1 if none does."""
    try:
        return view.select(pattern)
    except CheckpointNotFoundError as error:
        fail(str(error), Exit.NO)


@verb(
    'show',
    _PATH,
    STEP,
    FOLLOW_LINKS,
    option('--depth', 'Show this many levels of groups, with the sums of deeper ones.', COUNT),
    option('--grep', 'Only leaves whose whole name this regular expression matches.'),
    option(
        '--sort',
        'Order; size: a flat list, the largest leaf first.',
        click.Choice(['tree', 'name', 'size']),
        default='tree',
    ),
)
def show(path: str, follow_links: bool, depth: int | None, grep: str | None, sort: str) -> int:
    """Shows the leaves of a checkpoint as a tree: dtype, shape, number of values, bytes, and how they are stored.

    Reads only the manifest. Exits with 1 if --grep matches no leaf.

    \b
    Examples:
      t5ckpt show run
      t5ckpt show run --step 1000 --grep '.*kernel' --sort size
      t5ckpt show run/checkpoint_1000 --depth 2
    """
    if depth is not None and (sort != 'tree' or as_json()):
        raise click.UsageError('--depth applies only to the tree. Leave out --sort and --json.')
    view = opened(path, follow_links)
    infos = [info for info in view.infos() if grep is None or _matcher(grep).fullmatch(info.name)]
    unmatched = [grep] if grep is not None and not infos else []
    for pattern in unmatched:
        meant = meant_pattern(pattern, [info.name for info in view.infos()])
        say(f'--grep {pattern!r} matches no leaf in {view.path}. It is matched with whole names.{meant}', err=True)
    if sort != 'tree':
        infos.sort(key=lambda info: (-info.nbytes * (sort == 'size'), info.name))
    tree = build_tree(infos)
    rows = _rows(tree, depth) if sort == 'tree' else [_leaf_row(info.name, info) for info in infos]
    emit(
        {
            'path': view.path,
            'step': view.step,
            'metrics': view.metrics,
            'leaves': [_fields(info) for info in infos],
            'unmatched': unmatched,
        },
        _title(view),
        table(_TITLES, [*rows, _sums('total', tree)]),
    )
    return len(unmatched)


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


def _rows(group: Group, depth: int | None, level: int = 0) -> Iterator[Sequence[str]]:
    for key, child in group.children.items():
        indented = '  ' * level + key
        if isinstance(child, LeafInfo):
            yield _leaf_row(indented, child)
            continue
        yield _sums(indented, child)
        if depth is None or level + 1 < depth:
            yield from _rows(child, depth, level + 1)


def _sums(name: str, group: Group) -> Sequence[str]:
    return name, '', counted(group.leaves, 'leaf', 'leaves'), f'{group.size:,}', human_bytes(group.nbytes), ''


def _leaf_row(name: str, info: LeafInfo) -> Sequence[str]:
    where = f'{info.location} = {info.value}' if info.value else info.location
    array = [info.dtype, str(info.shape), f'{info.size:,}', human_bytes(info.nbytes)] if info.dtype else [''] * 4
    return name, *array, where


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Completes names of leaves; returns none if the checkpoint cannot be read."""
    del param
    try:
        return [name for name in open_checkpoint(ctx.params['path']) if name.startswith(incomplete)]
    except (KeyError, OSError, ValueError):
        return []


@verb(
    'cat',
    _PATH,
    argument('leaf', metavar='LEAF[SLICE]', shell_complete=_complete),
    STEP,
    FOLLOW_LINKS,
    flag('--npy', "Write the array to standard output in numpy's .npy format."),
)
def cat(path: str, leaf: str, follow_links: bool, npy: bool) -> None:
    """Prints the values of a leaf, or of a slice of it. Only the chunks that the slice touches are read.

    As in NumPy, the middle of a large array is left out; --json and --npy print every value. The .npy format does not
    support bfloat16 and similar dtypes; such arrays are written as float32.

    \b
    Examples:
      t5ckpt cat run state/step
      t5ckpt cat run 'target/token_embedder/embedding[:2, :8]'
      t5ckpt cat run target/encoder/scale --npy > scale.npy
    """
    if npy and as_json():
        raise click.UsageError('--npy and --json exclude each other. Pass one of them.')
    view = opened(path, follow_links)
    # A name may end in brackets itself.
    name, bracket, index = (
        (leaf, '', '') if leaf in set(view) else leaf.rpartition('[') if '[' in leaf else (leaf, '', '')
    )
    selected(view, name)
    value = view[name]
    if isinstance(value, CheckpointView):
        # A pattern keeps the names.
        first = next(iter(value), '')
        example = first if first in view else f'{name}/{first}'
        fail(f'{name} is a group of {counted(len(value), "leaf", "leaves")}. Name a leaf, such as {example}.', Exit.NO)
    if not isinstance(value, LazyArray):
        if npy or bracket:
            raise click.UsageError(f'{name} is {value!r:.80}, not an array: it has no .npy format and no slices.')
        # The keys are those of an array.
        emit({'name': name, 'dtype': '', 'shape': (), 'values': value}, repr(value))
        return
    array = np.asarray(value[_index(leaf, index, value, name) if bracket else ...])
    plain = array if array.dtype.isbuiltin == 1 else array.astype(np.float32)
    if npy:
        np.save(_Output(), plain, allow_pickle=False)
        return
    # JSON has no complex numbers: each becomes [real, imaginary].
    values = np.stack([np.real(plain), np.imag(plain)], axis=-1) if plain.dtype.kind == 'c' else plain
    fields = {'name': name, 'dtype': array.dtype.name, 'shape': array.shape, 'values': values.tolist()}
    emit(fields, *f'{array[()]}'.split('\n'))


class _Output:
    """Standard output as a file object, since the error of ``numpy.save`` to a real file has no cause."""

    def write(self, data: Any) -> int:
        """Writes bytes."""
        return sys.stdout.buffer.write(data)


def _index(leaf: str, text: str, array: LazyArray, name: str) -> Any:
    """The index that ``leaf`` ends with, checked without reading, since damage is not a wrong index."""
    wrong = click.UsageError(
        f'{leaf} does not end in a slice such as {name}[:2, 0]: in brackets, write numbers, start:stop:step, ... and commas.'
    )
    if not text.endswith(']'):
        raise wrong
    try:
        index = tuple(_axis(part.strip()) for part in text[:-1].split(',') if part.strip())
    except ValueError as error:
        raise wrong from error
    try:
        _ = np.broadcast_to(False, array.shape)[index]
    except (IndexError, ValueError) as error:
        raise click.UsageError(f'{name} has shape {array.shape}: {error}') from error
    return index


def _axis(part: str) -> Any:
    if part == '...':
        return Ellipsis
    if ':' not in part:
        return int(part)
    return slice(*[int(number) if number.strip() else None for number in part.split(':')])


@verb(
    'stats',
    _PATH,
    argument('leaves', required=False, metavar='[LEAVES]'),
    STEP,
    FOLLOW_LINKS,
    flag('--fail-on-nan', 'Exit with 1 if any value is NaN or infinite.'),
)
def stats(path: str, leaves: str | None, follow_links: bool, fail_on_nan: bool) -> int:
    """Prints statistics of each leaf of a checkpoint: mean, standard deviation, extremes, norm, zeros, NaN, inf.

    LEAVES is a name, a group, or a regular expression for complete names, such as 'target/.*/kernel'; default: all leaves.
    The leaves are read in blocks, so memory is bounded.

    \b
    Examples:
      t5ckpt stats run
      t5ckpt stats run 'target/.*/kernel' --fail-on-nan
    """
    view = opened(path, follow_links)
    view = view if leaves is None else selected(view, leaves)
    found = view.stats(bins=0, progress=progress('reading'))
    left_out = [info.name for info in view.infos() if info.name not in found]
    bad = [name for name, leaf in found.items() if leaf.nan or leaf.inf]
    fields = [{'name': name, **fields_of(leaf)} for name, leaf in found.items()]
    for leaf in fields:
        del leaf['counts'], leaf['edges']
    emit(
        {'path': view.path, 'step': view.step, 'leaves': fields, 'not_finite': bad, 'left_out': left_out},
        _title(view),
        table(found.columns, found.rows()),
        *[f'left out, because they contain no numbers: {", ".join(left_out)}'] * bool(left_out),
    )
    return int(bool(bad) and fail_on_nan)
