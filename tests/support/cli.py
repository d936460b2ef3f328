"""The command line, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def t5ckpt_cli(*words: object, code: int = 0, stdin: str | None = None) -> str:
    """Runs a verb, checks the exit code; what it printed, or what it complained of where the code is not 0."""
    done = subprocess.run(
        [sys.executable, '-W', 'error', '-m', 't5ckpt', *map(str, words)],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stdout + done.stderr
