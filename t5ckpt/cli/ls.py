"""``t5ckpt ls`` lists the steps of a run, ``t5ckpt best`` names the best of them by a metric."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from t5ckpt.catalog.locate import no_checkpoint, open_run_storage, openable_below, refuse_other_contents
from t5ckpt.catalog.step_summaries import StepSummary, summaries
from t5ckpt.cli.paths import RUN, TIERS, record_of
from t5ckpt.cli.verb import MODE, Exit, argument, code_of, emit, emit_lines, fields_of, flag, say, table, verb
from t5ckpt.core.text import counted, human_age, human_bytes, some_of
from t5ckpt.errors import T5CkptError
from t5ckpt.inspection.kept import by_policy, with_reasons
from t5ckpt.policies import KeepLatest
from t5ckpt.save.best_step import best_in
from t5ckpt.storage import Storage, open_storage

if TYPE_CHECKING:
    from t5ckpt.tiers.directory import TierRecord

_LOCAL, _PERSISTENT = 'local', 'persistent'
# Other metrics than those of the keep policy in the table.
_FEW = 3


class _Row(NamedTuple):
    """A step, and the tier that has it; None if there is one."""

    tier: str | None
    entry: StepSummary


@verb(
    'ls',
    argument('path', TIERS),
    flag('--all', 'Also list unfinished, broken and damaged steps, and what deletions left.'),
)
def ls(path: str, **how: bool) -> int:
    """Lists the steps of the run at PATH: size, age, metrics, and the reason to keep each.

    Complete steps are listed in the layouts of T5X, Orbax, Flax and Levanter; if there are several, a column names them. A
    step that cannot be read is listed with the reason. The size is that of the files that the save wrote. For a step
    that another program wrote, size and time are those of its files. The reason is that of the keep policy of the latest
    save. The metrics that it compares come first; more than three others are only in JSON. A local
    directory (LocalTier) is listed together with the run to which its steps are uploaded.

    \b
    Examples:
      t5ckpt ls run
      t5ckpt ls gs://bucket/run --all
    """
    record = record_of(path)
    paths = {None: path} if record is None else {_LOCAL: path, _PERSISTENT: record.run.rstrip('/')}
    rows: list[_Row] = []
    code = Exit.DONE
    for name, place in paths.items():
        policy = KeepLatest(record.keep) if record is not None and name == _LOCAL else None
        try:
            storage = run_at(place) if name != _PERSISTENT else open_run_storage(place)
            entries = _listed(storage, has_others=len(paths) > 1, everything=how['all'])
            rows += [_Row(name, entry) for entry in with_reasons(storage, entries, policy)]
            if record is not None and name == _PERSISTENT:
                _warn_of_another_run(record, storage)
        except T5CkptError as error:
            if name != _PERSISTENT:
                raise
            say(f'only the local steps are listed: {error}', err=True)
            code = code_of(error)
    rows.sort(key=lambda row: row.entry.step)
    if not rows:
        say(f'no complete checkpoint in {" or ".join(map(_url, paths.values()))}', err=True)
    emit([{**fields_of(row.entry), 'tier': row.tier} for row in rows], *_table(rows))
    return code


def run_at(path: str) -> Storage:
    """Opens a run.

    Raises:
      CheckpointNotFoundError: it does not exist, or is a step's directory. On a bucket this makes no request.
    """
    storage = open_run_storage(path)
    if storage.root_kind() != 'dir':
        raise no_checkpoint(storage)
    return storage


def check_exists(run: Storage) -> None:
    """Raises CheckpointNotFoundError if there is no run."""
    if run.kind('') != 'dir':
        raise no_checkpoint(run)


def _url(path: str) -> str:
    return open_storage(path).url()


def _warn_of_another_run(record: TierRecord, run: Storage) -> None:
    """Prints that the local steps are not those of the run at the recorded URL, if the ids differ."""
    from t5ckpt.tiers.directory import read_run_id

    identity = read_run_id(run)
    if identity not in ('', record.id):
        say(
            f'the local steps are of another run: their run has the id {record.id}, and the run at {record.run} has the id '
            f'{identity}',
            err=True,
        )


def _listed(storage: Storage, *, has_others: bool, everything: bool) -> list[StepSummary]:
    """The steps to list, after a line about what is not listed; with others, of the other tier, there may be none."""
    entries = summaries(storage)
    if not entries and not has_others:
        refuse_other_contents(storage)
        if storage.kind('') != 'dir' or any(not entry.name.startswith('.') for entry in storage.entries()):
            raise no_checkpoint(storage)
    listed = [entry for entry in entries if entry.complete or entry.reason or everything]
    # In a bucket, a listing of other names would list every chunk.
    names = {entry.path.rpartition('/')[2] for entry in entries}
    others = openable_below(storage, names) if listed and storage.is_file_system else []
    if others:
        say(f'not steps of the run, and therefore not listed: {some_of(others, 10)}. Open each by its path.', err=True)
    broken = [str(entry.step) for entry in entries if entry.state == 'broken' and entry not in listed]
    if broken:
        say(f'broken, and therefore not listed: {some_of(broken, 10)}. t5ckpt ls --all lists every entry.', err=True)
    return listed


def _table(rows: Sequence[_Row]) -> list[str]:
    """The table, without columns that have one value in all rows by nature."""
    if not rows:
        return []
    entries = [row.entry for row in rows]
    compared, others = by_policy(entries)
    others, hidden = ([], others) if len(others) > _FEW else (others, [])
    has_layouts = any(entry.layout != 't5x' for entry in entries)
    cells = [
        [
            str(entry.step),
            tier or '',
            human_bytes(entry.nbytes),
            '' if entry.created is None else human_age(time.time() - entry.created),
            *_values(entry, compared),
            entry.layout if has_layouts else '',
            entry.state,
            '; '.join(filter(None, [entry.kept, entry.reason])),
            *_values(entry, others),
        ]
        for tier, entry in rows
    ]
    titles = ['step', 'tier', 'size', 'age', *compared, 'layout', 'state', 'kept because', *others]
    note = f'not listed: {counted(len(hidden), "metric")} that no keep policy compares; --json has them'
    return [table(titles, cells), *[note] * bool(hidden)]


def _values(entry: StepSummary, names: Sequence[str]) -> list[str]:
    return [f'{entry.metrics[name]:.6g}' if name in entry.metrics else '' for name in names]


@verb(
    'best',
    argument('path', RUN),
    argument('metric', required=False, metavar='[METRIC]'),
    MODE,
)
def best(path: str, metric: str | None, mode: str | None) -> int:
    """Prints the step of the run at PATH that is best by METRIC.

    Of steps with equal values, the newest is best. NaN and infinities are never best. Metrics are those that were passed to
    save, those in TensorBoard's files below PATH (train/loss is the tag loss in PATH/train), and those that Orbax saved.
    METRIC and --mode default to those of the keep policy of the latest save; standard error then names them. In the place of
    a path, run@best:METRIC:min is the same step.

    Exit codes: 0 done; 1 no step has a value for METRIC; 2 wrong usage: the steps have metrics, but not METRIC, or the
    keep policy does not define the mode.

    \b
    Examples:
      t5ckpt best run
      t5ckpt best run eval/loss --mode min
    """
    storage = run_at(path)
    check_exists(storage)
    found = best_in(storage, metric, mode)
    emit(found._asdict(), *[] if found.step is None else [str(found.step)])
    if found.step is None:
        say(f'{storage.url()}: no step has a value for {found.metric}', err=True)
    elif mode is None:
        emit_lines(
            f'{found.metric}: {found.mode} is best by the keep policy of the run. --mode chooses another.', err=True
        )
    return Exit.NO if found.step is None else Exit.DONE
