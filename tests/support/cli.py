"""The command line, as a process of its own."""

from __future__ import annotations

from support import forked
from support.nursery import ROOT

__all__ = ['ROOT', 't5ckpt_cli']


def t5ckpt_cli(*words: object, code: int = 0, stdin: str | None = None) -> str:
    """Runs a verb, checks the exit code; what it printed, or what it complained of where the code is not 0."""
    done = forked.run(None, *words, stdin=stdin)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stdout + done.stderr
