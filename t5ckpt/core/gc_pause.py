"""Pauses Python's garbage collector while one large structure is built.

The collector traverses all objects whenever a quarter as many were created, and JAX keeps half a million alive. The plan of
10,000 leaves creates a hundred thousand objects, none of them garbage; collections took a third of that save
(docs/decisions.md).
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Generator

_paused = {'by us': False}


@contextlib.contextmanager
def paused() -> Generator[None]:
    """Disables the collector in all threads. Only for short work that leaves no reference cycles."""
    was_enabled = gc.isenabled()
    try:
        if was_enabled:
            _paused['by us'] = True
            gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
            _paused['by us'] = False


def _in_child() -> None:
    """Ends a pause in a forked process, which does not have the thread that would end it."""
    if _paused['by us']:
        gc.enable()
        _paused['by us'] = False


os.register_at_fork(after_in_child=_in_child)
