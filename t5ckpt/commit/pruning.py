"""Carries out what the keep policy decided: hides steps in one atomic operation each, and removes their files in the background.

A crash in between leaves a directory that no listing shows and that garbage collection removes. A deletion that fails is logged
and does not stop the others.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from t5ckpt.catalog.listing import waiting_steps
from t5ckpt.commit.bucket_deletion import Hidden
from t5ckpt.commit.by_rename import hide_by_rename
from t5ckpt.commit.deletion import remove_hidden
from t5ckpt.commit.prunable_steps import PrunableSteps, StayLog
from t5ckpt.commit.removal import is_pinned, kept_by
from t5ckpt.commit.step_lease import leases_to_hide
from t5ckpt.commit.strategy import strategy_of
from t5ckpt.commit.write_lease import WriteLease
from t5ckpt.core.interrupt_safe_event import InterruptSafeEvent
from t5ckpt.core.protocols import Clock
from t5ckpt.core.thread_pool import start_thread
from t5ckpt.errors import AccessDeniedError, CheckpointNotFoundError, T5CkptError, UnsupportedFormatError
from t5ckpt.format.names import parse_leftover, step_dir
from t5ckpt.policies import HELD, WAITS, Decision
from t5ckpt.storage import Storage

# The leases of a batch are not renewed.
_BATCH = 1000
_log = logging.getLogger('t5ckpt')


class Pruning:
    """One deletion of the steps that a keep policy gives up.

    Attributes:
      done: the decisions that were carried out, by this process or another one.
    """

    def __init__(self, storage: Storage, clock: Clock, steps: PrunableSteps, stay_log: StayLog):
        """Takes the run."""
        self.done: list[Decision] = []
        self._storage = storage
        self._clock = clock
        self._steps = steps
        self._stay_log = stay_log
        self._strategy = strategy_of(storage)
        self._hidden: list[Hidden] = []
        self._leases: dict[int, WriteLease] = {}
        self._replaced = set[int]()

    def hide_steps(self, plan: Sequence[Decision], confirmed: Collection[int] | None) -> None:
        """Hides the steps that do not stay, and logs why the others do.

        Args:
          plan: the decisions.
          confirmed: the steps that may go; None allows all of them. Of the others, nothing is logged.
        """
        asked = [each for each in plan if confirmed is None or each.step in confirmed]
        for decision in asked:
            if decision.keep:
                self._stay_log.log(decision)
        doomed = [decision for decision in asked if not decision.keep]
        for start in range(0, len(doomed), _BATCH):
            if not self._hide_batch(doomed[start : start + _BATCH]):
                break

    def _hide_batch(self, doomed: Sequence[Decision]) -> bool:
        """Hides some steps; on a file system with one listing of the leases, not one for each. See :meth:`_hide_logged`."""
        try:
            if self._storage.commits_by_rename and doomed[1:]:
                self._leases = leases_to_hide(self._storage, [each.step for each in doomed], self._clock)
                names = map(parse_leftover, (entry.name for entry in self._storage.entries()))
                self._replaced = {each.step for each in names if each is not None and each.state == 'replaced'}
            return all(self._hide_logged(decision) for decision in doomed)
        finally:
            for lease in self._leases.values():
                lease.leave()
            self._leases = {}

    def _hide_logged(self, decision: Decision) -> bool:
        """Hides a step, unless it is kept. A failure is logged.

        Returns False if the storage may refuse all deletions: each attempt would leave a lease that may not be deleted.
        """
        try:
            found = self._hide(decision.step)
            if found is None:
                self._log_kept(decision.step)
            else:
                self._hidden.append(found)
                self.done.append(decision)
                _log.info('t5ckpt: deleted step %d of %s: %s', decision.step, self._storage.url(), decision.reason)
        except CheckpointNotFoundError:
            # Another process has deleted it.
            self.done.append(decision)
        except T5CkptError as error:
            self._log_failure(decision.step, error)
            return self._storage.commits_by_rename or not isinstance(error, AccessDeniedError)
        return True

    def _log_kept(self, step: int) -> None:
        pinned = is_pinned(self._storage, step_dir(step))
        waits = WAITS if step in waiting_steps(self._storage) else HELD
        held = kept_by(self._storage, step, self._clock, pinned=pinned) or waits
        self._stay_log.log(Decision(step, True, held, overruled=True))

    def _hide(self, step: int) -> Hidden | None:
        """Hides a step; returns None if it is kept."""
        lease = self._leases.pop(step, None)
        if lease is not None:
            is_replaced = step in self._replaced
            return hide_by_rename(self._storage, step, self._clock, lease=lease, has_replacements=is_replaced)
        return self._strategy.hide(self._storage, step, self._clock)

    def _log_failure(self, step: int, error: T5CkptError) -> None:
        """Logs that a step could not be deleted; once for a step that a newer program wrote."""
        if isinstance(error, UnsupportedFormatError):
            self._stay_log.log(Decision(step, True, str(error), overruled=True))
        else:
            _log.warning('t5ckpt: could not delete step %d: %s', step, error)

    def start_removal(self) -> InterruptSafeEvent | None:
        """Starts a thread that removes the files of the hidden steps. Without a thread, returns None after their removal.

        To be called after each :meth:`hide_steps`: on an object store, each hidden step has a write lease, which would be renewed
        until this process ends.
        """
        if not self._hidden:
            return None
        remover = start_thread(self._remove, 't5ckpt-delete', daemon=False)
        if remover is None:
            self._remove()
        return remover

    def _remove(self) -> None:
        for hidden in self._hidden:
            try:
                remove_hidden(self._storage, hidden, self._clock)
            except T5CkptError as error:
                where = self._storage.url(hidden.directory)
                _log.warning('t5ckpt: could not remove %s, the next save will try again: %s', where, error)
