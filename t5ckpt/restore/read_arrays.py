"""Reads the leaves of a plan: the stored ones into the buffers of device shards, cast while they are read.

Buffers begin at a multiple of 64 bytes, so the CPU backend uses them without a copy. Each distinct shard box is read once
per process, however many devices hold it, and each chunk once, however many boxes overlap it. Leaves and chunks are in
flight together within one byte budget; the bytes of a leaf are released when its transfer to the devices has ended.

Leaves are restored in the order of the plan: while the main thread puts one on its devices, other threads read the next.
"""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from t5ckpt.core.byte_budget import ByteBudget, bytes_of_gb
from t5ckpt.core.leaf_path import Path
from t5ckpt.core.protocols import Progress
from t5ckpt.core.thread_pool import Future, Pool
from t5ckpt.format.array_spec import StoredArray
from t5ckpt.format.chunk_grid import Box
from t5ckpt.lazy import LazyArray, LazyThreadPoolArray
from t5ckpt.planning.leaf_reads import InlineRead, StoredRead, clipped, resized
from t5ckpt.planning.restore_plan import RestorePlan
from t5ckpt.progress import Meter
from t5ckpt.reading.aligned_memory import aligned_empty
from t5ckpt.reading.array_reader import ArrayReader, lazy_leaf
from t5ckpt.reading.chunks import OpenArray
from t5ckpt.reading.size_limits import check_memory
from t5ckpt.restore.all_gather import split_replicated
from t5ckpt.restore.make_leaf import make_inline_leaf, make_leaf
from t5ckpt.restore.request import RestoreRequest
from t5ckpt.tree.leaf_table import LeafTable

_log = logging.getLogger('t5ckpt')
# Of a tensor file, of which parts are read.
_LARGE_CHUNK = 64 * 2**20
Buffers: TypeAlias = dict[Box, np.ndarray]


def read_leaves(
    reader: ArrayReader, plan: RestorePlan, request: RestoreRequest
) -> tuple[LeafTable, dict[Path, Any], int]:
    """Reads the leaves of a plan; returns their values, the final shardings of those to be gathered, and the bytes read."""
    values: LeafTable = {read.path: make_inline_leaf(read) for read in plan.inline}
    reads, final_shardings = split_replicated(
        plan.stored, request.round.processes.count if request.reading.share_replicated else 1
    )
    budget = ByteBudget(bytes_of_gb(request.reading.restore_concurrent_gb))
    if request.local_part is None:
        values |= read_arrays(reader, reads, budget, meter_of(reads, request.progress))
    else:
        values |= request.local_part.read(request, reader, reads, budget)
    _log.debug('t5ckpt: at most %d bytes of arrays were in flight at once', budget.peak)
    stored = sum(map(_bytes_read, reads))
    request.note_read(stored)
    return values, final_shardings, stored + sum(np.asarray(read.value).nbytes for read in plan.inline)


def lazy_leaves(reader: ArrayReader, plan: RestorePlan) -> tuple[LeafTable, dict[Path, Any], None]:
    """The leaves of a plan as LazyArrays, except for Python numbers; returned as by :func:`read_leaves`."""
    values: LeafTable = {
        read.path: make_inline_leaf(read) if read.template.kind == 'scalar' else _lazy(reader, read, read.value)
        for read in plan.inline
    }
    return values | {read.path: _lazy(reader, read, read.leaf) for read in plan.stored}, {}, None


def _lazy(reader: ArrayReader, read: StoredRead | InlineRead, leaf: Any) -> LazyArray:
    lazy = lazy_leaf(reader, leaf, read.name, read.dtype)
    shape = read.template.shape
    return LazyThreadPoolArray(shape, read.dtype, lambda: resized(lazy.get(), shape)) if read.resizes else lazy


def read_arrays(
    reader: ArrayReader, reads: Sequence[StoredRead], budget: ByteBudget, meter: Meter | None = None
) -> dict[Path, Any]:
    """Reads stored leaves and puts them on the devices of their templates.

    Args:
      reader: of the checkpoint.
      reads: from ``plan_restore``.
      budget: bounds the host bytes of leaves from the start of their read to the end of their transfer.
      meter: counts the bytes of leaves that are done.

    Returns:
      The values by path: jax.Array, numpy array, or Python number, depending on the template of each leaf.
    """
    meter = meter_of(reads) if meter is None else meter
    values: dict[Path, Any] = {}
    for read in reads:
        hosts = _mapped(reader, read)
        if hosts is not None:
            values[read.path] = make_leaf(hosts, read.template, read.template.shape, read.dtype, read.name)
    rest = [read for read in reads if read.path not in values]
    meter.add(sum(read.leaf.nbytes for read in reads if read.path in values))
    check_host_memory(rest)
    if rest:
        # A thread keeps memory of a chunk, and of its encoded bytes.
        at_once = budget.limit * len(rest) // max(1, 2 * sum(_chunk_bytes(read.leaf) for read in rest))
        with Pool(min(reader.files.threads, max(2, at_once))) as pool:
            values |= _RestoreScheduler(reader, budget, meter, pool).run(rest)
    return values


def meter_of(reads: Sequence[StoredRead], progress: Progress | None = None) -> Meter:
    """Counts the bytes of stored leaves; ``progress`` is called with (bytes done, bytes in total)."""
    return Meter(progress, sum(read.leaf.nbytes for read in reads))


def check_host_memory(reads: Sequence[StoredRead]) -> None:
    """Checks that the leaves that stay in host memory fit there; raises as ``check_memory``."""
    in_host = [read for read in reads if read.uses_host_buffer]
    if in_host:
        more = f' and {len(in_host) - 1} more leaves' if len(in_host) > 1 else ''
        check_memory(sum(map(_bytes_wanted, in_host)), f'{in_host[0].name}{more}')


def leaf_of(read: StoredRead, buffers: Buffers) -> Any:
    """The value of a leaf from the buffers of its ``source_boxes``, which must not be written to afterwards."""
    hosts: dict[Box, np.ndarray] = {}
    for box in read.boxes:
        part = clipped(box, read.leaf.shape)
        if part == box:
            hosts[box] = buffers[box]
            continue
        hosts[box] = aligned_empty(box.shape, read.dtype)
        hosts[box][...] = 0
        if part is not None:
            hosts[box][part.relative_to(box).slices] = buffers[part]
    return make_leaf(hosts, read.template, read.template.shape, read.dtype, read.name)


def _mapped(reader: ArrayReader, read: StoredRead) -> dict[Box, np.ndarray] | None:
    """The mapped buffers of a leaf, if they have the right dtype and can be used without a copy."""
    if read.resizes or read.dtype != read.leaf.dtype or not read.uses_host_buffer:
        return None
    return reader.map_boxes(read.leaf, read.name, read.boxes)


class _RestoreScheduler:
    """Schedules the leaves from the start of their read to the end of their transfer.

    The pool, and the budget of one restore, are given up together if a leaf fails.
    """

    def __init__(self, reader: ArrayReader, budget: ByteBudget, meter: Meter, pool: Pool):
        self._reader = reader
        self._budget = budget
        self._meter = meter
        self._pool = pool
        self._reading: collections.deque[tuple[StoredRead, Buffers, list[Future[None]]]] = collections.deque()
        self._moving: collections.deque[tuple[StoredRead, Any]] = collections.deque()
        self._values: dict[Path, Any] = {}

    def run(self, reads: Sequence[StoredRead]) -> dict[Path, Any]:
        """Reads all leaves and puts them on devices."""
        for read, opening in self._opening(reads):
            opened = opening.result()
            while not self._budget.acquire(_bytes_in_flight(read), 0):
                self._continue()
            # In this thread, since memory that it has freed is used again.
            buffers = {box: aligned_empty(box.shape, read.dtype) for box in read.source_boxes}
            self._reading.append((read, buffers, [self._pool.submit(task) for task in opened.tasks(buffers)]))
        while self._reading or self._moving:
            self._continue()
        return self._values

    def _opening(self, reads: Iterable[StoredRead]) -> Iterator[tuple[StoredRead, Future[OpenArray]]]:
        """The leaves in their order; the next ones are opened while one is read."""
        waiting: collections.deque[tuple[StoredRead, Future[OpenArray]]] = collections.deque()
        for read in reads:
            waiting.append((read, self._pool.submit(self._reader.open, read.leaf, read.name)))
            if len(waiting) > self._reader.files.threads:
                yield waiting.popleft()
        yield from waiting

    def _continue(self) -> None:
        """Waits for a leaf: for its transfer to have ended, or else for its buffers."""
        if self._moving:
            read, leaf = self._moving.popleft()
            leaf.block_until_ready()
            self._budget.release(_bytes_in_flight(read))
            return
        read, buffers, tasks = self._reading.popleft()
        for task in tasks:
            task.result()
        leaf = leaf_of(read, buffers)
        self._values[read.path] = leaf
        self._meter.add(read.leaf.nbytes)
        if read.uses_host_buffer:
            self._budget.release(_bytes_in_flight(read))
        else:
            self._moving.append((read, leaf))


def _bytes_wanted(read: StoredRead) -> int:
    """The bytes of a leaf that this process restores."""
    return sum(box.size for box in read.boxes) * read.dtype.itemsize


def _bytes_read(read: StoredRead) -> int:
    """The boxes of a leaf that this process reads."""
    return sum(box.size for box in read.source_boxes) * read.leaf.disk_dtype.itemsize


def _chunk_bytes(leaf: StoredArray) -> int:
    shape = leaf.metadata.get('chunks') or leaf.shape
    return min(_LARGE_CHUNK, math.prod(shape) * leaf.disk_dtype.itemsize)


def _bytes_in_flight(read: StoredRead) -> int:
    size = sum(box.size for box in read.source_boxes) * max(read.leaf.disk_dtype.itemsize, read.dtype.itemsize)
    return size + _bytes_wanted(read) if read.resizes else size
