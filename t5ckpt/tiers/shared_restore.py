"""Restores from local directories in a job of several processes.

The processes choose a step (``tiers/shared_choice.py``), bring what each of them needs and lacks to its own disk
(``tiers/provide.py``), and restore from there as from any directory. A local file that is damaged, which is deleted, or that the
disk cannot read counts as absent, and they choose again.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from t5ckpt.catalog.listing import has_step, newest
from t5ckpt.catalog.locate import locate_step
from t5ckpt.commit.deletion import rename_damaged
from t5ckpt.distributed.coordinator import Coordinator
from t5ckpt.distributed.rounds import Phase
from t5ckpt.errors import (
    CheckpointNotFoundError,
    CoordinationError,
    CorruptCheckpointError,
    ProcessMissingError,
    StorageError,
    T5CkptError,
)
from t5ckpt.format.facts import save_id
from t5ckpt.reading.contents import read_raw
from t5ckpt.restore.execute import run_restore
from t5ckpt.restore.request import LocalPart, RestoreRequest
from t5ckpt.storage import Storage, is_disk_error, means_damage
from t5ckpt.tiers.catalog import TierCatalog
from t5ckpt.tiers.local_reads import LocalReads
from t5ckpt.tiers.part import LocalParts, Part, parts_in, time_of_save
from t5ckpt.tiers.provide import Provided, Provider, completed
from t5ckpt.tiers.restore import BytesRead
from t5ckpt.tiers.shared_choice import (
    ACTION as CHOICE_ACTION,
    RunStep,
    SharedChoice,
    choose_together,
    log_choice,
    log_other_saves,
)

_log = logging.getLogger('t5ckpt')
_ACTION = 'a restore from local directories'
_ATTEMPTS = 3
_DAMAGES = (CorruptCheckpointError, CheckpointNotFoundError, StorageError)


class SharedRestore:
    """One restore; every process makes one, and calls it at the same point."""

    def __init__(
        self,
        catalog: TierCatalog,
        coordinator: Coordinator,
        drop_intent: Callable[[int], None],
        local: LocalParts | None = None,
    ):
        """Reads nothing.

        Args:
          catalog: of the tiers.
          coordinator: for the rounds.
          drop_intent: forgets that a step waits for its upload.
          local: the parts in the local directory, if they are known; only the first choice uses them.
        """
        self._catalog = catalog
        self._known_parts = local
        self._local, self._run = catalog.local, catalog.run
        self._coordinator = coordinator
        self._drop_intent = drop_intent
        self._reads = LocalReads()

    def restore(self, request: RestoreRequest) -> Any:
        """Restores a step, and logs which, and how many bytes came from where.

        Raises:
          CheckpointNotFoundError: there is no step.
          CorruptCheckpointError: the disks do not have all of the step, and the run's storage does not have it.
        """
        wanted = request.step
        self._catalog.begin_restore(wanted)
        for attempt in range(_ATTEMPTS):
            found, local = self.choose(request)
            is_leader = self._coordinator.processes_of_job().index == 0
            if is_leader:
                log_choice(found)
            with self._catalog.noting_damage(wanted, *self._copies(found, local, wanted)):
                if not found.save or found.step is None:
                    restored = self._of_storage(request, found)
                else:
                    last = attempt + 1 == _ATTEMPTS
                    outcome = self._of_disks(request, found, found.step, local.parts.get(found.step), last=last)
                    if outcome is None:
                        continue
                    (restored,) = outcome
            if is_leader:
                log_other_saves(found, self._run.url())
            if wanted is None:
                self._put_others_aside(found)
            return restored
        raise AssertionError('the last attempt returns or raises')

    def _copies(self, found: SharedChoice, local: LocalParts, step: int | None) -> list[Storage]:
        """The storages that have a part of a step: this disk, and the run's storage if it is read."""
        disk = [self._local] if step in local.parts or step in local.damaged else []
        reads_run = found.step is not None and (found.in_run or not found.save)
        return [*disk, self._run] if reads_run else disk

    def choose(self, request: RestoreRequest) -> tuple[SharedChoice, LocalParts]:
        """The step to restore, and what the disk of this process has; every process calls it."""
        wanted = request.step
        positions = request.dataset is not None and not request.leaves_iterator
        at = self._coordinator.round(CHOICE_ACTION)
        with at.failing_together(Phase.LOOK):
            local, self._known_parts = self._known_parts or parts_in(self._local, self._reads), None
        query_run = functools.partial(self._find_run_step, wanted)
        found = choose_together(at, self._coordinator, local, query_run, wanted, needs_positions=positions)
        return found, local

    def _find_run_step(self, step: int | None, has_local: bool) -> RunStep:
        """Finds the step in the run's storage; in process 0."""
        try:
            if step is None:
                listed = newest(self._run)
                at = None if listed is None else listed.step
            else:
                at = step if has_step(self._run, step) else None
            facts = None if at is None else read_raw(locate_step(self._run, at)).facts
        except StorageError as error:
            if not has_local:
                raise
            _log.warning('t5ckpt: only the steps of the local directories are used: %s', error)
            return RunStep()
        return RunStep(at) if facts is None else RunStep(at, save_id(facts), time_of_save(facts))

    def _of_storage(self, request: RestoreRequest, found: SharedChoice) -> Any:
        """Restores from the run's storage, as without local directories."""
        if found.step is None and found.refused:
            reasons = '; '.join(f'step {step}: {why}' for step, why in sorted(found.refused.items()))
            raise CorruptCheckpointError(
                f'the local directories have no complete step, and {self._run.url()} does not have it: {reasons}.'
            )
        step = request.step if found.step is None else found.step
        read, at = BytesRead(), self._coordinator.round('a restore')
        of_run = dataclasses.replace(
            request, step=step, round=at, note_read=read, sources=lambda: self._sources(Provided(run=read.nbytes))
        )
        return run_restore(of_run)

    def _sources(self, nbytes: Provided) -> str:
        return (
            f'; {nbytes.own} bytes of arrays from {self._local.url()}, {nbytes.peers} from other processes, {nbytes.run} from '
            f'{self._run.url()}'
        )

    def _of_disks(
        self, request: RestoreRequest, found: SharedChoice, step: int, part: Part | None, *, last: bool
    ) -> tuple[Any] | None:
        """Restores from the local directories; None if a file could not be read and the processes choose again."""
        if part is not None and part.save != found.save:
            part = None
        if part is None or not found.on_all_disks:
            at = self._coordinator.round(_ACTION)
            part = completed(at, part, self._local, step, found.sender, self._catalog.clock)
        run = self._run if found.in_run else None
        provider = Provider(self._coordinator, part, run, request.reading.budget_bytes, self._reads)
        local_part = LocalPart(part.located, part.manifest, part.facts, provider)
        of_part = dataclasses.replace(
            request,
            step=step,
            storage=self._local,
            local_part=local_part,
            round=self._coordinator.round('a restore'),
            sources=lambda: self._sources(provider.provided),
        )
        try:
            restored = run_restore(of_part)
        except (CoordinationError, ProcessMissingError):
            raise
        except Exception as error:
            # The other processes have a RemoteError and come here, too.
            if self._choose_again(error, provider, last=last):
                return None
            raise
        return (restored,)

    def _choose_again(self, error: Exception, provider: Provider, *, last: bool) -> bool:
        """Finds the files that the restore could not read; returns, in all processes, whether they choose again.

        They do if any of them has such a file, or could not read one for a moment. They do not after the last attempt, or if the
        error of any of them does not mean damage.
        """
        at = self._coordinator.round(_ACTION)
        kind = 'other'
        with at.failing_together(Phase.NEED):
            if not means_damage(error):
                kind = 'not damage'
            elif isinstance(error, _DAMAGES):
                lacks_files = provider.check_files()
                kind = 'again' if lacks_files or (provider.has_ended and is_disk_error(error)) else kind

        def decide(kinds: Sequence[str]) -> bool:
            return 'again' in kinds and 'not damage' not in kinds and not last

        return at.reduce_on_leader(Phase.NEED, kind, decide)

    def _put_others_aside(self, found: SharedChoice) -> None:
        """Renames local steps that are newer than the restored one, and those of other saves: training reaches them again."""
        for step in self._catalog.local_steps():
            # The disk of every process has a part of a step that was restored from the disks.
            is_restored = step == found.step and found.save != ''
            if found.step is None or step < found.step or is_restored:
                continue
            try:
                aside = rename_damaged(self._local, step, self._catalog.clock)
                self._drop_intent(step)
            except T5CkptError as error:
                _log.warning('t5ckpt: local step %d was not restored, and could not be renamed: %s', step, error)
            else:
                _log.warning('t5ckpt: local step %d was not restored, and was renamed to %s', step, aside)
