"""A line on standard error whenever a verb has been silent for ten seconds: what it waits for, and how to end that."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Self

import click

from t5ckpt.core.text import printable

__all__ = ['SILENT_SECONDS', 'Waiting', 'current_waiting']

SILENT_SECONDS = 10.0


class Waiting:
    """While the block runs, breaks a silence of ten seconds.

    Args:
      remote: the paths of the verb that are not on this machine.
      seconds: of silence.
    """

    def __init__(self, remote: Sequence[str], seconds: float = SILENT_SECONDS):
        """Starts nothing."""
        self._remote = remote
        self._seconds = seconds
        self._started = self._spoke = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name='t5ckpt-waiting', daemon=True)
        self._show: Callable[[str], object] = lambda text: click.echo(text, err=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    @contextlib.contextmanager
    def shown_by(self, show: Callable[[str], object]) -> Generator[None]:
        """Within the block the line is printed by another function, such as that of a progress bar."""
        before, self._show = self._show, show
        try:
            yield
        finally:
            self._show = before

    def touch(self) -> None:
        """Something was shown just now."""
        self._spoke = time.monotonic()

    def _watch(self) -> None:
        while not self._is_over.wait(max(0.05, self._spoke + self._seconds - time.monotonic())):
            if time.monotonic() - self._spoke < self._seconds:
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
    """That of the verb that runs, if one does."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get('t5ckpt.waiting')
