"""The steps of a local directory that wait for their upload, and the decision which steps do.

``.t5ckpt/to_persist/<step>`` is written before the local commit of a step that the persist policy takes, and removed after the
commit in the run's storage. It is the whole state of an upload. No program deletes a step that has it, see
``commit/deletion.py``. A crash in between leaves a file whose step the next start uploads, or drops.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from t5ckpt.catalog.listing import waiting_steps
from t5ckpt.core.protocols import Clock
from t5ckpt.core.text import some_of
from t5ckpt.errors import StorageError, T5CkptError
from t5ckpt.format.names import INDEX, PARTIAL_SUFFIX, TO_PERSIST, to_persist_file
from t5ckpt.policies import StepInfo
from t5ckpt.save.schedule import PolicyState
from t5ckpt.save_policies import SavePolicy
from t5ckpt.storage import Storage

_REPLACES = b'overwrite'
_log = logging.getLogger('t5ckpt')


def replacing_steps(local: Storage) -> dict[int, bool]:
    """The steps that wait, ascending, and whether the upload of each may replace a complete checkpoint of the run."""
    steps = sorted(waiting_steps(local))
    texts = local.heads([to_persist_file(step) for step in steps], len(_REPLACES))
    return {step: text == _REPLACES for step, text in zip(steps, texts, strict=True)}


def note_waiting(local: Storage, step: int, *, replaces: bool) -> None:
    """Records durably that a step is to be uploaded."""
    local.make_dir(TO_PERSIST)
    local.write(to_persist_file(step), _REPLACES if replaces else b'')
    local.sync_tree(INDEX, [])


def note_ended(local: Storage, step: int) -> None:
    """Records that a step no longer waits. If the deletion fails, the next start repeats it; no caller waits for it."""
    try:
        local.delete_file(to_persist_file(step))
    except StorageError as error:
        _log.warning('t5ckpt: %s could not be removed: %s', local.url(to_persist_file(step)), error)


def remove_partial_records(local: Storage) -> None:
    """Removes the files of writes that were cut off by a crash."""
    for directory in (INDEX, TO_PERSIST):
        for entry in local.entries(directory):
            if entry.name.endswith(PARTIAL_SUFFIX):
                local.delete_file(f'{directory}/{entry.name}')


def lost_disks(found: Sequence[Sequence[Any]]) -> str:
    """The reason why a step cannot be uploaded, or ''; ``found`` has the save, the role and the number of roles of each disk."""
    save, _, count = found[0]
    roles = {role for each, role, _ in found if each == save}
    missing = [str(role) for role in range(count) if role not in roles]
    return f'the disks of the processes {some_of(missing, 8)} of the save are lost' if missing else ''


class PersistSchedule:
    """Decides which saved steps are uploaded. Called in the thread of the save, so by one thread at a time."""

    def __init__(self, policy: SavePolicy | None, uploaded: Callable[[], Collection[StepInfo]], clock: Clock):
        """``policy`` None takes every step; ``uploaded`` returns the facts of the steps that the run has, or that wait."""
        self._policy, self._uploaded, self._clock = policy, uploaded, clock
        self._previous: int | None = None
        # With the last step that was taken, when that was, and the best metrics.
        self._state = PolicyState(0.0, None, clock())
        self._knows_uploaded = False
        self._owed = ''

    def reason(self, step: int, metrics: Mapping[str, float], *, preempted: bool, is_uploading: bool) -> str | None:
        """The reason to upload a step that is being saved, or None."""
        if self._policy is None:
            return 'every save'
        if self._owed:
            return self._owed
        state = self._state
        if not self._knows_uploaded:
            self._knows_uploaded = True
            # Without an answer of the run's storage, the intervals begin again.
            with contextlib.suppress(T5CkptError):
                for info in sorted(self._uploaded(), key=lambda info: info.step):
                    state.note(info.step, info.metrics, info.created_unix or state.last_unix)
                    self._previous = info.step
        previous, self._previous = self._previous, step
        state.metrics, state.preempted, state.saving = metrics, preempted, is_uploading
        state.set_now(self._clock())
        return state.reason(self._policy, step, previous)

    def owe(self, step: int) -> None:
        """Requests the upload of the next save, in place of a step that could not be uploaded."""
        self._owed = f'step {step} was not uploaded'

    def note_taken(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records that a step is uploaded."""
        self._owed = ''
        self._state.note(step, metrics, self._clock())
