"""Processes that start in milliseconds: a module is imported once, and each process is a fork of the one that imported it.

A fork is a process like any other, with its own environment, output and exit code, and can be killed like any. JAX's backends
start in it. Forks share what an interpreter decides when it starts, such as the order of sets of strings. :class:`Nursery` is
the tests' side; the module run as a program is the process that forks.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import importlib
import io
import json
import os
import pathlib
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Self

ROOT = pathlib.Path(__file__).resolve().parents[2]
CRASHED = 99
"""The exit code after an error that escapes the program. Python's is 1, which many programs also answer with."""
# What the process that forks says of each process: its pid, then its wait status.
_NUMBER = struct.Struct('i')
_PIPE = subprocess.PIPE


class Process:
    """A process that a nursery has started; the methods are those of :class:`subprocess.Popen`."""

    def __init__(self, told: int, log: io.BufferedRandom, streams: Mapping[str, Any]) -> None:
        self._told, self._log = told, log
        self.stdin, self.stdout, self.stderr = (streams.get(name) for name in ('stdin', 'stdout', 'stderr'))
        self.pid = self._number()
        self.returncode: int | None = None

    def _number(self) -> int:
        data = os.read(self._told, _NUMBER.size)
        assert data, f'the process that forks has ended: {_text(self._log)}'
        return _NUMBER.unpack(data)[0]

    def poll(self) -> int | None:
        """Its exit code, or minus the signal's number, if it has ended."""
        return self._code(0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for it: its exit code, or minus the signal's number."""
        code = self._code(None if timeout is None else 1000 * timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f'process {self.pid}', timeout)
        return code

    def _code(self, milliseconds: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._told, select.POLLIN)
            if poll.poll(milliseconds):
                self.returncode = os.waitstatus_to_exitcode(self._number())
                os.close(self._told)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Closes its input, reads its outputs to their ends, and waits for it; what it printed."""
        if self.stdin is not None:
            self.stdin.close()
        outputs = [self.stdout, self.stderr]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            reads = [None if stream is None else pool.submit(stream.read) for stream in outputs]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            texts = tuple(None if read is None else read.result() for read in reads)
        for stream in filter(None, outputs):
            stream.close()
        return texts

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            # It may end now, and the one that forks hears of it first.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr, self.stdin):
            if stream is not None:
                stream.close()
        self.wait()


class Nursery:
    """Starts processes that call ``main`` of a module with arguments. Any number may run at once."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None, options: Sequence[str] = ()) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._orders, orders = socket.socketpair()
        self._guard = threading.Lock()
        with orders:
            self._process = subprocess.Popen(
                [sys.executable, *options, str(pathlib.Path(__file__)), module, str(orders.fileno())],
                env={**os.environ, 'PYTHONPATH': str(ROOT), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[orders.fileno()],
            )

    def start(
        self,
        arguments: object,
        *,
        environment: Mapping[str, str] | None = None,
        directory: pathlib.Path | None = None,
        **streams: Any,
    ) -> Process:
        """Starts a process.

        Args:
          arguments: those of ``main``; of JSON's types.
          environment: all variables of the process; those of the one that forks by default.
          directory: where it runs; by default where the one that forks does.
          **streams: ``stdin``, ``stdout`` and ``stderr``, as those of ``subprocess.Popen``; pipes are of text. By default the
            input is empty and the outputs go to the log.
        """
        order = [arguments, None if environment is None else dict(environment), directory and str(directory)]
        told, tell = os.pipe()
        ours: dict[str, Any] = {}
        theirs: list[int] = []
        closed = [tell]
        for name, mode in (('stdin', 'w'), ('stdout', 'r'), ('stderr', 'r')):
            given = streams.pop(name, None)
            if given == _PIPE:
                ends = os.pipe()
                mine, other = ends if mode == 'r' else ends[::-1]
                ours[name] = os.fdopen(mine, mode)
                closed.append(other)
            elif given is None and mode == 'w':
                other = os.open(os.devnull, os.O_RDONLY)
                closed.append(other)
            elif given == subprocess.STDOUT:
                other = theirs[1]
            else:
                other = self._log.fileno() if given is None else given if isinstance(given, int) else given.fileno()
            theirs.append(other)
        assert not streams, f'unknown: {list(streams)}'
        with self._guard:
            socket.send_fds(self._orders, [json.dumps(order).encode() + b'\n'], [tell, *theirs])
        for number in closed:
            os.close(number)
        return Process(told, self._log, ours)

    def run(self, arguments: object, **options: Any) -> int:
        """Starts a process and waits for it: its exit code, or minus the signal's number."""
        return self.start(arguments, **options).wait()

    def log(self) -> str:
        """What they wrote to standard error, and to standard output."""
        return _text(self._log)

    def close(self) -> None:
        """Ends the process that forks."""
        with self._process, self._log, self._orders:
            self._process.kill()


def _text(file: io.BufferedRandom) -> str:
    """What is in a file, at whose end others write."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors='replace')


class _Server:
    """Reads orders, forks, says each child's pid and, when it has ended, its wait status."""

    def __init__(self, program: types.ModuleType, orders: socket.socket) -> None:
        self._program, self._orders = program, orders
        self._told: dict[int, int] = {}
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Until the tests' side has ended."""
        poll = select.poll()
        for watched in (self._woken, self._orders):
            poll.register(watched, select.POLLIN)
        while True:
            for number, _ in poll.poll():
                if number == self._woken:
                    os.read(self._woken, 4096)
                    self._bury()
                elif not self._obey():
                    return

    def _bury(self) -> None:
        while self._told:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._say(self._told[pid], status)
            os.close(self._told.pop(pid))

    @staticmethod
    def _say(told: int, number: int) -> None:
        try:
            os.write(told, _NUMBER.pack(number))
        except BrokenPipeError:  # a test that was stopped does not wait
            return

    def _obey(self) -> bool:
        data, files, _, _ = socket.recv_fds(self._orders, 2**16, 4)
        while data and not data.endswith(b'\n'):
            data += self._orders.recv(2**16)
        if not data:
            return False
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', DeprecationWarning)  # Python 3.12: numpy has started a thread
            pid = os.fork()
        told, *streams = files
        if pid == 0:
            code = CRASHED
            # Whatever happens, the child must not go on reading the parent's orders.
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number in (self._woken, self._wake, told, *self._told.values()):
                    os.close(number)
                self._orders.close()
                code = _run(self._program, json.loads(data), streams)
            finally:
                os._exit(code)
        for number in streams:
            os.close(number)
        self._told[pid] = told
        self._say(told, pid)
        return True


def _run(program: types.ModuleType, order: list[Any], streams: Sequence[int]) -> int:
    """Calls ``main`` and ends the process as Python does: threads, then exit functions, then the outputs."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    arguments, environment, directory = order
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    if directory is not None:
        os.chdir(directory)
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


def _import(module: str) -> types.ModuleType:
    """The module, and what t5ckpt loads only when it is first used."""
    program = importlib.import_module(module)
    if 't5ckpt' in sys.modules:
        package = sys.modules['t5ckpt']
        for name in package.__all__:
            getattr(package, name)
        for name in ('flax.serialization', 'tensorstore'):
            importlib.import_module(name)
    return program


if __name__ == '__main__':
    _Server(_import(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))).serve()
