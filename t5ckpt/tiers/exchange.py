"""Sends files between the processes of a job with a device collective, at a restore.

Each process puts the files that it sends one after the other into rows of bytes, and one all-gather per row brings the rows of
all processes to all. The rows say whether more follow, so all processes enter the same number of collectives. A process whose
disk fails goes on with rows that are empty, and raises its error afterwards.

Notes: all bytes pass through every process. Memory holds a row of each process twice, within the byte budget of the restore and
at most 256 MiB together, and the files in flight. A row has at least 64 KiB.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from t5ckpt.format.file_checksums import FileEntry

# The rows of all processes: on the devices, and on the host.
_BYTES_OF_ROWS, _COPIES_OF_ROWS = 256 * 2**20, 2
_MOST_BYTES, _LEAST_BYTES = 8 * 2**20, 2**16
# Of a row: the bytes that it has, and whether more rows follow.
_HEAD = 16
# Before each file: the length of its description.
_LENGTH = 8

File = tuple[str, FileEntry, bytes]
"""The name of a file, its entry, and its bytes."""


def exchange(
    files: Iterator[File], wanted: Collection[str], receive: Callable[[File], None], budget_bytes: int
) -> None:
    """Sends files to all processes; every process calls it.

    Args:
      files: what this process sends.
      wanted: the names of the files that this process takes.
      receive: called with each of them.
      budget_bytes: of memory for the rows; the same in all processes.

    Raises:
      Exception: an error of ``files`` or ``receive``, after all processes have sent everything.
    """
    gather = _Gather(budget_bytes)
    stream, errors = _Stream(files), list[Exception]()
    parsers = [_Parser(wanted) for _ in range(gather.count)]
    more = True
    while more:
        payload, has_more = _tried(lambda: stream.take(gather.row_bytes - _HEAD), (b'', False), errors)
        more = False
        for parser, row in zip(parsers, gather(payload, has_more), strict=True):
            used, follows = np.frombuffer(row[:_HEAD].tobytes(), np.int64)
            more = more or bool(follows)
            for file in parser.feed(row[_HEAD : _HEAD + int(used)].tobytes()):
                _tried(lambda file=file: receive(file), None, errors)
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

    def __init__(self, budget_bytes: int) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        first: dict[int, Any] = {}
        for device in jax.devices():
            first.setdefault(device.process_index, device)
        self.count = len(first)
        together = min(_BYTES_OF_ROWS, budget_bytes // _COPIES_OF_ROWS)
        self.row_bytes = max(_LEAST_BYTES, min(_MOST_BYTES, together // self.count))
        mesh = Mesh(np.array([first[process] for process in sorted(first)]), ('process',))
        self._sharding = NamedSharding(mesh, PartitionSpec('process'))
        self._collect = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._make = jax.make_array_from_process_local_data

    def __call__(self, payload: bytes, has_more: bool) -> np.ndarray:
        """The rows of all processes, in their order."""
        row = np.zeros((1, self.row_bytes), np.uint8)
        row[0, :_HEAD] = np.frombuffer(np.array([len(payload), has_more], np.int64).tobytes(), np.uint8)
        row[0, _HEAD : _HEAD + len(payload)] = np.frombuffer(payload, np.uint8)
        rows = self._make(self._sharding, row, (self.count, self.row_bytes))
        return np.asarray(self._collect(rows).addressable_data(0))


class _Stream:
    """Files as one sequence of bytes, of which at most one file is in memory."""

    def __init__(self, files: Iterator[File]):
        self._files = files
        self._left = memoryview(b'')
        self._ended = False

    def take(self, nbytes: int) -> tuple[bytes, bool]:
        """The next bytes, and whether more may follow."""
        taken = bytearray()
        while len(taken) < nbytes and self._fill():
            part = self._left[: nbytes - len(taken)]
            taken += part
            self._left = self._left[len(part) :]
        return bytes(taken), bool(self._left) or not self._ended

    def _fill(self) -> bool:
        if not self._left and not self._ended:
            file = next(self._files, None)
            if file is None:
                self._ended = True
            else:
                name, entry, data = file
                head = json.dumps([name, *entry]).encode()
                self._left = memoryview(len(head).to_bytes(_LENGTH) + head + data)
        return bool(self._left)


class _Parser:
    """The files of one sender; keeps the bytes of those that are wanted."""

    def __init__(self, wanted: Collection[str]):
        self._wanted = wanted
        self._held = bytearray()
        self._file: tuple[str, FileEntry] | None = None
        self._skips = 0

    def feed(self, data: bytes) -> Iterator[File]:
        """Takes the next bytes; yields the wanted files that they complete."""
        self._held += data
        while self._step():
            if self._file is None:
                continue
            name, entry = self._file
            if len(self._held) < entry[0]:
                return
            yield name, entry, bytes(self._held[: entry[0]])
            del self._held[: entry[0]]
            self._file = None

    def _step(self) -> bool:
        """Skips, or reads the description of the next file; returns whether there may be more to do."""
        if self._file is not None:
            return True
        skipped = min(self._skips, len(self._held))
        del self._held[:skipped]
        self._skips -= skipped
        if self._skips or len(self._held) < _LENGTH:
            return False
        end = _LENGTH + int.from_bytes(self._held[:_LENGTH])
        if len(self._held) < end:
            return False
        name, size, checksum = json.loads(self._held[_LENGTH:end])
        del self._held[:end]
        if name in self._wanted:
            self._file = name, (size, checksum)
        else:
            self._skips = size
        return True
