"""Which process this is, among how many, and how they come to one mind.

Processes meet through JAX's coordination service alone, never through a device collective: a save in the background must
not get between the collectives of a training step, and a barrier there has no time-out.

One primitive serves everything: in ``Round.agree`` every process brings a note, process 0 decides on all of them, and all
get its answer. It costs one barrier and one key for each process. In a single process it is a call of a function.

Keys are ``t5ckpt/<channel>/<round>/<phase>/...``. Every process must begin its rounds in the same order, as it must enter
its jitted steps in the same order; a channel is the sequence of one checkpointer, so that two of them may save at once.

This is the one module that uses JAX's private interface: ``jax._src.distributed.global_state.client``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from t5ckpt._text import lines_of_error
from t5ckpt.errors import ProcessMissingError, RemoteError, T5CkptError

__all__ = [
    'DEFAULT_TIMEOUT_SECONDS',
    'READ_EVENT',
    'WRITE_EVENT',
    'Channel',
    'Processes',
    'Round',
    'jax_processes',
    'record_duration',
]

DEFAULT_TIMEOUT_SECONDS = 1200.0
# gRPC refuses messages above 4 MiB where nobody raised the limit.
_PIECE_BYTES = 2**20

Decide = Callable[[Sequence[Any]], Any]


class Processes(ABC):
    """The processes of a job, and a store of keys that all of them reach."""

    index: int
    count: int
    barriers = 0
    """How many barriers this process has entered."""

    def __init__(self) -> None:
        self._channels = itertools.count()

    def channel(self, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> Channel:
        """A new sequence of rounds; every process takes its channels in the same order."""
        return Channel(self, f't5ckpt/{next(self._channels)}', timeout_seconds)

    @abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Sets a key that was not set before."""

    @abstractmethod
    def get(self, key: str, timeout_seconds: float) -> bytes:
        """Waits for a key. Raises TimeoutError."""

    @abstractmethod
    def get_all(self, prefix: str) -> dict[str, bytes]:
        """The keys below a prefix that are set by now, by their last component."""

    @abstractmethod
    def remove(self, prefix: str) -> None:
        """Removes all keys below a prefix."""

    @abstractmethod
    def barrier(self, name: str, timeout_seconds: float) -> None:
        """Waits until all processes are here. Raises TimeoutError."""


class _One(Processes):
    """A job of one process, which has nobody to talk to."""

    index, count = 0, 1

    def put(self, key: str, value: bytes) -> None:
        raise NotImplementedError

    def get(self, key: str, timeout_seconds: float) -> bytes:
        raise NotImplementedError

    def get_all(self, prefix: str) -> dict[str, bytes]:
        raise NotImplementedError

    def remove(self, prefix: str) -> None:
        raise NotImplementedError

    def barrier(self, name: str, timeout_seconds: float) -> None:
        raise NotImplementedError


class _Coordinated(Processes):
    """The processes of ``jax.distributed``."""

    def __init__(self, index: int, count: int, client: Any):
        super().__init__()
        self.index = index
        self.count = count
        self.client = client

    def put(self, key: str, value: bytes) -> None:
        _call(self.client.key_value_set_bytes, key, value)

    def get(self, key: str, timeout_seconds: float) -> bytes:
        return _call(self.client.blocking_key_value_get_bytes, key, int(timeout_seconds * 1000))

    def get_all(self, prefix: str) -> dict[str, bytes]:
        return {key.rpartition('/')[2]: value for key, value in _call(self.client.key_value_dir_get_bytes, prefix)}

    def remove(self, prefix: str) -> None:
        _call(self.client.key_value_delete, prefix)

    def barrier(self, name: str, timeout_seconds: float) -> None:
        self.barriers += 1
        _call(self.client.wait_at_barrier, name, int(timeout_seconds * 1000))


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    # The client raises jaxlib's XlaRuntimeError, a RuntimeError, for whatever happens: its text begins with a code.
    try:
        return function(*arguments)
    except RuntimeError as error:
        raise TimeoutError(str(error)) from error


class _Registry:
    """The coordination service is one for the process, and so is the order of the channels on it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._current: _Coordinated | None = None

    def of(self, index: int, count: int, client: Any) -> Processes:
        with self._guard:
            if self._current is None or self._current.client is not client:
                self._current = _Coordinated(index, count, client)
            return self._current


_registry = _Registry()


def jax_processes() -> Processes:
    """This job's processes. Asking never starts JAX: a program that has not imported it is one process."""
    jax = sys.modules.get('jax')
    if jax is None or jax.process_count() == 1:
        return _One()
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise T5CkptError(
            f'JAX has {jax.process_count()} processes and no coordination service. Start them with '
            'jax.distributed.initialize.'
        )
    return _registry.of(jax.process_index(), jax.process_count(), client)


class Channel:
    """The rounds of one checkpointer, one after another."""

    def __init__(self, processes: Processes, prefix: str, timeout_seconds: float):
        self.processes = processes
        self._prefix = prefix
        self._timeout = timeout_seconds
        self._numbers = itertools.count()
        self._finished: list[str] = []

    def round(self, action: str) -> Round:
        """Begins the next round; ``action`` is for errors, such as 'the save of step 5'."""
        prefix = f'{self._prefix}/{next(self._numbers)}'
        # Whoever meets in this round has left the ones before it, so their keys may go once all have met.
        old, self._finished = self._finished, [prefix]
        return Round(self.processes, prefix, action, self._timeout, old)

    def tell(self, name: str, data: bytes | None, action: str) -> bytes:
        """Gives a few of process 0's bytes to all, outside of any round and without a barrier; the others pass None.

        Raises:
          ProcessMissingError: process 0 said nothing in time.
        """
        key = f'{self._prefix}/told/{name}'
        if data is not None:
            self.processes.put(key, data)
            return data
        try:
            return self.processes.get(key, self._timeout)
        except TimeoutError as error:
            raise ProcessMissingError(action, name, (0,), self._timeout, str(error)[:300]) from error

    def call(self, name: str) -> None:
        """Leaves word for process 0, once."""
        self.processes.put(f'{self._prefix}/calls/{name}/{self.processes.index}', b'1')

    def was_called(self, name: str) -> bool:
        """Whether any process has left such word."""
        return bool(self.processes.get_all(f'{self._prefix}/calls/{name}'))

    def forget(self, name: str) -> None:
        """Removes what was told below a name; nobody may come to ask for it any more."""
        self.processes.remove(f'{self._prefix}/told/{name}')


class Round:
    """One thing that all processes do together."""

    def __init__(self, processes: Processes, prefix: str, action: str, timeout_seconds: float, old: Sequence[str]):
        self.processes = processes
        self._prefix = prefix
        self._action = action
        self._timeout = timeout_seconds
        self._old = old

    @property
    def is_alone(self) -> bool:
        """Whether there is one process."""
        return self.processes.count == 1

    @property
    def is_first(self) -> bool:
        """Whether this is process 0."""
        return self.processes.index == 0

    def agree(self, phase: str, note: Any, decide: Decide) -> Any:
        """Meets all processes.

        Args:
          phase: unique in the round; for errors, too.
          note: what this process brings, of JSON's types. ``{'error': text}`` fails the round on all.
          decide: called in process 0 with the notes in order of the processes; returns something of JSON's types.

        Returns:
          What ``decide`` returned.

        Raises:
          ProcessMissingError: naming the processes that did not come in time.
          RemoteError: another process brought an error, or process 0 failed to decide.
          Exception: in process 0, what ``decide`` raised.
        """
        if self.is_alone:
            return decide([note])
        at = f'{self._prefix}/{phase}'
        self._meet(at, phase, note)
        if not self.is_first:
            return self._hear(at, phase)
        try:
            found = {int(name): text for name, text in self.processes.get_all(f'{at}/note').items()}
            notes = [json.loads(found[index]) for index in range(self.processes.count)]
            self._raise_failures(phase, notes)
            value = decide(notes)
        except BaseException as error:
            self.processes.put(f'{at}/answer', json.dumps({'error': lines_of_error(error)}).encode())
            raise
        self.processes.put(f'{at}/answer', json.dumps({'value': value}).encode())
        return value

    def _meet(self, at: str, phase: str, note: Any) -> None:
        try:
            self.processes.put(f'{at}/note/{self.processes.index:08d}', json.dumps(note).encode())
            self.processes.barrier(f'{at}/all', self._timeout)
            if self.is_first:
                for prefix in self._old:
                    self.processes.remove(prefix)
                self._old = ()
        except TimeoutError as error:
            raise self._missing(at, phase, error) from error

    def _missing(self, at: str, phase: str, error: TimeoutError) -> ProcessMissingError:
        try:
            here = {int(name) for name in self.processes.get_all(f'{at}/note')}
        except TimeoutError:
            return ProcessMissingError(self._action, phase, (0,), self._timeout, f'its service is gone: {error}')
        missing = tuple(sorted(set(range(self.processes.count)) - here))
        return ProcessMissingError(self._action, phase, missing, self._timeout, str(error))

    def _raise_failures(self, phase: str, notes: Sequence[Any]) -> None:
        failed = {
            index: note['error'] for index, note in enumerate(notes) if isinstance(note, dict) and 'error' in note
        }
        if failed:
            shown = '; '.join(f'process {index}: {text}' for index, text in list(failed.items())[:4])
            more = f' and {len(failed) - 4} more' if len(failed) > 4 else ''
            raise RemoteError(f'{self._action} failed in {phase!r}: {shown}{more}', tuple(failed))

    def _hear(self, at: str, phase: str) -> Any:
        try:
            answer = json.loads(self.processes.get(f'{at}/answer', self._timeout))
        except TimeoutError as error:
            raise ProcessMissingError(self._action, phase, (0,), self._timeout, str(error)) from error
        if 'error' in answer:
            kind, _, text = answer['error'].partition(': ')
            if kind == 'RemoteError':
                raise RemoteError(text)
            raise RemoteError(f'{self._action} failed in {phase!r}: process 0: {answer["error"]}', (0,))
        return answer['value']

    def fail(self, phase: str, error: BaseException) -> None:
        """Tells the others that this process cannot go on; returns when they know, or do not come."""
        # Whoever is missing will not come to hear it either.
        is_known = any(isinstance(each, ProcessMissingError) for each in (error, error.__cause__))
        if not self.is_alone and not is_known:
            with contextlib.suppress(T5CkptError):
                self.agree(phase, {'error': lines_of_error(error)}, lambda _: None)

    def share(self, name: str, data: bytes | None) -> bytes:
        """Gives process 0's bytes to all; the others pass None. No barrier."""
        at = f'{self._prefix}/{name}'
        if data is not None:
            if not self.is_alone:
                pieces = range(0, len(data), _PIECE_BYTES)
                for number, start in enumerate(pieces):
                    self.processes.put(f'{at}/{number}', data[start : start + _PIECE_BYTES])
                self.processes.put(f'{at}/count', str(len(pieces)).encode())
            return data
        deadline = time.monotonic() + self._timeout
        try:
            count = int(self._wait(f'{at}/count', deadline))
            return b''.join(self._wait(f'{at}/{number}', deadline) for number in range(count))
        except TimeoutError as error:
            raise ProcessMissingError(self._action, name, (0,), self._timeout, str(error)) from error

    def _wait(self, key: str, deadline: float) -> bytes:
        return self.processes.get(key, max(0.001, deadline - time.monotonic()))

    def say(self, name: str, data: bytes) -> None:
        """Leaves bytes under this process's name, for whoever asks with :meth:`ask`."""
        self.processes.put(f'{self._prefix}/{name}/{self.processes.index}', data)

    def ask(self, name: str, process: int) -> bytes:
        """What a process said.

        Raises:
          ProcessMissingError: it said nothing in time.
        """
        try:
            return self.processes.get(f'{self._prefix}/{name}/{process}', self._timeout)
        except TimeoutError as error:
            raise ProcessMissingError(self._action, name, (process,), self._timeout, str(error)) from error


# T5X's names (t5x/checkpoints.py), so that a dashboard made for T5X goes on working.
WRITE_EVENT = '/jax/checkpoint/write/durations_sec'
READ_EVENT = '/jax/checkpoint/read/durations_sec'


def record_duration(event: str, seconds: float) -> None:
    """Tells jax.monitoring how long a save or restore took, where JAX is in use."""
    jax = sys.modules.get('jax')
    if jax is not None:
        jax.monitoring.record_event_duration_secs(event, seconds)
