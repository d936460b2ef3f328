"""Joins the local directories of a job of several processes, once, before the first restore, save or deletion.

The processes agree on the run's id, end overwrites that were cut off (``tiers/mixed_overwrites.py``), and decide which
interrupted uploads go on (``tiers/coverage.py``). A restart needs one vote for it, unless something has changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from t5ckpt.core.protocols import Clock
from t5ckpt.distributed.coordinator import Coordinator
from t5ckpt.distributed.rounds import Phase
from t5ckpt.tiers.coverage import interrupted_uploads
from t5ckpt.tiers.local_dir import LocalDir
from t5ckpt.tiers.lost_files import LostFiles, find_lost_files
from t5ckpt.tiers.mixed_overwrites import put_back_saves, replaced_in, saves_to_put_back
from t5ckpt.tiers.orders import Orders
from t5ckpt.tiers.part import LocalParts, parts_in
from t5ckpt.tiers.provide import completed
from t5ckpt.tiers.uploads import Uploads


class Join:
    """Joins the local directory of this process to those of the job."""

    def __init__(self, directory: LocalDir, uploads: Uploads, clock: Clock):
        """Reads nothing."""
        self._dir = directory
        self._uploads = uploads
        self._clock = clock

    def run(self, coordinator: Coordinator, open_directory: Callable[[], None]) -> LocalParts | None:
        """Agrees with the other processes, and begins the uploads; every process calls it.

        Args:
          coordinator: for the rounds, and the channel of the orders about uploads.
          open_directory: locks and checks the local directory; an error is raised in all processes.

        Returns:
          The parts in the local directory; None if they have changed since they were read.

        Raises:
          LocalDirError: a directory is in use, or of another run.
        """
        storage = self._dir.storage
        at = coordinator.round('opening the local directories')
        with at.failing_together(Phase.LOOK):
            open_directory()
            waiting, local, saves = self._uploads.records(), parts_in(storage), self._dir.saves()
            replaced = [[step, list(names)] for step, names in replaced_in(storage).items()]
            vote = {
                'id': self._dir.known_id(),
                'saves': saves,
                'replaced': replaced,
                'waiting': waiting,
                'parts': self._uploads.part_votes(local),
            }
        decided = at.reduce_on_leader(Phase.LOOK, vote, functools.partial(_decide, self._dir))
        if decided['put_back']:
            with at.together(Phase.COMMIT):
                put_back_saves(storage, dict(decided['put_back']), dict(saves), self._clock)
            return self.run(coordinator, open_directory)
        if decided['is_new']:
            with at.together(Phase.COMMIT):
                self._dir.adopt(decided['id'], is_shared=decided['is_shared'])
        self._begin_uploads(coordinator, decided)
        return None if decided['incomplete'] else local

    def _begin_uploads(self, coordinator: Coordinator, decided: dict[str, Any]) -> None:
        """Begins the uploads, after the files of a lost disk have been found on the others."""
        waiting, dropped, lost = decided['waiting'], decided['dropped'], None
        for step, save, index, sender in decided['incomplete']:
            part, rounds = self._uploads.part_of(step, save), functools.partial(coordinator.round, 'the uploads')
            part = completed(rounds(), part, self._dir.storage, step, sender, self._clock)
            lost = find_lost_files(rounds(), part, index)
            if lost is None:
                dropped.append([step, f'files that process {index} of the save was to upload are on no disk'])
            else:
                waiting.append(step)
        channel = coordinator.new_channel()
        orders = Orders(channel.processes, channel.prefix, lost or LostFiles())
        self._uploads.join(orders, waiting, dropped, decided['overwriting'])


def _decide(directory: LocalDir, votes: Sequence[Any]) -> dict[str, Any]:
    """On process 0: the id, the overwrites to end, and which of the waiting steps are uploaded."""
    saves = {(step, save) for vote in votes for step, save in vote['saves']}
    mixed = saves_to_put_back([dict(vote['saves']) for vote in votes], [dict(vote['replaced']) for vote in votes])
    if mixed and len({vote['id'][0] for vote in votes} - {''}) == 1:
        return {'put_back': [*mixed.items()]}
    agreed, is_shared = directory.agreed_id([tuple(vote['id']) for vote in votes], saves)
    uploads = interrupted_uploads([vote['waiting'] for vote in votes], [vote['parts'] for vote in votes])
    is_new = any(vote['id'] != [agreed, is_shared] for vote in votes)
    return {'put_back': [], 'id': agreed, 'is_shared': is_shared, 'is_new': is_new, **uploads}
