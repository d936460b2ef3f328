"""``t5ckpt ls``: the steps of a run."""

from __future__ import annotations

import time

import click

from t5ckpt.catalog.foreign_layouts import foreign_layout
from t5ckpt.catalog.layouts import is_orbax
from t5ckpt.catalog.step_summaries import StepSummary, summaries
from t5ckpt.cli.output import Column, check_exists, fields_of, json_option, print_json, print_table, run_at, say
from t5ckpt.cli.paths import RUN
from t5ckpt.cli.verb import Verb
from t5ckpt.core.text import human_age, human_bytes, some_of
from t5ckpt.errors import CheckpointNotFoundError, UnsupportedFormatError
from t5ckpt.inspection.kept import with_reasons

__all__ = ['command']


@click.command('ls', cls=Verb)
@click.argument('path', type=RUN)
@click.option(
    '--all',
    'show_all',
    is_flag=True,
    help='Also what is no complete checkpoint: unfinished, broken, set aside as damaged.',
)
@json_option
def command(path: str, show_all: bool, as_json: bool) -> None:
    """Lists the steps of the run at PATH: size, age, metrics, why each is kept.

    A step is listed when it is complete, in whichever layout; a column names it where one is not T5X's. A step that cannot
    be read is listed with the reason. Sizes, times and metrics come from the sidecars that t5ckpt writes; sizes and
    times of what others wrote are those of the files. Why a step stays is what the keep policy says, under which the
    latest step was saved.

    \b
    Example:
      t5ckpt ls run
    """
    storage = run_at(path)
    entries = summaries(storage)
    found = [entry for entry in entries if entry.complete or entry.reason or show_all]
    if not found:
        check_exists(storage)
    foreign = None if found else foreign_layout(storage)
    if foreign is not None:
        raise UnsupportedFormatError(f'{path}: no complete checkpoint there; it looks like {foreign}.')
    if not found and is_orbax(storage, ''):
        raise CheckpointNotFoundError(
            f'{path} is one checkpoint of Orbax, not a run. t5ckpt show {path} lists its leaves.'
        )
    found = with_reasons(storage, found)
    broken = [str(entry.step) for entry in entries if entry.state == 'broken' and entry not in found]
    if broken:
        say(f'broken, and therefore not listed: {some_of(broken, 10)}. t5ckpt ls --all lists every entry.', err=True)
    if as_json:
        print_json([fields_of(entry) for entry in found])
        return
    now = time.time()
    names = sorted({name for entry in found for name in entry.metrics})
    columns = [Column('step', right=True), Column('size', right=True), Column('age', right=True)]
    columns += [Column(name, right=True) for name in names]
    has_layouts = any(entry.layout != 't5x' for entry in found)
    columns += [Column('layout')] * has_layouts + [Column('state'), Column('kept because')]
    print_table(columns, [_row(entry, names, now, has_layouts) for entry in found])
    if not found:
        say(f'no complete checkpoint in {storage.url()}', err=True)


def _row(entry: StepSummary, names: list[str], now: float, has_layouts: bool) -> list[str]:
    age = '' if entry.created is None else human_age(now - entry.created)
    metrics = ['' if name not in entry.metrics else f'{entry.metrics[name]:.6g}' for name in names]
    layout = [entry.layout] * has_layouts
    return [
        str(entry.step),
        human_bytes(entry.nbytes),
        age,
        *metrics,
        *layout,
        entry.state,
        f'{entry.kept}; {entry.reason}' if entry.kept and entry.reason else entry.kept or entry.reason,
    ]
