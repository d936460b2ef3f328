"""Parses the names of steps: ``run@1200``, ``run@latest``, ``run@best``, ``run@best:eval/loss``, or the step's path."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

from t5ckpt.catalog.locate import locate, open_run_storage
from t5ckpt.errors import T5CkptError
from t5ckpt.storage import Storage, open_storage

_NAMED = re.compile(r'(?P<run>.+)@(?P<step>\d+|latest|best(:(?P<metric>.+?)(:(?P<mode>min|max))?)?)', re.DOTALL)
_MISNAMED = re.compile(r'(?P<run>.+)@(?P<word>[^/@:]*)(?P<rest>(:[^@]*)?)', re.DOTALL)


class _Path(click.types.StringParamType):
    """A path or URL, which is resolved when the verb runs."""

    def __init__(self, name: str):
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The path unchanged."""
        if not value:
            self.fail("The path is empty. Write '.' for the current directory.", param, ctx)
        return str(value)


# CHECKPOINT: a run, a step by any of its names, or a file. RUN: only a run. ANY_PATH: any file or directory.
CHECKPOINT = _Path('path')
RUN = _Path('run')
ANY_PATH = _Path('path')


def named_paths(command: click.Command, given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that name checkpoints, with ``run@1200`` replaced by the step's directory.

    A verb with ``--tier`` gets ``run@1200`` unchanged, because the tier has to be chosen first; it calls :func:`resolved`.

    Raises:
      click.UsageError: the path of a run names a step, or ``--step`` names one as well.
    """
    resolved: dict[str, Any] = {}
    for param in command.params:
        value = given.get(param.name)
        if param.type not in (CHECKPOINT, RUN) or value is None:
            continue
        is_run = param.type is RUN
        several = isinstance(value, tuple)
        paths = [_resolved(path, given, is_run, param) for path in (value if several else (value,))]
        resolved[param.name] = tuple(paths) if several else paths[0]
    return resolved


def paths_of(command: click.Command, given: Mapping[str, Any]) -> list[str]:
    """All paths and URLs in the arguments of a verb."""
    values = [given.get(param.name) for param in command.params if isinstance(param.type, _Path)]
    return [path for value in values if value is not None for path in (value if isinstance(value, tuple) else (value,))]


def remote_paths(paths: Sequence[str]) -> list[str]:
    """The paths that are not on a file system."""
    remote: list[str] = []
    for path in paths:
        # The verb reports the error of a malformed path.
        with contextlib.suppress(T5CkptError):
            remote += [] if open_storage(path).is_file_system else [path]
    return remote


def checkpoints_of(paths: Sequence[str], steps: Sequence[int]) -> list[str]:
    """The directories of several checkpoints, without duplicates.

    Raises:
      click.UsageError: steps are named for more than one run.
    """
    if steps and len(paths) > 1:
        raise click.UsageError(
            '--step names steps of one run. For several paths, name each step in its path: run@1200.'
        )
    located = [locate(path, step) for path in paths for step in steps or (None,)]
    return list(dict.fromkeys(checkpoint.storage.url(checkpoint.directory) for checkpoint in located))


def _resolved(path: str, given: Mapping[str, Any], is_run: bool, param: click.Parameter) -> str:
    named = step_named(path)
    if named is None:
        if not is_run:
            _refuse_misnamed(path)
        return path
    run = named['run']
    if is_run:
        cure = (
            'Pass the run'
            if param.name in ('path', 'run')
            else 'Set the step to write with --as-step, and pass the run'
        )
        raise click.UsageError(f'{path} names a step, but this argument is the path of a run. {cure}: {run}')
    if given.get('step') is not None or given.get('steps'):
        raise click.UsageError(f'{path} names a step, so --step cannot name another. Leave one of them out.')
    _refuse_file(path, run)
    return path if 'tier' in given else resolved(path)


def resolved(path: str) -> str:
    """The directory of the step that ``run@1200`` names; other paths unchanged."""
    named = step_named(path)
    return path if named is None else step_path(named['run'], _step_in(named))


def step_number(path: str) -> int | None:
    """The number of the step that ``run@latest`` names.

    Raises:
      CheckpointNotFoundError: the run does not have it.
    """
    named = step_named(path)
    return None if named is None else locate(named['run'], _step_in(named)).step


def step_path(run: str, step: int | None) -> str:
    """The path of a step: its directory, or its file in Flax's layout."""
    located = locate(run, step)
    return located.storage.url(located.directory) if located.directory or not located.manifest else located.url


def step_named(path: str) -> re.Match[str] | None:
    """The parts of a path that ends in ``@`` and a step; None for other paths, and for an existing file or directory."""
    named = _NAMED.fullmatch(path)
    if named is None:
        return None
    storage = open_storage(path)
    if storage.is_file_system and storage.kind('') is not None:
        return None
    return named


def _refuse_file(path: str, run: str) -> None:
    """Raises click.UsageError for ``a.safetensors@3``: a file has no steps."""
    storage = open_storage(run)
    if storage.is_file_system and storage.kind('') == 'file':
        raise click.UsageError(f'{path} names a step, but {run} is a file, which has no steps. Pass {run}.')


def _refuse_misnamed(path: str) -> None:
    """Raises click.UsageError for ``run@bset`` if the run exists, and no file has the whole name."""
    match = _MISNAMED.fullmatch(path)
    if match is None or open_storage(path).kind('') is not None or open_storage(match['run']).kind('') != 'dir':
        return
    word, rest = match['word'], match['rest']
    near = difflib.get_close_matches(word.lower(), ('latest', 'best'), 1)
    meant = f' Did you mean {match["run"]}@{near[0]}{rest if near[0] == "best" else ""}?' if near else ''
    raise click.UsageError(
        f'{path}: no such file or directory, and {word}{rest} names no step. Write the number of a step, latest, best or '
        f'best:METRIC after @.{meant}'
    )


def _step_in(named: re.Match[str]) -> int | None:
    if named['step'] == 'latest':
        return None
    if named['step'].isdecimal():
        return int(named['step'])
    from t5ckpt.cli.best_step import chosen

    storage = open_run_storage(named['run'])
    metric = named['metric']
    cure = f'Write {named["run"]}@best:{metric or "METRIC"}:min, or :max.'
    try:
        best = chosen(storage, metric, named['mode'], cure)
    except click.UsageError as error:
        _refuse_mode(storage, named)
        raise error from None
    if best.step is None:
        raise click.UsageError(f'{named["run"]}@{named["step"]}: no step has a value for {best.metric}.')
    return best.step


def _refuse_mode(storage: Storage, named: re.Match[str]) -> None:
    """Raises click.UsageError for ``run@best:loss:lowest``: the steps have the metric, and the word after it is not a mode."""
    from t5ckpt.cli.best_step import chosen

    metric, _, word = (named['metric'] or '').rpartition(':')
    if not metric:
        return
    try:
        is_metric = chosen(storage, metric, 'min').step is not None
    except click.UsageError:
        return
    if is_metric:
        start = f'{named["run"]}@best:{metric}'
        raise click.UsageError(
            f'{word!r} is not a mode. Write {start}:min if low values are best, otherwise {start}:max.'
        )
