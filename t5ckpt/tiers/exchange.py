"""Sends files between the processes of a job with a device collective, at a restore.

Each process puts the files that it sends one after the other into rows of bytes, and one all-gather per row brings the rows of
all processes to all. The rows say whether more follow, so all processes enter the same number of collectives. A process whose
disk fails goes on with rows that are empty, and raises its error afterwards.

Notes: all bytes pass through every process. Half of the byte budget of the restore is for the rows. Memory has up to nine copies
of them with those that the allocator keeps, and two without, which have at most 256 MiB. The other half is for files: the one
that this process sends, and the one that it receives from each sender. Therefore only as many processes send at once as the
budget has room for files. A row has 64 KiB to 1 MiB, since glibc keeps larger blocks that are freed, and one process always
sends.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, cast

import numpy as np

from t5ckpt.format.file_checksums import FileEntry

# The rows of all processes are on the devices and on the host; the own row is filled and sent in addition.
_BYTES_OF_ROWS, _COPIES_OF_ROWS, _OWN_ROWS = 256 * 2**20, 2, 2
# Of rows up to 1 MiB, glibc keeps the freed copies in the arenas of XLA's threads: in all, 5 to 8 of each row were measured.
_KEPT_COPIES = 9
_MOST_BYTES, _LEAST_BYTES = 2**20, 2**16
# Of a row: the bytes that it has, and whether more rows follow.
_HEAD = 16
# Before each file: the length of its description.
_LENGTH = 8

File = tuple[str, FileEntry, bytes]
"""The name of a file, its entry, and its bytes."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """The facts about the memory of an exchange that all processes know.

    Attributes:
      budget_bytes: for rows and files.
      largest_bytes: the size of the largest file that is sent.
    """

    budget_bytes: int
    largest_bytes: int

    def row_bytes(self, processes: int) -> int:
        """The size of a row."""
        of_all = _BYTES_OF_ROWS // (_COPIES_OF_ROWS * processes + _OWN_ROWS)
        of_budget = self.budget_bytes // 2 // (_KEPT_COPIES * processes + _OWN_ROWS)
        return max(_LEAST_BYTES, min(_MOST_BYTES, of_all, of_budget))

    def senders(self) -> int:
        """The number of processes that send at once; a process may send a file while it receives one from each of them."""
        return max(1, self.budget_bytes // 2 // max(1, self.largest_bytes) - 1)


def exchange(files: Iterator[File], wanted: Collection[str], receive: Callable[[File], None], memory: Memory) -> None:
    """Sends files to all processes; every process calls it.

    Args:
      files: the files that this process sends.
      wanted: the names of the files that this process takes.
      receive: called with each of them.
      memory: the same in all processes.

    Raises:
      Exception: an error of ``files`` or ``receive``, after all processes have sent everything.
    """
    gather = _Gather(memory)
    stream, errors = _Stream(files), list[Exception]()
    parsers = [_Parser(wanted) for _ in range(gather.count)]
    left = list(range(gather.count))
    while left:
        row, sending = np.zeros((1, gather.row_bytes), np.uint8), left[: memory.senders()]
        used, follows = 0, gather.index in left
        if gather.index in sending:
            used, follows = _tried(functools.partial(stream.fill, memoryview(row[0])[_HEAD:]), (0, False), errors)
        row[0, :_HEAD] = np.frombuffer(np.array([used, follows], np.int64).tobytes(), np.uint8)
        for process, (parser, found) in enumerate(zip(parsers, gather(row), strict=True)):
            used, follows = np.frombuffer(found[:_HEAD].tobytes(), np.int64)
            if not follows and process in left:
                left.remove(process)
            for file in parser.feed(memoryview(found)[_HEAD : _HEAD + int(used)]):
                _tried(functools.partial(receive, file), None, errors)
                del file
            # It keeps the rows of all processes.
            del found
    if errors:
        raise errors[0]


def _tried(action: Callable[[], Any], otherwise: Any, errors: list[Exception]) -> Any:
    """The result of an action; ``otherwise`` if it, or an earlier one, failed."""
    if errors:
        return otherwise
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - raised when the collectives are over
        errors.append(error)
        return otherwise


class _Gather:
    """All-gathers one row of bytes of each process, over one device of each."""

    def __init__(self, memory: Memory) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        first: dict[int, Any] = {}
        for device in jax.devices():
            first.setdefault(device.process_index, device)
        self.count, self.index = len(first), sorted(first).index(jax.process_index())
        self.row_bytes = memory.row_bytes(self.count)
        mesh = Mesh(np.array([first[process] for process in sorted(first)]), ('process',))
        self._sharding = NamedSharding(mesh, PartitionSpec('process'))
        self._collect = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._make = jax.make_array_from_process_local_data

    def __call__(self, row: np.ndarray) -> np.ndarray:
        """The rows of all processes, in their order."""
        rows = self._make(self._sharding, row, (self.count, self.row_bytes))
        return np.asarray(self._collect(rows).addressable_data(0))


class _Stream:
    """Files as one sequence of bytes, of which at most one file is in memory."""

    def __init__(self, files: Iterator[File]):
        self._files = files
        self._left = deque[memoryview]()
        self._ended = False

    def fill(self, row: memoryview) -> tuple[int, bool]:
        """Fills a row; returns the number of bytes, and whether more may follow."""
        used = 0
        while used < len(row) and self._has_bytes():
            part = self._left[0][: len(row) - used]
            row[used : used + len(part)] = part
            used += len(part)
            self._left[0] = self._left[0][len(part) :]
        return used, bool(self._left) or not self._ended

    def _has_bytes(self) -> bool:
        """Whether there are bytes to send; reads the next file if the previous one is sent."""
        while self._left and not self._left[0]:
            self._left.popleft()
        if not self._left and not self._ended:
            file = next(self._files, None)
            self._ended = file is None
            if file is not None:
                name, entry, data = file
                head = json.dumps([name, *entry]).encode()
                self._left.extend([memoryview(len(head).to_bytes(_LENGTH) + head), memoryview(data)])
        return bool(self._left)


class _Parser:
    """The files of one sender; keeps the bytes of those that are wanted."""

    def __init__(self, wanted: Collection[str]):
        self._wanted = wanted
        self._head = bytearray()
        self._file: tuple[str, FileEntry] | None = None
        # Of the file: its bytes so far if it is wanted, and how many follow.
        self._data: bytearray | None = None
        self._left = 0

    def feed(self, data: memoryview) -> Iterator[File]:
        """Takes the next bytes; yields the wanted files that they complete."""
        while data:
            if self._file is None:
                data = self._read_head(data)
            else:
                part = data[: self._left]
                if self._data is not None:
                    start = len(self._data) - self._left
                    self._data[start : start + len(part)] = part
                self._left -= len(part)
                data = data[len(part) :]
            if self._file is not None and self._left == 0:
                (name, entry), complete = self._file, self._data
                self._file = self._data = None
                if complete is not None:
                    # A copy would take as much memory again.
                    yield name, entry, cast('bytes', complete)
                del complete

    def _read_head(self, data: memoryview) -> memoryview:
        """Reads the description of the next file, as far as it has arrived; returns the bytes after it."""
        end = _LENGTH if len(self._head) < _LENGTH else _LENGTH + int.from_bytes(self._head[:_LENGTH])
        taken = end - len(self._head)
        self._head += data[:taken]
        if len(self._head) == end and end > _LENGTH:
            name, size, checksum = json.loads(self._head[_LENGTH:])
            self._head.clear()
            self._file, self._left = (name, (size, checksum)), size
            self._data = bytearray(size) if name in self._wanted else None
        return data[taken:]
