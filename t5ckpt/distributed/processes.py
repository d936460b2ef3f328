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

import itertools
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from t5ckpt.errors import T5CkptError

__all__ = ['DEFAULT_TIMEOUT_SECONDS', 'Processes', 'jax_processes']

DEFAULT_TIMEOUT_SECONDS = 1200.0


class Processes(ABC):
    """The processes of a job, and a store of keys that all of them reach."""

    index: int
    count: int
    barriers = 0
    """How many barriers this process has entered."""

    def __init__(self) -> None:
        self._channels = itertools.count()

    def next_channel(self) -> str:
        """The prefix of a new channel's keys; every process takes its channels in the same order."""
        return f't5ckpt/{next(self._channels)}'

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
