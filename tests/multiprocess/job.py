"""A job of real processes on this machine, joined by jax.distributed over loopback, that does what it is told."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Collection
from typing import Any

from support.nursery import Nursery, Process

_HERE = pathlib.Path(__file__).parent
_ROOT = _HERE.parent.parent
_START_SECONDS = 120
# A dead process takes the others with it after this long: JAX ends them (its default is 100 s).
HEARTBEAT_SECONDS = 10
DEAD = {'error': ['Dead', 'the process has ended']}


@functools.cache
def _nurseries(preload: str) -> list[Nursery]:
    """Two, so that not all processes of a job have the same hashes, and with them the same order of each set."""
    path = os.pathsep.join(map(str, (_ROOT, _HERE, _HERE.parent)))
    environment = {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': path, **({'LD_PRELOAD': preload} if preload else {})}
    found = [Nursery('worker', environment) for _ in range(2)]
    for nursery in found:
        atexit.register(nursery.close)
    return found


class Job:
    """Processes that wait for orders; each order is a function of scenarios.py that all of them call at once."""

    def __init__(self, count: int, devices: int, preload: str = ''):
        """Starts the processes, each with so many CPU devices; ``preload`` is faultshim.so, which two processes do not share."""
        self.count = count
        self._logs = tempfile.TemporaryDirectory(prefix='job-')
        with socket.socket() as probe:
            probe.bind(('127.0.0.1', 0))
            port = probe.getsockname()[1]
        environment = os.environ | {'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}'}
        nurseries = _nurseries(preload)
        self.processes: list[Process] = []
        for index in range(count):
            with self._log(index).open('wb') as log:
                self.processes.append(
                    nurseries[index % len(nurseries)].start(
                        [port, count, index, HEARTBEAT_SECONDS],
                        environment=environment,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                    )
                )
        for process in self.processes:
            self._answer(process, _START_SECONDS)

    def _log(self, index: int) -> pathlib.Path:
        return pathlib.Path(self._logs.name) / f'{index}.log'

    def start(self, name: str, *arguments: Any, each: list[Any] | None = None) -> None:
        """Has every process call a scenario; with ``each`` every one gets an argument of its own, too."""
        for index, process in enumerate(self.processes):
            own = [] if each is None else [each[index]]
            order = json.dumps([name, [*map(_plain, arguments), *own]])
            try:
                process.stdin.write(order + '\n')
                process.stdin.flush()
            except BrokenPipeError:
                continue

    def answers(self, timeout: float = 120, processes: Collection[int] | None = None) -> list[Any]:
        """What the scenario returned in each process, or in some; {'error': [kind, text]} where it raised, DEAD where it died."""
        deadline = time.monotonic() + timeout
        asked = [self.processes[index] for index in range(self.count) if processes is None or index in processes]
        return [self._answer(process, max(1.0, deadline - time.monotonic())) for process in asked]

    def run(self, name: str, *arguments: Any, each: list[Any] | None = None, timeout: float = 120) -> list[Any]:
        """``start`` and ``answers``; every process must do well."""
        self.start(name, *arguments, each=each)
        answers = self.answers(timeout)
        for index, answer in enumerate(answers):
            if isinstance(answer, dict) and 'error' in answer:
                raise AssertionError(f'process {index}: {answer}\n{self.log(index)[-3000:]}')
        return answers

    def errors(
        self, name: str, *arguments: Any, each: list[Any] | None = None, timeout: float = 120
    ) -> list[list[str]]:
        """``start`` and ``answers``; every process must raise. (kind, text) of each."""
        self.start(name, *arguments, each=each)
        answers = self.answers(timeout)
        assert all(isinstance(answer, dict) and 'error' in answer for answer in answers), answers
        return [answer['error'] for answer in answers]

    def log(self, index: int) -> str:
        """What a process wrote to standard error."""
        return self._log(index).read_text(errors='replace')

    def signal(self, index: int, number: int) -> None:
        """Sends a signal."""
        self.processes[index].send_signal(number)

    def wait_dead(self, timeout: float) -> bool:
        """Whether all processes have ended by then."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if all(process.poll() is not None for process in self.processes):
                return True
            time.sleep(0.05)
        return False

    def close(self) -> None:
        """Ends the processes. Not SIGTERM: JAX catches it."""
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
        for process in self.processes:
            process.wait()
            with contextlib.suppress(BrokenPipeError):  # an order that a dead process did not read
                process.stdin.close()
            process.stdout.close()
        self._logs.cleanup()

    @staticmethod
    def _answer(process: Process, timeout: float) -> Any:
        # A pipe has no time-out of its own; a process that is killed ends the read.
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        try:
            while line := process.stdout.readline():
                if line.startswith('ANSWER '):
                    return json.loads(line.removeprefix('ANSWER '))
            return DEAD
        finally:
            timer.cancel()


def _plain(argument: Any) -> Any:
    return str(argument) if isinstance(argument, pathlib.Path) else argument
