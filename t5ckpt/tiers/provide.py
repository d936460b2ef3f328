"""Brings the files that a restore reads, and that the disk of a process lacks, to its local directory.

They come from the disks of other processes, with one exchange, or from the run's storage if it has the same save. They are
written to the local directory, so the disk is complete again for the next restart. A file that its sender finds damaged
is deleted and counts as absent, as does a file that cannot be read, which stays; the processes then repeat the exchange.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from t5ckpt.catalog.listing import has_step
from t5ckpt.catalog.locate import locate_step
from t5ckpt.commit.deletion import rename_damaged
from t5ckpt.commit.transaction import Transaction
from t5ckpt.core.keys import join
from t5ckpt.core.protocols import Clock
from t5ckpt.distributed.coordinator import Coordinator
from t5ckpt.distributed.rounds import CoordinationRound, Phase
from t5ckpt.errors import CorruptCheckpointError
from t5ckpt.format.file_checksums import FileChecksums, entry_of
from t5ckpt.format.names import COPIES, TRAIN_DS_PREFIX, step_dir
from t5ckpt.reading.contents import read_contents
from t5ckpt.storage import Storage
from t5ckpt.tiers.coverage import ChunkNumbers, decode_bits, encode_bits, num_bits, plan_sends, union
from t5ckpt.tiers.exchange import ExchangePlan, File, exchange
from t5ckpt.tiers.fetch import Fetch
from t5ckpt.tiers.local_reads import LocalReads
from t5ckpt.tiers.part import Part, array_bytes, positions_in
from t5ckpt.tiers.part_files import PartFiles

_log = logging.getLogger('t5ckpt')
_TURNS = 4
_ACTION = 'a restore from local directories'


@dataclasses.dataclass
class Provided:
    """The bytes of arrays that this process read, by source."""

    own: int = 0
    peers: int = 0
    run: int = 0


class Provider:
    """Provides the files of one step; every process has one, and calls it at the same point.

    Attributes:
      part: of this process.
      provided: the bytes by source.
      has_ended: whether all files are provided, so that a later error is one of reading them.
    """

    def __init__(self, coordinator: Coordinator, part: Part, run: Storage | None, budget_bytes: int, reads: LocalReads):
        """Reads nothing.

        Args:
          coordinator: for the rounds.
          part: of this process.
          run: the run's storage if it has the same save.
          budget_bytes: of the restore.
          reads: of the restore.
        """
        self.part = part
        self.provided = Provided()
        self.has_ended = False
        self._coordinator = coordinator
        self._run = run
        self._budget_bytes = budget_bytes
        self._files = PartFiles(part, reads)
        # Whether the step has no position of this process's data iterator.
        self._lacks_position = False

    def __call__(self, first: CoordinationRound, names: Sequence[str], prefix: str | None) -> FileChecksums:
        """Makes files available locally; returns the checksums of all files that are there.

        Args:
          first: the round of the restore.
          names: the chunk files that this process reads.
          prefix: of the names of its position of the data iterator; None without one.

        Raises:
          CorruptCheckpointError: a chunk is nowhere, in all processes; or the position of this process is nowhere.
        """
        with first.failing_together(Phase.NEED):
            self._files.replace_unreadable_metadata()
        numbers, at = self.part.numbers(), first
        for turn in range(_TURNS + 1):
            lacking = [name for name in names if name not in self._files.there]
            wanted_prefix = self._wanted_positions(prefix)
            missing = self._missing(at, numbers, lacking, wanted_prefix)
            if missing is None:
                break
            if turn == _TURNS:
                raise CorruptCheckpointError(
                    f'{self._files.url()}: files of the local directories are damaged again and again.'
                )
            at = self._turn(numbers, lacking, wanted_prefix, missing, prefix)
        self.has_ended = True
        self.provided.own = sum(self._files.entries[name][0] for name in names if name not in self._files.brought)
        return FileChecksums({name: self._files.entries[name] for name in self._files.there})

    def _wanted_positions(self, prefix: str | None) -> str | None:
        """The prefix of the positions that this process lacks; a new disk takes all, for those that a lost one had twice."""
        if prefix is None or self._files.positions(prefix) or self._lacks_position:
            return None
        return prefix if self._files.there else TRAIN_DS_PREFIX

    @staticmethod
    def _missing(
        at: CoordinationRound, numbers: ChunkNumbers, lacking: Sequence[str], wanted_prefix: str | None
    ) -> dict[str, Any] | None:
        """The chunks and positions that any process lacks; None if there are none."""
        vote = [encode_bits(numbers.bits(lacking)), wanted_prefix]

        def decide(votes: Sequence[Any]) -> dict[str, Any] | None:
            bits = encode_bits(union((text for text, _ in votes), numbers.count))
            prefixes = sorted({prefix for _, prefix in votes if prefix is not None})
            return {'chunks': bits, 'prefixes': prefixes} if bits or prefixes else None

        return at.reduce_on_leader(Phase.NEED, vote, decide)

    def _turn(
        self,
        numbers: ChunkNumbers,
        lacking: Sequence[str],
        wanted_prefix: str | None,
        missing: dict[str, Any],
        prefix: str | None,
    ) -> CoordinationRound:
        """Exchanges the missing files that the disks have, and fetches the others from the run's storage.

        Returns:
          The next round.
        """
        chunks = decode_bits(missing['chunks'], numbers.count)
        positions = [name for prefix in missing['prefixes'] for name in self._files.positions(prefix)]
        bits = numbers.bits(self._files.there) & chunks
        may_send = [*positions, *numbers.chosen(self._files.there, bits)]
        largest = max((self._files.entries[name][0] for name in may_send), default=0)
        shards = sorted({shards for _, shards in positions_in(self._files.there)})
        vote = [encode_bits(bits), positions, self._budget_bytes, largest, shards]
        at = self._coordinator.round(_ACTION)
        answer = at.reduce_on_leader(
            Phase.SEND,
            vote,
            lambda votes: _assigned(at, votes, chunks, numbers.count, has_run=self._run is not None),
        )
        if answer['lost']:
            raise CorruptCheckpointError(f'{self._files.url()}: {answer["lost"]}')
        index = at.processes.index
        sends = decode_bits(at.receive(f'sends/{index}').decode(), numbers.count)
        nowhere = decode_bits(answer['nowhere'], numbers.count)
        names = numbers.chosen(sorted(self._files.there), sends)
        names += [name for name, sender in answer['positions'].items() if sender == index]
        wanted = {
            *lacking,
            *(name for name in answer['positions'] if wanted_prefix is not None and name.startswith(wanted_prefix)),
        }
        plan = ExchangePlan(tuple(answer['senders']), *answer['memory'])
        following = self._coordinator.round(_ACTION)
        with following.failing_together(Phase.NEED):
            exchange(self._sent(names), wanted - self._files.there, self._receive, plan)
            from_run = numbers.chosen([name for name in lacking if name not in self._files.there], nowhere)
            if wanted_prefix is not None and prefix is not None:
                from_run += self._lacking_positions(prefix, answer['positions'], answer['shards'])
            self._fetch(from_run)
            self._files.write_metadata()
            self._files.record()
        return following

    def _sent(self, names: Sequence[str]) -> Iterator[File]:
        """The files that this process sends, without those that count as absent from now on."""
        for name in names:
            data = self._files.read(name)
            if data is not None:
                yield name, self._files.entries[name], data
                del data  # before the next one is read

    def _receive(self, file: File) -> None:
        name, entry, data = file
        if name not in self._files.there and entry_of(data) == entry:
            self._files.write(name, entry, data)
            self.provided.peers += array_bytes(name, entry[0])

    def _fetch(self, names: Sequence[str]) -> None:
        """Fetches files from the run's storage, which has the same save."""
        if self._run is None or not names:
            return
        fetch = self._fetch_from(self._run)
        try:
            fetch.run(names)
        finally:
            for name, entry in fetch.entries.items():
                self._files.note_brought(name, entry)
                self.provided.run += array_bytes(name, entry[0])

    def _fetch_from(self, run: Storage) -> Fetch:
        located = locate_step(run, self.part.step)
        checksums = read_contents(located).read_checksums() or FileChecksums()
        return Fetch(located, checksums, self.part.storage, step_dir(self.part.step), budget_bytes=self._budget_bytes)

    def _lacking_positions(self, prefix: str, sent: Collection[str], shards: Collection[int]) -> list[str]:
        """The files of the run's storage with the position of this process, if no disk had it.

        Args:
          prefix: of the names.
          sent: the positions that were to be sent.
          shards: the numbers of data shards whose positions are on the disks.

        Raises:
          CorruptCheckpointError: the step has such positions, and this one is nowhere.
        """
        if self._files.positions(prefix) or any(name.startswith(prefix) for name in sent):
            # If its sender has found it damaged, the next turn asks again.
            return []
        of_run = [] if self._run is None else self._fetch_from(self._run).positions()
        found = [name for name in of_run if name.startswith(prefix)]
        if not found:
            own = {of for _, of in positions_in([prefix])}
            if own & {*shards, *(of for _, of in positions_in(of_run))}:
                where = '' if self._run is None else f', and {self._run.url()} does not have it'
                raise CorruptCheckpointError(
                    f'{self._files.url()}: the position {prefix} of the data iterator is on no disk{where}.'
                )
            self._lacks_position = True
        return found

    def check_files(self) -> bool:
        """Reads all files of the part; those that are damaged are deleted, and those that cannot be read count as absent.

        Returns:
          Whether there are such files, also among those that this provider was to send.

        Raises:
          StorageError: as :meth:`PartFiles.read`.
        """
        for _ in self._sent(sorted(self._files.there)):
            pass
        return self._files.has_lost


def _assigned(at: CoordinationRound, votes: Sequence[Any], chunks: Any, count: int, *, has_run: bool) -> dict[str, Any]:
    """On process 0: assigns the sends. Each process receives only the bitmap of its own."""
    plan = plan_sends(chunks, [text for text, *_ in votes], count)
    for process, text in enumerate(plan.sends):
        at.share(f'sends/{process}', text.encode())
    positions: dict[str, int] = {}
    for process, vote in enumerate(votes):
        for name in vote[1]:
            positions.setdefault(name, process)
    missing = num_bits(plan.nowhere)
    lost = '' if has_run or not missing else f'{missing} of {count} chunks are on no disk.'
    senders = sorted({*positions.values(), *(process for process, text in enumerate(plan.sends) if text)})
    budget, largest = min(budget for _, _, budget, *_ in votes), max(largest for *_, largest, _ in votes)
    shards = sorted({of for *_, own in votes for of in own})
    nowhere = encode_bits(plan.nowhere)
    answer = {'nowhere': nowhere, 'positions': positions, 'lost': lost, 'shards': shards}
    return answer | {'senders': senders, 'memory': [budget, largest]}


def completed(at: CoordinationRound, part: Part | None, storage: Storage, step: int, sender: int, clock: Clock) -> Part:
    """The part that this process has of a step; every process calls it.

    Args:
      at: a round of all processes.
      part: what the disk of this process has. None makes a part without chunks, with the manifest of a process that has one.
      storage: the local directory.
      step: the step.
      sender: a process whose disk has a part.
      clock: unix seconds.
    """
    some_lack = at.reduce_on_leader(Phase.LOOK, part is None, any)
    if some_lack:
        with at.together(Phase.SEND):
            if at.processes.index == sender and part is not None:
                at.share('manifest', part.manifest)
                at.share('facts', part.facts)
            if part is None:
                part = begin_part(storage, step, at.receive('manifest'), at.receive('facts'), clock)
    if part is None:
        raise AssertionError('every process has a part now')
    return part


def begin_part(storage: Storage, step: int, manifest: bytes, facts: bytes, clock: Clock) -> Part:
    """Makes a part without chunks. Renames what the disk has of another save of the step, or a part that cannot be read."""
    if has_step(storage, step):
        aside = rename_damaged(storage, step, clock)
        _log.warning('t5ckpt: a part of step %d of another save, or a damaged one, was renamed to %s', step, aside)
    with Transaction(storage, step, clock) as work:
        storage.write(join(work.directory, COPIES), FileChecksums().encode())
        work.commit(manifest, facts, [])
    return Part.read(storage, step)
