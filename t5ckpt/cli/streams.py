"""Standard input, output and error of the program: closed streams, full disks, and readers that end.

A program may be started with any of the three closed. The next file that it opens would get that number, and messages of a
library to standard error would be written to a chunk file. So each closed number is opened before any other file.
"""

from __future__ import annotations

import io
import os
import sys
from typing import IO, Any

from t5ckpt.core.standard_descriptors import open_standard_descriptors


class OutputError(Exception):
    """Standard output cannot be written, for the reason that is its cause. Not an OSError, for which click has an exit code."""


class _Output(io.FileIO):
    """Standard output; its errors are distinguished from those of a checkpoint's files."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            raise OutputError(f'standard output: {error.strerror}.') from error


class _Errors(io.FileIO):
    """Standard error; errors of its writes are ignored."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def open_streams() -> None:
    """Opens the descriptors 0, 1 and 2 if they are closed, and sets streams in ``sys`` that report their errors."""
    open_standard_descriptors()
    if sys.stdin is None:
        sys.stdin = open(0, encoding='utf-8', errors='replace', closefd=False)  # noqa: SIM115 - open until the end
    sys.stdout = _text(_Output(1, 'w', closefd=False), sys.stdout)
    sys.stderr = _text(_Errors(2, 'w', closefd=False), sys.stderr)


def _text(raw: io.FileIO, before: IO[str] | None) -> io.TextIOWrapper:
    """The stream as text, in the encoding that Python has chosen; characters that it lacks are escaped."""
    encoding = getattr(before, 'encoding', None) or 'utf-8'
    is_live = raw.isatty() or raw.fileno() == 2
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, 'backslashreplace', line_buffering=is_live)


def discard_output() -> None:
    """Discards the buffered output, since Python's flush at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
