"""faultshim.c, built and controlled: file-system calls below a directory that fail, vanish, or kill the process."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pathlib
import shutil
import struct
import subprocess
from collections.abc import Iterator

import pytest

_SOURCE = pathlib.Path(__file__).with_name('faultshim.c')

# Classes of calls, and what happens at the chosen one: as in faultshim.c.
READ, CREATE, WRITE, SYNC, RENAME, LINK, REMOVE, LOCK, CLOSE, GETS, PUTS = (1 << bit for bit in range(11))
FAIL, KILL, TORN, SHORT, LOSE, DO_AND_FAIL, SHUTDOWN = range(7)
ANY = (1 << 11) - 1
_LOG_BYTES = 4 << 20
_HEADER = struct.Struct('<4Iq')


def require_gcc() -> str:
    """The compiler; without one the test is skipped, but never in CI."""
    gcc = shutil.which('gcc')
    if gcc is None:
        assert not os.environ.get('CI'), 'gcc is missing, and .ci/run installs it'
        pytest.skip('gcc is not installed: faults at file-system calls need it (apt-get install gcc libc6-dev)')
    return gcc


def build(directory: pathlib.Path) -> pathlib.Path:
    """Compiles the library; a few tenths of a second."""
    target = directory / 'faultshim.so'
    command = [require_gcc(), '-O2', '-Wall', '-Wextra', '-Werror', '-shared', '-fPIC', '-o', str(target), str(_SOURCE)]
    subprocess.run([*command, '-ldl', '-lpthread'], check=True)
    return target


@dataclasses.dataclass(frozen=True)
class Call:
    """A file-system call that was made below the directory.

    Attributes:
      kind: its class, one of the constants above.
      name: the C library's function.
      path: relative to the directory, with a leading '/' or empty.
    """

    kind: int
    name: str
    path: str


@dataclasses.dataclass(frozen=True)
class Operation:
    """A change of the disk, in the order in which the file system made them; for replays.

    Attributes:
      kind: 'c'reate, 't'runcate, 'w'rite, 's'ync, 'd'irectory, 'r'ename, 'l'ink, 'u'nlink, or '!', a mark.
      path: relative to the directory.
      other: the second path of a rename or a link.
      offset: where a write goes, or the size after a truncation.
      data: what is written.
    """

    kind: str
    path: str
    other: str
    offset: int
    data: bytes


class Shim:
    """The library in this process, which was started with it in LD_PRELOAD."""

    def __init__(self) -> None:
        """Finds it."""
        self._library = ctypes.CDLL(None)
        self._library.faultshim_shared.restype = ctypes.c_void_p
        self._library.faultshim_arm.argtypes = [
            ctypes.c_char_p,
            ctypes.c_int64,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_int,
        ]
        self._address = self._library.faultshim_shared()

    def arm(
        self,
        directory: str | os.PathLike[str],
        at: int = -1,
        mode: int = FAIL,
        error: int = 0,
        classes: int = ANY,
        sticky: int = 0,
        *,
        record: bool = False,
    ) -> None:
        """Counts calls below a directory anew; the first of `classes` from the index `at` on is hit.

        Later calls of the sticky classes fail, too.
        """
        self._library.faultshim_arm(os.fsencode(directory), at, mode, error, classes, sticky, record)

    def disarm(self) -> None:
        """Lets everything pass."""
        self._library.faultshim_disarm()

    def mark(self) -> None:
        """Puts a mark into the record: everything before it has returned to the caller."""
        self._library.faultshim_mark()

    def _field(self, index: int) -> int:
        return ctypes.c_int64.from_address(self._address + 8 * index).value

    @property
    def fired(self) -> bool:
        """Whether the chosen call came; also of a child that was forked after the start."""
        return self._field(1) >= 0

    def calls(self) -> list[Call]:
        """All calls since `arm`, also those of a child."""
        assert self._field(4) == 0, 'the record is full, or holds a call that it cannot replay'
        text = ctypes.string_at(self._address + 40, self._field(2)).decode()
        found = (line.split('\t') for line in text.splitlines())
        return [Call(int(parts[0]), parts[1], parts[2]) for parts in found]

    def hit(self) -> Call:
        """The call that was chosen."""
        return self.calls()[self._field(1)]

    def operations(self) -> list[Operation]:
        """The record."""
        assert self._field(4) == 0, 'the record is full, or holds a call that it cannot replay'
        return list(_operations(ctypes.string_at(self._address + 40 + _LOG_BYTES, self._field(3))))


def _operations(data: bytes) -> Iterator[Operation]:
    at = 0
    while at < len(data):
        kind, first, second, size, offset = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        path, other = data[at : at + first].decode(), data[at + first : at + first + second].decode()
        at += first + second
        yield Operation(chr(kind), path, other, offset, data[at : at + size])
        at += size
