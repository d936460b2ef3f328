"""The messages of process 0 to the others about uploads: numbered keys of the coordination service."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Sequence

from t5ckpt.distributed.processes import Processes
from t5ckpt.tiers.lost_files import LostFiles

_POLL_SECONDS = 5.0
_CALL_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Upload:
    """The order to send the files of a step; ``save`` identifies it."""

    step: int
    save: str
    directory: str


@dataclasses.dataclass(frozen=True)
class Failed:
    """An attempt of an upload failed, and process 0 repeats it."""

    text: str


@dataclasses.dataclass(frozen=True)
class Refused:
    """Nothing is uploaded, since the local directory of process 0 is of another run."""

    text: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """A step no longer waits: ``save`` of it is uploaded, or, with ``why``, it is dropped; ``is_failure`` as in Outcomes."""

    step: int
    why: str = ''
    save: str | None = None
    is_failure: bool = False


@dataclasses.dataclass(frozen=True)
class Close:
    """The last order."""


Order = Upload | Failed | Refused | Ended | Close
_ORDERS = {order.__name__: order for order in (Upload, Failed, Refused, Ended, Close)}


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of an :class:`Upload` in one process: it sent all files of these lists, or failed.

    ``positions`` are the files with positions of data iterators that it sent, and ``lost`` the packed entries of those for a lost
    disk. With ``is_unreadable``, a local file could not be
    read; with ``is_fatal``, no later attempt can succeed.
    """

    lists: Sequence[int] = ()
    nbytes: int = 0
    positions: Sequence[str] = ()
    lost: str = ''
    error: str = ''
    is_fatal: bool = False
    is_unreadable: bool = False


class Orders:
    """The messages of process 0 to the others about uploads. Safe from any thread.

    Attributes:
      processes: of the job.
      lost: the files that this process uploads in place of a lost disk.
    """

    def __init__(self, processes: Processes, prefix: str, lost: LostFiles):
        """Takes a prefix of keys that nothing else uses."""
        self.processes = processes
        self.lost = lost
        self._prefix = f'{prefix}/uploads'
        self._guard = threading.Lock()
        self._next = self._removed = 0

    def send(self, order: Order) -> int:
        """Sends an order; returns its number."""
        data = json.dumps([type(order).__name__, dataclasses.asdict(order)]).encode()
        with self._guard:
            number, self._next = self._next, self._next + 1
            self.processes.put(f'{self._prefix}/order/{number}', data, _CALL_SECONDS)
        return number

    def receive(self) -> tuple[int, Order] | None:
        """Waits for the next order; None if there is none within a few seconds."""
        try:
            data = self.processes.get(f'{self._prefix}/order/{self._next}', _POLL_SECONDS)
        except TimeoutError:
            return None
        number, self._next = self._next, self._next + 1
        name, fields = json.loads(data)
        return number, _ORDERS[name](**fields)

    def answer(self, number: int, answer: Answer) -> None:
        """Answers an order."""
        key = f'{self._prefix}/answer/{number}/{self.processes.index}'
        self.processes.put(key, json.dumps(dataclasses.asdict(answer)).encode(), _CALL_SECONDS)

    def collect_answers(self, number: int) -> list[Answer]:
        """Returns the answers to an order so far. When all have arrived, removes them, and the orders up to this one."""
        answers = self.processes.get_all(f'{self._prefix}/answer/{number}', _CALL_SECONDS)
        if len(answers) == self.processes.count - 1:
            for old in range(self._removed, number + 1):
                self.processes.remove(f'{self._prefix}/order/{old}', _CALL_SECONDS)
            self.processes.remove(f'{self._prefix}/answer/{number}', _CALL_SECONDS)
            self._removed = number + 1
        return [Answer(**json.loads(data)) for data in answers.values()]

    def stop(self, number: int) -> None:
        """Ends the work of the others on an order."""
        self.processes.put(f'{self._prefix}/stop/{number}/0', b'1', _CALL_SECONDS)

    def is_stopped(self, number: int) -> bool:
        """Whether process 0 has called :meth:`stop`."""
        return bool(self.processes.get_all(f'{self._prefix}/stop/{number}', _CALL_SECONDS))
