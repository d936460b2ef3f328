"""Coordination rounds: barriers, votes and broadcasts over the key-value store of the coordination service.

:meth:`CoordinationRound.reduce_on_leader` is the primitive of saves and restores. Every process sends a vote, process 0
(the leader) reduces the votes to a decision, and every process returns the decision. It costs one barrier and one key for
each process; in a job of one process it is a function call. Rounds are numbered, so the keys of two rounds never collide.

A save calls it twice, the second time before the commit (``save/execute.py``). A restore calls it once, and once more with
``share_replicated`` (``restore/execute.py``). Saves to local directories and restores from them call it more often
(``save/parts.py``, ``tiers/``).
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from t5ckpt.core.text import lines_of_error, numbered
from t5ckpt.distributed.processes import Processes, ServiceError, Status
from t5ckpt.errors import CoordinationError, ProcessMissingError, RemoteError, T5CkptError

# gRPC refuses messages above 4 MiB unless the limit was raised.
_MESSAGE_BYTES = 2**20
# The time-out of the request that finds the missing processes.
_ASKING_SECONDS = 2.0


Decide = Callable[[Sequence[Any]], Any]


class Phase(enum.StrEnum):
    """The part of an action that ends with a vote of all processes; each occurs at most once in a round, and errors name it."""

    PLAN = 'plan'  # a save: all plans are equal, and process 0 has made the directory
    WRITE = 'write'  # a save: all chunks are written, and process 0 commits
    COMMIT = 'commit'  # a save to local directories: each process has committed its own
    LOOK = 'look'  # local directories: each process has listed its own, or read its part of a step that is uploaded
    NEED = 'need'  # a restore from local directories: each process has listed the arrays that its directory lacks
    SEND = 'send'  # an upload: all files are sent; a restore from local directories: all processes plan the same collectives
    INIT = 'init'  # a restore: all processes know the leaves that are new, before init_fn is called
    READ = 'read'  # a restore: all processes have read, before they exchange replicated arrays
    RESTORE = 'restore'  # a restore: all processes have their state
    AGREE = 'agree'  # the first action of a job: all processes have the same options; Restorer.agree
    CONVERT = 'convert'  # process 0 has converted a checkpoint of TensorFlow
    DELETE = 'delete'  # process 0 has deleted a step


@contextlib.contextmanager
def _mapped_errors(action: str, phase: str, awaited: tuple[int, ...], seconds: float) -> Generator[None]:
    """Maps the errors of the coordination service; ``awaited`` are the processes that a time-out is blamed on."""
    try:
        yield
    except TimeoutError as error:
        raise ProcessMissingError(action, phase, awaited, seconds) from error
    except ServiceError as error:
        raise coordination_error(action, phase, error.status) from error


def coordination_error(action: str, phase: str, status: Status) -> CoordinationError:
    """Returns the error of a call that failed with a status; ``action`` and ``phase`` name the operation of the processes."""
    text = status.text[:300]
    if status.has_dead:
        names = numbered('process', status.died, 'processes') if status.died else 'a process'
        what = f'{names} died. Look at its log, then restart the job; it continues from its latest checkpoint. ({text})'
    elif status.code == 'UNAVAILABLE':
        what = (
            "lost JAX's coordination service, which runs in process 0: that process died, or the network to it failed. "
            f'Look at its log, then restart the job. ({text})'
        )
    else:
        what = f"JAX's coordination service failed: {text}"
    return CoordinationError(f'{action}, in {phase!r}: {what}', status.code, status.died)


class Channel:
    """The sequence of rounds of one checkpointer."""

    def __init__(self, processes: Processes, prefix: str, timeout_seconds: float):
        self.processes = processes
        self.prefix = prefix
        self._timeout = timeout_seconds
        self._numbers = itertools.count()
        self._finished: list[str] = []

    def round(self, action: str) -> CoordinationRound:
        """Begins the next round; ``action`` is for errors, such as 'the save of step 5'."""
        prefix = f'{self.prefix}/{next(self._numbers)}'
        # All processes that enter this round have left the earlier ones, so their keys are removed after its first barrier.
        old, self._finished = self._finished, [prefix]
        return CoordinationRound(self.processes, prefix, action, self._timeout, old)

    def broadcast(self, name: str, data: bytes | None, action: str) -> bytes:
        """Sends a short message of the leader to all processes, outside of any round and without a barrier.

        Args:
          name: unique in the channel until it is dropped.
          data: the message on the leader, None on the other processes.
          action: for errors.

        Returns:
          The message.

        Raises:
          ProcessMissingError: the leader sent no message within the time-out.
          CoordinationError: a process died, or the service failed.
        """
        key = f'{self.prefix}/broadcast/{name}'
        with _mapped_errors(action, name, (0,), self._timeout):
            if data is None:
                return self.processes.get(key, self._timeout)
            self.processes.put(key, data, self._timeout)
            return data

    def signal_leader(self, name: str) -> None:
        """Signals the leader. A process may send each signal once."""
        with _mapped_errors(f'the signal {name!r}', name, (0,), self._timeout):
            self.processes.put(f'{self.prefix}/signals/{name}/{self.processes.index}', b'1', self._timeout)

    def was_signalled(self, name: str) -> bool:
        """Returns whether any process has sent this signal."""
        with _mapped_errors(f'the signal {name!r}', name, (0,), self._timeout):
            return bool(self.processes.get_all(f'{self.prefix}/signals/{name}', self._timeout))

    def drop(self, name: str, action: str) -> None:
        """Removes the broadcast messages below a name; no process may receive them afterwards. ``action`` is for errors."""
        with _mapped_errors(action, name, (0,), self._timeout):
            self.processes.remove(f'{self.prefix}/broadcast/{name}', self._timeout)


class CoordinationRound:
    """One action that all processes take together, such as a save.

    Attributes:
      processes: of the job.
      is_single_process: whether the job has one process.
      is_leader: whether this is process 0.
      prefix: of the keys.
    """

    def __init__(
        self,
        processes: Processes,
        prefix: str,
        action: str,
        timeout_seconds: float,
        old: Sequence[str],
    ):
        self.processes = processes
        self.is_single_process = processes.count == 1
        self.is_leader = processes.index == 0
        self.prefix = prefix
        self._action = action
        self._timeout = timeout_seconds
        self._old = old

    def reduce_on_leader(self, phase: Phase, vote: Any, decide: Decide) -> Any:
        """Gathers a vote of every process on the leader, and returns the leader's decision on all processes.

        Args:
          phase: of the round.
          vote: of this process, of JSON's types. ``{'error': text}`` fails the round on all processes.
          decide: called on the leader with the votes in order of the processes; returns a value of JSON's types.

        Returns:
          The value that ``decide`` returned.

        Raises:
          ProcessMissingError: naming the processes that did not arrive within the time-out.
          CoordinationError: a process died, or the service failed.
          RemoteError: another process voted with an error, or ``decide`` raised on the leader.
          Exception: on the leader, the exception of ``decide``.
        """
        if self.is_single_process:
            return decide([vote])
        prefix = f'{self.prefix}/{phase}'
        self._gather(prefix, phase, vote)
        if not self.is_leader:
            return self._receive_decision(prefix, phase)
        with self._mapped(phase.value, (0,)):
            votes = self.processes.get_all(f'{prefix}/vote', self._timeout)
            texts = {int(name): text for name, text in votes.items()}
        try:
            votes = [json.loads(texts[index]) for index in range(self.processes.count)]
            self._raise_failures(phase, votes)
            value = decide(votes)
        except BaseException as error:
            # Raises the exception of the leader, even if the others cannot be reached.
            with contextlib.suppress(T5CkptError):
                self._send_decision(prefix, phase, self._failure(phase, error))
            raise
        self._send_decision(prefix, phase, {'value': value})
        return value

    def barrier(self, phase: Phase) -> None:
        """Waits until all processes have reached the end of a phase; raises as :meth:`reduce_on_leader`."""
        self.reduce_on_leader(phase, None, lambda _: None)

    def _mapped(self, phase: str, awaited: tuple[int, ...]) -> contextlib.AbstractContextManager[None]:
        return _mapped_errors(self._action, phase, awaited, self._timeout)

    def _gather(self, prefix: str, phase: Phase, vote: Any) -> None:
        try:
            with self._mapped(phase.value, ()):
                self.processes.put(
                    f'{prefix}/vote/{self.processes.index:08d}', json.dumps(vote).encode(), self._timeout
                )
                self.processes.barrier(f'{prefix}/all', self._timeout)
        except ProcessMissingError as error:
            raise self._missing(prefix, phase) from error.__cause__
        with self._mapped(phase.value, (0,)):
            if self.is_leader:
                for old in self._old:
                    self.processes.remove(old, self._timeout)
                self._old = ()

    def _missing(self, prefix: str, phase: Phase) -> ProcessMissingError:
        """Names the processes whose vote has not arrived; process 0 if its service does not answer."""
        with self._mapped(phase.value, (0,)):
            votes = self.processes.get_all(f'{prefix}/vote', min(self._timeout, _ASKING_SECONDS))
            voted = {int(name) for name in votes}
        missing = tuple(sorted(set(range(self.processes.count)) - voted))
        return ProcessMissingError(self._action, phase.value, missing, self._timeout)

    def _raise_failures(self, phase: Phase, votes: Sequence[Any]) -> None:
        failed = {
            index: vote['error'] for index, vote in enumerate(votes) if isinstance(vote, dict) and 'error' in vote
        }
        if failed:
            shown = '; '.join(f'process {index}: {text}' for index, text in list(failed.items())[:4])
            more = f' and {len(failed) - 4} more' if len(failed) > 4 else ''
            raise RemoteError(f'{self._action} failed in {phase.value!r}: {shown}{more}', tuple(failed))

    def _failure(self, phase: Phase, error: BaseException) -> dict[str, Any]:
        """The error of the leader, as the other processes raise it, of JSON's types."""
        if isinstance(error, RemoteError):
            # A vote failed: the text names the process.
            return {'error': str(error), 'processes': error.processes}
        return {
            'error': f'{self._action} failed in {phase.value!r}: process 0: {lines_of_error(error)}',
            'processes': [0],
        }

    def _send_decision(self, prefix: str, phase: Phase, decision: dict[str, Any]) -> None:
        with self._mapped(phase.value, (0,)):
            self.processes.put(f'{prefix}/decision', json.dumps(decision).encode(), self._timeout)

    def _receive_decision(self, prefix: str, phase: Phase) -> Any:
        with self._mapped(phase.value, (0,)):
            decision = json.loads(self.processes.get(f'{prefix}/decision', self._timeout))
        if 'error' in decision:
            raise RemoteError(decision['error'], tuple(decision['processes']))
        return decision['value']

    @contextlib.contextmanager
    def together(self, phase: Phase) -> Generator[None]:
        """Runs a block, and then waits until all processes have run theirs; if one fails, the others raise a RemoteError."""
        with self.failing_together(phase):
            yield
        self.barrier(phase)

    @contextlib.contextmanager
    def failing_together(self, phase: Phase) -> Generator[None]:
        """Sends an error of this process to the others, as its vote in a phase; there they raise a RemoteError.

        Args:
          phase: that of the next :meth:`reduce_on_leader` or :meth:`barrier`, in which the others wait. They do not receive the
            error in another phase, and wait until the time-out. If the block itself has voted in this phase, an error after
            that is not sent: a vote cannot be written twice.
        """
        try:
            yield
        except BaseException as error:
            self._send_failure(phase, error)
            raise

    def _send_failure(self, phase: Phase, error: BaseException) -> None:
        """Votes with an error; returns when the other processes have it, or after the time-out."""
        # After these errors the others cannot be reached, or have failed themselves.
        is_known = any(
            isinstance(cause, (ProcessMissingError, CoordinationError)) for cause in (error, error.__cause__)
        )
        if not self.is_single_process and not is_known:
            with contextlib.suppress(T5CkptError):
                self.reduce_on_leader(phase, {'error': lines_of_error(error)}, lambda _: None)

    def share(self, name: str, data: bytes) -> None:
        """Sends bytes to all processes, without a barrier; in a job of one process they go nowhere."""
        if self.is_single_process:
            return
        prefix = f'{self.prefix}/{name}/{self.processes.index}'
        with self._mapped(name, (0,)):
            starts = range(0, len(data), _MESSAGE_BYTES)
            for number, start in enumerate(starts):
                self.processes.put(f'{prefix}/{number}', data[start : start + _MESSAGE_BYTES], self._timeout)
            self.processes.put(f'{prefix}/count', str(len(starts)).encode(), self._timeout)

    def receive(self, name: str, process: int = 0) -> bytes:
        """Returns the bytes that a process shares under a name, also in that process.

        Raises:
          ProcessMissingError: the process shared nothing within the time-out.
          CoordinationError: a process died, or the service failed.
        """
        prefix = f'{self.prefix}/{name}/{process}'
        with self._mapped(name, (process,)):
            deadline = time.monotonic() + self._timeout
            count = int(self._wait(f'{prefix}/count', deadline))
            return b''.join(self._wait(f'{prefix}/{number}', deadline) for number in range(count))

    def _wait(self, key: str, deadline: float) -> bytes:
        return self.processes.get(key, max(0.001, deadline - time.monotonic()))
