"""Decides which local step the disks of a job cover, and which process sends which missing chunk. Pure.

For each step on its disk, a process reports the save, its time, and the index that the writing process had in it: 60 bytes. A
step is covered if the disks have all indices of one save, each with all of its files. Only if an index is missing, the processes
also report the chunks on their disks, as bitmaps; the chunks of a lost disk may be on the disks of replicas.

No process id is reported, so disks may come back in another order, or on other machines. Bitmaps are merged packed and one at a
time: those of 1,024 disks with millions of chunks take gigabytes as arrays.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from t5ckpt.core.text import some_of
from t5ckpt.format.chunk_grid import ChunkGrid, ceil_div

NOWHERE = 'no disk has a part of it that can be read'
"""The reason for a step whose save may have been killed before its commit."""
# This program writes no manifest with more chunks.
_MOST_CHUNKS = 2**31


@dataclasses.dataclass(frozen=True)
class DiskStep:
    """One local step of one disk.

    Attributes:
      save: the checksum of the facts, which is the same on all disks that took part in the save.
      index: of the process in the save; -1 if the disk does not have the files that were assigned to it.
      count: of the processes in the save.
      positions: the positions of data iterators on the disk, T5X's ``(SSS, NNN)`` of their names.
      num_positions: how many positions the save has, as far as the lists on the disk show; 0 if they were removed on purpose.
      created: the time of the save, in unix seconds; 0 if it is not recorded.
    """

    save: str
    index: int
    count: int
    positions: tuple[tuple[int, int], ...] = ()
    num_positions: int = 0
    created: float = 0.0

    def vote(self, step: int) -> list[Any]:
        """The facts in JSON's types, for :meth:`of`."""
        positions = [list(pair) for pair in self.positions]
        return [step, self.save, self.index, self.count, positions, self.num_positions, round(self.created, 3)]

    @classmethod
    def of(cls, vote: Sequence[Any]) -> tuple[int, DiskStep]:
        """The step and the facts of a vote."""
        step, save, index, count, positions, num_positions, created = vote
        return step, cls(save, index, count, tuple((shard, of) for shard, of in positions), num_positions, created)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A step that the disks together may have completely.

    Attributes:
      step, save: identify it.
      missing: the indices whose files are not all on one disk; if there are none, the disks have all chunks.
      positions: how many positions of data iterators are on no disk.
      created: the time of the save, in unix seconds; 0 if it is not recorded.
    """

    step: int
    save: str
    missing: tuple[int, ...]
    positions: int
    created: float


def candidates(disks: Iterable[Mapping[int, DiskStep]]) -> list[Candidate]:
    """The saves of which any disk has a part, the newest step first.

    Of one step, the save with the fewest missing indices is first, and of several such, the newest one.
    """
    by_save: dict[tuple[int, str], list[DiskStep]] = {}
    for disk in disks:
        for step, disk_step in disk.items():
            by_save.setdefault((step, disk_step.save), []).append(disk_step)
    made = [_candidate(step, save, parts) for (step, save), parts in by_save.items()]
    return sorted(made, key=lambda each: (-each.step, len(each.missing), -each.created, each.save))


def _candidate(step: int, save: str, parts: Sequence[DiskStep]) -> Candidate:
    indices = {part.index for part in parts}
    missing = tuple(index for index in range(max(part.count for part in parts)) if index not in indices)
    num_positions = max(part.num_positions for part in parts)
    shards = {shard for part in parts for shard, _ in part.positions}
    if num_positions == parts[0].count:
        # One for each process, except those without an iterator: the disk has all files of their lists.
        shards |= {part.index for part in parts if part.index >= 0}
    return Candidate(step, save, missing, num_positions - len(shards & set(range(num_positions))), parts[0].created)


def interrupted_uploads(records: Sequence[Sequence[Any]], parts: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Decides which steps that wait are uploaded: those of which the disks have all files.

    The job may have had another number of processes. For the newest step, one disk may be lost, whose files may be on those of
    replicas.

    Args:
      records: of each process, (step, whether the upload may replace a step of the run) for each record on its disk.
      parts: of each process, the votes on the steps of its disk, see :meth:`DiskStep.vote`.

    Returns:
      In JSON's types: ``waiting``, the steps to upload; ``dropped``, the others, each with the reason; ``incomplete``, for the
      newest step [its number, its save, the index of the lost disk, a process that has a part], with the index -1 if no disk is
      lost; ``overwriting``, the steps whose upload may replace one of the run.
    """
    flags = [(step, overwrites) for each in records for step, overwrites in each]
    recorded = {step for step, _ in flags}
    on_disks = [dict(DiskStep.of(vote) for vote in votes) for votes in parts]
    disks = [{step: part for step, part in disk.items() if step in recorded} for disk in on_disks]
    saves = {step: part.save for step, part in disks[0].items()}
    all_candidates = [candidate for candidate in candidates(disks) if candidate.save]
    waiting = {
        candidate.step
        for candidate in all_candidates
        if not candidate.missing and candidate.save == saves.get(candidate.step)
    }
    incomplete: list[Any] = []
    for candidate in all_candidates[:1]:
        if candidate.step not in waiting and len(candidate.missing) < 2:
            holders = [disk.get(candidate.step) for disk in disks]
            sender = next(
                process for process, part in enumerate(holders) if part is not None and part.save == candidate.save
            )
            incomplete.append([candidate.step, candidate.save, *(candidate.missing or [-1]), sender])
    dropped = sorted(recorded - waiting - {step for step, *_ in incomplete})
    return {
        'waiting': sorted(waiting),
        'dropped': [[step, _why_dropped(step, all_candidates)] for step in dropped],
        'incomplete': incomplete,
        'overwriting': sorted({step for step, overwrites in flags if overwrites}),
    }


def _why_dropped(step: int, known: Sequence[Candidate]) -> str:
    """The reason why the upload of a step is not resumed, from the candidates of all steps."""
    found = next((each for each in known if each.step == step), None)
    if found is None:
        return NOWHERE
    if found.missing:
        lost = some_of([*map(str, found.missing)], 8)
        processes = 'process' if len(found.missing) == 1 else 'processes'
        return f'the disks with the files of {processes} {lost} of the save are lost'
    return f'process 0 has no part of this save, and step {known[0].step} is newer'


class ChunkNumbers:
    """Numbers all chunks of a step in one order that follows from its manifest: arrays by location, grids in C order."""

    def __init__(self, grids: Mapping[str, ChunkGrid]):
        """Takes the grid of each array directory."""
        self._grids = dict(sorted(grids.items()))
        self._first: dict[str, int] = {}
        self.count = 0
        for location, grid in self._grids.items():
            self._first[location] = self.count
            self.count += grid.num_chunks

    @property
    def locations(self) -> list[str]:
        """The directories of the arrays."""
        return list(self._grids)

    def bits(self, names: Iterable[str]) -> np.ndarray:
        """The packed bitmap of some files; those that are not chunks are left out."""
        bits = np.zeros(self.count, bool)
        numbers = [number for name in names if (number := self._number(name)) is not None]
        bits[numbers] = True
        return np.packbits(bits)

    def chosen(self, names: Iterable[str], bits: np.ndarray) -> list[str]:
        """Those of some files whose chunks are in a packed bitmap."""
        if not bits.any():
            return []
        numbered = ((name, self._number(name)) for name in names)
        return [name for name, number in numbered if number is not None and bits[number >> 3] >> (7 - (number & 7)) & 1]

    def _number(self, name: str) -> int | None:
        location, _, key = name.rpartition('/')
        grid = self._grids.get(location)
        index = None if grid is None else grid.index(key)
        if grid is None or index is None:
            return None
        number = 0
        for axis_index, size in zip(index, grid.grid_shape, strict=True):
            if axis_index >= size:
                return None
            number = number * size + axis_index
        return self._first[location] + number


def encode_bits(bits: np.ndarray) -> str:
    """A packed bitmap as text; '' for one without a bit. The chunks of contiguous shards are mostly runs, so zlib shortens it."""
    return base64.b85encode(zlib.compress(bits.tobytes(), 6)).decode() if bits.any() else ''


def decode_bits(text: str, count: int) -> np.ndarray:
    """The packed bitmap of ``count`` chunks.

    Raises:
      ValueError: the text is not of this form.
    """
    if not 0 <= count < _MOST_CHUNKS:
        raise ValueError(f'{count} chunks')
    nbytes = (count + 7) // 8
    if not text:
        return np.zeros(nbytes, np.uint8)
    data = zlib.decompressobj().decompress(base64.b85decode(text), nbytes + 1)
    if len(data) != nbytes:
        raise ValueError(f'{len(data)} of {nbytes} bytes')
    return np.frombuffer(data, np.uint8)


def num_bits(bits: np.ndarray) -> int:
    """The number of chunks in a packed bitmap."""
    return int(np.bitwise_count(bits).sum())


def union(votes: Iterable[str], count: int) -> np.ndarray:
    """The union of encoded bitmaps."""
    merged = np.zeros((count + 7) // 8, np.uint8)
    for vote in votes:
        if vote:
            merged |= decode_bits(vote, count)
    return merged


@dataclasses.dataclass(frozen=True)
class SendPlan:
    """The assignment of chunks to sending processes; all processes that lack a chunk receive it at once.

    Attributes:
      sends: for each process, the encoded bitmap of the chunks that it sends.
      nowhere: the packed bitmap of the chunks that no disk has.
    """

    sends: tuple[str, ...]
    nowhere: np.ndarray


def plan_sends(lacking: np.ndarray, votes: Sequence[str], count: int) -> SendPlan:
    """Assigns each missing chunk to a process that has it.

    Every process first takes up to its equal part, and then the processes take the remaining chunks, in order.

    Args:
      lacking: the packed bitmap of the chunks that any process lacks.
      votes: for each process, the encoded bitmap of those that it has.
      count: of all chunks.
    """
    left = lacking.copy()
    part = ceil_div(num_bits(lacking), max(1, sum(bool(vote) for vote in votes)))
    sends = [np.zeros(0, np.uint8)] * len(votes)
    # The processes that have only replicated arrays of a lost disk all vote alike.
    decoded = functools.lru_cache(maxsize=1)(lambda vote: decode_bits(vote, count))
    for process, vote in enumerate(votes):
        to_send = decoded(vote) & left
        if to_send.any():
            to_send = _first_bits(to_send, part)
            left &= ~to_send
            sends[process] = _shrunk(to_send)
    for process, vote in enumerate(votes):
        if vote and left.any():
            to_send = decoded(vote) & left
            if to_send.any():
                left &= ~to_send
                sends[process] = _shrunk(to_send | _grown(sends[process], left.size))
    return SendPlan(tuple(encode_bits(_grown(bits, left.size)) if bits.size else '' for bits in sends), left)


def _first_bits(bits: np.ndarray, count: int) -> np.ndarray:
    """The bitmap with only its first ``count`` bits."""
    if num_bits(bits) <= count:
        return bits
    totals = np.cumsum(np.bitwise_count(bits), dtype=np.int64)
    last_byte = int(np.searchsorted(totals, count, side='right'))
    kept = bits.copy()
    kept[last_byte:] = 0
    rest = count - (int(totals[last_byte - 1]) if last_byte else 0)
    ones = np.flatnonzero(np.unpackbits(bits[last_byte : last_byte + 1]))[:rest]
    last = np.zeros(8, np.uint8)
    last[ones] = 1
    kept[last_byte] = np.packbits(last)[0]
    return kept


def _shrunk(bits: np.ndarray) -> np.ndarray:
    """The bitmap compressed to bytes, since there is one for each process."""
    return np.frombuffer(zlib.compress(bits.tobytes(), 1), np.uint8)


def _grown(data: np.ndarray, size: int) -> np.ndarray:
    return np.frombuffer(zlib.decompress(data.tobytes()), np.uint8) if data.size else np.zeros(size, np.uint8)
