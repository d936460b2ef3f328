"""Chooses the step to restore from what the disks of a job have. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt.core.text import counted


@dataclasses.dataclass(frozen=True)
class SavedStep:
    """One save of a step, of which any disk has a part.

    Attributes:
      step, save: identify it.
      count: of the processes that saved it.
      created: the time of the save, in unix seconds; 0 if it is not recorded.
      roles: by role, see ``tiers/disk_step.py``, the process that has the disk now.
      lost_positions: how many positions of data iterators are on no disk.
    """

    step: int
    save: str
    count: int
    created: float
    roles: Mapping[int, int]
    lost_positions: int

    def reason_against(self, count: int, *, needs_positions: bool) -> str:
        """The reason why a job of ``count`` processes cannot restore it, or ''. The disks may still lack an array."""
        if self.count != count:
            return f'{counted(self.count, "process", "processes")} saved it, and this job has {count}'
        if needs_positions and self.lost_positions:
            return f'no disk has {counted(self.lost_positions, "position")} of data iterators'
        return '' if self.roles else 'no disk has a list of its files'


def saved_steps(votes: Sequence[Sequence[Sequence[Any]]]) -> list[SavedStep]:
    """The saves that any disk has, the newest step first; of one step that of most disks, and of several such the newest.

    ``votes`` has those of each process, see ``DiskStep.vote``.
    """
    by_save: dict[tuple[int, str], list[tuple[int, Sequence[Any]]]] = {}
    for process, steps in enumerate(votes):
        for step, save, *rest in steps:
            by_save.setdefault((step, save), []).append((process, rest))
    made = [_saved_step(step, save, disks) for (step, save), disks in by_save.items()]
    return sorted(made, key=lambda each: (-each.step, -len(each.roles), -each.created, each.save))


def _saved_step(step: int, save: str, disks: Sequence[tuple[int, Sequence[Any]]]) -> SavedStep:
    roles: dict[int, int] = {}
    shards = set[int]()
    num_positions = 0
    for process, (role, _, _, positions, of) in disks:
        # Of a disk and its copy, the one in its place.
        if role >= 0 and (role not in roles or role == process):
            roles[role] = process
        shards.update(positions)
        num_positions = max(num_positions, of)
    _, count, created, *_ = disks[0][1]
    lost = num_positions - len(shards & {*range(num_positions)})
    return SavedStep(step, save, count, created, dict(sorted(roles.items())), lost)
