"""``t5ckpt cat``: prints the values of one leaf, or of a slice of it."""

from __future__ import annotations

import re
import sys
from typing import Any

import click
import numpy as np

from t5ckpt.cli.output import follow_links_option, json_option, print_json, print_line, step_option
from t5ckpt.cli.paths import CHECKPOINT
from t5ckpt.cli.verb import Exit, Verb, fail
from t5ckpt.core.text import counted
from t5ckpt.inspection.view import CheckpointView, open_checkpoint
from t5ckpt.lazy import LazyArray
from t5ckpt.options import CheckpointerOptions

_INDEX = re.compile(r'\[([0-9:, .\-]*)\]\Z')


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Completes names of leaves; returns none if the checkpoint cannot be read."""
    del param
    try:
        return [name for name in open_checkpoint(ctx.params['path']) if name.startswith(incomplete)]
    except (KeyError, OSError, ValueError):
        return []


@click.command('cat', cls=Verb)
@click.argument('path', type=CHECKPOINT)
@click.argument('leaf', metavar='LEAF[SLICE]', shell_complete=_complete)
@step_option
@follow_links_option
@click.option('--npy', is_flag=True, help="Write the array to standard output in numpy's .npy format.")
@json_option
def command(path: str, leaf: str, step: int | None, follow_links: bool, npy: bool, as_json: bool) -> None:
    """Prints the values of a leaf, or of a slice of it. Only the chunks that the slice touches are read.

    As in NumPy, the middle of a large array is left out; --json and --npy print every value. The .npy format does not
    support bfloat16 and similar dtypes; such arrays are written as float32.

    \b
    Examples:
      t5ckpt cat run state/step
      t5ckpt cat run 'target/token_embedder/embedding[:2, :8]'
      t5ckpt cat run target/encoder/scale --npy > scale.npy
    """
    if npy and as_json:
        raise click.UsageError('--npy and --json exclude each other. Pass one of them.')
    view = open_checkpoint(path, step, options=CheckpointerOptions(follow_links=follow_links))
    name, index = _parsed(leaf, view)
    value = view[name]
    if not isinstance(value, LazyArray):
        if isinstance(value, CheckpointView):
            leaves = counted(len(value), 'leaf', 'leaves')
            # A pattern keeps the names.
            first = next(iter(value), '')
            example = first if first in view else f'{name}/{first}'
            fail(f'{name} is a group of {leaves}. Name a leaf, such as {example}.', Exit.NO)
        if npy or index is not ...:
            raise click.UsageError(f'{name} is {value!r:.80}, not an array: it has no .npy format and no slices.')
        # The keys are those of an array.
        print_json({'name': name, 'dtype': '', 'shape': (), 'values': value}) if as_json else print_line(repr(value))
        return
    array = np.asarray(_sliced(value, index, name))
    if npy:
        np.save(_Output(), _known_to_numpy(array), allow_pickle=False)
    elif as_json:
        print_json({'name': name, 'dtype': array.dtype.name, 'shape': array.shape, 'values': _listed(array)})
    else:
        click.echo(f'{array[()]}')


class _Output:
    """Standard output as a file object, since the error of ``numpy.save`` to a real file has no cause."""

    def write(self, data: Any) -> int:
        """Writes bytes."""
        return sys.stdout.buffer.write(data)


def _parsed(text: str, view: CheckpointView) -> tuple[str, Any]:
    """A leaf's name and the index after it, or ...; the name itself may end in brackets."""
    if text in set(view):
        return text, ...
    match = _INDEX.search(text)
    name = text if match is None else text[: match.start()]
    try:
        view[name]
    except KeyError as error:
        fail(error.args[0], Exit.NO)
    if match is None:
        return name, ...
    try:
        return name, tuple(_axis(part.strip()) for part in match[1].split(',') if part.strip())
    except ValueError as error:
        raise click.UsageError(f'{match[0]} is not an index: use numbers, start:stop:step, ... and commas.') from error


def _axis(part: str) -> Any:
    if part == '...':
        return Ellipsis
    if ':' not in part:
        return int(part)
    return slice(*[int(number) if number.strip() else None for number in part.split(':')])


def _sliced(value: LazyArray, index: Any, name: str) -> Any:
    try:
        # Without reading, since damage is not a wrong index.
        _ = np.broadcast_to(False, value.shape)[index]
    except (IndexError, ValueError) as error:
        raise click.UsageError(f'{name} has shape {value.shape}: {error}') from error
    return value[index]


def _known_to_numpy(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.isbuiltin == 1 else array.astype(np.float32)


def _listed(array: np.ndarray) -> Any:
    values = _known_to_numpy(array)
    # JSON has no complex numbers: each becomes [real, imaginary].
    return (
        np.stack([np.real(values), np.imag(values)], axis=-1).tolist() if values.dtype.kind == 'c' else values.tolist()
    )
