"""Restores the newest step of the local disks or the run's storage.

    agree on a step      each process lists what its disk has; process 0 chooses, see ``tiers/choice.py``
    agree on the arrays  each process says of which arrays its disk lacks files; a step with an array that no disk has is refused
    read                 from the own disk; what is on another one comes by a collective, see ``tiers/exchange.py``

A local file that is damaged, gone or cannot be read counts as absent, and the processes choose again. A job of one process does
the same, without messages.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgpack

from t5ckpt.catalog.listing import has_step, newest, read_facts, steps_in
from t5ckpt.catalog.locate import Located, log_newer
from t5ckpt.commit.deletion import try_to_rename_damaged
from t5ckpt.core.byte_budget import ByteBudget
from t5ckpt.core.keys import join
from t5ckpt.core.leaf_path import Path
from t5ckpt.core.protocols import Clock
from t5ckpt.core.text import some_of
from t5ckpt.distributed.coordinator import Coordinator
from t5ckpt.distributed.processes import Processes
from t5ckpt.distributed.rounds import CoordinationRound, Phase
from t5ckpt.errors import (
    CheckpointNotFoundError,
    CoordinationError,
    CorruptCheckpointError,
    DisagreementError,
    ProcessMissingError,
    RemoteError,
    StorageError,
    T5CkptError,
    UnsupportedTopologyError,
)
from t5ckpt.format.facts import decode_facts, save_id
from t5ckpt.format.file_checksums import FileChecksums
from t5ckpt.format.names import MANIFEST, step_dir
from t5ckpt.planning.leaf_reads import StoredRead
from t5ckpt.reading.array_reader import ArrayReader
from t5ckpt.restore.execute import run_restore
from t5ckpt.restore.request import LocalPart, RestoreRequest
from t5ckpt.storage import Storage, is_disk_error, means_damage, open_in_memory
from t5ckpt.tiers.choice import SavedStep, saved_steps
from t5ckpt.tiers.directory import LocalDirectory
from t5ckpt.tiers.disk_step import DiskStep, why_lost
from t5ckpt.tiers.exchange import Move, plan_moves, read_with_moves

_ACTION = 'a restore from local directories'
_DAMAGES = (CorruptCheckpointError, CheckpointNotFoundError, StorageError)
_SHOWN = 5
_log = logging.getLogger('t5ckpt')


class _StepOnNoDiskError(T5CkptError):
    """The disks do not have all arrays of a step; raised in all processes.

    Attributes:
      is_for_others: whether a job with other shardings can restore it.
    """

    def __init__(self, text: str, *, is_for_others: bool):
        super().__init__(text)
        self.is_for_others = is_for_others


class LocalRestore:
    """One restore; every process makes one, and calls it at the same point."""

    def __init__(
        self,
        directory: LocalDirectory,
        coordinator: Coordinator,
        clock: Clock,
    ):
        """Reads nothing."""
        self._directory, self._clock = directory, clock
        self._local, self._run = directory.storage, directory.run
        self._coordinator = coordinator
        self._processes = coordinator.processes_of_job()
        # Why saves are not restored from the disks, and whether another job can restore them.
        self._refused: dict[tuple[int, str], tuple[str, bool]] = {}
        # The files of this disk that count as absent, by save.
        self._lost_files: dict[str, frozenset[str]] = {}
        self._failed_for_a_moment = set[str]()
        self.for_others = set[int]()
        """Steps that another job can restore, and this one cannot."""

    def restore(self, request: RestoreRequest) -> Any:
        """Restores a step, and logs which, and how many bytes came from where.

        Raises:
          CheckpointNotFoundError: there is no step.
          CorruptCheckpointError: the disks do not have all of the step, and the run's storage does not have it.
          UnsupportedTopologyError: as before, and another number of processes saved the step; or lazy parameters, of which no
            disk has all.
        """
        if request.lazy and self._processes.count > 1:
            raise UnsupportedTopologyError(
                'lazy_parameters: each disk has a part of the arrays. Restore without it, or with a Checkpointer without local=.'
            )
        wanted = request.step
        needs_positions = request.dataset is not None and not request.leaves_iterator
        while True:
            at = self._coordinator.round(_ACTION)
            with at.failing_together(Phase.LOOK):
                self._directory.open()
                disks, damaged = self._disk_steps(wanted)
                vote = needs_positions, [disk.vote() for disk in disks.values()], [*damaged.items()]
            chosen = at.reduce_on_leader(Phase.LOOK, vote, functools.partial(self._choose, wanted=wanted))
            self.for_others = {step for step, _, is_for_others in chosen['why'] if is_for_others}
            if not chosen['save']:
                restored = self._of_run(request, chosen)
                break
            disk = disks.get(chosen['step'])
            disk = disk if disk is not None and disk.identity.save == chosen['save'] else None
            part = self._part(at, disk, chosen)
            try:
                restored = self._of_disks(request, part, chosen['step'])
                break
            except (CoordinationError, ProcessMissingError):
                raise
            except _StepOnNoDiskError as error:
                self._refused[chosen['step'], chosen['save']] = str(error), error.is_for_others
            except Exception as error:
                # The other processes have a RemoteError and come here, too.
                if not self._counts_as_absent(error, disk, chosen):
                    raise
        if wanted is None:
            self._report_newer(request, {*disks, *damaged}, chosen)
        return restored

    def _disk_steps(self, wanted: int | None) -> tuple[dict[int, DiskStep], dict[int, str]]:
        """The steps of this disk, or the one that is ``wanted``; and why some count as absent: their manifest is damaged."""
        found: dict[int, DiskStep] = {}
        damaged: dict[int, str] = {}
        there = [] if self._local.kind('') is None else steps_in(self._local)
        for step in [each for each in there if wanted in (None, each)]:

            def read(step: int = step) -> None:
                disk = DiskStep.read(self._local, step)
                lost = self._lost_files.get(disk.identity.save, frozenset())
                found[step] = dataclasses.replace(disk, there=disk.there - lost)

            if why := why_lost(read):
                damaged[step] = why
        return found, damaged

    def _choose(self, votes: Sequence[Any], wanted: int | None) -> dict[str, Any]:
        """In process 0: the newest step that the disks may have or, with the empty ``save``, that of the run's storage."""
        needs_positions = any(needs for needs, _, _ in votes)
        known = saved_steps([disk for _, disk, _ in votes])
        # By step, the reason, and whether only another job can restore it; of the steps that are not older than the answer.
        why: dict[int, tuple[str, bool]] = {}
        chosen: SavedStep | None = None
        for each in known:
            reason = each.reason_against(self._processes.count, needs_positions=needs_positions)
            refused = self._refused.get((each.step, each.save), (reason, each.count != self._processes.count))
            if not refused[0]:
                chosen = each
                break
            why.setdefault(each.step, refused)
        newest_local = -1 if chosen is None else chosen.step
        for step, text in (each for _, _, damaged in votes for each in damaged):
            if step > newest_local:
                why.setdefault(step, (text, False))
        # During an outage it is unknown whether the run has a newer local step that is refused, so an older one may not be taken.
        step_of_run = self._step_of_run(wanted, may_be_away=chosen is not None and not why)
        if chosen is not None and step_of_run == chosen.step and self._has_later_save(chosen):
            why[chosen.step] = f'{self._run.url()} has a later save of it', False
            chosen = None
        if chosen is not None and (step_of_run is None or step_of_run <= chosen.step):
            answer: dict[str, Any] = {'step': chosen.step, 'save': chosen.save, 'roles': [*chosen.roles.items()]}
        else:
            answer = {'step': step_of_run, 'save': ''}
        why = {step: reason for step, reason in why.items() if answer['step'] is None or step >= answer['step']}
        return answer | {'why': [[step, *reason] for step, reason in why.items()]}

    def _has_later_save(self, local: SavedStep) -> bool:
        """Whether the run has a later save of a local step: it was saved again without local directories."""
        try:
            facts = read_facts(self._run, step_dir(local.step))
            created = decode_facts(facts, '').created_unix or 0.0
        except T5CkptError:
            return False
        return created > local.created and save_id(facts) != local.save

    def _step_of_run(self, wanted: int | None, *, may_be_away: bool) -> int | None:
        def query() -> list[int]:
            if wanted is not None:
                return [wanted] if has_step(self._run, wanted) else []
            found = newest(self._run)
            return [] if found is None else [found.step]

        return next(iter(self._directory.query_run(query, [] if may_be_away else None)), None)

    def _of_run(self, request: RestoreRequest, chosen: Mapping[str, Any]) -> Any:
        """Restores from the run's storage, as without local directories."""
        step, why = chosen['step'], chosen['why']
        if step is None and why:
            reasons = '; '.join(f'step {each}: {reason}' for each, reason, _ in sorted(why))
            text = f'the local directories have no complete step, and {self._run.url()} does not have it: {reasons}.'
            if all(is_for_others for _, _, is_for_others in why):
                cure = 'Start as many processes, with the same shardings.'
                raise UnsupportedTopologyError(f'{text} {cure}')
            raise CorruptCheckpointError(text)
        nbytes: list[int] = []
        return run_restore(
            dataclasses.replace(
                request,
                step=request.step if step is None else step,
                round=self._coordinator.round('a restore'),
                note_read=nbytes.append,
                sources=lambda: self._sources(0, 0, sum(nbytes)),
            )
        )

    def _sources(self, own: int, peers: int, run: int) -> str:
        return f'; {own} bytes of arrays from {self._local.url()}, {peers} from other processes, {run} from {self._run.url()}'

    def _part(self, at: CoordinationRound, disk: DiskStep | None, chosen: Mapping[str, Any]) -> DiskPart:
        """The part of a step that this process has; the manifest and the facts come from another one, if its disk has none."""
        roles: dict[int, int] = dict(chosen['roles'])
        having = {*roles.values()}
        if disk is None:
            manifest, facts = at.receive('manifest', min(having)), at.receive('facts', min(having))
        else:
            manifest, facts = disk.manifest, disk.facts
        if len(having) < self._processes.count and self._processes.index == min(having):
            at.share('manifest', manifest)
            at.share('facts', facts)
        located = Located(self._local, step_dir(chosen['step']), MANIFEST, chosen['step'])
        checksums = FileChecksums() if disk is None else disk.checksums
        return DiskPart(located, manifest, facts, checksums, disk, roles, self._processes)

    def _of_disks(self, request: RestoreRequest, part: DiskPart, step: int) -> Any:
        nbytes: list[int] = []
        reading = dataclasses.replace(request.reading, share_replicated=False)
        return run_restore(
            dataclasses.replace(
                request,
                step=step,
                storage=self._local,
                local_part=part,
                reading=reading,
                round=self._coordinator.round('a restore'),
                note_read=nbytes.append,
                sources=lambda: self._sources(sum(nbytes) - part.received_bytes, part.received_bytes, 0),
            )
        )

    def _counts_as_absent(self, error: Exception, disk: DiskStep | None, chosen: Mapping[str, Any]) -> bool:
        """Looks for the files that the restore could not read, so that the processes choose again; without any, for the save.

        Returns False, in all processes, if the error of any process says nothing about a file.
        """
        at = self._coordinator.round(_ACTION)
        kind, save = 'other', chosen['save']
        with at.failing_together(Phase.NEED):
            if isinstance(error, RemoteError):
                kind = 'none'
            elif isinstance(error, _DAMAGES) and means_damage(error):
                known, directory = self._lost_files.get(save, frozenset()), step_dir(chosen['step'])
                lost = frozenset[str]() if disk is None else disk.unreadable_files() - known
                self._lost_files[save] = known | lost
                for name in sorted(lost)[:_SHOWN]:
                    _log.warning('t5ckpt: %s is damaged, and counts as absent', self._local.url(join(directory, name)))
                # A disk may have failed for a moment.
                is_new = bool(lost) or (is_disk_error(error) and save not in self._failed_for_a_moment)
                self._failed_for_a_moment.add(save)
                kind = 'again' if is_new else 'damaged'

        def decide(votes: Sequence[Sequence[str]]) -> bool:
            kinds = [each for each, _ in votes]
            if not {'again', 'other'}.intersection(kinds):
                self._refused[chosen['step'], save] = votes[kinds.index('damaged')][1], False
            return 'other' not in kinds

        return at.reduce_on_leader(Phase.NEED, (kind, str(error)), decide)

    def _report_newer(self, request: RestoreRequest, disks: Collection[int], chosen: Mapping[str, Any]) -> None:
        """Logs which newer local steps were not restored, and renames them: training reaches them again."""
        log_newer(self._local, chosen['step'])
        for step, reason, _ in chosen['why'] if self._processes.index == 0 else ():
            _log.warning('t5ckpt: local step %d was not restored: %s', step, reason)
        refused = {step for step, *_ in chosen['why'] if step > chosen['step']} - self.for_others
        for step in sorted(refused.intersection(disks)) if request.continues else ():
            try_to_rename_damaged(self._local, step, self._clock)


@dataclasses.dataclass
class DiskPart(LocalPart):
    """The part of a step that a process restores from: its own disk, and what comes from the others.

    Attributes:
      located, manifest, facts, checksums: as for :class:`LocalPart`.
      disk: what the disk has; None if it has none of the save.
      roles: by role, the process that has the disk.
      processes: of the job.
      received_bytes: of arrays, from other processes.
    """

    located: Located
    manifest: bytes
    facts: bytes
    checksums: FileChecksums
    disk: DiskStep | None
    roles: Mapping[int, int]
    processes: Processes
    received_bytes: int = 0
    moves: Sequence[Move] = ()
    received_positions: Mapping[str, bytes] = dataclasses.field(default_factory=dict[str, bytes])

    def agree(self, at: CoordinationRound, reads: Sequence[StoredRead], position: str | None) -> None:
        """Agrees with the other processes on what each of them gets from where; every process calls it.

        Raises:
          _StepOnNoDiskError: an array is on no disk.
        """
        disk = self.disk
        own = {} if disk is None else disk.positions()
        has = [prefix for prefix, files in own.items() if files]
        lacks, never_had = ([], False) if disk is None else self._lacking(reads, disk)
        wanted = None if position in has else position
        damaged = [*own.keys() - {*has}]
        vote = {'lacks': lacks, 'never_had': never_had, 'has': has, 'damaged': damaged, 'position': wanted}

        def decide(votes: Sequence[Any]) -> dict[str, Any]:
            by_role = {role: votes[process]['lacks'] for role, process in self.roles.items()}
            _, missing = plan_moves(reads, self.roles, by_role, self.processes.count)
            positions = sorted({each['position'] for each in votes if each['position'] is not None})
            senders = {
                each: next((index for index, other in enumerate(votes) if each in other['has']), None)
                for each in positions
            }
            missing = [f'a part of {name}' for name in missing]
            damaged = {prefix for each in votes for prefix in each['damaged']}
            missing += [
                f'the position {prefix}' for prefix in positions if prefix in damaged and senders[prefix] is None
            ]
            other = any(votes[process]['never_had'] for process in self.roles.values())
            return {'lacks': [*by_role.items()], 'missing': some_of(missing, 4), 'senders': senders, 'other': other}

        agreed = at.reduce_on_leader(Phase.NEED, vote, decide)
        if agreed['missing']:
            text = f'{agreed["missing"]} is on no disk'
            if agreed['other']:
                text += ': the shardings are not those of the save'
            raise _StepOnNoDiskError(text, is_for_others=agreed['other'])
        self.moves, _ = plan_moves(reads, self.roles, dict(agreed['lacks']), self.processes.count)
        self._exchange_positions(at, agreed['senders'], own, wanted)

    def _lacking(self, reads: Sequence[StoredRead], disk: DiskStep) -> tuple[list[str], bool]:
        """The locations of the arrays of which the disk lacks files that its role needs; whether it never had one of them."""
        role, count = disk.identity.role, self.processes.count
        lacking = {
            f'{read.leaf.location}/{read.leaf.grid.key(index)}': read.leaf.location
            for read in reads
            for box in read.source_boxes_by_process(count)[role]
            for index in read.leaf.grid.chunks_of(box)
            if f'{read.leaf.location}/{read.leaf.grid.key(index)}' not in disk.there
        }
        return [*dict.fromkeys(lacking.values())], not lacking.keys() <= disk.checksums.keys()

    def _exchange_positions(
        self,
        at: CoordinationRound,
        senders: Mapping[str, int | None],
        own: Mapping[str, Mapping[str, bytes]],
        wanted: str | None,
    ) -> None:
        """Brings the positions of data iterators that are on another disk."""
        for prefix, sender in senders.items():
            if sender == self.processes.index:
                at.share(f'positions-{prefix}', msgpack.packb(own[prefix]) or b'')
        sender = None if wanted is None else senders.get(wanted)
        if sender is not None:
            self.received_positions = msgpack.unpackb(at.receive(f'positions-{wanted}', sender))

    def read(
        self, request: RestoreRequest, reader: ArrayReader, reads: Sequence[StoredRead], budget: ByteBudget
    ) -> dict[Path, Any]:
        """Reads the arrays, as ``read_arrays``; every process calls it."""

        def decide(plans: Sequence[int]) -> None:
            if len({*plans}) > 1:
                raise DisagreementError(
                    'the processes do not plan alike: restore_concurrent_gb differs, or the sharding of a leaf has the devices '
                    'of one process alone. Pass it alike, and shardings over the devices of the job, or leave out local=.'
                )

        # A process that fails before it would leave the others in a collective.
        request.round.reduce_on_leader(Phase.SEND, hash((budget.limit, *self.moves)) if self.moves else 0, decide)
        index = self.processes.index
        self.received_bytes = sum(move.nbytes for move in self.moves if move.target == index)
        return read_with_moves(reader, reads, self.moves, index, budget, request.progress)

    def positions(self) -> tuple[Storage, str] | None:
        """The position of this process, if it came from another disk."""
        return (open_in_memory(self.received_positions), '') if self.received_positions else None
