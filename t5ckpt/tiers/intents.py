"""The steps of a local directory that wait for their upload, and the decision which steps do.

``.t5ckpt/to_persist/<step>`` is written before the local commit of a step that the persist policy takes, and removed after the
commit in the run's storage. No program deletes a step that has it, see ``commit/deletion.py``. A crash between the two leaves a
file whose step is uploaded by the next start; without the step, the next start removes the file.

``.t5ckpt/taken.json`` has the step and the time of the latest decision, so that intervals of time continue after a restart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from t5ckpt.catalog.listing import newest, waiting_steps
from t5ckpt.core.protocols import Clock
from t5ckpt.errors import CheckpointNotFoundError
from t5ckpt.format.names import INDEX, PARTIAL_SUFFIX, TO_PERSIST, to_persist_file
from t5ckpt.save_policies import Moment, SavePolicy
from t5ckpt.storage import Storage

_TAKEN = f'{INDEX}/taken.json'


class Intents:
    """The steps that wait for their upload."""

    def __init__(self, local: Storage):
        """Takes the local directory."""
        self._local = local

    def steps(self) -> list[int]:
        """The steps, ascending."""
        return sorted(waiting_steps(self._local))

    def overwrites(self, step: int) -> bool:
        """Whether the upload of a step replaces a complete checkpoint of the run."""
        try:
            return self._local.read(to_persist_file(step)) == b'overwrite'
        except CheckpointNotFoundError:
            return False

    def add(self, step: int, *, overwrite: bool) -> bool:
        """Records durably that a step is to be uploaded; returns whether it was not recorded."""
        is_new = not self._local.is_file(to_persist_file(step))
        self._local.make_dir(TO_PERSIST)
        self._local.write(to_persist_file(step), b'overwrite' if overwrite else b'')
        self._local.sync_tree(INDEX, [])
        return is_new

    def collect(self) -> None:
        """Removes the files of writes that a crash cut off."""
        for directory in (INDEX, TO_PERSIST):
            for entry in self._local.entries(directory):
                if entry.name.endswith(PARTIAL_SUFFIX):
                    self._local.delete_file(f'{directory}/{entry.name}')

    def drop(self, step: int) -> None:
        """Removes the record of a step."""
        self._local.delete_file(to_persist_file(step))


class PersistSchedule:
    """Decides which saved steps wait for their upload; ``tiers/queue.py`` drops those that a newer one overtakes.

    Called in the thread of the save, so by one thread at a time.
    """

    def __init__(self, policy: SavePolicy | None, local: Storage, clock: Clock):
        """``policy`` None takes every step."""
        self._policy = policy
        self._local = local
        self._clock = clock
        self._began = clock()
        self._previous: int | None = None
        self._taken: dict[str, Any] | None = None
        self.upload_seconds: float | None = None
        """How long the latest upload took."""

    def reason(self, step: int, metrics: Mapping[str, float], *, preempted: bool, is_uploading: bool) -> str | None:
        """Why to upload a step that is being saved, or None.

        Args:
          step: the step.
          metrics: of the save.
          preempted: whether the job is preempted.
          is_uploading: whether an upload is running.
        """
        if self._policy is None:
            return 'every save'
        if self._previous is None and (found := newest(self._local)) is not None:
            # The previous save may be one of an earlier process.
            self._previous = found.step
        previous, self._previous = self._previous, step
        taken = self._last()
        return self._policy.reason(
            Moment(
                step=step,
                previous_step=previous,
                last_saved_step=taken['step'],
                seconds_since_save=self._clock() - (self._began if taken['unix'] is None else taken['unix']),
                preempted=preempted,
                metrics=metrics,
                best={name: (low, high) for name, (low, high) in taken['best'].items()},
                blocked_seconds=self.upload_seconds,
                write_seconds=self.upload_seconds,
                saving=is_uploading,
            )
        )

    def note_taken(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records that a step is uploaded."""
        if self._policy is None:
            return
        best = self._last()['best']
        for name, value in metrics.items():
            if not math.isnan(value):
                low, high = best.get(name, (value, value))
                best[name] = [min(low, value), max(high, value)]
        self._taken = {'step': step, 'unix': self._clock(), 'best': best}
        self._local.write(_TAKEN, json.dumps(self._taken).encode())

    def _last(self) -> dict[str, Any]:
        if self._taken is None:
            self._taken = {'step': None, 'unix': None, 'best': {}, **self._recorded()}
        return self._taken

    def _recorded(self) -> dict[str, Any]:
        try:
            return json.loads(self._local.read(_TAKEN))
        except (CheckpointNotFoundError, ValueError):
            # Only intervals depend on it.
            return {}
