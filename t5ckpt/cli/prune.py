"""``t5ckpt prune``: deletes the steps that a policy does not keep."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from t5ckpt.catalog.listing import listing
from t5ckpt.catalog.pin_file import pin_reason
from t5ckpt.cli.output import (
    check_exists,
    confirm,
    decision_fields,
    deleted_texts,
    json_option,
    moved_option,
    print_decisions,
    print_json,
    print_line,
    run_at,
)
from t5ckpt.cli.paths import RUN
from t5ckpt.cli.tiers import tier_option, tier_paths
from t5ckpt.cli.verb import Exit, Verb
from t5ckpt.commit.retention import Retention, missing_from_all, recorded_policy
from t5ckpt.core.text import counted, numbered, some_of
from t5ckpt.format.names import step_dir
from t5ckpt.metrics import TensorBoardMetrics
from t5ckpt.policies import (
    Decision,
    KeepAll,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepEveryHours,
    KeepLatest,
    KeepPolicy,
    KeepSteps,
)
from t5ckpt.save.best_step import monitored_metrics
from t5ckpt.storage import Storage

_SHOWN = 20  # deleted steps that are named


@click.command('prune', cls=Verb)
@click.argument('path', type=RUN)
@click.option('--keep', type=click.IntRange(1), metavar='N', help='Keep the N latest.')
@click.option('--best', 'metric', metavar='METRIC', help='Keep the best step by this metric.')
@click.option('--keep-best', type=click.IntRange(1), metavar='N', help='With --best: keep the N best; default: 1.')
@click.option(
    '--mode',
    type=click.Choice(['max', 'min']),
    help='Which value is best; default: that of the keep policy of the run.',
)
@click.option('--every', type=click.IntRange(1), metavar='K', help='Keep the multiples of K.')
@click.option('--every-hours', type=float, metavar='T', help='Keep one step for every T hours.')
@click.option(
    '--keep-step',
    'steps',
    type=click.IntRange(0),
    multiple=True,
    metavar='STEP',
    help='Keep this step; may be repeated.',
)
@moved_option('--step', '--keep-step keeps a step. To delete one, use t5ckpt rm PATH --step STEP.')
@click.option('--dry-run', is_flag=True, help='Print what would be deleted; delete nothing.')
@click.option('--yes', is_flag=True, help='Do not ask for confirmation.')
@tier_option(both=True)
@json_option
def command(path: str, tier: str | None, dry_run: bool, yes: bool, as_json: bool, **rules: Any) -> None:
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
    tiers = [_planned(name, run_at(location), rules) for name, location in tier_paths(path, tier).items()]
    plan = sorted(
        ((tier.name, decision) for tier in tiers for decision in tier.plan),
        key=lambda item: (item[1].step, str(item[0])),
    )
    _check_present(rules['steps'], [decision.step for _, decision in plan])
    if not as_json:
        for note in dict.fromkeys(tier.note for tier in tiers if tier.note is not None):
            print_line(note)
        print_decisions(plan)
    doomed = sum(len(tier.doomed) for tier in tiers)
    deleted: list[tuple[str | None, int]] = []
    if doomed and not dry_run:
        confirm(f'Delete {doomed:,} of {counted(len(plan), "step")}?', yes)
        deleted = [(tier.name, step) for tier in tiers for step in tier.carry_out()]
    left = [] if dry_run else [decision for tier in tiers for decision in tier.left()]
    failed = {decision.step: decision.reason if decision.keep else 'the storage did not delete it' for decision in left}
    if as_json:
        print_json(
            {
                'plan': decision_fields(plan, deleted),
                'deleted': list(dict.fromkeys(step for _, step in deleted)),
                'failed': failed,
                'mode': tiers[0].mode,
                'dry_run': dry_run,
            }
        )
    else:
        print_line(_summary(deleted, doomed, len(plan), dry_run=dry_run))
    if failed and not as_json:
        print_line(f'not deleted: {", ".join(f"{step} ({reason})" for step, reason in failed.items())}', err=True)
    if failed:
        raise click.exceptions.Exit(Exit.NO if all(decision.keep for decision in left) else Exit.STORAGE)


@dataclasses.dataclass(frozen=True)
class _Planned:
    """The steps to delete in a tier, or in a run without tiers.

    Attributes:
      name: of the tier; None without tiers.
      retention: of its storage, with the policy of the options.
      mode: of the metric, and the ``note`` that describes it.
      plan: the decision about each step, ascending.
    """

    name: str | None
    retention: Retention
    mode: str | None
    note: str | None
    plan: list[Decision]

    @property
    def doomed(self) -> list[int]:
        """The steps to delete."""
        return [decision.step for decision in self.plan if not decision.keep]

    def carry_out(self) -> list[int]:
        """Deletes the steps of the plan that may still be deleted, and returns them."""
        return self.retention.carry_out(confirmed=self.doomed)

    def left(self) -> list[Decision]:
        """The decisions about the steps that were to be deleted and still exist after :meth:`carry_out`.

        Steps that another process has deleted in the meantime do not count as failed.
        """
        return [decision for decision in self.retention.plan() if decision.step in self.doomed] if self.doomed else []


def _planned(name: str | None, storage: Storage, rules: Mapping[str, Any]) -> _Planned:
    """Decides about the steps of a storage.

    Raises:
      click.UsageError: the options cannot be applied to it.
    """
    retention = Retention(storage, KeepAll(), time.time, None, TensorBoardMetrics(storage))
    mode, note = _mode(storage, retention, rules['metric'], rules['mode'])
    retention.policy = _policy({**rules, 'mode': mode})
    plan = [
        dataclasses.replace(decision, reason=pin_reason(storage, step_dir(decision.step)))
        if decision.reason == 'pinned'
        else decision
        for decision in retention.plan()
    ]
    if not plan:
        check_exists(storage)
    return _Planned(name, retention, mode, note, plan)


def _summary(deleted: Sequence[tuple[str | None, int]], doomed: int, steps: int, *, dry_run: bool) -> str:
    if deleted:
        return f'deleted: {some_of(deleted_texts(deleted), _SHOWN, ", ")}'
    return f'{doomed:,} of {counted(steps, "step")} would be deleted' if dry_run else 'nothing was deleted'


def _mode(
    storage: Storage, retention: Retention, metric: str | None, mode: str | None
) -> tuple[str | None, str | None]:
    """The mode of a metric, by default from the run's keep policy, and its description.

    Raises:
      click.UsageError: no step has the metric, or its mode is unknown; a wrong mode would delete the best steps.
    """
    # Only these are deleted.
    own = {each.step for each in listing(storage) if each.is_t5x}
    infos = [] if metric is None else [info for info in retention.infos((metric,)) if info.step in own]
    if metric is None or not infos:
        return mode, None
    missing = missing_from_all(infos, metric)
    if missing is not None:
        raise click.UsageError(f'--best: {missing} Nothing was deleted.')
    policy = recorded_policy(storage)
    monitored = () if policy is None else monitored_metrics(policy, None)
    recorded = sorted({best for name, best in monitored if name == metric})
    if mode is None and len(recorded) != 1:
        raise click.UsageError(
            f'--best {metric}: the keep policy of the run does not define whether high or low values are best. Pass '
            '--mode max or --mode min.'
        )
    used = mode or recorded[0]
    which = 'highest' if used == 'max' else 'lowest'
    origin = "from the run's keep policy" if mode is None else 'from --mode'
    other = f"; the run's keep policy has {recorded[0]}" if recorded and used not in recorded else ''
    return used, f'--best {metric}: the {which} value is best ({used}, {origin}{other})'


def _check_present(wanted: Sequence[int], steps: Sequence[int]) -> None:
    """Refuses steps to keep that the run does not have, since a mistyped number would delete the intended step.

    Raises:
      click.UsageError: the message lists them, and the steps of the run.
    """
    absent = sorted(set(wanted) - set(steps))
    if absent:
        existing = f'it has {some_of(sorted(map(str, set(steps)), key=int), 20, ", ")}' if steps else 'it has none'
        raise click.UsageError(
            f'--keep-step: the run has no {numbered("step", absent)}; {existing}. Nothing was deleted.'
        )


def _policy(keep: Mapping[str, Any]) -> KeepPolicy:
    """The keep policy of the options.

    Raises:
      click.UsageError: no option was given, or one is out of range.
    """
    policies: list[KeepPolicy] = []
    if keep['keep'] is not None:
        policies.append(KeepLatest(keep['keep']))
    if keep['metric'] is not None:
        policies.append(KeepBest(keep['keep_best'] or 1, keep['metric'], keep['mode'] or 'max'))
    elif keep['keep_best'] is not None or keep['mode'] is not None:
        raise click.UsageError('--keep-best and --mode need --best METRIC.')
    if keep['every'] is not None:
        policies.append(KeepEvery(keep['every']))
    if keep['every_hours'] is not None:
        if not 0 < keep['every_hours'] < math.inf:
            raise click.UsageError(f'--every-hours must be a finite number above 0, got {keep["every_hours"]:g}.')
        policies.append(KeepEveryHours(keep['every_hours']))
    if keep['steps']:
        policies.append(KeepSteps(frozenset(keep['steps'])))
    if not policies:
        raise click.UsageError('no rule was passed. Pass --keep, --best, --every, --every-hours or --keep-step.')
    return KeepAny(tuple(policies))
