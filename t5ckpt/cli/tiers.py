"""The tiers of a local directory, for verbs: the directory, and the run that its steps are uploaded to.

``.t5ckpt/tier.json`` of a local directory names the run. A verb without ``--tier`` works on the directory that it is given, as on
any run; ``ls`` lists both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import click

from t5ckpt.cli.paths import step_named
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.format.names import TIER_RECORD
from t5ckpt.storage import open_storage, split_path

if TYPE_CHECKING:
    from t5ckpt.tiers.directory import TierRecord


LOCAL, PERSISTENT, BOTH = 'local', 'persistent', 'all'


def tier_option(*, both: bool) -> Any:
    """``--tier``; ``both``: whether the verb takes both tiers at once."""
    choices = [LOCAL, PERSISTENT, *[BOTH] * both]
    text = 'If PATH is in a local directory (LocalTier): its steps, or those of the run to which they are uploaded'
    return click.option('--tier', type=click.Choice(choices), help=f'{text}, or both.' if both else f'{text}.')


def record_in(directory: str) -> TierRecord | None:
    """The record of a local directory; None for other directories, files and buckets.

    Raises:
      LocalDirError: it is damaged.
    """
    storage = open_storage(directory)
    if not storage.is_file_system or not storage.is_file(TIER_RECORD):
        return None
    from t5ckpt.tiers.directory import read_record

    return read_record(storage)


def recorded_run(path: str) -> str | None:
    """The path in the run that a local directory, or a step of one, is uploaded to; None for other paths.

    For ``LOCAL@latest`` it ends in ``@latest``, too.

    Raises:
      LocalDirError: the record of the directory is damaged.
    """
    for directory, rest in _divisions(path):
        record = record_in(directory)
        if record is not None:
            return f'{record.run.rstrip("/")}{rest}' if rest else record.run
    return None


def _divisions(path: str) -> list[tuple[str, str]]:
    """The directories that may be the local directory of a path, each with the rest of the path."""
    named = step_named(path)
    if named is not None:
        return [(named['run'], f'@{named["step"]}')]
    parent, name = split_path(path)
    return [(path, ''), (parent, f'/{name}')]


@contextlib.contextmanager
def naming_record(path: str, tier: str | None) -> Generator[None]:
    """Adds to the error for a run that does not exist that its URL is in the record of the local directory."""
    try:
        yield
    except CheckpointNotFoundError as error:
        record = next(((each, found) for each, _ in _divisions(path) if (found := record_in(each)) is not None), None)
        if tier != PERSISTENT or record is None or open_storage(record[1].run).kind('') == 'dir':
            raise
        file = open_storage(record[0]).url(TIER_RECORD)
        raise CheckpointNotFoundError(f'{error} {file} names this run: the local steps are uploaded to it.') from error


def tier_paths(path: str, tier: str | None, *, default: str = LOCAL) -> dict[str | None, str]:
    """The paths that a verb works on, by the names of their tiers.

    Args:
      path: a run, a local directory, or a step of either, also as ``LOCAL@latest``.
      tier: of ``--tier``.
      default: the tier for None.

    Returns:
      The path alone, under None, if it is not in a local directory. A step is not resolved: ``RUN@latest``.

    Raises:
      click.UsageError: ``tier`` is given, and the path is not in a local directory.
    """
    run = recorded_run(path)
    if run is None:
        if tier is not None:
            raise click.UsageError(
                f'--tier is for local directories (LocalTier), and {path} has no {TIER_RECORD}. Leave it out.'
            )
        return {None: path}
    paths: dict[str | None, str] = {LOCAL: path, PERSISTENT: run}
    wanted = tier or default
    return paths if wanted == BOTH else {wanted: paths[wanted]}
