"""Where the processes of one checkpointer meet; nobody is asked before the first time, since a constructor meets nobody."""

from __future__ import annotations

from t5ckpt.distributed.processes import Processes, jax_processes
from t5ckpt.distributed.rounds import Channel, CoordinationRound
from t5ckpt.errors import UnsupportedTopologyError
from t5ckpt.storage import Storage

__all__ = ['Coordinator']


class Coordinator:
    """The rounds of one checkpointer."""

    def __init__(self, storage: Storage, processes: Processes | None, timeout_seconds: float):
        """``processes`` are those of the job; None takes those of ``jax.distributed``."""
        self._storage = storage
        self._processes = processes
        self._timeout = timeout_seconds
        self._channel: Channel | None = None

    def processes_of_job(self) -> Processes:
        """The processes that meet."""
        return jax_processes() if self._processes is None else self._processes

    def new_channel(self) -> Channel:
        """A sequence of its own, in which they need not take turns with a save."""
        processes = self.processes_of_job()
        return Channel(processes, processes.next_channel(), self._timeout)

    def round(self, action: str) -> CoordinationRound:
        """The next thing that all of them do together.

        Raises:
          UnsupportedTopologyError: several processes, and a storage that only one of them sees.
        """
        if self._channel is None:
            processes = self.processes_of_job()
            if processes.count > 1 and not self._storage.is_shared:
                raise UnsupportedTopologyError(
                    f'{self._storage.url()} is seen by one process alone, and this job has {processes.count}. Use a '
                    'directory that all of them share.'
                )
            self._channel = self.new_channel()
        return self._channel.round(action)
