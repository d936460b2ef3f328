"""Standard input, output and error of the program: closed ones, full ones, and a reader that goes away.

A program may be started with any of the three closed. The next file that it opens would get that number, and what a library
writes to standard error would land in a chunk file. So each number is taken before anything else is opened.
"""

from __future__ import annotations

import io
import os
import sys
from typing import IO, Any

__all__ = ['OutputError', 'ReaderGoneError', 'discard_output', 'open_streams']


class OutputError(Exception):
    """Standard output takes nothing: its disk is full, or it is closed."""


class ReaderGoneError(OutputError):
    """What reads standard output has ended, such as head. No OSError: click would exit with the code of another meaning."""


class _Output(io.FileIO):
    """Standard output. An error of it is told from one of a checkpoint's files."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError as error:
            raise ReaderGoneError('standard output: nothing reads it.') from error
        except OSError as error:
            raise OutputError(f'standard output: {error.strerror}.') from error


class _Errors(io.FileIO):
    """Standard error. Where it takes nothing, nobody can be told so."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def open_streams() -> None:
    """Takes the numbers 0, 1 and 2 where they are closed, and puts streams into ``sys`` that report their errors."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one. Output is opened for reading, so that writing to it fails.
            os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
    if sys.stdin is None:
        sys.stdin = open(0, encoding='utf-8', errors='replace', closefd=False)  # noqa: SIM115 - open until the end
    sys.stdout = _text(_Output(1, 'w', closefd=False), sys.stdout)
    sys.stderr = _text(_Errors(2, 'w', closefd=False), sys.stderr)


def _text(raw: io.FileIO, before: IO[str] | None) -> io.TextIOWrapper:
    """The stream as text, in the encoding that Python has chosen for it; letters that it lacks are shown as escapes."""
    encoding = getattr(before, 'encoding', None) or 'utf-8'
    is_live = raw.isatty() or raw.fileno() == 2
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, 'backslashreplace', line_buffering=is_live)


def discard_output() -> None:
    """Sends what is still buffered nowhere: Python flushes once more on its way out, and would fail once more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
