"""Chooses the step to restore, in a job of several processes: the newest that the disks of all have, else that of the bucket."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t5ckpt.distributed.coordinator import Coordinator
from t5ckpt.distributed.rounds import CoordinationRound, Phase
from t5ckpt.tiers.coverage import Candidate, DiskStep, candidates, encode_bits, num_bits, union
from t5ckpt.tiers.part import LocalParts, Part

_log = logging.getLogger('t5ckpt')
ACTION = 'the choice of the step to restore'
# The processes report the chunks on their disks before it is known whether a step can be restored.
_UNKNOWN = 'unknown'
# Of the reason why a step is damaged, in a vote.
_REASON_CHARACTERS = 300


@dataclasses.dataclass(frozen=True)
class RunStep:
    """The result of process 0's search in the run's storage.

    Attributes:
      step: the newest step, or the requested one; None without one.
      save: the checksum of its facts.
      created: the time of the save, in unix seconds; 0 if it is not known.
    """

    step: int | None = None
    save: str = ''
    created: float = 0.0


@dataclasses.dataclass(frozen=True)
class SharedChoice:
    """The step to restore.

    Attributes:
      step: None if there is none.
      save: of the local step; '' if it is read from the run's storage.
      sender: a process whose disk has a part of it.
      in_run: whether the run's storage has the same save, and provides the chunks that are on no disk.
      on_all_disks: whether the disk of every process has a part of it.
      refused: why newer steps were not taken, by step.
      created: the time of the local save.
      others: the times of other saves of the step that the disks have.
      of_run: the time of another save of the step that the run's storage has; None without one.
    """

    step: int | None
    save: str = ''
    sender: int = 0
    in_run: bool = False
    on_all_disks: bool = False
    refused: Mapping[int, str] = dataclasses.field(default_factory=dict[int, str])
    created: float = 0.0
    others: Sequence[float] = ()
    of_run: float | None = None


def choose_together(
    first: CoordinationRound,
    coordinator: Coordinator,
    local: LocalParts,
    query_run: Callable[[bool], RunStep],
    step: int | None,
    *,
    needs_positions: bool,
) -> SharedChoice:
    """Chooses the step; every process calls it.

    Args:
      first: a round of all processes.
      coordinator: of the checkpointer, for further rounds.
      local: what the disk of this process has.
      query_run: asks the run's storage, in process 0; called with whether any disk has a part.
      step: the requested step, or None.
      needs_positions: whether the positions of data iterators are restored, too.
    """
    vote = {
        'parts': [part.as_vote().vote(at) for at, part in local.parts.items() if step in (None, at)],
        'damaged': [[at, why[:_REASON_CHARACTERS]] for at, why in local.damaged.items() if step in (None, at)],
    }
    decided = first.reduce_on_leader(Phase.LOOK, vote, lambda votes: _listed(votes, query_run, needs_positions))
    run_step, refused = decided['run'], dict[int, str](decided['damaged'])
    for at, save, created, sender, known, in_run, on_all_disks in decided['candidates']:
        if run_step is not None and at < run_step:
            break
        part = local.parts.get(at)
        why = known
        if known == _UNKNOWN:
            why = _missing_chunks(coordinator, part if part is not None and part.save == save else None)
        if not why or in_run:
            others = [time for step, other, time, *_ in decided['candidates'] if step == at and other != save]
            of_run = decided['run_created'] if at == run_step and not in_run else None
            return SharedChoice(at, save, sender, in_run, on_all_disks, refused, created, others, of_run)
        refused.setdefault(at, why)
    return SharedChoice(run_step, refused={at: why for at, why in refused.items() if at != run_step})


def _listed(votes: Sequence[Any], query_run: Callable[[bool], RunStep], needs_positions: bool) -> dict[str, Any]:
    """On process 0: the candidates, and the state of each: '' for a complete step, unknown, or why it cannot be restored."""
    run_step = query_run(any(vote['parts'] for vote in votes))
    disks = [dict(DiskStep.of(part) for part in vote['parts']) for vote in votes]
    found: list[Any] = []
    for each in candidates(disks):
        holders = [
            process for process, disk in enumerate(disks) if each.step in disk and disk[each.step].save == each.save
        ]
        in_run = (each.step, each.save) == (run_step.step, run_step.save)
        on_all_disks = len(holders) == len(disks)
        known = _known(each, needs_positions)
        found.append([each.step, each.save, each.created, holders[0], known, in_run, on_all_disks])
    damaged: dict[int, str] = {}
    for process, vote in enumerate(votes):
        for at, why in vote['damaged']:
            damaged.setdefault(at, f'its files are damaged on all disks; process {process}: {why}')
    nowhere = [[at, why] for at, why in damaged.items() if not any(at in disk for disk in disks)]
    return {'candidates': found, 'damaged': nowhere, 'run': run_step.step, 'run_created': run_step.created}


def _known(candidate: Candidate, needs_positions: bool) -> str:
    if needs_positions and candidate.positions > 0:
        return f'{candidate.positions} positions of data iterators are on no disk'
    return _UNKNOWN if candidate.missing else ''


def _missing_chunks(coordinator: Coordinator, part: Part | None) -> str:
    """Gathers which chunks the disks have; '' if they have all, else what is missing."""
    numbers = None if part is None else part.numbers()
    vote = None if numbers is None or part is None else [numbers.count, encode_bits(numbers.bits(part.there))]

    def decide(votes: Sequence[Any]) -> str:
        having = [each for each in votes if each is not None]
        count = having[0][0]
        missing = count - num_bits(union((text for _, text in having), count))
        return f'{missing} of {count} chunks are on no disk' if missing else ''

    return coordinator.round(ACTION).reduce_on_leader(Phase.LOOK, vote, decide)


def log_choice(found: SharedChoice) -> None:
    """Logs why newer steps were not taken, in process 0."""
    for step, reason in sorted(found.refused.items()):
        if found.step is None or step > found.step:
            _log.warning('t5ckpt: local step %d was not restored: %s', step, reason)


def log_other_saves(found: SharedChoice, run_url: str) -> None:
    """Logs which other saves of the restored step there are, in process 0."""
    holders = [*(('the disks', created) for created in found.others)]
    if found.of_run is not None:
        holders.append((run_url, found.of_run))
    for holder, created in holders:
        _log.warning(
            't5ckpt: step %s: %s also %s the save of %s, which was not taken; the restored one is of %s',
            found.step,
            holder,
            'has' if holder == run_url else 'have',
            _time_of(created),
            _time_of(found.created),
        )


def _time_of(created: float) -> str:
    return time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(created)) if created else 'an unknown time'
