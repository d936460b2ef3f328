"""Processes that start in milliseconds: a module is imported once, and each process is a fork of the one that imported it.

A fork is a process like any other, with its own environment, output and exit code, and can be killed like any. JAX's backends
start in it. :class:`Nursery` is the tests' side; the module run as a program is the process that forks.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
CRASHED = 99
"""The exit code after an error that escapes the program. Python's is 1, which many programs also answer with."""


class Nursery:
    """Starts processes that call ``main`` of a module with arguments, one after the other."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None, options: Sequence[str] = ()) -> None:
        self._log = tempfile.TemporaryFile('w+')  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [sys.executable, *options, str(pathlib.Path(__file__)), module],
            env={**os.environ, 'PYTHONPATH': str(ROOT), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._number = 0

    def start(self, arguments: object) -> int:
        """Starts a process; its pid."""
        self._number += 1
        self._process.stdin.write(json.dumps([self._number, arguments]) + '\n')
        self._process.stdin.flush()
        return self._answer()

    def ended(self) -> int:
        """Waits for it: its exit code, or minus the signal's number."""
        return os.waitstatus_to_exitcode(self._answer())

    def run(self, arguments: object) -> int:
        """Starts a process and waits for it: its exit code."""
        self.start(arguments)
        return self.ended()

    def _answer(self) -> int:
        for line in self._process.stdout:
            number, answer = map(int, line.split())
            # A test that was stopped has not read its answers.
            if number == self._number:
                return answer
        raise AssertionError(self.log())

    def log(self) -> str:
        """What they wrote to standard error."""
        self._log.seek(0)
        return self._log.read()

    def close(self) -> None:
        """Ends the process that forks."""
        with self._process, self._log:
            self._process.kill()


def _serve(module: str) -> None:
    """Reads a line of JSON, forks, answers with the child's pid, and, when it has ended, with its wait status."""
    # What the processes print goes to the log and not among the answers.
    answers = os.fdopen(os.dup(1), 'w', buffering=1)
    os.dup2(2, 1)
    program = importlib.import_module(module)
    for line in sys.stdin:
        number, arguments = json.loads(line)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', DeprecationWarning)  # Python 3.12: numpy has started a thread
            pid = os.fork()
        if pid == 0:
            answers.close()
            code = CRASHED
            # Whatever happens, the child must not go on reading the parent's commands.
            try:
                code = _run(program, arguments)
            finally:
                os._exit(code)
        answers.write(f'{number} {pid}\n')
        answers.write(f'{number} {os.waitpid(pid, 0)[1]}\n')


def _run(program: types.ModuleType, arguments: object) -> int:
    """Calls ``main`` and ends the process as Python does: threads, then exit functions, then the outputs."""
    code = CRASHED
    try:
        program.main(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - any error of a program is its end
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


if __name__ == '__main__':
    _serve(sys.argv[1])
