"""Hearing that this process is to end.

A scheduler sends SIGTERM some seconds before SIGKILL (30 s on Google Cloud and in Kubernetes). The notice only remembers
it; ``maybe_save`` with ``SaveOnPreemption`` does the rest: all processes agree on one step, save it, and ``should_stop``
tells the loop to leave.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, Self

from t5ckpt.core.call_site import warn_caller
from t5ckpt.errors import NoEffectWarning

__all__ = ['PreemptionNotice']


class PreemptionNotice:
    """Remembers that one of the signals came; pass it to ``Checkpointer(preempted=...)``.

    Use it as a context manager in the main thread, where Python delivers signals, and after
    ``jax.distributed.initialize``, which sets a handler of its own. A handler in Python that was there before is called,
    too; at the end it is put back.
    """

    def __init__(self, signals: Sequence[int] = (signal.SIGTERM,)):
        """Names the signals; nothing is installed before ``with``."""
        self._signals = tuple(signals)
        if not self._signals:
            raise ValueError(
                'PreemptionNotice: no signal is named, so none would be heard. Leave signals out for SIGTERM.'
            )
        self._before: dict[int, Any] = {}
        self._came = False
        self._is_deaf = True

    def __call__(self) -> bool:
        """Whether a signal came."""
        if self._is_deaf:
            self._is_deaf = False
            warn_caller(
                NoEffectWarning(
                    'PreemptionNotice hears no signal before it is entered. Write: with PreemptionNotice() as notice: ...'
                )
            )
        return self._came

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError('PreemptionNotice: signals reach the main thread alone, enter it there.')
        self._is_deaf = False
        for number in self._signals:
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            # None was a handler not of Python's, which nobody can put back.
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
