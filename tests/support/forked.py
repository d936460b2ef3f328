"""Code of tests, and the command line, as processes of their own that have imported JAX and t5ckpt when they start.

What depends on how the interpreter starts, imports or ends is not tested this way, but with an interpreter of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pathlib
import subprocess
import tempfile
from typing import Any

from support.nursery import ROOT, Nursery, Process

__all__ = ['run', 'start']


@functools.cache
def _nursery() -> Nursery:
    nursery = Nursery('forked_program', options=('-W', 'error'))
    atexit.register(nursery.close)
    return nursery


def start(code: str | None, *words: object, **streams: Any) -> Process:
    """Starts ``python -c code words...``, or, without code, ``python -W error -m t5ckpt words...``."""
    return _nursery().start(
        [code, [str(word) for word in words]],
        environment={**os.environ, 'PYTHONPATH': str(ROOT)},
        directory=pathlib.Path.cwd(),
        **streams,
    )


def run(code: str | None, *words: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Likewise, and waits for it: its exit code, and what it printed."""
    with contextlib.ExitStack() as stack:
        given, *outputs = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        given.write((stdin or '').encode())
        given.seek(0)
        ended = start(code, *words, stdin=given, stdout=outputs[0], stderr=outputs[1]).wait()
        for file in outputs:
            file.seek(0)
        return subprocess.CompletedProcess(words, ended, *(file.read().decode() for file in outputs))
