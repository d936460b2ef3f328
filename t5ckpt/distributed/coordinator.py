"""The coordinator of one checkpointer, which numbers its rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from t5ckpt.core.text import some_of
from t5ckpt.distributed.processes import Processes, jax_processes
from t5ckpt.distributed.rounds import Channel, CoordinationRound, Phase
from t5ckpt.errors import DisagreementError, UnsupportedTopologyError
from t5ckpt.storage import Storage


class Coordinator:
    """Begins the coordination rounds of one checkpointer.

    The constructor does not ask JAX for the processes, so a checkpointer may be made before ``jax.distributed.initialize``.
    """

    def __init__(
        self,
        storage: Storage,
        processes: Processes | None,
        timeout_seconds: float,
        options: Mapping[str, Any] | None = None,
    ):
        """Asks for nothing.

        Args:
          storage: of the run.
          processes: those of the job; None takes those of ``jax.distributed``.
          timeout_seconds: of a barrier.
          options: those that all processes must pass alike, by name, of JSON's types, compared before the first action.
        """
        self._storage = storage
        self._processes = processes
        self._timeout = timeout_seconds
        self._options = {} if options is None else dict(options)
        self._channel: Channel | None = None

    def processes_of_job(self) -> Processes:
        """Returns the processes that take part."""
        return jax_processes() if self._processes is None else self._processes

    def new_channel(self, timeout_seconds: float | None = None) -> Channel:
        """Returns a channel of its own, whose messages are independent of the rounds of saves."""
        processes = self.processes_of_job()
        return Channel(processes, processes.next_channel(), timeout_seconds or self._timeout)

    def round(self, action: str) -> CoordinationRound:
        """Begins the next round of all processes.

        Raises:
          UnsupportedTopologyError: the job has several processes, and only one of them sees the storage.
          DisagreementError: in the first round, the processes have different options.
        """
        if self._channel is not None:
            return self._channel.round(action)
        self._channel = channel = self._checked_channel()
        # Both rounds are taken also if the vote fails.
        first, following = channel.round(action), channel.round(action)
        if difference := first.reduce_on_leader(Phase.AGREE, self._options, _difference):
            raise DisagreementError(f'{difference}. Every process of the job has to pass it alike.')
        return following

    def _checked_channel(self) -> Channel:
        processes = self.processes_of_job()
        if processes.count > 1 and not self._storage.is_shared:
            raise UnsupportedTopologyError(
                f'{self._storage.url()} is visible to one process only, and this job has {processes.count}. Use a directory that '
                'all processes share.'
            )
        return self.new_channel()


def _difference(options: Sequence[Mapping[str, Any]]) -> str:
    """The first option that some processes have with another value, with all values; '' without one."""
    for name in options[0]:
        by_value: dict[Any, list[str]] = {}
        for index, each in enumerate(options):
            by_value.setdefault(each[name], []).append(str(index))
        if len(by_value) > 1:
            texts = [
                f'{value} in {"process" if len(indices) == 1 else "processes"} {some_of(indices, 4)}'
                for value, indices in by_value.items()
            ]
            return f'{name} is {", and ".join(texts)}'
    return ''
