"""``t5ckpt ls``: the steps of a run."""

from __future__ import annotations

import dataclasses
import time

import click

from t5ckpt._foreign import foreign_layout
from t5ckpt._summaries import StepSummary, summaries
from t5ckpt._text import human_age, human_bytes
from t5ckpt.cli._output import Column, json_option, print_json, print_table
from t5ckpt.errors import CheckpointNotFoundError, UnsupportedFormatError
from t5ckpt.storage import open_storage

__all__ = ['command']


@click.command('ls')
@click.argument('path')
@click.option(
    '--all', 'show_all', is_flag=True, help='Also what is no complete checkpoint: unfinished, broken, leftover.'
)
@json_option
def command(path: str, show_all: bool, as_json: bool) -> None:
    """Lists the steps of the run at PATH: size, age, metrics, why each is kept.

    A step is listed when it is complete. Sizes, times and metrics come from the sidecars that t5ckpt writes; sizes and
    times of what others wrote are those of the files.

    \b
    Example:
      t5ckpt ls run
    """
    storage = open_storage(path)
    if storage.renames and storage.kind('') != 'dir':
        raise CheckpointNotFoundError(f'{path}: there is no such directory.')
    found = [entry for entry in summaries(storage) if entry.complete or show_all]
    foreign = None if found else foreign_layout(storage)
    if foreign is not None:
        raise UnsupportedFormatError(f'{path}: no complete checkpoint there; it looks like {foreign}.')
    if as_json:
        print_json([dataclasses.asdict(entry) for entry in found])
        return
    now = time.time()
    names = sorted({name for entry in found for name in entry.metrics})
    columns = [Column('step', right=True), Column('size', right=True), Column('age', right=True)]
    columns += [Column(name, right=True) for name in names]
    columns += [Column('state'), Column('kept because')]
    print_table(columns, [_row(entry, names, now) for entry in found])
    if not found:
        click.echo(f'no complete checkpoint in {storage.url()}', err=True)


def _row(entry: StepSummary, names: list[str], now: float) -> list[str]:
    age = '' if entry.created is None else human_age(now - entry.created)
    metrics = ['' if name not in entry.metrics else f'{entry.metrics[name]:.6g}' for name in names]
    state = 'complete' if entry.complete else entry.state
    return [str(entry.step), human_bytes(entry.nbytes), age, *metrics, state, entry.kept]
