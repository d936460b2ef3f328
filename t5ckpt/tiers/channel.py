"""The messages about uploads in a job of several processes: keys of the coordination service.

    <channel>/uploads/<number>/message             of process 0, in this order for each upload:
                                                   ['order', step]: which step it uploads
                                                   ['send', save, directory]: where to; not if there is nothing to send
                                                   ['end', save, error]: how the upload has ended
                                                   []: there are no more
    <channel>/uploads/<number>/answer/<process>    to 'send': what a process has sent, or its error

Without messages, a process could not learn that the files of another one are damaged.
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from t5ckpt.distributed.rounds import Channel
from t5ckpt.errors import StorageError

_POLL_SECONDS = 5.0
_CALL_SECONDS = 60.0
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.1, 2.0


class UploadChannel:
    """The messages of one checkpointer.

    Attributes:
      index: of this process.
    """

    def __init__(self, channel: Channel):
        """Takes a channel that nothing else uses."""
        self._processes = channel.processes
        self._prefix = f'{channel.prefix}/uploads'
        self.index = channel.processes.index
        # How many messages process 0 has sent, and how many of them all have left.
        self._number = self._removed = 0

    def put(self, message: Sequence[Any]) -> None:
        """Sends a message of JSON's types, in process 0."""
        self._put(f'{self._number}/message', message)
        self._number += 1

    def get(self) -> Sequence[Any]:
        """Waits for the next message of process 0; none if the program ends."""
        while threading.main_thread().is_alive():
            try:
                data = self._processes.get(f'{self._prefix}/{self._number}/message', _POLL_SECONDS)
            except TimeoutError:
                continue
            self._number += 1
            return json.loads(data)
        return ()

    def put_answer(self, value: Any) -> None:
        """Answers the last message."""
        self._put(f'{self._number - 1}/answer/{self.index}', value)

    def get_answers(self, check: Callable[[], None]) -> list[Any]:
        """Returns the answers of all other processes to the last message. Some may have left, so ``check`` is called meanwhile.

        Raises:
          StorageError: the program ends.
        """
        pause, last = _LOOK_SECONDS, self._number - 1
        while True:
            answers = self._processes.get_all(f'{self._prefix}/{last}/answer', _CALL_SECONDS)
            if len(answers) == self._processes.count - 1:
                for number in range(self._removed, last):
                    self._processes.remove(f'{self._prefix}/{number}', _CALL_SECONDS)
                self._removed = last
                return [json.loads(data) for data in answers.values()]
            check()
            if not threading.main_thread().is_alive():
                raise StorageError(errno.EINTR, 'the program ends')
            time.sleep(pause)
            pause = min(_LONGEST_LOOK_SECONDS, 1.5 * pause)

    def _put(self, name: str, value: Any) -> None:
        self._processes.put(f'{self._prefix}/{name}', json.dumps(value).encode(), _CALL_SECONDS)
