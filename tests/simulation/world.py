"""The world of one schedule: a storage, processes that use it, and the observer that checks the invariants at each change."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Callable, Collection
from typing import Any

import msgpack
import numpy as np

from simulation import posix
from simulation.bucket import Bucket, SimulatedBucket, mount
from simulation.directory import SimulatedDirectory
from simulation.disk import Disk
from simulation.own_storage import OwnServer, OwnStorage
from simulation.scheduler import Scheduler
from simulation.tasks import Process, Task
from t5ckpt.format.names import MANIFEST, to_persist_file
from t5ckpt.storage import Storage

# The age of a marker, less the difference of clocks, at which garbage collection takes the files of a writer.
_COLLECTED_SECONDS = 6600.0
_STEP = re.compile(r'checkpoint_(0|[1-9][0-9]*)')


def state_of(value: float) -> dict[str, Any]:
    """The state that a saver saves: every element is the same number, so a mixture of two savers' files shows."""
    return {'n': np.int32(value), 'w': np.full(2, value, np.float32)}


@dataclasses.dataclass(frozen=True)
class _Contents:
    """The contents of a manifest: the value, the files with the bytes that they must have (None for any), and their lists."""

    value: float
    files: tuple[tuple[str, bytes | None], ...]
    lists: tuple[str, ...]


_decoded: dict[bytes, _Contents] = {}


def _contents(manifest: bytes) -> _Contents:
    """Decodes a manifest with msgpack alone."""
    if manifest not in _decoded:
        tree = msgpack.unpackb(manifest, raw=False, strict_map_key=False, ext_hook=lambda code, data: data)
        leaves = tree['optimizer']
        _, dtype, data = msgpack.unpackb(leaves['n'], raw=False)
        value = float(np.frombuffer(data, dtype)[0])
        spec = leaves['w']
        path, size = spec['kvstore']['path'].strip('/'), int(spec['metadata']['chunks'][0])
        chunk = np.full(size, value, np.float32).tobytes()
        chunks = [(f'{path}/{index}', chunk) for index in range(int(spec['metadata']['shape'][0]) // size)]
        below = path.rpartition('/')[0]
        names = [name for name in json.loads(tree['t5ckpt'])['digests'] if name != MANIFEST]
        lists = [f'{below}/{name}'.lstrip('/') for name in names]
        _decoded[manifest] = _Contents(value, ((f'{path}/.zarray', None), *chunks), tuple(lists))
    return _decoded[manifest]


class Observer:
    """Checks the invariants of a run, and fails the schedule at the first change that violates one.

    Attributes:
      visible: the value of each step that is listed.
      appeared, disappeared: the steps that did, since a listing began.
      saved: the value of each save that has returned, by step, unless a process was meant to delete or replace the step since.
      replacers: the processes that may replace these steps, and not hide them.
      ended: the process and the step of each deletion that has returned; no request of it may delete the step later.
      may_disappear: the steps of deletions whose error said that a request may delete the step later.
      pins: the steps that are pinned.
      least: how many complete steps a keep policy keeps.
      damaged: the value of each step of which a file was lost by accident.
      states: hashes of the sets of keys that the storage had.
    """

    def __init__(self, read: Callable[[str], bytes | None], scheduler: Scheduler):
        self._read = read
        self._scheduler = scheduler
        self.visible: dict[int, float] = {}
        self.saved: dict[int, float] = {}
        self.may_delete: dict[str, Callable[[int], bool]] = {}
        self.replacers: set[str] = set()
        self.ended: set[tuple[str, int]] = set()
        self.may_disappear: set[int] = set()
        self.holds: dict[tuple[str, int], float] = {}
        self.pins: set[int] = set()
        self.least = 0
        self.damaged: dict[int, float] = {}
        self.states: set[int] = set()
        self.appeared: set[int] = set()
        self.disappeared: set[int] = set()
        self.state = 0
        self._writers: dict[int, str] = {}
        self._collected: set[bytes] = set()

    def copied(self, read: Callable[[str], bytes | None], scheduler: Scheduler) -> Observer:
        """The same knowledge for another schedule."""
        other = Observer(read, scheduler)
        other.visible, other.saved, other.pins = dict(self.visible), dict(self.saved), set(self.pins)
        other.damaged = dict(self.damaged)
        return other

    # --- reports of processes ---------------------------------------------------------------------------------------------

    def is_saved(self, step: int, value: float) -> None:
        """A save of this process has returned a checkpoint."""
        if self.visible.get(step) != value and not self.is_deletable(step):
            self._scheduler.fail(f'save({step}) returned, and the step is {self.visible.get(step)}, not {value}')
        if self.saved.get(step, value) != value and not self.is_deletable(step):
            self._scheduler.fail(f'two processes returned a checkpoint of step {step}')
        if self.visible.get(step) == value:
            self.saved[step] = value

    def is_held(self, process: str, step: int, until: float) -> None:
        """A reader may read a step until some time."""
        self.holds[process, step] = until
        if step not in self.visible:
            self._scheduler.fail(f'{process} is held by a reader of step {step}, which does not exist')

    def is_returned(self, process: str, step: int) -> None:
        """The reader has ended its hold."""
        self.holds.pop((process, step), None)

    def is_deletable(self, step: int) -> bool:
        """Whether a process is meant to delete or replace a step."""
        return any(may(step) for may in self.may_delete.values())

    # --- changes of the storage -----------------------------------------------------------------------------------------

    def changed(self, keys: Collection[str]) -> None:
        """Checks the steps of some keys, relative to the run."""
        for key in keys:
            self.state ^= hash((key, self._read(key) is None))
        self.states.add(self.state)
        for name in {key.partition('/')[0] for key in keys}:
            match = _STEP.fullmatch(name)
            if match is not None:
                self._check(int(match.group(1)))

    def check_all(self, steps: Collection[int]) -> None:
        """Checks some steps after a power cut: a step whose save has not returned may be gone."""
        for step in sorted({*steps, *self.visible, *self.saved}):
            if self._read(f'checkpoint_{step}/{MANIFEST}') is not None:
                self._check(step)
            elif step in self.saved and not self.is_deletable(step):
                self._scheduler.fail(f'step {step} was saved, and the power cut has removed it')
            else:
                self.visible.pop(step, None)
                self.saved.pop(step, None)

    def _check(self, step: int) -> None:
        directory = f'checkpoint_{step}'
        manifest = self._read(f'{directory}/{MANIFEST}')
        before = self.visible.get(step)
        if manifest is None:
            if before is not None:
                self.disappeared.add(step)
                self._check_hidden(step)
                del self.visible[step]
            return
        try:
            contents = _contents(manifest)
        except Exception as error:
            self._scheduler.fail(f'step {step} is listed, and its manifest is damaged: {error!r}')
            raise
        lists = [self._read(f'{directory}/{name}') for name in contents.lists]
        if None in lists and self._was_collected(step, manifest):
            self.visible.pop(step, None)
            return
        for name, data in contents.files:
            stored = self._read(f'{directory}/{name}')
            if stored is None and self.damaged.get(step) == contents.value:
                # Also if a deletion that failed lists it again.
                break
            if stored is None:
                self._scheduler.fail(f'step {step} is listed, and {directory}/{name} is missing')
            if data is not None and stored != data:
                self._scheduler.fail(f'step {step} is that of {contents.value:g}, and {directory}/{name} is not')
        if None in lists and before is None:
            self._scheduler.fail(f'step {step} is listed without its lists of checksums')
        if before is not None and before != contents.value and not self._may(step):
            self._scheduler.fail(f'step {step} was that of {before:g}, and is that of {contents.value:g}')
        if before != contents.value:
            self.saved.pop(step, None)
            task = self._scheduler.current
            self._writers[step] = '' if task is None else (task.sender or task.process).name
        self.visible[step] = contents.value
        self.appeared.add(step)

    def _was_collected(self, step: int, manifest: bytes) -> bool:
        """Whether a manifest whose lists are gone is of a writer that was stopped for an hour, and has not saved the step yet.

        Its writer removes it, or another one replaces it. Otherwise it is a leftover at the end.
        """
        task = self._scheduler.current
        name = self._writers.get(step) if step in self.visible else None if task is None else task.process.name
        writer = self._scheduler.processes.get(name or '')
        if step not in self.saved and writer is not None and writer.stopped > _COLLECTED_SECONDS:
            self._collected.add(manifest)
        return manifest in self._collected

    def _check_hidden(self, step: int) -> None:
        task = self._scheduler.current
        if task is not None and task.process.is_daemon and step in self.may_disappear:
            self.saved.pop(step, None)
            return
        sender = None if task is None else task.sender or task.process
        takes_back = sender is not None and step not in self.saved and self._writers.get(step) == sender.name
        if not (takes_back or self._may(step, hides=True)):
            self._scheduler.fail(f'step {step} is gone, and this process was not meant to delete it')
        now = self._scheduler.now
        for (process, held), until in self.holds.items():
            if held == step and until > now and not self._scheduler.processes[process].is_dead:
                self._scheduler.fail(f'step {step} is gone while {process} is held by a reader of it')
        if len(self.visible) <= self.least:
            self._scheduler.fail(f'step {step} is gone, of the {self.least} that the policy keeps')
        if step in self.pins:
            self._scheduler.fail(f'step {step} is gone, and it is pinned')
        # A commit whose directory could not be synchronized is undone before its record is removed.
        if not takes_back and self._read(to_persist_file(step)) is not None:
            self._scheduler.fail(f'step {step} is gone, and it waits for its upload')
        self.saved.pop(step, None)

    def _may(self, step: int, *, hides: bool = False) -> bool:
        meant = {name: may for name, may in self.may_delete.items() if not hides or name not in self.replacers}
        task = self._scheduler.current
        if task is None:
            return True
        may = meant.get(task.process.name)
        if not task.process.is_daemon:
            return may is not None and may(step)
        return any(may(step) for name, may in meant.items() if (name, step) not in self.ended)


def _steps_of(keys: Collection[str]) -> list[int]:
    return [int(match.group(1)) for key in keys if (match := _STEP.match(key.partition('/')[0]))]


class World:
    """A run on a simulated storage, and the processes that use it.

    Attributes:
      kind: 'bucket', 'disk', 'tiers' for a bucket and a local directory on a disk, or a function that makes an empty storage.
      scheduler: runs the processes.
      observer: checks the invariants of the run.
      disk: the one of the local directory, and
      local: the observer of that directory; without tiers it has no steps.
    """

    def __init__(self, kind: str | Callable[[], Storage], scheduler: Scheduler, before: World | None = None):
        """Makes an empty world, or one with the files of another."""
        self.kind, self.scheduler = kind, scheduler
        network = scheduler.process('network')
        network.is_daemon = True
        self.server: Bucket | Disk | OwnServer
        now = lambda: scheduler.now  # noqa: E731
        self.disk = Disk(now) if before is None else before.disk.copied(now)
        posix.mount(self.disk)
        if callable(kind):
            self.server = OwnServer(
                kind, None if before is None or isinstance(before.server, Disk | Bucket) else before.server
            )
        elif kind != 'disk':
            self.server = Bucket()
            mount(self.server)
            if before is not None and isinstance(before.server, Bucket):
                self.server.objects.update(before.server.objects)
                self.server.versions = copy.copy(before.server.versions)
        else:
            previous = None if before is None else before.server
            self.server = previous.copied(now) if isinstance(previous, Disk) else Disk(now)
            posix.mount(self.server)
        self.observer = (
            Observer(self.read, scheduler) if before is None else before.observer.copied(self.read, scheduler)
        )
        self.local = (
            Observer(self.read_local, scheduler) if before is None else before.local.copied(self.read_local, scheduler)
        )
        self.server.changed = self._changed
        self.disk.changed = self._changed_locally
        scheduler.cut_power = self.cut_power

    @property
    def _beginning(self) -> str:
        """The prefix of the keys of the run on the server."""
        return {'disk': '/run/', 'bucket': 'run/', 'tiers': 'run/'}[self.kind] if isinstance(self.kind, str) else ''

    def _changed(self, keys: tuple[str, ...]) -> None:
        beginning = self._beginning
        self.observer.changed([key.removeprefix(beginning) for key in keys if key.startswith(beginning)])

    def _changed_locally(self, keys: tuple[str, ...]) -> None:
        self.local.changed([key.removeprefix('/local/') for key in keys if key.startswith('/local/')])
        self.observer.states.add(self.observer.state ^ self.local.state)

    def read_local(self, key: str) -> bytes | None:
        """As :meth:`read`, of the local directory."""
        return self.disk.read(f'/local/{key}')

    def read(self, key: str) -> bytes | None:
        """The bytes of a key of the run, without a point."""
        if isinstance(self.server, Bucket):
            stored = self.server.objects.get(f'run/{key}')
            return None if stored is None else stored[0]
        if isinstance(self.server, OwnServer):
            return self.server.read(key)
        return self.server.read(f'/run/{key}')

    def keys(self) -> set[str]:
        """The keys of all files of the run."""
        beginning = self._beginning
        return {key.removeprefix(beginning) for key in self.server.files() if key.startswith(beginning)}

    def local_keys(self) -> set[str]:
        """The keys of all files of the local directory."""
        return {key.removeprefix('/local/') for key in self.disk.files() if key.startswith('/local/')}

    def names(self) -> list[str]:
        """The names of all files, and of the directories of a disk."""
        return self.disk.paths() + (self.server.paths() if isinstance(self.server, Disk) else [*self.server.files()])

    def storage(self, run: str = 'run') -> Storage:
        """A run, as one process opens it; the observer checks ``run``."""
        if isinstance(self.server, OwnServer):
            return OwnStorage(self.server)
        return SimulatedBucket(self.server, run) if isinstance(self.server, Bucket) else SimulatedDirectory(run)

    def path(self, run: str = 'run') -> str:
        """The path or URL of a run."""
        return self.storage(run).url()

    def lose(self, step: int, name: str) -> None:
        """Loses a file of a step, as by accident."""
        key = next(key for key in self.server.files() if key.endswith(f'/{name}') and f'run/checkpoint_{step}/' in key)
        changed, self.server.changed = self.server.changed, lambda keys: None
        if isinstance(self.server, Bucket):
            del self.server.objects[key]
        else:
            assert isinstance(self.server, Disk)
            self.server.unlink(key)
            self.server.sync(self.server.parent(key)[0])
        self.server.changed = changed
        self.observer.damaged[step] = self.observer.visible[step]

    def start(
        self,
        name: str,
        program: Callable[[], object],
        *,
        machine: str = 'machine',
        ahead: float = 0.0,
        may_delete: Callable[[int], bool] | None = None,
        replaces: bool = False,
    ) -> Task:
        """Starts a process.

        Args:
          name: of the process.
          program: runs in its first thread.
          machine: processes on one machine see whether others have ended.
          ahead: seconds by which the clock of the machine is ahead.
          may_delete: the complete steps that it is meant to delete or replace; None for none.
          replaces: whether it is meant only to replace them, so that they are listed all the time.
        """
        process: Process = self.scheduler.process(name, machine=machine, ahead=ahead)
        if may_delete is not None:
            self.observer.may_delete[name] = may_delete
        if replaces:
            self.observer.replacers.add(name)
        return self.scheduler.start(process, program)

    def cut_power(self, seed: int) -> None:
        """Ends all processes, and cuts the power of the disks."""
        for process in self.scheduler.processes.values():
            self.scheduler.kill(process)
        if isinstance(self.server, Disk):
            self.server.cut_power(seed)
            self.observer.check_all(_steps_of(self.keys()))
        self.disk.cut_power(seed)
        self.local.check_all(_steps_of(self.local_keys()))
