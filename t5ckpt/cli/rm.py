"""``t5ckpt rm``: deletes steps of a run."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import click

from t5ckpt.catalog.layouts import ListedStep, inspect_name
from t5ckpt.catalog.listing import has_step
from t5ckpt.catalog.locate import open_run_storage
from t5ckpt.cli.output import (
    confirm,
    decision_fields,
    deleted_texts,
    json_option,
    print_decisions,
    print_json,
    print_line,
    run_at,
    steps_option,
)
from t5ckpt.cli.paths import CHECKPOINT, step_named, step_number
from t5ckpt.cli.tiers import BOTH, tier_option, tier_paths
from t5ckpt.cli.verb import Verb
from t5ckpt.commit.deletion import decide_deletion, find_step, hide
from t5ckpt.core.text import counted, numbered_are
from t5ckpt.errors import CheckpointNotFoundError, StepKeptError
from t5ckpt.format.names import parse_step_dir
from t5ckpt.policies import WAITS
from t5ckpt.storage import Storage, open_storage, split_path

_TO_FORCE = ' To delete a step before its upload, pass --force.'
_NUMBER = re.compile(r'-?[0-9]+')


@click.command('rm', cls=Verb)
@click.argument('path', type=CHECKPOINT)
@click.argument('others', metavar='[STEP]...', type=CHECKPOINT, nargs=-1)
@steps_option
@click.option('--pinned', is_flag=True, help='Delete pinned steps, too.')
@click.option('--force', is_flag=True, help='Delete steps that wait for their upload, too.')
@click.option('--dry-run', is_flag=True, help='Print what would be deleted; delete nothing.')
@click.option('--yes', is_flag=True, help='Do not ask for confirmation.')
@tier_option(both=True)
@json_option
def command(path: str, others: tuple[str, ...], steps: tuple[int, ...], tier: str | None, **how: Any) -> int:
    """Deletes the step at PATH, or steps of the run at PATH. Each STEP is a number, or a path of a step.

    A step is hidden in one atomic operation, and then removed. If one of the steps is pinned, held by a reader, or waits for
    its upload, nothing is deleted. A step of Orbax or Flax is deleted with all of its files. To delete steps by a rule, use
    t5ckpt prune.

    Exit codes: 0 done; 1 a step must be kept, or could not be deleted; 3 no such step.

    \b
    Examples:
      t5ckpt rm run --step 1000 --dry-run
      t5ckpt rm run 1000 2000
      t5ckpt rm run@1000 run@2000
      t5ckpt rm run/checkpoint_3000 --yes
    """
    storage, chosen = _chosen(path, others, steps, tier)
    targets = _targets(storage, chosen, tier)
    as_json = how['as_json']
    even = {'even_pinned': how['pinned'], 'even_waiting': how['force']}
    plan = [decide_deletion(each.storage, each.listed, time.time, **even) for each in targets]
    by_tier = [(each.tier, decision) for each, decision in zip(targets, plan, strict=True)]
    if not as_json:
        print_decisions(by_tier)
    kept = [each.step for each in plan if each.keep]
    deleted: list[tuple[str | None, int]] = []
    failed: dict[int, str] = {}
    if not kept and not how['dry_run']:
        urls = ' and '.join(dict.fromkeys(each.storage.url() for each in targets))
        confirm(f'Delete {counted(len(chosen), "step")} of {urls}?', how['yes'])
        for each in targets:
            step = each.listed.step
            try:
                hide(each.storage, each.listed, time.time, **even)()
                deleted.append((each.tier, step))
            except StepKeptError as error:
                failed[step] = str(error)
    if as_json:
        print_json(
            {
                'plan': decision_fields(by_tier, deleted),
                'deleted': list(dict.fromkeys(step for _, step in deleted)),
                'must_stay': kept,
                'failed': failed,
                'dry_run': how['dry_run'],
            }
        )
    elif kept:
        cures = {'pinned': '' if how['pinned'] else ' To delete pinned steps, pass --pinned.', WAITS: _TO_FORCE}
        cure = ''.join(text for reason, text in cures.items() if any(each.reason.startswith(reason) for each in plan))
        print_line(f'nothing was deleted: {", ".join(map(str, kept))} must stay.{cure}', err=True)
    elif deleted:
        print_line(f'deleted: {", ".join(deleted_texts(deleted))}')
    for text in failed.values():
        print_line(text, err=True)
    return 1 if kept or failed else 0


class _Target(NamedTuple):
    """A step to delete, and its tier."""

    tier: str | None
    storage: Storage
    listed: ListedStep


def _targets(storage: Storage, steps: Sequence[int], tier: str | None) -> list[_Target]:
    """The steps in each tier; the run's first, because its storage may not answer. A step may be in one tier only.

    Raises:
      CheckpointNotFoundError: a step does not exist, in neither tier if there are two.
    """
    storages = {name: open_run_storage(location) for name, location in tier_paths(storage.url(), tier).items()}
    found = [
        (name, storages[name], step)
        for name in sorted(storages, key=str, reverse=True)
        for step in steps
        if len(storages) == 1 or has_step(storages[name], step)
    ]
    absent = sorted(set(steps) - {step for *_, step in found})
    if absent:
        urls = ' nor '.join(each.url() for each in storages.values())
        raise CheckpointNotFoundError(f'{numbered_are("step", absent)} in neither {urls}.')
    return [_Target(name, each, find_step(each, step)) for name, each, step in found]


def _chosen(path: str, others: Sequence[str], numbers: Sequence[int], tier: str | None) -> tuple[Storage, list[int]]:
    """The run, and the named steps of it.

    Raises:
      click.UsageError: no step is named, or steps of several runs, or a number for the path of a step.
    """
    run, first = _run_and_step(path, tier)
    steps = {*numbers} if first is None else {first}
    for word in others:
        if _NUMBER.fullmatch(word):
            steps.add(int(word))
            continue
        parent, step = _run_and_step(word, tier)
        if step is None or open_storage(parent).url() != open_storage(run).url():
            raise click.UsageError(f'{word} is not a step of {run}. Delete the steps of one run at a time.')
        steps.add(step)
    if not steps:
        raise click.UsageError('no step is named. Pass it: t5ckpt rm PATH STEP, or --step STEP.')
    if first is not None and (numbers or any(map(_NUMBER.fullmatch, others))):
        raise click.UsageError(
            f'{path} is one step, so other steps cannot be named by their numbers. Pass the run, {run}.'
        )
    return run_at(run), sorted(steps)


def _run_and_step(path: str, tier: str | None) -> tuple[str, int | None]:
    """The run's path, and the step if the path is a step's directory or names one (``run@1200``)."""
    named = step_named(path)
    if named is not None:
        return named['run'], _named_step(path, named['step'], tier)
    parent, name = split_path(path)
    step = parse_step_dir(name)
    if step is None and name and (found := inspect_name(open_storage(parent), name)) is not None:
        # A step of another layout may have another name.
        step = found.step
    return (path, None) if step is None else (parent, step)


def _named_step(path: str, name: str, tier: str | None) -> int | None:
    """The number of the step that ``run@1200`` or ``run@best`` names in a tier.

    Raises:
      click.UsageError: it is not the same step in both tiers.
    """
    if tier == BOTH and name.isdecimal():
        # A step may be in one tier only.
        return int(name)
    steps = {each: step_number(location) for each, location in tier_paths(path, tier).items()}
    if len(set(steps.values())) > 1:
        listed = ' and '.join(f'step {step} in the tier {each}' for each, step in steps.items())
        raise click.UsageError(f'{path} is {listed}. Pass the number of the step.')
    return next(iter(steps.values()))
