"""Coordination rounds: barriers, votes and broadcasts, numbered so that none meets another."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from t5ckpt.core.text import lines_of_error
from t5ckpt.distributed.processes import Processes
from t5ckpt.errors import ProcessMissingError, RemoteError, T5CkptError

__all__ = ['Channel', 'CoordinationRound']


# gRPC refuses messages above 4 MiB where nobody raised the limit.
_PIECE_BYTES = 2**20


Decide = Callable[[Sequence[Any]], Any]


class Channel:
    """The rounds of one checkpointer, one after another."""

    def __init__(self, processes: Processes, prefix: str, timeout_seconds: float):
        self.processes = processes
        self._prefix = prefix
        self._timeout = timeout_seconds
        self._numbers = itertools.count()
        self._finished: list[str] = []

    def round(self, action: str) -> CoordinationRound:
        """Begins the next round; ``action`` is for errors, such as 'the save of step 5'."""
        prefix = f'{self._prefix}/{next(self._numbers)}'
        # Whoever meets in this round has left the ones before it, so their keys may go once all have met.
        old, self._finished = self._finished, [prefix]
        return CoordinationRound(self.processes, prefix, action, self._timeout, old)

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

    def was_signalled(self, name: str) -> bool:
        """Whether any process has left such word."""
        return bool(self.processes.get_all(f'{self._prefix}/calls/{name}'))

    def forget(self, name: str) -> None:
        """Removes what was told below a name; nobody may come to ask for it any more."""
        self.processes.remove(f'{self._prefix}/told/{name}')


class CoordinationRound:
    """One thing that all processes do together."""

    def __init__(self, processes: Processes, prefix: str, action: str, timeout_seconds: float, old: Sequence[str]):
        self.processes = processes
        self._prefix = prefix
        self._action = action
        self._timeout = timeout_seconds
        self._old = old

    @property
    def is_single_process(self) -> bool:
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
        if self.is_single_process:
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
        if not self.is_single_process and not is_known:
            with contextlib.suppress(T5CkptError):
                self.agree(phase, {'error': lines_of_error(error)}, lambda _: None)

    def share(self, name: str, data: bytes | None) -> bytes:
        """Gives process 0's bytes to all; the others pass None. No barrier."""
        at = f'{self._prefix}/{name}'
        if data is not None:
            if not self.is_single_process:
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
