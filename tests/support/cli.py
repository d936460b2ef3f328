"""The command line, as a process of its own."""

from __future__ import annotations

import atexit
import functools
import os
import pathlib
import tempfile
import threading

from support.nursery import ROOT, Nursery

__all__ = ['ROOT', 't5ckpt_cli']

_LOCK = threading.Lock()


@functools.cache
def _nursery() -> Nursery:
    nursery = Nursery('cli_program', options=('-W', 'error'))
    atexit.register(nursery.close)
    return nursery


def t5ckpt_cli(*words: object, code: int = 0, stdin: str | None = None) -> str:
    """Runs a verb, checks the exit code; what it printed, or what it complained of where the code is not 0."""
    with tempfile.TemporaryDirectory() as directory:
        files = [pathlib.Path(directory, name) for name in ('input', 'output', 'errors')]
        for file, text in zip(files, (stdin or '', '', ''), strict=True):
            file.write_text(text, encoding='utf-8')
        given = {
            'words': [str(word) for word in words],
            'environment': {**os.environ, 'PYTHONPATH': str(ROOT)},
            'directory': str(pathlib.Path.cwd()),
            'files': [str(file) for file in files],
        }
        with _LOCK:
            ended = _nursery().run(given)
        printed, complained = (file.read_bytes().decode() for file in files[1:])
    assert ended == code, printed + complained
    return printed if code == 0 else printed + complained
