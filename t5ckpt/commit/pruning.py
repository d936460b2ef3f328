"""Carries out what the keep policy decided: hides steps in one atomic operation each, and removes their files in the background.

A crash in between leaves a directory that no listing shows and that garbage collection removes. A deletion that fails is logged
and does not stop the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from t5ckpt.catalog.listing import waiting_steps
from t5ckpt.commit.announcement import announced_steps
from t5ckpt.commit.bucket_deletion import Hidden
from t5ckpt.commit.by_rename import hide_announced
from t5ckpt.commit.deletion import remove_hidden
from t5ckpt.commit.holds import held_steps
from t5ckpt.commit.prunable_steps import PrunableSteps, StayLog
from t5ckpt.commit.removal import kept_by
from t5ckpt.commit.strategy import strategy_of
from t5ckpt.core.interrupt_safe_event import InterruptSafeEvent
from t5ckpt.core.protocols import Clock
from t5ckpt.core.thread_pool import start_thread
from t5ckpt.errors import AccessDeniedError, CheckpointNotFoundError, T5CkptError, UnsupportedFormatError
from t5ckpt.format.names import parse_leftover
from t5ckpt.policies import HELD, WAITS, Decision
from t5ckpt.storage import Storage

# A batch is hidden within minutes of its announcement, also where a rename takes seconds.
_BATCH = 100
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
        """Hides some steps; on a file system with one listing of the holds, not one for each. See :meth:`_hide_logged`."""
        storage, clock = self._storage, self._clock
        if not storage.commits_by_rename or not doomed[1:]:
            return all(
                self._hide_logged(each, lambda step: self._strategy.hide(storage, step, clock)) for each in doomed
            )
        names = map(parse_leftover, (entry.name for entry in storage.entries()))
        replaced = {each.step for each in names if each is not None and each.state == 'replaced'}
        with announced_steps(storage, [each.step for each in doomed], clock) as held:
            return all(
                self._hide_logged(
                    each, lambda step: hide_announced(storage, step, clock, held, has_replacements=step in replaced)
                )
                for each in doomed
            )

    def _hide_logged(self, decision: Decision, hide: Callable[[int], Hidden | None]) -> bool:
        """Hides a step, unless it is kept. A failure is logged.

        Returns False if the storage may refuse all deletions: each attempt would leave a marker that may not be deleted.
        """
        try:
            found = hide(decision.step)
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
        waits = WAITS if step in waiting_steps(self._storage) else HELD
        reason = kept_by(self._storage, step, held_steps(self._storage, self._clock)) or waits
        self._stay_log.log(Decision(step, True, reason, overruled=True))

    def _log_failure(self, step: int, error: T5CkptError) -> None:
        """Logs that a step could not be deleted; once for a step that a newer program wrote."""
        if isinstance(error, UnsupportedFormatError):
            self._stay_log.log(Decision(step, True, str(error), overruled=True))
        else:
            _log.warning('t5ckpt: could not delete step %d: %s', step, error)

    def start_removal(self) -> InterruptSafeEvent | None:
        """Starts a thread that removes the files of the hidden steps. Without a thread, returns None after their removal."""
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
