"""Parses the names of steps: ``run@1200``, ``run@latest``, ``run@best``, ``run@best:eval/loss:min``, or the step's path."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from t5ckpt.catalog.layouts import inspect_name
from t5ckpt.catalog.locate import locate, open_run_storage
from t5ckpt.format.names import TIER_RECORD, parse_step_dir
from t5ckpt.save.best_step import best_in
from t5ckpt.storage import open_storage, split_path

if TYPE_CHECKING:
    from t5ckpt.tiers.directory import TierRecord

_STEP = re.compile(r'\d+|latest|best(:.+)?', re.DOTALL)


class _Named(NamedTuple):
    """The parts of ``run@1200``."""

    run: str
    step: str


def step_named(path: str) -> _Named | None:
    """The parts of a path that ends in ``@`` and a step; None for other paths, and for an existing file or directory.

    Raises:
      click.UsageError: the word after ``@`` names no step, or a file is before it.
    """
    run, _, word = path.rpartition('@')
    is_step = _STEP.fullmatch(word) is not None
    if not run or not (is_step or '/' not in word.partition(':')[0]):
        return None
    on_disk = open_storage(path).is_file_system
    # A bucket is not asked about a step's name.
    kind = open_storage(run).kind('') if on_disk or not is_step else 'dir'
    if (on_disk or not is_step) and (open_storage(path).kind('') or not (is_step or kind == 'dir')):
        return None
    if kind == 'file':
        raise click.UsageError(f'{path} names a step, but {run} is a file, which has no steps. Pass {run}.')
    if not is_step:
        raise click.UsageError(
            f'{path}: no such file or directory, and {word} names no step. Write the number of a step, latest, best, '
            'best:METRIC, or best:METRIC:min after @.'
        )
    return _Named(run, word)


def _number(named: _Named) -> int | None:
    """The number of a step; None for the latest.

    Raises:
      click.UsageError: no step has a value for the metric.
    """
    if not named.step.startswith('best'):
        return None if named.step == 'latest' else int(named.step)
    metric, _, mode = named.step.partition(':')[2].rpartition(':')
    if mode not in ('min', 'max'):
        metric, mode = ':'.join(filter(None, [metric, mode])), ''
    best = best_in(open_run_storage(named.run), metric or None, mode or None)
    if best.step is None:
        raise click.UsageError(f'{named.run}@{named.step}: no step has a value for {best.metric}.')
    return best.step


def checkpoint(path: str, step: int | None = None) -> str:
    """The path of a checkpoint: of the step that ``run@1200`` or ``--step`` names; other paths unchanged."""
    named = step_named(path)
    if named is None:
        return path if step is None else step_path(path, step)
    if step is not None:
        raise click.UsageError(f'{path} names a step, so --step cannot name another. Leave one of them out.')
    return step_path(named.run, _number(named))


def step_path(run: str, step: int | None = None) -> str:
    """The path of a step: its directory, or its file in Flax's layout; None takes the latest, or the path of a step itself."""
    located = locate(run, step)
    return located.storage.url(located.directory) if located.directory or not located.manifest else located.url


def _run(path: str, _: int | None = None) -> str:
    """The path of a run.

    Raises:
      click.UsageError: it names a step.
    """
    named = step_named(path)
    if named is not None:
        raise click.UsageError(
            f'{path} names a step, but this argument is the path of a run. To write as another step, pass --as-step. Pass the '
            f'run: {named.run}'
        )
    return path


def run_and_step(path: str) -> tuple[str, int | None]:
    """The run's path, and the step if the path is a step's directory or names one, which need not exist."""
    named = step_named(path)
    if named is not None:
        number = _number(named)
        return named.run, locate(named.run).step if number is None else number
    parent, name = split_path(path)
    step = parse_step_dir(name)
    if step is None and name and (found := inspect_name(open_storage(parent), name)) is not None:
        # A step of another layout may have another name.
        step = found.step
    return (path, None) if step is None else (parent, step)


class PathType(click.types.StringParamType):
    """A path or URL, and how it is resolved, with ``--step``, when the verb runs."""

    def __init__(self, name: str, resolve: Callable[[str, int | None], str] = lambda path, _: path):
        self.name = name
        self.resolve = resolve

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The path unchanged."""
        if not value:
            self.fail("The path is empty. Write '.' for the current directory.", param, ctx)
        return str(value)


# A run, a step by any of its names, or a file; LATER: the verb chooses the steps first, and resolves it itself.
CHECKPOINT = PathType('checkpoint', checkpoint)
LATER = PathType('path')
RUN = PathType('run', _run)
# A run, or a local directory, whose record names the run to which its steps are uploaded.
TIERS = PathType('run', _run)
# Any file or directory.
OTHER = PathType('path')


def record_of(directory: str) -> TierRecord | None:
    """The record of a local directory; None for other directories.

    Raises:
      LocalDirError: the record is damaged.
    """
    storage = open_storage(directory)
    if not (storage.is_file_system and storage.is_file(TIER_RECORD)):
        return None
    from t5ckpt.tiers.directory import read_record

    return read_record(storage)
