"""``t5ckpt rm``: deletes steps of a run."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence

import click

from t5ckpt.catalog.layouts import inspect_name
from t5ckpt.cli.output import confirm, json_option, print_decisions, print_json, run_at, say, steps_option
from t5ckpt.cli.paths import CHECKPOINT
from t5ckpt.cli.verb import Verb
from t5ckpt.commit.deletion import decide_deletion, delete_step
from t5ckpt.core.text import counted
from t5ckpt.errors import StepKeptError
from t5ckpt.format.names import parse_step_dir
from t5ckpt.policies import WAITS
from t5ckpt.storage import Storage, open_storage, split_path

__all__ = ['command']

_TO_FORCE = ' To delete a step before its upload, pass --force.'
_NUMBER = re.compile(r'-?[0-9]+')


@click.command('rm', cls=Verb)
@click.argument('path', type=CHECKPOINT)
@click.argument('others', metavar='[STEP]...', type=CHECKPOINT, nargs=-1)
@steps_option
@click.option('--pinned', is_flag=True, help='Delete pinned steps, too.')
@click.option('--force', is_flag=True, help='Delete steps that wait for their upload, too.')
@click.option('--dry-run', is_flag=True, help='Only say what would be done.')
@click.option('--yes', is_flag=True, help='Do not ask.')
@json_option
def command(path: str, others: tuple[str, ...], steps: tuple[int, ...], as_json: bool, **how: bool) -> int:
    """Deletes the step at PATH, or steps of the run at PATH: each STEP is a number, or named like PATH.

    Each becomes invisible in one atomic operation, and is then removed. If one of them is pinned, held by a reader, or waits for
    its upload, nothing is deleted. Which steps go by a rule instead, prune says.

    \b
    Exit codes: 0 done; 1 a step is pinned, held or waits, or could not be deleted; 3 there is no such step.

    \b
    Examples:
      t5ckpt rm run --step 1000 --dry-run
      t5ckpt rm run 1000 2000
      t5ckpt rm run@1000 run@2000
      t5ckpt rm run/checkpoint_3000 --yes
    """
    storage, chosen = _chosen(path, others, steps)
    even = {'even_pinned': how['pinned'], 'even_waiting': how['force']}
    plan = [decide_deletion(storage, step, time.time, **even) for step in chosen]
    if not as_json:
        print_decisions(plan)
    kept = [each.step for each in plan if each.keep]
    deleted: list[int] = []
    failed: dict[int, str] = {}
    if not kept and not how['dry_run']:
        confirm(f'Delete {counted(len(plan), "step")} of {storage.url()}?', how['yes'])
        for step in chosen:
            try:
                delete_step(storage, step, time.time, **even)
                deleted.append(step)
            except StepKeptError as error:
                failed[step] = str(error)
    if as_json:
        decisions = [dataclasses.asdict(decision) for decision in plan]
        print_json({'plan': decisions, 'deleted': deleted, 'kept': kept, 'failed': failed, 'dry_run': how['dry_run']})
    elif kept:
        cures = {'pinned': '' if how['pinned'] else ' To delete pinned steps, pass --pinned.', WAITS: _TO_FORCE}
        cure = ''.join(text for reason, text in cures.items() if any(each.reason.startswith(reason) for each in plan))
        say(f'nothing was deleted: {", ".join(map(str, kept))} must stay.{cure}', err=True)
    for text in failed.values():
        say(text, err=True)
    return 1 if kept or failed else 0


def _chosen(path: str, others: Sequence[str], numbers: Sequence[int]) -> tuple[Storage, list[int]]:
    """The run, and the named steps of it.

    Raises:
      click.UsageError: no step is named, or steps of several runs, or a number for the path of a step.
    """
    run, first = _run_and_step(path)
    steps = {*numbers} if first is None else {first}
    for word in others:
        if _NUMBER.fullmatch(word):
            steps.add(int(word))
            continue
        parent, step = _run_and_step(word)
        if step is None or open_storage(parent).url() != open_storage(run).url():
            raise click.UsageError(f'{word} is not a step of {run}. Steps of one run are deleted at a time.')
        steps.add(step)
    if not steps:
        raise click.UsageError('say which steps: t5ckpt rm PATH STEP, or --step.')
    if first is not None and (numbers or any(map(_NUMBER.fullmatch, others))):
        raise click.UsageError(f'{path} is one step, so no other can be named by its number. Give the run, {run}.')
    return run_at(run), sorted(steps)


def _run_and_step(path: str) -> tuple[str, int | None]:
    """The run's path, and the step if the path is a step's directory."""
    parent, name = split_path(path)
    step = parse_step_dir(name)
    if step is None and name and (found := inspect_name(open_storage(parent), name)) is not None:
        # A step of another layout may have another name.
        step = found.step
    return (path, None) if step is None else (parent, step)
