"""Processes that start in milliseconds: a module is imported once, and each process is a fork of the one that imported it.

A fork is a process like any other, with its own environment, output and exit code, and can be killed like any. JAX's backends
start in it. :class:`Nursery` is the tests' side; the module run as a program is the process that forks.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]


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

    def start(self, arguments: object) -> int:
        """Starts a process; its pid."""
        self._process.stdin.write(json.dumps(arguments) + '\n')
        self._process.stdin.flush()
        return int(self._answer())

    def ended(self) -> int:
        """Waits for it: its exit code, or minus the signal's number."""
        return os.waitstatus_to_exitcode(int(self._answer()))

    def run(self, arguments: object) -> int:
        """Starts a process and waits for it: its exit code."""
        self.start(arguments)
        return self.ended()

    def _answer(self) -> str:
        # The processes may print, too.
        for line in self._process.stdout:
            if line.strip().isdigit():
                return line
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
    program = importlib.import_module(module)
    for line in sys.stdin:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', DeprecationWarning)  # Python 3.12: numpy has started a thread
            pid = os.fork()
        if pid == 0:
            # Whatever happens, the child must not go on reading the parent's commands.
            code = 1
            try:
                program.main(json.loads(line))
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        sys.stdout.write(f'{pid}\n')
        sys.stdout.flush()
        sys.stdout.write(f'{os.waitpid(pid, 0)[1]}\n')
        sys.stdout.flush()


if __name__ == '__main__':
    _serve(sys.argv[1])
