"""``t5ckpt ls``: lists the steps of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from t5ckpt.catalog.locate import (
    foreign_in,
    no_checkpoint,
    open_run_storage,
    openable_below,
    refuse_other_contents,
)
from t5ckpt.catalog.step_summaries import StepSummary, summaries
from t5ckpt.cli.output import Column, check_exists, fields_of, json_option, print_json, print_line, print_table, run_at
from t5ckpt.cli.paths import RUN
from t5ckpt.cli.tiers import BOTH, LOCAL, PERSISTENT, naming_record, record_in, tier_option, tier_paths
from t5ckpt.cli.verb import Exit, Verb, code_of
from t5ckpt.core.text import counted, human_age, human_bytes, some_of
from t5ckpt.errors import T5CkptError
from t5ckpt.inspection.kept import by_policy, with_reasons
from t5ckpt.policies import KeepLatest
from t5ckpt.storage import open_storage

if TYPE_CHECKING:
    from t5ckpt.tiers.directory import TierRecord


# Other metrics than those of the keep policy that are listed without --metrics.
_FEW = 3


@click.command('ls', cls=Verb)
@click.argument('path', type=RUN)
@click.option(
    '--all',
    'show_all',
    is_flag=True,
    help='Also list unfinished, broken and damaged steps.',
)
@click.option(
    '--metrics', 'show_metrics', is_flag=True, help='Also list all metrics that the keep policy does not compare.'
)
@tier_option(both=True)
@json_option
def command(path: str, show_all: bool, show_metrics: bool, tier: str | None, as_json: bool) -> int:
    """Lists the steps of the run at PATH: size, age, metrics, and the reason to keep each.

    Complete steps are listed in the layouts of T5X, Orbax, Flax and Levanter; if there are several, a column names them. A
    step that cannot be read is listed with the reason. The size is that of the files that the save wrote. For a step
    that another program wrote, size and time are those of its files. The reason is that of the keep policy of the latest
    save. The metrics that it compares come first; more than three others are listed with --metrics, and in JSON. A local
    directory (LocalTier) is listed together with the run to which its steps are uploaded.

    \b
    Examples:
      t5ckpt ls run
      t5ckpt ls /ssd/run --tier local
    """
    paths = tier_paths(path, tier, default=BOTH)
    record = None if None in paths else record_in(path)
    rows: list[_Row] = []
    code = Exit.DONE
    for name, location in paths.items():
        try:
            with naming_record(path, name):
                rows += [
                    _Row(name, entry) for entry in _steps_at(location, show_all, name, record, is_beside=len(paths) > 1)
                ]
        except T5CkptError as error:
            if name != PERSISTENT or len(paths) == 1:
                raise
            print_line(f'only the local steps are listed: {error}', err=True)
            code = code_of(error)
    if record is not None and PERSISTENT in paths and code == Exit.DONE:
        _warn_of_another_run(record)
    rows.sort(key=lambda row: row.entry.step)
    if as_json:
        print_json([{**fields_of(row.entry), 'tier': row.tier} for row in rows])
        return code
    if rows:
        _print_rows(rows, show_metrics=show_metrics)
    else:
        print_line(
            f'no complete checkpoint in {" or ".join(open_storage(location).url() for location in paths.values())}',
            err=True,
        )
    return code


def _warn_of_another_run(record: TierRecord) -> None:
    """Prints that the local steps are not those of the run at the recorded URL, if the ids differ."""
    from t5ckpt.tiers.directory import read_run_id

    identity = read_run_id(open_run_storage(record.run))
    if identity and identity != record.id:
        print_line(
            f'the local steps are of another run: their run has the id {record.id}, and the run at {record.run} has the id '
            f'{identity}',
            err=True,
        )


class _Row(NamedTuple):
    """A step, and the tier that has it; None if there is one."""

    tier: str | None
    entry: StepSummary


def _steps_at(
    path: str, show_all: bool, tier: str | None, record: TierRecord | None, *, is_beside: bool
) -> list[StepSummary]:
    """The steps of one run or local directory, each with the reasons to keep it; ``is_beside`` another tier, it may have none."""
    storage = run_at(path) if tier != PERSISTENT else open_run_storage(path)
    entries = summaries(storage)
    listed = [entry for entry in entries if entry.complete or entry.reason or show_all]
    if not listed and (record is None or not is_beside):
        check_exists(storage)
        if not entries:
            refuse_other_contents(storage)
            if foreign_in(storage):
                raise no_checkpoint(storage)
    listed = with_reasons(storage, listed, KeepLatest(record.keep) if record is not None and tier == LOCAL else None)
    broken = [str(entry.step) for entry in entries if entry.state == 'broken' and not (entry.reason or show_all)]
    # In a bucket, a listing of other names would list every chunk.
    names = {entry.path.rpartition('/')[2] for entry in entries}
    others = openable_below(storage, names) if listed and storage.is_file_system else []
    if others:
        print_line(
            f'not steps of the run, and therefore not listed: {some_of(others, 10)}. Open each by its path.', err=True
        )
    if broken:
        print_line(
            f'broken, and therefore not listed: {some_of(broken, 10)}. t5ckpt ls --all lists every entry.', err=True
        )
    return listed


def _print_rows(rows: list[_Row], *, show_metrics: bool) -> None:
    now = time.time()
    entries = [row.entry for row in rows]
    compared, others = by_policy(entries)
    if len(others) > _FEW and not show_metrics:
        print_line(
            f'not listed: {counted(len(others), "metric")} that no keep policy compares. Pass --metrics.', err=True
        )
        others = []
    has_tiers = any(row.tier is not None for row in rows)
    columns = [Column('step', right=True), *[Column('tier')] * has_tiers]
    columns += [Column('size', right=True), Column('age', right=True)]
    columns += [Column(name, right=True) for name in compared]
    has_layouts = any(entry.layout != 't5x' for entry in entries)
    columns += [Column('layout')] * has_layouts + [Column('state'), Column('kept because')]
    columns += [Column(name, right=True) for name in others]
    print_table(columns, [[*_cells(row, compared, now, has_layouts), *_values(row, others)] for row in rows])


def _values(row: _Row, names: Sequence[str]) -> list[str]:
    metrics = row.entry.metrics
    return ['' if name not in metrics else f'{metrics[name]:.6g}' for name in names]


def _cells(row: _Row, names: Sequence[str], now: float, has_layouts: bool) -> list[str]:
    tier, entry = row
    age = '' if entry.created is None else human_age(now - entry.created)
    layout = [entry.layout] * has_layouts
    return [
        str(entry.step),
        *([] if tier is None else [tier]),
        human_bytes(entry.nbytes),
        age,
        *_values(row, names),
        *layout,
        entry.state,
        f'{entry.kept}; {entry.reason}' if entry.kept and entry.reason else entry.kept or entry.reason,
    ]
