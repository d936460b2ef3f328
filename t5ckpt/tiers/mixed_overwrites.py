"""Ends overwrites that a dead process has left between the commits of a job: all disks get the same save of the step again.

A process commits an overwrite when the new files of all processes are durable, and keeps the old checkpoint, in its
temporary directory, until all have committed theirs. If one dies before that, some disks have the new save of
the step and others the old one, and neither may be complete. The next start puts the save in place that all of them have.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from t5ckpt.catalog.listing import read_facts
from t5ckpt.commit.transaction import Transaction
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.format.facts import save_id
from t5ckpt.format.names import parse_tmp_dir
from t5ckpt.storage import Storage

_log = logging.getLogger('t5ckpt')


def replaced_in(storage: Storage) -> dict[int, dict[str, str]]:
    """The replaced checkpoints in a local directory: by step, the name of each by its save."""
    replaced: dict[int, dict[str, str]] = {}
    for entry in storage.entries():
        step = parse_tmp_dir(entry.name) if entry.is_dir else None
        if step is None:
            continue
        try:
            save = save_id(read_facts(storage, entry.name))
        except CheckpointNotFoundError:
            # Its writer died before it was complete.
            continue
        replaced.setdefault(step, {})[save] = entry.name
    return replaced


def saves_to_put_back(
    current: Sequence[Mapping[int, str]], replaced: Sequence[Mapping[int, Sequence[str]]]
) -> dict[int, str]:
    """Decides which save of a step all disks get, where they have different ones.

    Args:
      current: the save of each step, by process.
      replaced: the replaced saves of each step, by process.

    Returns:
      By step, a save that each disk with the step has, in its place or replaced; of several, that of most disks.
    """
    decided: dict[int, str] = {}
    for step in sorted({step for disk in replaced for step in disk}):
        disks = [
            (saves[step], {saves[step], *old.get(step, ())})
            for saves, old in zip(current, replaced, strict=True)
            if step in saves
        ]
        in_place = [save for save, _ in disks]
        common = set[str].intersection(*(known for _, known in disks)) if disks else set[str]()
        if len(set(in_place)) > 1 and common:
            decided[step] = max(common, key=lambda save: (in_place.count(save), save))
    return decided


def put_back_saves(storage: Storage, saves: Mapping[int, str], current: Mapping[int, str], clock: Clock) -> None:
    """Puts the replaced checkpoints of some saves back in the place of the current ones, which are removed.

    Raises:
      StepKeptError: the current one is pinned or held by a reader.
      StorageError: the disk failed.
    """
    replaced = replaced_in(storage)
    for step, save in saves.items():
        name = replaced.get(step, {}).get(save)
        if name is not None and current.get(step) != save:
            Transaction.take_back(storage, step, name, clock)
            _log.warning(
                't5ckpt: a process died while step %d was being overwritten; the save that all disks have was put back in %s',
                step,
                storage.url(),
            )
