"""The coordinator of one checkpointer, which numbers its rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from t5ckpt.distributed.opening import Opening
from t5ckpt.distributed.processes import Processes, jax_processes
from t5ckpt.distributed.rounds import Channel, CoordinationRound
from t5ckpt.errors import UnsupportedTopologyError
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
          options: those that all processes must pass alike, by name, of JSON's types; see :class:`Opening`.
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
        """
        if self._channel is None:
            self._channel = self._checked_channel()
            self._channel.opening = Opening(f'{self._channel.prefix}/first', self._options)
        return self._channel.round(action)

    def _checked_channel(self) -> Channel:
        processes = self.processes_of_job()
        if processes.count > 1 and not self._storage.is_shared:
            raise UnsupportedTopologyError(
                f'{self._storage.url()} is visible to one process only, and this job has {processes.count}. Use a directory that '
                'all processes share.'
            )
        return self.new_channel()
