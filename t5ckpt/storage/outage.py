"""The state of a server that is silent or fails requests, and the probe that shows whether it works again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from t5ckpt.storage.error_mapping import TENSORSTORE_ERRORS, transient_answer
from t5ckpt.storage.options import Retries

# A probe repeats its request itself, so that it sees each answer.
PROBE_RETRIES = Retries(1, 1, 0.001, 0.001)
_FIRST_PROBE_SECONDS = 1.0
_REPEAT_SECONDS, _MAX_REPEAT_SECONDS = 0.1, 2.0


@dataclasses.dataclass(frozen=True)
class Outage:
    """A server that is silent or fails each request.

    Attributes:
      since: the start of the first wait without an answer, in seconds of the monotonic clock.
      seconds: the duration of the next probe.
      answer: the latest answer to a probe; empty if the server was silent.
    """

    since: float
    seconds: float
    answer: str = ''

    @classmethod
    def after(cls, before: Outage | None, since: float, patience: float, answer: str) -> Outage:
        """The outage after one more probe has failed."""
        if before is None:
            return cls(since, min(_FIRST_PROBE_SECONDS, patience / 2), answer)
        return cls(min(before.since, since), min(2 * before.seconds, patience / 2), answer or before.answer)

    def text(self, now: float) -> str:
        """The text of the error: what happened, for how long, and the cure."""
        wait = "storage_options={'retry_seconds': ...} sets the wait."
        seconds = f'{now - self.since:.0f} s'
        if not self.answer:
            return f'the server has not replied for {seconds}. Check the endpoint and the network; {wait}'
        return f'all requests have failed for {seconds}; the latest reply is: {self.answer}. Check the server; {wait}'


def probe(ask: Callable[[], Any], seconds: float) -> str | None:
    """Repeats a small request until the server answers it, for some seconds at most.

    Returns:
      None if the server answered, including a refusal. Else its answer to the last request; empty if it was silent.
    """
    deadline, last, pause = time.monotonic() + seconds, '', _REPEAT_SECONDS
    while True:
        try:
            ask().result(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return last
        except TENSORSTORE_ERRORS as error:
            answer = transient_answer(error)
            if answer is None:
                return None
            last = answer
        else:
            return None
        left = deadline - time.monotonic()
        if left <= 0:
            return last
        # The total time, which the error names.
        time.sleep(min(pause, left))
        # A server that throttles gets few requests.
        pause = min(2 * pause, _MAX_REPEAT_SECONDS)
