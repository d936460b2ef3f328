"""``t5ckpt rm`` deletes steps of a run, ``t5ckpt prune`` those that a policy does not keep."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import click

from t5ckpt.catalog.listing import has_step
from t5ckpt.catalog.locate import open_run_storage
from t5ckpt.catalog.pin_file import pin_reason
from t5ckpt.cli.ls import check_exists, run_at
from t5ckpt.cli.paths import LATER, RUN, run_and_step, tier_paths
from t5ckpt.cli.verb import (
    COUNT,
    DRY_RUN,
    MODE,
    NUMBER,
    TIER,
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
from t5ckpt.core.text import counted, numbered, numbered_are, some_of
from t5ckpt.errors import CheckpointNotFoundError, StepKeptError
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
_Plan: TypeAlias = Sequence[tuple[str | None, Decision]]
"""The decisions about steps, each with the name of its tier, or None."""
_Target: TypeAlias = tuple[str | None, int]
"""A step of a tier, or of the run where there is no other."""
_Delete: TypeAlias = Callable[[], tuple[Sequence[_Target], Mapping[_Target, str]]]
"""Deletes steps; returns those that it deleted, and why others were not."""
_REFUSED = 'the storage did not delete it'
_YES = flag('--yes', 'Do not ask for confirmation.')


def _carry_out(plan: _Plan, doomed: int, delete: _Delete, *, dry_run: bool, yes: bool) -> Exit:
    """Prints a plan, asks, deletes the doomed steps, and prints what was deleted, and why each other step was not."""
    rows = [[str(each.step), tier or '', 'keep' if each.keep else 'delete', each.reason] for tier, each in plan]
    emit_lines(table(['step', 'tier', '', 'because'], rows))
    deleted, failed = (), {}
    of_all = f'{doomed:,} of {counted(len(plan), "step")}'
    if doomed and not dry_run:
        confirm(f'Delete {of_all}?', yes=yes)
        deleted, failed = delete()
    fields = {
        'plan': [{**fields_of(each), 'tier': tier, 'was_deleted': (tier, each.step) in deleted} for tier, each in plan],
        'deleted': sorted({step for _, step in deleted}),
        'failed': {step: reason for (_, step), reason in failed.items()},
        'dry_run': dry_run,
    }
    texts = [_shown(target) for target in deleted]
    done = f'deleted: {some_of(texts, _SHOWN)}' if deleted else 'nothing was deleted'
    emit(fields, f'{of_all} would be deleted' if dry_run else done)
    for target, reason in failed.items():
        say(f'step {_shown(target)} was not deleted: {reason}', err=True)
    return Exit.STORAGE if _REFUSED in failed.values() else Exit.NO if failed else Exit.DONE


def _shown(target: _Target) -> str:
    tier, step = target
    return str(step) if tier is None else f'{step} ({tier})'


@verb(
    'rm',
    argument('path', LATER),
    argument('others', LATER, metavar='[STEP]...', nargs=-1),
    flag('--pinned', 'Delete pinned steps, too.'),
    flag('--force', 'Delete steps that wait for their upload, too.'),
    DRY_RUN,
    _YES,
    TIER,
)
def rm(path: str, others: Sequence[str], tier: str | None, pinned: bool, force: bool, **how: bool) -> int:
    """Deletes the step at PATH, or steps of the run at PATH. Each STEP is a number, or a path of a step.

    A step is hidden in one atomic operation, and then removed. If one of the steps is pinned, held by a reader, or waits for
    its upload, nothing is deleted. A step of Orbax or Flax is deleted with all of its files. To delete steps by a rule, use
    t5ckpt prune.

    Exit codes: 0 done; 1 a step must be kept, or could not be deleted; 3 no such step.

    \b
    Examples:
      t5ckpt rm run 1000 2000 --dry-run
      t5ckpt rm run@1000 run@2000
      t5ckpt rm run/checkpoint_3000 --yes
    """
    runs, steps = _named(path, others, tier)
    # The run's storage may not answer, so its steps are the first. A step may be in one tier only.
    targets = {
        (name, step): find_step(run, step)
        for name, run in sorted(runs.items(), key=str, reverse=True)
        for step in steps
        if len(runs) == 1 or has_step(run, step)
    }
    absent = sorted(set(steps) - {step for _, step in targets})
    if absent:
        places = ' nor '.join(run.url() for run in runs.values())
        raise CheckpointNotFoundError(f'{numbered_are("step", absent)} in neither {places}.')
    even = {'even_pinned': pinned, 'even_waiting': force}
    plan = [(name, decide_deletion(runs[name], listed, time.time, **even)) for (name, _), listed in targets.items()]
    failed: dict[_Target, str] = {}

    def delete() -> tuple[list[_Target], Mapping[_Target, str]]:
        for target, listed in targets.items():
            try:
                hide(runs[target[0]], listed, time.time, **even)()
            except StepKeptError as error:
                failed[target] = str(error)
        return [target for target in targets if target not in failed], failed

    kept = list(dict.fromkeys(each.step for _, each in plan if each.keep))
    code = _carry_out(plan, 0 if kept else len(plan), delete, **how)
    if kept:
        say(
            f'{numbered("step", kept)} must stay. To delete pinned steps, pass --pinned; to delete a step before its upload, '
            'pass --force.',
            err=True,
        )
    return Exit.NO if kept else code


def _named(path: str, others: Sequence[str], tier: str | None) -> tuple[dict[str | None, Storage], list[int]]:
    """The run in each tier, and the steps that are named.

    Raises:
      click.UsageError: no step is named, steps of several runs, or different steps in both tiers.
    """
    runs: dict[str | None, Storage] = {}
    steps = {int(word) for word in others if word.isdecimal()}
    for word in [path, *(word for word in others if not word.isdecimal())]:
        named = {name: run_and_step(place) for name, place in tier_paths(word, tier).items()}
        found = {name: open_run_storage(run) for name, (run, _) in named.items()}
        runs = runs or found
        numbers = {step for _, step in named.values()}
        if len(numbers) > 1:
            each = ' and '.join(f'step {step} in the tier {name}' for name, (_, step) in named.items())
            raise click.UsageError(f'{word} is {each}. Pass the number of the step.')
        is_step_of_run = None not in numbers and [run.url() for run in found.values()] == [
            run.url() for run in runs.values()
        ]
        if found is not runs and not is_step_of_run:
            raise click.UsageError(f'{word} is not a step of {path}. Delete the steps of one run at a time.')
        steps |= {step for step in numbers if step is not None}
    if not steps:
        raise click.UsageError('no step is named. Pass it: t5ckpt rm PATH STEP.')
    return runs, sorted(steps)


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
    TIER,
)
def prune(path: str, tier: str | None, dry_run: bool, yes: bool, **rules: Any) -> int:
    """Deletes the steps of the run at PATH that no rule keeps, and prints the reason for each step.

    A step is kept if any of the options keeps it. The latest step, pinned and held steps are always kept.
    Steps in the layouts of Orbax and Flax are kept and not counted. A trainer with the same policy deletes the same steps.
    Metrics are those that were passed to save, and those in TensorBoard's files below PATH (train/loss is the tag loss in
    PATH/train). --mode defaults to the mode of the keep policy of the latest save. With --tier all, the rules apply to each
    tier on its own.

    Exit codes: 0 done, or nothing to do; 1 a step was pinned or held in the meantime; 2 wrong usage, such as a metric
    or a step to keep that does not exist (nothing is deleted); 4 the storage did not delete a step.

    \b
    Example:
      t5ckpt prune run --keep 3 --best eval/accuracy --every 10000 --dry-run
    """
    runs = {name: run_at(place) for name, place in tier_paths(path, tier).items()}
    retentions = {name: _retention(run, rules) for name, run in runs.items()}
    plan = [(name, each) for name, retention in retentions.items() for each in _with_reasons(runs[name], retention)]
    plan.sort(key=lambda item: (item[1].step, str(item[0])))
    for retention in retentions.values() if rules['best'] else ():
        # Of the steps that may be deleted: another program's may have it.
        if missing := missing_from_all(retention.decided, rules['best']):
            raise click.UsageError(f'--best: {missing} Nothing was deleted.')
    steps = sorted({each.step for _, each in plan})
    for run in () if plan else runs.values():
        check_exists(run)
    absent = sorted({*rules['keep_step']} - {*steps})
    if absent:
        # A mistyped number would delete the step that was meant.
        existing = some_of(list(map(str, steps)), _SHOWN) or 'none'
        raise click.UsageError(
            f'--keep-step: the run has no {numbered("step", absent)}; it has {existing}. Nothing was deleted.'
        )

    def delete() -> tuple[list[_Target], Mapping[_Target, str]]:
        deleted: list[_Target] = []
        failed: dict[_Target, str] = {}
        for name, retention in retentions.items():
            doomed = [each.step for tier, each in plan if tier == name and not each.keep]
            deleted += [(name, step) for step in retention.carry_out(confirmed=doomed)]
            # Another process may have deleted a step in the meantime.
            left = [each for each in retention.plan() if each.step in doomed]
            failed |= {(name, each.step): each.reason if each.keep else _REFUSED for each in left}
        return deleted, failed

    return _carry_out(plan, sum(not each.keep for _, each in plan), delete, dry_run=dry_run, yes=yes)


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
