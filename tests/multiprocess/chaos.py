"""Breaks a training job of four real processes at random, again and again, and checks what is left of its run.

    python tests/multiprocess/chaos.py --seconds 600 --seed 7

Processes are killed (SIGKILL), stopped for up to 40 s (SIGSTOP) or cut off from the network for as long; the disk becomes full
and is emptied. Each process has a network namespace of its own on a bridge, and the run is on a tmpfs of its own, so nothing
outside is touched. After the end of each job: each listed step verifies in full and has the values that were saved, the newest
is not older than any whose save returned, and no process has outlived another by more than the time-outs allow. At the end a
job that nothing breaks leaves no other files. Needs root and iproute2. Exit code 1 where something did not hold.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator

_HERE = pathlib.Path(__file__).parent
_ROOT = _HERE.parent.parent
sys.path[:0] = [str(_HERE), str(_ROOT)]

import numpy as np
from chaos_state import HEARTBEAT_SECONDS, LEAVES, PROCESS_TIMEOUT, values

import t5ckpt

COUNT = 4
_NAMESPACES = ('unshare', '--net', '--mount')
_DISK_BYTES = 32 * 2**20
_START_SECONDS = 120
# After the first process has ended, or a fault is over: rounds that wait, then JAX's heartbeat, then the rest of a slow machine.
_LIMIT_SECONDS = 3 * PROCESS_TIMEOUT + 2 * HEARTBEAT_SECONDS + 40
_FAULTS = ('kill', 'stop', 'stop', 'cut', 'cut', 'fill', 'fill', 'fill')
_EXPECTED_CODES = (-signal.SIGKILL, -signal.SIGABRT, 3)


class BrokenPromiseError(Exception):
    """Something that must hold did not."""


def missing() -> str | None:
    """Why this machine cannot run it; None if it can."""
    if os.geteuid() != 0:
        return 'namespaces and a tmpfs need root'
    if shutil.which('ip') is None:
        return 'ip (iproute2) is not installed'
    script = 'ip link add br0 type bridge && ip link add v0 type veth peer name v1 && mount -t tmpfs none /mnt'
    tried = subprocess.run([*_NAMESPACES, 'sh', '-c', script], capture_output=True, text=True, check=False)
    return f'this kernel or container has no bridge: {tried.stderr.strip()}' if tried.returncode else None


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@dataclasses.dataclass
class Member:
    """A process of the job.

    Attributes:
      process: it; it runs in a network namespace of its own.
      index: its number, and that of its end of the bridge.
      log: a line for each restore and save.
      errors: its standard error.
      ended: when it was seen to have ended, in seconds of the monotonic clock.
    """

    process: subprocess.Popen[bytes]
    index: int
    log: pathlib.Path
    errors: pathlib.Path
    ended: float | None = None

    def connect(self, is_up: bool) -> None:
        """Joins it to the others, or cuts it off."""
        _call('ip', 'link', 'set', f'v{self.index}', 'up' if is_up else 'down')

    def lines(self, word: str) -> list[int]:
        """The steps of which the log has this word."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(f'{word} ')]


class Job:
    """Four processes that train, until all have ended."""

    def __init__(self, directory: pathlib.Path, run: pathlib.Path):
        self.members: list[Member] = []
        port = 20_000 + random.randrange(10_000)
        environment = os.environ | {
            'JAX_PLATFORMS': 'cpu',
            'XLA_FLAGS': '--xla_force_host_platform_device_count=1',
            'PYTHONPATH': os.pathsep.join([str(_ROOT), str(_HERE)]),
        }
        for index in range(COUNT):
            log, errors = directory / f'{index}.log', directory / f'{index}.errors'
            program = [sys.executable, str(_HERE / 'chaos_worker.py')]
            arguments = [f'10.7.0.1:{port}', str(COUNT), str(index), str(run), str(log)]
            with errors.open('wb') as stderr:
                process = subprocess.Popen(
                    ['unshare', '--net', *program, *arguments], env=environment, stdin=subprocess.PIPE, stderr=stderr
                )
            self.members.append(Member(process, index, log, errors))
            self._network(self.members[-1])

    @staticmethod
    def _network(member: Member) -> None:
        pid, link = str(member.process.pid), f'v{member.index}'
        while os.readlink(f'/proc/{pid}/ns/net') == os.readlink('/proc/self/ns/net'):
            time.sleep(0.01)
        _call('ip', 'link', 'add', link, 'type', 'veth', 'peer', 'name', 'eth0', 'netns', pid)
        _call('ip', 'link', 'set', link, 'master', 'br0', 'up')
        inside = ('nsenter', '--net', f'--target={pid}', 'ip')
        _call(*inside, 'addr', 'add', f'10.7.0.{member.index + 1}/24', 'dev', 'eth0')
        _call(*inside, 'link', 'set', 'eth0', 'up')
        _call(*inside, 'link', 'set', 'lo', 'up')
        member.process.stdin.write(b'go\n')
        member.process.stdin.close()

    def running(self) -> list[Member]:
        """The processes that have not ended."""
        for member in self.members:
            if member.ended is None and member.process.poll() is not None:
                member.ended = time.monotonic()
        return [member for member in self.members if member.ended is None]

    def newest(self, word: str = 'saved') -> int:
        """The newest step of which any process has this word; -1 for none."""
        return max((step for member in self.members for step in member.lines(word)), default=-1)

    def wait_for_a_save(self, seconds: float) -> None:
        """Until a save has returned, or a process has ended."""
        before, deadline = self.newest(), time.monotonic() + seconds
        while self.newest() <= before and len(self.running()) == COUNT:
            if time.monotonic() > deadline:
                raise BrokenPromiseError(
                    f'no save returned for {seconds:.0f} s, and no process has ended.{self.stacks()}'
                )
            time.sleep(0.05)

    def wait_until_ended(self) -> None:
        """Until all processes have ended; an error if one outlives the first by more than the limit."""
        if len(self.running()) == COUNT:
            return
        deadline = time.monotonic() + _LIMIT_SECONDS
        while left := self.running():
            if time.monotonic() > deadline:
                names = [member.index for member in left]
                raise BrokenPromiseError(f'processes {names} hang {_LIMIT_SECONDS:.0f} s after another.{self.stacks()}')
            time.sleep(0.05)

    def stacks(self) -> str:
        """What the processes do now, and their last words."""
        for member in self.running():
            member.process.send_signal(signal.SIGUSR1)
        time.sleep(1)
        return ''.join(f'\n--- process {each.index}\n{each.errors.read_text()[-4000:]}' for each in self.members)

    def end(self) -> None:
        """Kills what is left."""
        for member in self.running():
            member.process.kill()
        for member in self.members:
            member.process.wait()
            with contextlib.suppress(subprocess.CalledProcessError):
                _call('ip', 'link', 'del', f'v{member.index}')

    def check_codes(self) -> None:
        """An error if a process has ended otherwise than by a signal, or because another one is missing."""
        for member in self.members:
            code = member.process.returncode
            if code not in _EXPECTED_CODES:
                raise BrokenPromiseError(
                    f'process {member.index} ended with {code}:\n{member.errors.read_text()[-4000:]}'
                )


class Chaos:
    """Job after job on one run."""

    def __init__(self, seed: int, longest: float):
        self.random, self._longest = random.Random(seed), longest
        self.counts: collections.Counter[str] = collections.Counter()
        self.newest = -1

    def life(self, job: Job, run: pathlib.Path, until: float) -> None:
        """Breaks a job until it has ended."""
        job.wait_for_a_save(_START_SECONDS)
        while time.monotonic() < until and len(job.running()) == COUNT:
            time.sleep(self.random.uniform(0, 1.5))
            kind = self.random.choice(_FAULTS)
            self.counts[kind] += 1
            seconds = math.exp(self.random.uniform(math.log(0.1), math.log(self._longest)))
            self.fault(kind, self.random.choice(job.members), run, seconds)
            if len(job.running()) == COUNT:
                job.wait_for_a_save(_LIMIT_SECONDS)
        job.wait_until_ended()

    def fault(self, kind: str, member: Member, run: pathlib.Path, seconds: float) -> None:
        """One fault, and its end."""
        if kind == 'kill':
            member.process.kill()
            member.process.wait()
        elif kind == 'stop':
            member.process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            member.process.send_signal(signal.SIGCONT)
        elif kind == 'cut':
            member.connect(False)
            time.sleep(seconds)
            member.connect(True)
        else:
            with _full(run.parent):
                time.sleep(min(seconds, 5))

    def check(self, job: Job, run: pathlib.Path) -> None:
        """Compares what is left with what was promised."""
        self.newest = max(self.newest, job.newest())
        self.counts['saves'] += len({step for member in job.members for step in member.lines('saved')})
        self.counts['failed saves'] += len({step for member in job.members for step in member.lines('failed')})
        steps = t5ckpt.all_steps(run)
        if self.newest > max(steps, default=-1):
            raise BrokenPromiseError(f'the save of step {self.newest} returned, and the newest step is {steps[-1:]}.')
        self.counts['restores'] += job.newest('restored') > 0
        for step in steps:
            t5ckpt.verify(run, step, full=True).raise_if_damaged()
            tree = t5ckpt.load_t5x_checkpoint(run, step)
            for name in LEAVES:
                np.testing.assert_array_equal(tree['params'][name], values(name, step))
            self.counts['steps verified'] += 1

    def run(self, directory: pathlib.Path, seconds: float) -> None:
        """Jobs for so long, then one that nothing breaks."""
        run, until = directory / 'disk' / 'run', time.monotonic() + seconds
        while time.monotonic() < until:
            self._one_job(directory, run, until)
        job = Job(self._logs(directory), run)
        try:
            for _ in range(4):
                job.wait_for_a_save(_START_SECONDS)
        finally:
            job.end()
        self.check(job, run)
        self._check_leftovers(directory, run)

    def _one_job(self, directory: pathlib.Path, run: pathlib.Path, until: float) -> None:
        job = Job(self._logs(directory), run)
        self.counts['jobs'] += 1
        try:
            self.life(job, run, until)
        finally:
            job.end()
        job.check_codes()
        self.check(job, run)

    def _check_leftovers(self, directory: pathlib.Path, run: pathlib.Path) -> None:
        """One process saves once more and closes, so that nothing is in the midst of a save."""
        step = self.newest + 1000
        for marker in run.glob('busy_*'):
            # What a killed job has left is removed two hours later.
            os.utime(marker, (time.time() - 2 * 3600 - 1,) * 2)
        state = {'params': {name: values(name, step) for name in LEAVES}, 'step': step}
        with t5ckpt.Checkpointer(state, checkpoints_dir=str(run), keep=3) as checkpointer:
            checkpointer.save(state)
        names = sorted(path.name for path in run.iterdir())
        if len(names) != 3 or not all(name.startswith('checkpoint_') and 'tmp' not in name for name in names):
            raise BrokenPromiseError(f'the run has other files than its three steps: {names}')

    def _logs(self, directory: pathlib.Path) -> pathlib.Path:
        logs = directory / f'job-{self.counts["jobs"]}'
        logs.mkdir(exist_ok=True)
        return logs


@contextlib.contextmanager
def _full(disk: pathlib.Path) -> Generator[None]:
    """The disk has no space left."""
    ballast = disk / 'ballast'
    try:
        with ballast.open('wb', buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        yield
    finally:
        ballast.unlink()


def _inside(seconds: float, seed: int, longest: float) -> int:
    """The run, in namespaces of its own."""
    _call('ip', 'link', 'set', 'lo', 'up')
    _call('ip', 'link', 'add', 'br0', 'type', 'bridge')
    _call('ip', 'link', 'set', 'br0', 'up')
    chaos = Chaos(seed, longest)
    with tempfile.TemporaryDirectory(prefix='t5ckpt-chaos-') as name:
        directory = pathlib.Path(name)
        disk = directory / 'disk'
        disk.mkdir()
        _call('mount', '-t', 'tmpfs', '-o', f'size={_DISK_BYTES}', 'none', str(disk))
        try:
            chaos.run(directory, seconds)
        except BrokenPromiseError as error:
            print(f'seed {seed}: {error}', file=sys.stderr)
            return 1
        finally:
            print(json.dumps(dict(chaos.counts)))
            _call('umount', '--lazy', str(disk))
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--seconds', type=float, default=600)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--longest', type=float, default=40, help='seconds of the longest stop or cut')
    parser.add_argument('--inside', action='store_true', help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        sys.exit(_inside(options.seconds, options.seed, options.longest))
    if why := missing():
        sys.exit(why)
    command = [*_NAMESPACES, sys.executable, __file__, *sys.argv[1:], '--inside']
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == '__main__':
    main()
