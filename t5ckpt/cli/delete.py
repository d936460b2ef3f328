"""``t5ckpt rm`` deletes steps of a run, ``t5ckpt prune`` those that a policy does not keep."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import click

from t5ckpt.catalog.locate import open_run_storage
from t5ckpt.catalog.pin_file import pin_reason
from t5ckpt.cli.ls import check_exists, run_at
from t5ckpt.cli.paths import LATER, RUN, run_and_step
from t5ckpt.cli.verb import (
    COUNT,
    DRY_RUN,
    MODE,
    NUMBER,
    Exit,
    argument,
    confirm,
    emit,
    emit_lines,
    fields_of,
    flag,
    option,
    say,
    table,
    verb,
)
from t5ckpt.commit.deletion import decide_deletion, find_step, hide
from t5ckpt.commit.retention import Retention, missing_from_all
from t5ckpt.core.text import counted, numbered, some_of
from t5ckpt.errors import StorageError, T5CkptError
from t5ckpt.format.names import step_dir
from t5ckpt.metrics import TensorBoardMetrics
from t5ckpt.policies import (
    Decision,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepEveryHours,
    KeepLatest,
    KeepPolicy,
    KeepSteps,
)
from t5ckpt.save.best_step import best_in
from t5ckpt.storage import Storage

_SHOWN = 20  # deleted steps that are named
_Delete: TypeAlias = Callable[[], tuple[Sequence[int], Mapping[int, str]]]
"""Deletes steps; returns those that it deleted, and why others were not."""
_REFUSED = 'the storage did not delete it'
_YES = flag('--yes', 'Do not ask for confirmation.')


def _carry_out(plan: Sequence[Decision], doomed: int, delete: _Delete, *, dry_run: bool, yes: bool) -> Exit:
    """Prints a plan, asks, deletes the doomed steps, and prints what was deleted, and why each other step was not."""
    rows = [[str(each.step), 'keep' if each.keep else 'delete', each.reason] for each in plan]
    emit_lines(table(['step', '', 'because'], rows))
    deleted, failed = (), {}
    of_all = f'{doomed:,} of {counted(len(plan), "step")}'
    if doomed and not dry_run:
        confirm(f'Delete {of_all}?', yes=yes)
        deleted, failed = delete()
    fields = {
        'plan': [{**fields_of(each), 'was_deleted': each.step in deleted} for each in plan],
        'deleted': sorted(deleted),
        'failed': failed,
        'dry_run': dry_run,
    }
    done = f'deleted: {some_of(list(map(str, deleted)), _SHOWN)}' if deleted else 'nothing was deleted'
    emit(fields, f'{of_all} would be deleted' if dry_run else done)
    for step, reason in failed.items():
        say(f'step {step} was not deleted: {reason}', err=True)
    return Exit.STORAGE if _REFUSED in failed.values() else Exit.NO if failed else Exit.DONE


@verb(
    'rm',
    argument('path', LATER),
    argument('others', LATER, metavar='[STEP]...', nargs=-1),
    flag('--pinned', 'Delete pinned steps, too.'),
    flag('--force', 'Delete steps that wait for their upload, too.'),
    DRY_RUN,
    _YES,
)
def rm(path: str, others: Sequence[str], pinned: bool, force: bool, **how: bool) -> int:
    """Deletes the step at PATH, or steps of the run at PATH. Each STEP is a number, or a path of a step.

    A step is hidden in one atomic operation, and then removed. If one of the steps is pinned, held by a reader, or waits for
    its upload, nothing is deleted. A step of Orbax or Flax is deleted with all of its files. To delete steps by a rule, use
    t5ckpt prune.

    Exit codes: 0 done; 1 a step must be kept; 3 no such step; 4 the storage did not delete a step. The others are deleted.

    \b
    Examples:
      t5ckpt rm run 1000 2000 --dry-run
      t5ckpt rm run@1000 run@2000
      t5ckpt rm run/checkpoint_3000 --yes
    """
    run, steps = _named(path, others)
    targets = {step: find_step(run, step) for step in steps}
    even = {'even_pinned': pinned, 'even_waiting': force}
    plan = [decide_deletion(run, listed, time.time, **even) for listed in targets.values()]
    failed: dict[int, T5CkptError] = {}

    def delete() -> tuple[list[int], Mapping[int, str]]:
        for step, listed in targets.items():
            try:
                hide(run, listed, time.time, **even)()
            except T5CkptError as error:
                failed[step] = error
        return [step for step in targets if step not in failed], {step: str(error) for step, error in failed.items()}

    kept = [each.step for each in plan if each.keep]
    code = _carry_out(plan, 0 if kept else len(plan), delete, **how)
    if kept:
        say(
            f'{numbered("step", kept)} must stay. To delete pinned steps, pass --pinned; to delete a step before its upload, '
            'pass --force.',
            err=True,
        )
    is_refused = any(isinstance(error, StorageError) for error in failed.values())
    return Exit.NO if kept else Exit.STORAGE if is_refused else code


def _named(path: str, others: Sequence[str]) -> tuple[Storage, list[int]]:
    """The run, and the steps that are named.

    Raises:
      click.UsageError: no step is named, or steps of several runs.
    """
    directory, first = run_and_step(path)
    run = open_run_storage(directory)
    steps = set() if first is None else {first}
    for word in others:
        other, step = (directory, int(word)) if word.isdecimal() else run_and_step(word)
        if step is None or open_run_storage(other).url() != run.url():
            raise click.UsageError(f'{word} is not a step of {path}. Delete the steps of one run at a time.')
        steps.add(step)
    if not steps:
        raise click.UsageError('no step is named. Pass it: t5ckpt rm PATH STEP.')
    return run, sorted(steps)


@verb(
    'prune',
    argument('path', RUN),
    option('--keep', 'Keep the N latest.', COUNT, 'N'),
    option('--best', 'Keep the best step by this metric.', metavar='METRIC'),
    option('--keep-best', 'With --best: keep the N best; default: 1.', COUNT, 'N'),
    MODE,
    option('--every', 'Keep the multiples of K.', COUNT, 'K'),
    option('--every-hours', 'Keep one step for every T hours.', float, 'T'),
    option('--keep-step', 'Keep this step; may be repeated.', NUMBER, 'STEP', multiple=True),
    DRY_RUN,
    _YES,
)
def prune(path: str, dry_run: bool, yes: bool, **rules: Any) -> int:
    """Deletes the steps of the run at PATH that no rule keeps, and prints the reason for each step.

    A step is kept if any of the options keeps it. The latest step, pinned and held steps are always kept.
    Steps in the layouts of Orbax and Flax are kept and not counted. A trainer with the same policy deletes the same steps.
    Metrics are those that were passed to save, and those in TensorBoard's files below PATH (train/loss is the tag loss in
    PATH/train). --mode defaults to the mode of the keep policy of the latest save.

    Exit codes: 0 done, or nothing to do; 1 a step was pinned or held in the meantime; 2 wrong usage, such as a metric
    or a step to keep that does not exist (nothing is deleted); 4 the storage did not delete a step.

    \b
    Example:
      t5ckpt prune run --keep 3 --best eval/accuracy --every 10000 --dry-run
    """
    run = run_at(path)
    retention = _retention(run, rules)
    plan = sorted(_with_reasons(run, retention), key=lambda each: each.step)
    # Of the steps that may be deleted: another program's may have it.
    if rules['best'] and (missing := missing_from_all(retention.decided, rules['best'])):
        raise click.UsageError(f'--best: {missing} Nothing was deleted.')
    if not plan:
        check_exists(run)
    steps = [each.step for each in plan]
    absent = sorted({*rules['keep_step']} - {*steps})
    if absent:
        # A mistyped number would delete the step that was meant.
        existing = some_of(list(map(str, steps)), _SHOWN) or 'none'
        raise click.UsageError(
            f'--keep-step: the run has no {numbered("step", absent)}; it has {existing}. Nothing was deleted.'
        )

    doomed = [each.step for each in plan if not each.keep]

    def delete() -> tuple[Sequence[int], Mapping[int, str]]:
        deleted = retention.carry_out(confirmed=doomed)
        # Another process may have deleted a step in the meantime.
        left = [each for each in retention.plan() if each.step in doomed]
        return deleted, {each.step: each.reason if each.keep else _REFUSED for each in left}

    return _carry_out(plan, len(doomed), delete, dry_run=dry_run, yes=yes)


def _retention(run: Storage, rules: Mapping[str, Any]) -> Retention:
    """A run with the keep policy of the options.

    Raises:
      click.UsageError: no option was given, or no step has the metric.
      ValueError: an option is out of range, or it is not known which values of the metric are best.
    """
    kinds: Mapping[str, Callable[[Any], KeepPolicy]] = {
        'keep': KeepLatest,
        'every': KeepEvery,
        'every_hours': KeepEveryHours,
        'keep_step': lambda steps: KeepSteps(frozenset(steps)),
    }
    policies: list[KeepPolicy] = [kind(rules[name]) for name, kind in kinds.items() if rules[name] not in (None, ())]
    metric, mode, count = rules['best'], rules['mode'], rules['keep_best']
    if metric is None and (mode is not None or count is not None):
        raise click.UsageError('--keep-best and --mode need --best METRIC.')
    if metric is not None:
        found = best_in(run, metric, mode)
        if found.step is None:
            raise click.UsageError(f'--best: no step has a value for {metric}. Nothing was deleted.')
        emit_lines(f'--best {metric}: the {"highest" if found.mode == "max" else "lowest"} value is best')
        policies.append(KeepBest(count or 1, metric, found.mode))
    if not policies:
        raise click.UsageError('no rule was passed. Pass --keep, --best, --every, --every-hours or --keep-step.')
    return Retention(run, KeepAny(tuple(policies)), time.time, source=TensorBoardMetrics(run))


def _with_reasons(run: Storage, retention: Retention) -> list[Decision]:
    """The decision about each step; for a pinned one with the user's reason."""
    return [
        dataclasses.replace(each, reason=pin_reason(run, step_dir(each.step))) if each.reason == 'pinned' else each
        for each in retention.plan()
    ]
