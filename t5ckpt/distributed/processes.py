"""The processes of a job: their indices, and the calls of JAX's coordination service.

Processes coordinate only over this service, never with a device collective. A save in the background must not come between
the collectives of a training step, and a barrier of a collective has no time-out.

Keys are ``t5ckpt/<channel>/<round>/<phase>/...``. Every process must begin its rounds in the same order, as it must enter
its jitted steps in the same order. Each checkpointer has a channel, so two of them may save at the same time.

Only this module uses JAX's private interface: ``jax._src.distributed.global_state.client``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import threading
from collections.abc import Callable
from typing import Any

from t5ckpt.core.loaded import loaded
from t5ckpt.core.thread_pool import Pool
from t5ckpt.errors import T5CkptError

DEFAULT_TIMEOUT_SECONDS = 1200.0

# The error of the service says more than a local time-out, so the service gets this much more time.
_GRACE_SECONDS = 1.0
# absl's names of status codes, which begin the text of every error of jaxlib's client.
_CODE = re.compile(r'([A-Z][A-Z_]+)(?:: |$)')
# A process that died fails the barriers of the others with INTERNAL, and later calls with UNAVAILABLE.
_PEER_DIED = re.compile(
    r'task is set to ERROR|heartbeat timeout|stopped sending heartbeats|Barrier failed because', re.IGNORECASE
)
_TASK = re.compile(r'\btask:? ?(\d+)|^(\d+)$', re.IGNORECASE | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Status:
    """The status of a failed call of the coordination service.

    Attributes:
      code: absl's name of the status code, such as ``'DEADLINE_EXCEEDED'``; '' where the text begins with none.
      died: the indices of the processes that the service reports as dead.
      has_dead: whether it reports a dead process; the service does not always name it.
      text: the first line of the error.
    """

    code: str
    died: tuple[int, ...]
    has_dead: bool
    text: str


def parse_status(text: str) -> Status:
    """Parses the text of an error of jaxlib's client, an ``XlaRuntimeError`` that has no attribute for the code."""
    match = _CODE.match(text)
    code = '' if match is None else match[1]
    has_dead = code in ('ABORTED', 'INTERNAL', 'UNAVAILABLE') and _PEER_DIED.search(text) is not None
    died = {int(one or other) for one, other in _TASK.findall(text)} if has_dead else set[int]()
    return Status(code, tuple(sorted(died)), has_dead, text.partition('\n')[0])


class ServiceError(Exception):
    """A call of the coordination service that failed for another reason than its time-out."""

    def __init__(self, status: Status):
        super().__init__(status.text)
        self.status = status


class Processes:
    """The processes of a job, and the key-value store of their coordination service.

    Every method raises TimeoutError where the service reports a passed deadline, and :class:`ServiceError` for its other
    errors.
    """

    index: int
    count: int
    barriers = 0
    """The number of barriers that this process has entered."""

    def __init__(self) -> None:
        self._channels = itertools.count()

    def next_channel(self) -> str:
        """The prefix of a new channel's keys; every process takes its channels in the same order."""
        return f't5ckpt/{next(self._channels)}'

    def put(self, key: str, value: bytes, timeout_seconds: float) -> None:
        """Sets a key that must not be set yet."""
        raise NotImplementedError

    def get(self, key: str, timeout_seconds: float) -> bytes:
        """Waits for a key and returns its value."""
        raise NotImplementedError

    def get_all(self, prefix: str, timeout_seconds: float) -> dict[str, bytes]:
        """Returns the values of the keys that are set below a prefix, by the last component of the key."""
        raise NotImplementedError

    def remove(self, prefix: str, timeout_seconds: float) -> None:
        """Removes all keys below a prefix."""
        raise NotImplementedError

    def barrier(self, name: str, timeout_seconds: float) -> None:
        """Waits until all processes have entered the barrier of this name."""
        raise NotImplementedError


class _One(Processes):
    """A job of one process, which needs no coordination service."""

    index, count = 0, 1


def lone_process() -> Processes:
    """Returns this process alone, also if it is one of several of a job."""
    return _One()


class _Coordinated(Processes):
    """The processes of ``jax.distributed``."""

    def __init__(self, index: int, count: int, client: Any):
        super().__init__()
        self.index = index
        self.count = count
        self.client = client

    def put(self, key: str, value: bytes, timeout_seconds: float) -> None:
        _call(timeout_seconds, self.client.key_value_set_bytes, key, value)

    def get(self, key: str, timeout_seconds: float) -> bytes:
        return _call(timeout_seconds, self.client.blocking_key_value_get_bytes, key, int(timeout_seconds * 1000))

    def get_all(self, prefix: str, timeout_seconds: float) -> dict[str, bytes]:
        entries = _call(timeout_seconds, self.client.key_value_dir_get_bytes, prefix)
        return {key.rpartition('/')[2]: value for key, value in entries}

    def remove(self, prefix: str, timeout_seconds: float) -> None:
        _call(timeout_seconds, self.client.key_value_delete, prefix)

    def barrier(self, name: str, timeout_seconds: float) -> None:
        self.barriers += 1
        _call(timeout_seconds, self.client.wait_at_barrier, name, int(timeout_seconds * 1000))


def _call(timeout_seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the client in a thread of its own: the service enforces the time-outs, and may be stopped or out of reach."""
    pool = Pool(1)
    answer = pool.submit(function, *arguments)
    pool.shutdown(wait=False)
    try:
        return answer.result(timeout_seconds + _GRACE_SECONDS)
    except TimeoutError:
        raise TimeoutError(f'DEADLINE_EXCEEDED: no answer within {timeout_seconds:g} s') from None
    except RuntimeError as error:
        # The client raises jaxlib's XlaRuntimeError, a RuntimeError, for every status code.
        status = parse_status(str(error))
        if status.code == 'DEADLINE_EXCEEDED':
            raise TimeoutError(status.text) from error
        raise ServiceError(status) from error


_guard = threading.Lock()
# The one client of this process, with the order of the channels on it.
_coordinated = functools.lru_cache(maxsize=1)(_Coordinated)


def jax_processes() -> Processes:
    """Returns the processes of this job. Never imports JAX: a program that has not imported it is one process."""
    jax = loaded('jax')
    if jax is None or jax.process_count() == 1:
        return _One()
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise T5CkptError(
            f'JAX has {jax.process_count()} processes and no coordination service. Start them with '
            'jax.distributed.initialize.'
        )
    with _guard:
        return _coordinated(jax.process_index(), jax.process_count(), client)
