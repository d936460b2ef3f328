"""Detects that this process is preempted.

A scheduler sends SIGTERM some seconds before SIGKILL (30 s on Google Cloud and in Kubernetes). The notice only records the
signal. ``maybe_save`` with ``SaveOnPreemption`` acts on it: all processes agree on one step (``save/schedule.py``) and
save it, and ``should_stop`` becomes true.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, Self

from t5ckpt.core.call_site import warn_caller
from t5ckpt.errors import NoEffectWarning


class PreemptionNotice:
    """Records that the process received a signal; pass it to ``Checkpointer(preempted=...)``.

    Use it as a context manager in the main thread, where Python delivers signals, and after ``jax.distributed.initialize``, which
    installs a handler, too. A previous handler in Python is still called, and is reinstalled at the end.
    """

    def __init__(self, signals: Sequence[int] = (signal.SIGTERM,)):
        """Takes the signals; ``__enter__`` installs the handlers."""
        self._signals = tuple(signals)
        if not self._signals:
            raise ValueError('PreemptionNotice: signals is empty. Leave it out for SIGTERM.')
        self._previous: dict[int, Any] = {}
        self._received = False
        self._warns = True

    def __call__(self) -> bool:
        """Whether a signal was received."""
        if self._warns:
            self._warns = False
            warn_caller(
                NoEffectWarning(
                    'PreemptionNotice receives no signals before it is entered. Write: with PreemptionNotice() as notice: ...'
                )
            )
        return self._received

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError('PreemptionNotice must be entered in the main thread, where Python delivers signals.')
        if self._previous:
            raise RuntimeError('This PreemptionNotice is already entered. Enter it once, and pass it on.')
        self._warns = False
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._receive)
        # SIGTERM ends the forked workers of multiprocessing, so they do not inherit the handlers. An early signal waits.
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, self._previous),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, self._previous),
            after_in_child=self._leave_child,
        )
        return self

    def _leave_child(self) -> None:
        signals = self._previous
        self.__exit__()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            # None stands for a handler that Python did not install and cannot reinstall.
            signal.signal(number, previous or signal.SIG_DFL)
        self._previous = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)
