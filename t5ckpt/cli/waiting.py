"""Prints a line on standard error when a verb has printed nothing for ten seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from typing import Self

import click

from t5ckpt.core.interrupt_safe_event import InterruptSafeEvent
from t5ckpt.core.text import printable
from t5ckpt.core.thread_pool import start_thread

SILENT_SECONDS = 10.0


class Waiting:
    """While the block runs, prints a line after every ten seconds without output.

    Args:
      remote: the paths of the verb that are not on this machine.
      seconds: the longest time without output.
    """

    def __init__(self, remote: Sequence[str], seconds: float = SILENT_SECONDS):
        """Starts nothing."""
        self._remote = remote
        self._seconds = seconds
        self._started = self._printed_at = time.monotonic()
        self._is_over = InterruptSafeEvent()
        self._show: Callable[[str], object] = lambda text: click.echo(text, err=True)

    def __enter__(self) -> Self:
        start_thread(self._watch, 't5ckpt-waiting', daemon=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    @contextlib.contextmanager
    def shown_by(self, show: Callable[[str], object]) -> Generator[None]:
        """Within the block, prints the line with another function, such as a progress bar's."""
        before, self._show = self._show, show
        try:
            yield
        finally:
            self._show = before

    def touch(self) -> None:
        """Records that output was printed just now."""
        self._printed_at = time.monotonic()

    def _watch(self) -> None:
        while not self._is_over.wait(max(0.05, self._printed_at + self._seconds - time.monotonic())):
            if time.monotonic() - self._printed_at < self._seconds:
                continue
            self.touch()
            self._show(printable(self._text(time.monotonic() - self._started)))

    def _text(self, seconds: float) -> str:
        if not self._remote:
            return f't5ckpt: still working, {seconds:.0f} s so far'
        return (
            f't5ckpt: waiting for {" and ".join(self._remote)}, {seconds:.0f} s so far; --timeout SECONDS ends the wait'
        )


def current_waiting() -> Waiting | None:
    """The instance of the running verb, or None."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get('t5ckpt.waiting')
