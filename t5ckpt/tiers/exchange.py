"""Sends files between the processes of a job with a device collective, at a restore.

Each sender puts its files one after the other into rows of bytes. An all-reduce sums the rows of as many senders as the budget
allows. The other processes add zeros, so all processes receive every row. The rows say whether more follow, so all processes
enter the same number of collectives. A sender whose disk fails sends no further row, and raises its error afterwards.

Notes: all bytes that are sent pass through every process, twice with a ring. Half of the byte budget of the restore is for the
rows. Memory has up to nine copies of them with those that the allocator keeps, and five without, which have at most 256 MiB.
The other half is for files: the one that this process sends, and the one that it receives from each sender. Therefore only as
many processes send at once as the budget has room for files. A row has 64 KiB to 1 MiB, since glibc keeps larger blocks that
are freed, and one process always sends.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, cast

import numpy as np

from t5ckpt.format.file_checksums import FileEntry
from t5ckpt.tree.transfers import explicit_transfers

# Of the sender: its rows on the host and on the device; of all processes: the sum on both, and a buffer of the collective.
_BYTES_OF_ROWS, _COPIES_OF_ROWS = 256 * 2**20, 5
# Of rows up to 1 MiB, glibc keeps the freed copies in the arenas of XLA's threads: in all, 5 to 8 of each row were measured.
_KEPT_COPIES = 9
_MOST_BYTES, _LEAST_BYTES = 2**20, 2**16
# Rows are summed as these, which all devices can; each byte is zero in all rows but one.
_WORD = np.dtype(np.uint32)
# Of a row: the bytes that it has, and whether more rows follow.
_HEAD = 16
# Before each file: the length of its description.
_LENGTH = 8

File = tuple[str, FileEntry, bytes]
"""The name of a file, its entry, and its bytes."""


@dataclasses.dataclass(frozen=True)
class ExchangePlan:
    """The senders of an exchange and its memory, which all processes know.

    Attributes:
      senders: the processes that send, ascending.
      budget_bytes: for rows and files.
      largest_bytes: the size of the largest file that is sent.
    """

    senders: tuple[int, ...]
    budget_bytes: int
    largest_bytes: int

    def slots(self) -> int:
        """The number of processes that send at once; a process may send a file while it receives one from each of them."""
        at_once = self.budget_bytes // 2 // max(1, self.largest_bytes) - 1
        return max(1, min(len(self.senders), at_once))

    def row_bytes(self) -> int:
        """The size of a row, a multiple of 64 KiB below 1 MiB."""
        in_all = min(_BYTES_OF_ROWS // _COPIES_OF_ROWS, self.budget_bytes // 2 // _KEPT_COPIES) // self.slots()
        return max(_LEAST_BYTES, min(_MOST_BYTES, in_all // _LEAST_BYTES * _LEAST_BYTES))


def exchange(
    files: Iterator[File], wanted: Collection[str], receive: Callable[[File], None], plan: ExchangePlan
) -> None:
    """Sends files to all processes; every process calls it.

    Args:
      files: to send; none in a process that does not send.
      wanted: the names of the files that this process takes.
      receive: called with each of them.
      plan: the same in all processes.

    Raises:
      Exception: an error of ``files`` or ``receive``, after all processes have sent everything.
    """
    if not plan.senders:
        return
    rows = _Rows(plan)
    stream, errors = _Stream(files), list[Exception]()
    parsers = {process: _Parser(wanted) for process in plan.senders}
    left = list(plan.senders)
    while left:
        sending = left[: plan.slots()]
        summed = rows.sum(*_own_row(rows, sending, stream, errors))
        for process, row in zip(sending, summed, strict=False):
            used, follows = row[:_HEAD].view(np.int64)
            if not follows:
                left.remove(process)
            for file in parsers[process].feed(row.data[_HEAD : _HEAD + int(used)]):
                _tried(functools.partial(receive, file), None, errors)
                del file
            # Its base has the rows of all senders.
            del row
        del summed
    if errors:
        raise errors[0]


def _own_row(
    rows: _Rows, sending: Sequence[int], stream: _Stream, errors: list[Exception]
) -> tuple[int, np.ndarray] | tuple[None, None]:
    """The slot and the row of this process; None for both if it does not send."""
    if rows.index not in sending:
        return None, None
    row = np.zeros(rows.row_bytes, np.uint8)
    fill = functools.partial(stream.fill, row.data[_HEAD:])
    row[:_HEAD] = np.array(_tried(fill, (0, False), errors), np.int64).view(np.uint8)
    return sending.index(rows.index), row


def _tried(action: Callable[[], Any], otherwise: Any, errors: list[Exception]) -> Any:
    """The result of an action; ``otherwise`` if it, or an earlier one, failed."""
    if errors:
        return otherwise
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - raised when the collectives are over
        errors.append(error)
        return otherwise


class _Rows:
    """Sums one row of bytes of each sender over one device of each process.

    Attributes:
      index: of this process.
      row_bytes: the size of a row.
    """

    def __init__(self, plan: ExchangePlan) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        first: dict[int, Any] = {}
        for device in jax.devices():
            first.setdefault(device.process_index, device)
        self.index, self.row_bytes = jax.process_index(), plan.row_bytes()
        self._own_shape = 1, plan.slots(), self.row_bytes // _WORD.itemsize
        self._shape = len(first), *self._own_shape[1:]
        mesh = Mesh(np.array([first[process] for process in sorted(first)]), ('process',))
        self._sharding = NamedSharding(mesh, PartitionSpec('process'))
        replicated = NamedSharding(mesh, PartitionSpec())
        self._sum = jax.jit(lambda rows: rows.sum(axis=0, dtype=_WORD), out_shardings=replicated)
        self._make = jax.make_array_from_process_local_data
        self._nothing = self._global(np.zeros(self._own_shape, _WORD))

    def _global(self, own: np.ndarray) -> Any:
        with explicit_transfers():
            return self._make(self._sharding, own, self._shape)

    def sum(self, slot: int | None, row: np.ndarray | None) -> np.ndarray:
        """The rows of all senders by slot, as uint8; ``row`` is that of this process in ``slot``, None if it sends nothing."""
        rows = self._nothing
        if slot is not None and row is not None:
            own = np.zeros(self._own_shape, _WORD)
            own[0, slot] = row.view(_WORD)
            rows = self._global(own)
        with explicit_transfers():
            return np.asarray(self._sum(rows).addressable_data(0)).view(np.uint8)


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
