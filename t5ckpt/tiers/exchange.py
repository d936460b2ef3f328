"""Brings boxes of arrays from the disks that have them to the processes that need them, with JAX's collectives.

A step on local disks was saved by as many processes as restore it. The disk that process p of the saved job wrote, the *role* p,
has the boxes that process p needs now. The disk may be at another process, lost, or damaged; another role that has the same box
stands in for it.

All processes compute the same moves. They exchange the bytes of several leaves at a time, in rows: each process sends at most one
row at once, and receives at most one. A row is spread over the devices of its process, so that all their links are used, and has
unsigned words, whose bits no device changes. Pairs of processes that exchange rows at once stay the same, since each set of pairs
is a program to compile.

Notes: a quarter of the byte budget is for the boxes that a process sends and receives, another one for rows; the first exchange
of a process takes the rest. The boxes that a process has of a leaf that it receives are read for one leaf at a time. The bytes
between two processes are a stream, in which boxes begin at multiples of 64 bytes: chunks are decoded into it, and the CPU backend
uses it without a copy.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from t5ckpt.core.byte_budget import ByteBudget
from t5ckpt.core.leaf_path import Path
from t5ckpt.core.protocols import Progress
from t5ckpt.format.chunk_grid import Box
from t5ckpt.planning.leaf_reads import StoredRead
from t5ckpt.reading.aligned_memory import ALIGNMENT, aligned_empty
from t5ckpt.reading.array_reader import ArrayReader
from t5ckpt.reading.chunks import run_tasks
from t5ckpt.restore.read_arrays import Buffers, check_host_memory, leaf_of, meter_of, read_arrays

_LEAST_ROW_BYTES, _MOST_ROW_BYTES = 2**16, 64 * 2**20
# A quarter of the budget is for five rows, which were measured: on the host and on the devices, some of them of the round before.
_ROWS_IN_BUDGET = 20
_WORD = np.dtype(np.uint32)

_Exchange: TypeAlias = Callable[[Sequence['Move'], np.ndarray, np.ndarray], None]
"""Called with the moves of all processes: sends a stream, with zeros after its end, and receives another."""


class Move(NamedTuple):
    """A box of a leaf that a process sends to another.

    A named tuple, since a large job has millions, and a frozen dataclass takes three times as long to make.

    Attributes:
      leaf: the index of its read.
      box: in the coordinates of the stored array.
      source, target: the processes.
      nbytes: of the box in the dtype of the read.
    """

    leaf: int
    box: Box
    source: int
    target: int
    nbytes: int

    @property
    def space(self) -> int:
        """The bytes that it takes in a stream."""
        return self.nbytes + -self.nbytes % ALIGNMENT


def plan_moves(
    reads: Sequence[StoredRead], roles: Mapping[int, int], lacks: Mapping[int, Collection[str]], count: int
) -> tuple[list[Move], list[str]]:
    """Plans which process sends which boxes to which; the same in all processes.

    Args:
      reads: of the restore, in the same order in all processes.
      roles: by role, the process that has its disk; without lost disks.
      lacks: by role, the locations of the arrays that its disk does not have intact.
      count: of the processes.

    Returns:
      The moves in the order of the reads, and the names of the leaves of which a box is on no disk.
    """
    moves, missing = list[Move](), set[str]()
    role_at = {process: role for role, process in roles.items()}
    sent: collections.Counter[int] = collections.Counter()
    # By target, the roles that send to it: few pairs of processes are few programs.
    chosen: dict[int, set[int]] = collections.defaultdict(set)
    # Most leaves share their shape and sharding with others.
    known: dict[Any, list[tuple[int, Box, set[int]]]] = {}
    for leaf, read in enumerate(reads):
        lacking = frozenset(role for role, locations in lacks.items() if read.leaf.location in locations)
        key = read.template, read.leaf.shape, lacking
        if key not in known:
            boxes = read.source_boxes_by_process(count)
            holders: dict[Box, set[int]] = collections.defaultdict(set)
            for role in roles.keys() - lacking:
                for box in boxes[role]:
                    holders[box].add(role)
            known[key] = [
                (process, box, holders[box])
                for process in range(count)
                for box in boxes[process]
                if role_at.get(process) not in holders[box]
            ]
        for target, box, having in known[key]:
            if not having:
                missing.add(read.name)
                continue
            role = target
            if target not in having:
                role = min(chosen[target] & having or having, key=lambda role: (sent[role], role))
            chosen[target].add(role)
            nbytes = box.size * read.dtype.itemsize
            sent[role] += nbytes
            moves.append(Move(leaf, box, roles[role], target, nbytes))
    return moves, sorted(missing)


def read_with_moves(
    reader: ArrayReader,
    reads: Sequence[StoredRead],
    moves: Sequence[Move],
    index: int,
    budget: ByteBudget,
    progress: Progress | None = None,
) -> dict[Path, Any]:
    """Reads leaves from the disk of this process and from other processes, all of which call it in ``explicit_transfers``.

    If a process fails, the others may return zeros in place of values: the caller votes before it uses them.

    Args:
      reader: of the disk of this process.
      reads: see :func:`plan_moves`.
      moves: from it.
      index: of this process.
      budget: bounds the host memory of leaves until they are on their devices.
      progress: called with (bytes done, bytes in total).

    Returns:
      The values as :func:`read_arrays` returns them.

    Raises:
      Exception: of a read; after the collectives, which all processes enter.
    """
    meter, values, errors = meter_of(reads, progress), dict[Path, Any](), list[Exception]()
    received = {move.leaf for move in moves if move.target == index}
    with _deferred(errors):
        check_host_memory([reads[leaf] for leaf in received])
        values |= read_arrays(reader, [read for leaf, read in enumerate(reads) if leaf not in received], budget, meter)
    exchanges = _exchanges(moves, budget.limit) if moves else []
    for window in _windows(moves, budget.limit // 8):
        held: dict[int, Buffers] = collections.defaultdict(dict)
        for pairs, exchange in exchanges:
            moved = [move for move in window if pairs.get(move.source) == move.target]
            sent = taken = np.empty(0, np.uint8)
            with _deferred(errors):
                taken, boxes = _stream(reads, [move for move in moved if move.target == index])
                for leaf, buffers in boxes.items():
                    held[leaf] |= buffers
                data, boxes = _stream(reads, [move for move in moved if move.source == index])
                for leaf, buffers in boxes.items():
                    _fill(reader, reads[leaf], buffers)
                sent = data
            exchange(moved, sent, taken)
        with _deferred(errors):
            for leaf in held if not errors else ():
                read = reads[leaf]
                values[read.path] = _assembled(reader, read, held[leaf])
                meter.add(read.leaf.nbytes)
    if errors:
        raise errors[0]
    return values


@contextlib.contextmanager
def _deferred(errors: list[Exception]) -> Generator[None]:
    """Notes the error of a block, to be raised when the collectives are over."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised by the caller
        errors.append(error)


def _windows(moves: Sequence[Move], limit: int) -> Iterator[list[Move]]:
    """The moves of consecutive leaves of which no process receives more than ``limit`` bytes, or of one leaf."""
    window: list[Move] = []
    most = 0
    for _, group in itertools.groupby(moves, operator.attrgetter('leaf')):
        of_leaf = list(group)
        nbytes: collections.Counter[int] = collections.Counter()
        for move in of_leaf:
            nbytes[move.target] += move.space
        most += max(nbytes.values())
        if window and most > limit:
            yield window
            window, most = [], max(nbytes.values())
        window += of_leaf
    yield window


def _stream(reads: Sequence[StoredRead], moves: Sequence[Move]) -> tuple[np.ndarray, dict[int, Buffers]]:
    """The memory of a stream, and by leaf its parts as buffers of boxes."""
    data = aligned_empty([sum(move.space for move in moves)], np.dtype(np.uint8))
    buffers: dict[int, Buffers] = collections.defaultdict(dict)
    start = 0
    for move in moves:
        part = data[start : start + move.nbytes].view(reads[move.leaf].dtype)
        buffers[move.leaf][move.box] = part.reshape(move.box.shape)
        start += move.space
    return data, buffers


def _fill(reader: ArrayReader, read: StoredRead, buffers: Buffers) -> None:
    run_tasks(reader.open(read.leaf, read.name).tasks(buffers), reader.files.threads)


def _assembled(reader: ArrayReader, read: StoredRead, held: Buffers) -> Any:
    """The value of a leaf of which this process has received some boxes."""
    own = {box: aligned_empty(box.shape, read.dtype) for box in read.source_boxes if box not in held}
    if own:
        _fill(reader, read, own)
    if not read.template.device:
        # A view would keep the memory of other leaves.
        held = {box: values.copy() for box, values in held.items()}
    leaf = leaf_of(read, held | own)
    if not read.uses_host_buffer:
        leaf.block_until_ready()
    return leaf


def _exchanges(moves: Sequence[Move], limit: int) -> list[tuple[dict[int, int], _Exchange]]:
    """Pairs of processes that exchange rows at once, each target by its source, and the function that exchanges streams."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    totals: collections.Counter[tuple[int, int]] = collections.Counter()
    for move in moves:
        totals[move.source, move.target] += move.space
    devices = [jax.local_devices(process_index=process) for process in range(jax.process_count())]
    each = min(map(len, devices))
    mesh = Mesh(np.array([of_process[:each] for of_process in devices]), ('process', 'device'))
    spec = PartitionSpec(*mesh.axis_names)
    wanted = min(_MOST_ROW_BYTES, limit // _ROWS_IN_BUDGET, 2 * max(totals.values()))
    words = max(_LEAST_ROW_BYTES, wanted) // (_WORD.itemsize * each)

    def exchange(program: Any, moved: Sequence[Move], sent: np.ndarray, taken: np.ndarray) -> None:
        lengths: collections.Counter[int] = collections.Counter()
        for move in moved:
            lengths[move.source] += move.space
        start = 0
        while start < max(lengths.values(), default=0):
            # A power of two, so that few sizes of rows are compiled.
            row = np.zeros((1, each, 1 << words.bit_length() - 1), _WORD)
            part = sent[start : start + row.nbytes]
            row.reshape(-1).view(np.uint8)[: part.size] = part
            # The caller may have set another mesh.
            with jax.set_mesh(mesh):
                rows = program(jax.make_array_from_process_local_data(NamedSharding(mesh, spec), row))
            for shard in sorted(rows.addressable_shards, key=lambda shard: shard.index[1].start or 0):
                values = np.asarray(shard.data).reshape(-1).view(np.uint8)
                part = taken[start : start + values.size]
                part[...] = values[: part.size]
                start += values.size

    def exchange_of(pairs: dict[int, int]) -> _Exchange:
        permute = functools.partial(jax.lax.ppermute, axis_name='process', perm=[*pairs.items()])
        program = jax.jit(jax.shard_map(permute, mesh=mesh, in_specs=spec, out_specs=spec))
        return functools.partial(exchange, program)

    return [(pairs, exchange_of(pairs)) for pairs in _matchings(totals)]


def _matchings(totals: collections.Counter[tuple[int, int]]) -> list[dict[int, int]]:
    """Sets of pairs in each of which a process sends at most once and receives at most once, similar totals together."""
    matchings: list[dict[int, int]] = []
    for (source, target), _ in totals.most_common():
        free = [pairs for pairs in matchings if source not in pairs and target not in pairs.values()]
        if not free:
            free = [{}]
            matchings += free
        free[0][source] = target
    return matchings
